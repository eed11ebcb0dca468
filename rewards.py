"""Verifiers: each compares the text of a completion with the reference answer and returns a number.

`countdown` for the countdown game, `gsm8k_last_number` and `gsm8k_boxed` for GSM8K, `math` for LaTeX answers.
`countdown_habits` measures how a model searches; it is a diagnostic, not a reward.

Completions are untrusted: none of them is ever evaluated as Python, and the work for each is bounded.
This file imports nothing else from this repository. `math` requires math-verify, and runs it in a subprocess.
"""

import ast
import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from fractions import Fraction
from functools import cache

MAX_TEXT = 100_000  # characters of a completion that are searched for numbers or attempts


# ---------------------------------------------- countdown ---------------------------------------------------
MAX_EXPRESSION = 200  # characters, blanks not counted; answers to countdown are far shorter
MAX_DIGITS = 18  # per number in an expression
TOKEN = re.compile(r"[0-9]+|\S")


def countdown(text: str, nums: list[int], target: int) -> float:
    """Return 1.0 if the last <answer> uses each of `nums` exactly once and equals `target`, else 0.0.

    Answers may contain whole numbers, + - * /, signs and parentheses, and are computed exactly. In equations,
    only the left side counts.
    """
    _, opening_tag, rest = text.rpartition("<answer>")
    answer, closing_tag, _ = rest.partition("</answer>")
    if not opening_tag or not closing_tag:
        return 0.0
    expression = answer.partition("=")[0]
    try:
        value, used = evaluate(expression)
    except (ValueError, ZeroDivisionError):
        return 0.0
    uses_each_once = sorted(used) == sorted(int(num) for num in nums)
    return float(uses_each_once and value == Fraction(target))


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Return the exact value of an arithmetic expression and the numbers in it, in order of appearance.

    A recursive-descent parser for
        sum     := product (("+" | "-") product)*
        product := factor (("*" | "/") factor)*
        factor  := number | "(" sum ")" | ("+" | "-") factor
    Raises ValueError if the expression is malformed or too long, ZeroDivisionError if it divides by zero.
    """
    length = len("".join(expression.split()))
    if length > MAX_EXPRESSION:
        raise ValueError(f"expression of {length} characters, more than {MAX_EXPRESSION}")
    tokens = TOKEN.findall(expression)
    if tokens.count("(") != tokens.count(")"):  # this also limits the nesting to MAX_EXPRESSION / 2 levels
        raise ValueError("unbalanced parentheses")
    tokens.reverse()  # now a stack: the next token is the last element
    numbers = []

    def parse_sum() -> Fraction:
        value = parse_product()
        while tokens and tokens[-1] in "+-":
            sign = 1 if tokens.pop() == "+" else -1
            value += sign * parse_product()
        return value

    def parse_product() -> Fraction:
        value = parse_factor()
        while tokens and tokens[-1] in "*/":
            if tokens.pop() == "*":
                value *= parse_factor()
            else:
                value /= parse_factor()
        return value

    def parse_factor() -> Fraction:
        token = tokens.pop() if tokens else "end"
        if token == "+":
            return parse_factor()
        if token == "-":
            return -parse_factor()
        if token == "(":
            value = parse_sum()
            if not tokens or tokens.pop() != ")":
                raise ValueError("expected a closing parenthesis")
            return value
        if not (token.isascii() and token.isdecimal() and len(token) <= MAX_DIGITS):
            raise ValueError(f"expected a number of at most {MAX_DIGITS} digits, found {token!r}")
        numbers.append(int(token))
        return Fraction(token)

    value = parse_sum()
    if tokens:
        raise ValueError(f"expected an operator, found {tokens[-1]!r}")
    return value, numbers


def countdown_habits(text: str, target: int) -> dict[str, float]:
    """Measure a search that makes one attempt per line, for example `12+4-1 = 16-1 = 15 no`.

    Returns shares in [0, 1], omitting those with an empty denominator:
    - `arithmetic`: the share of attempts in which all sides of the equation are equal
    - `verdicts`: the share of attempts whose `yes` or `no` is correct for the result that they state
    - `stops_after_hit`: the share of attempts marked `yes` that are the last one
    - `goes_on_after_miss`: the share of attempts marked `no` that are not the last one
    Only the first MAX_TEXT characters are read.
    """
    trace = text[:MAX_TEXT].partition("</think>")[0].removeprefix("<think>")
    attempts = []
    for line in trace.splitlines():
        equation, _, verdict = line.rpartition(" ")
        if verdict in ("yes", "no"):
            sides = [value_or_none(side) for side in equation.split("=")]
            attempts.append((sides, verdict))
    last = len(attempts) - 1
    outcomes = {
        "arithmetic": [None not in sides and len(set(sides)) == 1 for sides, _ in attempts],
        "verdicts": [(sides[-1] == Fraction(target)) == (verdict == "yes") for sides, verdict in attempts],
        "stops_after_hit": [i == last for i, (_, verdict) in enumerate(attempts) if verdict == "yes"],
        "goes_on_after_miss": [i < last for i, (_, verdict) in enumerate(attempts) if verdict == "no"],
    }
    return {name: sum(values) / len(values) for name, values in outcomes.items() if values}


def value_or_none(expression: str) -> Fraction | None:
    """Return the value of an expression, or None if `evaluate` rejects it."""
    try:
        return evaluate(expression)[0]
    except (ValueError, ZeroDivisionError):
        return None


# ---------------------------------------------- GSM8K -------------------------------------------------------
INTEGER = re.compile(r"[-−]?[0-9]+")
NUMBER = re.compile(
    r"""
    (?: (?<![0-9)]) [-−] (?:\\?\$)? )?  # a sign, as in -$5; in 5-6 and (5)-6 it is an operator
    (?: [0-9][0-9,]* (?:\.[0-9]+)? | \.[0-9]+ )
    """,
    re.VERBOSE,
)
MAX_NUMBER = 60  # characters; a longer number equals nothing
NORMALIZE = str.maketrans({"−": "-", ",": "", "$": "", "\\": ""})


def gsm8k_last_number(text: str, gold: str) -> float:
    """Return 1.0 if the last number in the text equals the reference answer, else 0.0.

    `gold` is a GSM8K solution (arXiv:2110.14168), with the answer after `####`, or just the number. 1,072.00
    equals 1072. Only the last MAX_TEXT characters are read. Raises ValueError if `gold` contains no number.
    """
    expected = gold_number(gold)
    numbers = NUMBER.findall(text[-MAX_TEXT:])
    return float(bool(numbers) and to_fraction(numbers[-1]) == expected)


def gsm8k_boxed(text: str, gold: str) -> int:
    r"""Return 1 if the first integer after the last \boxed is the reference answer, 0 if not, -1 without one.

    This is TapeAgents' protocol (examples/rl_gsm8k). Commas are ignored; `gold` is as in gsm8k_last_number.
    """
    expected = gold_number(gold)
    _, box, rest = text.rpartition("\\boxed")
    found = INTEGER.search(rest.replace(",", ""))
    if not box or not found:
        return -1
    return int(to_fraction(found[0]) == expected)


def gold_number(gold: str) -> Fraction:
    """Return the last number (after `####` where there is one). Raises ValueError if there is no number."""
    numbers = NUMBER.findall(str(gold).split("####")[-1])
    value = to_fraction(numbers[-1]) if numbers else None
    if value is None:
        raise ValueError(f"no number in the reference answer {gold!r}")
    return value


def to_fraction(number: str) -> Fraction | None:
    """Convert a match of NUMBER or INTEGER exactly; None if it is too long."""
    return Fraction(number.translate(NORMALIZE)) if len(number) <= MAX_NUMBER else None


# ---------------------------------------------- MATH --------------------------------------------------------
MAX_LATEX = 500  # characters; the longest answer in MATH has 159
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # the first alternative skips escaped braces


def math(text: str, gold: str) -> float:
    r"""Return 1.0 if the content of the last \boxed{} (LaTeX) is mathematically equal to `gold`, else 0.0.

    math-verify compares them in a subprocess with limits on CPU time and memory; an answer that exceeds
    one scores 0. Thread-safe. Raises RuntimeError if the subprocess does not start.
    """
    answer = boxed(text)
    return float(bool(answer) and grader_of(os.getpid()).grade(answer, str(gold)))


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}, None if it is missing, unclosed or longer than MAX_LATEX."""
    _, box, rest = text.rpartition("\\boxed")
    rest = rest.lstrip()
    if not box or not rest.startswith("{"):
        return None
    depth = 0
    for match in BRACE.finditer(rest, 0, MAX_LATEX + 2):
        if match[0] in "{}":
            depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return rest[1 : match.start()]
    return None


