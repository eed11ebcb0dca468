"""Grades answers in LaTeX with math-verify, in a process that the kernel ends when one takes too long.

A short answer can keep sympy, which math-verify stands on, busy for hours: a tower of powers, a hard integral. Nothing
in the trainer's own process can stop that for sure: math-verify's timeouts are signals, which only the main thread
gets, and not before a product of huge numbers is done. So a worker of its own, started on first use, has a limit of CPU
time for each answer, which a busy machine does not use up, and one of memory. One that is ended is replaced.
`grade` may be called from any thread; answers are graded one after another.
"""
import ast
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module

SECONDS = 1.0           # of CPU time for an answer
PATIENCE = 60.0         # seconds on the clock, after which a worker that does nothing is ended as well
MEMORY = 2**30          # bytes
LITERALS = {"Integer", "Float", "Rational", "Symbol"}
PLAIN = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant, ast.UnaryOp, ast.USub, ast.BinOp, ast.Add, ast.Sub,
         ast.Mult, ast.Div)


class Grader:
    """The trainer's end: keeps a worker, and asks it."""

    def __init__(self):
        self.lock = threading.Lock()
        self.worker = None

    def start(self):
        """A new worker, apart from the terminal's signals."""
        environment = os.environ | {"PYTHONHASHSEED": "0"}      # sympy's order of terms may not change a verdict
        self.worker = subprocess.Popen([sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       start_new_session=True, env=environment)

    def grade(self, answer: str, gold: str) -> bool:
        """Whether they are equal; False where the worker dies of the question. RuntimeError where none can start."""
        with self.lock:
            if self.worker is None or self.worker.poll() is not None:
                self.start()
            guard = threading.Timer(PATIENCE, self.worker.kill)
            guard.daemon = True
            guard.start()
            try:
                self.worker.stdin.write(json.dumps([answer, gold]).encode() + b"\n")
                self.worker.stdin.flush()
                said = self.worker.stdout.readline()
            except BrokenPipeError:
                said = b""
            except BaseException:
                self.worker.kill()      # what it says to a question given up would be taken for the next one's answer
                self.end()
                raise
            finally:
                guard.cancel()
            if not said and self.end() > 0:
                raise RuntimeError("the process that grades LaTeX did not start; is math-verify installed?")
            return said == b"right\n"

    def end(self) -> int:
        """Waits for the end of the worker. Its exit code; below 0 where a signal ended it."""
        worker, self.worker = self.worker, None
        with suppress(BrokenPipeError):
            worker.stdin.close()
        worker.stdout.close()
        return worker.wait()


@cache
def grader(process: int) -> Grader:
    """That of a process: a fork of it needs one of its own."""
    return Grader()


def grade(answer: str, gold: str) -> bool:
    """Whether an answer in LaTeX equals the gold one. False as well when that takes too much time or memory to say."""
    return grader(os.getpid()).grade(answer, gold)


# ------------------------------------------------ in a process of its own: the worker --------------------------------
def work():
    """Answers questions, a line each, until there are none. Its death by a signal is an answer, too."""
    forbid_evaluation()
    logging.getLogger("math_verify").setLevel(logging.ERROR)        # it warns that we let it have no timeout
    replies, sys.stdout = sys.stdout, sys.stderr
    if not judge("1", "1"):                                         # also imports, outside of the limits
        sys.exit("math-verify does not find that 1 is 1")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)               # no handler: the kernel ends this process
        verdict = judge(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print("right" if verdict else "wrong", file=replies, flush=True)


def judge(answer: str, gold: str) -> bool:
    """What math-verify says, however long it takes."""
    from math_verify import LatexExtractionConfig, parse, verify

    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    answers = parse(f"\\boxed{{{answer}}}", boxed, extraction_mode="first_match", parsing_timeout=None)
    golds = parse(f"\\boxed{{{gold}}}", boxed, parsing_timeout=None)
    return bool(answers) and verify(golds, answers, timeout_seconds=None)


def forbid_evaluation():
    """sympy makes numbers of texts by `eval`. From now on it evaluates arithmetic of literals, and nothing else."""
    import_module("sympy.physics.units")    # `simplify` does so late, and evaluates names of units as it does
    from sympy.parsing import sympy_parser

    evaluate = sympy_parser.eval_expr

    def checked(code: str, *names):
        nodes = [*ast.walk(ast.parse(code, mode="eval"))]
        names_used = {node.id for node in nodes if isinstance(node, ast.Name)}
        if not (all(isinstance(node, PLAIN) for node in nodes) and names_used <= LITERALS):
            raise ValueError(f"not evaluated: {code!r}")
        return evaluate(code, *names)

    sympy_parser.eval_expr = checked


if __name__ == "__main__":
    work()