# A short answer, for example a tower of powers, can keep sympy, on which math-verify builds, busy for hours.
# Nothing inside the trainer's process stops that reliably: math-verify's timeouts are signals, which reach
# only the main thread, and only between two bytecodes. So a worker process grades, under limits that the
# kernel enforces.
CPU_SECONDS = 1.0  # per answer; unlike wall-clock time, independent of how busy the machine is
WALL_SECONDS = 60  # per answer, in case the worker hangs without using the CPU
MEMORY_BYTES = 2**30


class Grader:
    """Sends answers to a worker process, one at a time, and replaces a worker that has died."""

    def __init__(self):
        self.lock = threading.Lock()
        self.worker = None

    def grade(self, answer: str, gold: str) -> bool:
        """Return the worker's verdict, False if it dies. Raises RuntimeError if no worker starts."""
        with self.lock:
            reply = ""
            try:
                if self.worker is None or self.worker.poll() is not None:
                    self.start_worker()
                with suppress(BrokenPipeError):
                    self.worker.stdin.write(json.dumps([answer, gold]) + "\n")
                    self.worker.stdin.flush()
                    reply = self.worker.stdout.readline()
            finally:
                if not reply:  # it died, or its late reply would be read as the reply to the next question
                    self.stop_worker()
            return reply == "equal\n"

    def start_worker(self):
        self.stop_worker()
        self.worker = subprocess.Popen(
            [sys.executable, "-P", __file__, "--grade"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # or sympy's order of terms, and a verdict, could vary
            start_new_session=True,  # Ctrl-C in the terminal does not reach it
        )
        if self.worker.stdout.readline() != "ready\n":
            raise RuntimeError("the process that grades LaTeX failed to start; is math-verify installed?")

    def stop_worker(self):
        if self.worker is None:
            return
        self.worker.kill()
        self.worker.wait()
        with suppress(BrokenPipeError):
            self.worker.stdin.close()
        self.worker.stdout.close()
        self.worker = None


@cache
def grader_of(process_id: int) -> Grader:
    """Return the grader of a process. A forked process must not share its parent's pipes."""
    return Grader()


def run_worker():
    """Read lines of `[answer, gold]` (JSON) from standard input and reply `equal` or `different` to each."""
    restrict_sympy_eval()
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are disabled
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not be read as a reply
    if not latex_equal("1", "1"):  # also imports everything before the limits apply
        sys.exit("math-verify does not accept 1 as equal to 1")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        answer, gold = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # without a handler, a timer's signal kills
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        equal = latex_equal(answer, gold)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print("equal" if equal else "different", file=replies, flush=True)


def latex_equal(answer: str, gold: str) -> bool:
    """Return math-verify's verdict, however long it takes."""
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    answers = parse(f"\\boxed{{{answer}}}", config, extraction_mode="first_match", parsing_timeout=None)
    golds = parse(f"\\boxed{{{gold}}}", config, parsing_timeout=None)
    return bool(answers) and verify(golds, answers, timeout_seconds=None)


def restrict_sympy_eval():
    """Patch sympy, which parses strings with `eval`, to evaluate nothing but arithmetic of literals."""
    import sympy.physics.units  # noqa: F401 - imported late by sympy's simplify, and full of such strings
    from sympy.parsing import sympy_parser

    structure = (ast.Expression, ast.Call, ast.Name, ast.Load, ast.Constant)
    operators = (ast.UnaryOp, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div)
    functions = {"Integer", "Float", "Rational", "Symbol"}
    eval_expr = sympy_parser.eval_expr

    def checked_eval_expr(code: str, *namespaces):
        nodes = list(ast.walk(ast.parse(code, mode="eval")))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        if not names <= functions or not all(isinstance(node, structure + operators) for node in nodes):
            raise ValueError(f"refused to evaluate {code!r}")
        return eval_expr(code, *namespaces)

    sympy_parser.eval_expr = checked_eval_expr


if __name__ == "__main__" and sys.argv[1:] == ["--grade"]:
    run_worker()
