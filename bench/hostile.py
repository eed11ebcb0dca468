"""Does a hostile text get a wrong score from rewards.py, does a hostile program get out of extras/sandbox.py?

    python -m bench.hostile [--modes namespaces plain "bwrap ..."] [--expressions 100000] [--output FILE]

assets/hostile_texts.jsonl has completions and the scores that they must get: mostly 0, and 1 for correct
answers in unusual forms. Random expressions, half of them malformed, compare `rewards.evaluate` with Python.
assets/hostile_programs.txt has programs that attack this process, its files and the machine. A mode is a
value of the environment variable SANDBOX; run them both as root and as an ordinary user.
"""

import argparse
import json
import os
import platform
import random
import re
import secrets
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import rewards
from extras import sandbox

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 20.0  # seconds, for programs whose header has none
SLACK = 15.0  # a call that returns this many seconds after the timeout is late
CONCURRENCY = 6  # programs that run at the same time


# ---------------------------------------------- texts -------------------------------------------------------
def read_texts() -> list[dict]:
    """The cases: verifier, kind, text, score, and the verifier's further arguments."""
    cases = [json.loads(line) for line in (ROOT / "assets/hostile_texts.jsonl").open()]
    for case in cases:  # a long text is a list of strings and [string, number of repetitions]
        pieces = case["text"] if isinstance(case["text"], list) else [case["text"]]
        case["text"] = "".join(piece if isinstance(piece, str) else piece[0] * piece[1] for piece in pieces)
    return cases


def score_text(case: dict) -> tuple[float, float]:
    """The score that a case gets, and the seconds that scoring took."""
    arguments = {name: case[name] for name in ("nums", "target", "gold") if name in case}
    start = time.perf_counter()
    score = getattr(rewards, case["verifier"])(case["text"], **arguments)
    return score, time.perf_counter() - start


def python_value(expression: str) -> tuple[Fraction, list[int]] | None:
    """What rewards.evaluate should return, computed by Python; None where it should raise."""
    if re.search(r"[^0-9+*/()\s-]|[0-9]\s+[0-9]|\*\s*\*|/\s*/|\(\s*\)", expression):
        return None
    compact = re.sub(r"\s", "", expression)
    numbers = re.findall("[0-9]+", compact)
    if len(compact) > rewards.MAX_EXPRESSION or max(map(len, numbers), default=0) > rewards.MAX_DIGITS:
        return None
    try:
        value = eval(re.sub("([0-9]+)", r"Fraction('\1')", compact), {"Fraction": Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None
    return (value, list(map(int, numbers))) if isinstance(value, Fraction) else None


def random_expression(rng: random.Random, depth: int = 4) -> str:
    space = rng.choice(["", "", "", " ", "\n", " \t"])
    kind = rng.random()
    if depth == 0 or kind < 0.2:
        return f"{space}{rng.randrange(10 ** rng.choice([1, 1, 2, rng.randrange(1, 21)]))}"
    first = random_expression(rng, depth - 1)
    if kind < 0.36:
        return f"{space}{rng.choice('+-')}{first}"
    if kind < 0.55:
        return f"{space}({first}{space})"
    return first + space + rng.choice("+-*/") + random_expression(rng, depth - 1)


def broken(rng: random.Random, expression: str) -> str:
    """The expression with a few characters inserted, removed or replaced; it may still be well-formed."""
    mistakes = ["", "", *"0123456789+-*/()()  .,_=xj%&^~#'\\\0", "**", "//", "0x", "e5", *"٣²½−\u00a0"]
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(expression) + 1)
        expression = expression[:place] + rng.choice(mistakes) + expression[place + rng.randrange(3) :]
    return expression


def disagreements(count: int, seed: int) -> tuple[list[str], int]:
    """Random expressions, half of them broken, that rewards.evaluate gets wrong; and how many are valid."""
    rng = random.Random(seed)
    wrong = []
    valid = 0
    for number in range(count):
        expression = random_expression(rng)
        if number % 2:
            expression = broken(rng, expression)
        try:
            found = rewards.evaluate(expression)
        except (ValueError, ZeroDivisionError):
            found = None
        if found != python_value(expression):
            wrong.append(expression)
        valid += found is not None
    return wrong, valid


# ---------------------------------------------- programs ----------------------------------------------------
class Program(NamedTuple):
    expected: str  # regular expression for its output
    timeout_s: float
    code: str


def read_programs(only=("",)) -> dict[str, Program]:
    """The programs whose names contain one of these parts, each behind the common prelude."""
    text = (ROOT / "assets/hostile_programs.txt").read_text()
    _, prelude, *blocks = re.split(r"^### ", text, flags=re.MULTILINE)
    programs = {}
    for block in blocks:
        header, _, code = block.partition("\n")
        name, _, rest = header.split(" | ", 2)
        expected, _, seconds = re.fullmatch(r"(.*?)( \| (\d+))?", rest).groups()
        uses_call_numbers = re.search("libc.syscall|mmap", code)
        is_runnable = platform.machine() == "x86_64" or not uses_call_numbers
        if is_runnable and any(part in name for part in only):
            timeout_s = float(seconds or TIMEOUT)
            programs[name] = Program(expected, timeout_s, prelude.partition("\n")[2] + code)
    return programs


class Target:
    """What programs attack: this process, its environment and sockets, a checkpoint, the repository."""

    def __init__(self, folder: Path):
        self.mark = secrets.token_hex(8)  # programs put it into the names of what they create
        self.secret = secrets.token_hex(16)
        os.environ["WANDB_API_KEY"] = self.secret
        sandbox.libc.prctl(sandbox.SUBREAPER, 1, 0, 0, 0)  # adopt processes that outlive their sandbox
        self.checkpoint = folder / "checkpoint"
        self.checkpoint.mkdir()
        (self.checkpoint / "model.safetensors").write_text(self.secret)
        self.sandboxes = folder / "sandboxes"
        self.sandboxes.mkdir()
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix_stream = socket.socket(socket.AF_UNIX)
        self.unix_stream.bind(str(self.checkpoint / "socket"))
        self.unix_stream.listen()
        self.unix_datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.unix_datagram.bind("\0" + self.mark)
        self.before = self.state()

    def fill_in(self, code: str) -> str:
        """A program with its placeholders replaced."""
        values = {"TRAINER": os.getpid(), "PORT": self.tcp.getsockname()[1], "CHECKPOINT": self.checkpoint}
        values |= {"REPOSITORY": ROOT, "MARK": self.mark}
        return re.sub("|".join(values), lambda match: str(values[match[0]]), code)

    def state(self) -> set[tuple]:
        """What programs must not change, but nothing that other users of the machine change."""
        found = {("process", pid) for pid in sandbox.descendants(os.getpid())}
        repository = [path for path in ROOT.rglob("*") if not {".git", "__pycache__"} & set(path.parts)]
        library = Path(os.__file__).parent
        own = [self.sandboxes, *self.sandboxes.iterdir(), self.checkpoint, *self.checkpoint.iterdir()]
        for path in [*repository, *own, *library.glob("*.py"), library]:
            status = path.stat()
            changed = 0 if path == self.sandboxes else status.st_mtime_ns
            found.add((str(path), status.st_size, status.st_mode, status.st_uid, changed))
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", "/home", "/etc"):
            names = os.listdir(folder) if os.path.isdir(folder) else []
            found |= {(folder, name) for name in names if self.mark in name}
        key = str(int(self.mark[:6], 16))
        for kind in ("shm", "sem", "msg"):
            rows = Path("/proc/sysvipc", kind).read_text().splitlines()
            found |= {(kind, row) for row in rows if row.split()[0] == key}
        mounts = Path("/proc/mounts").read_text().splitlines()
        return found | {("mount", row) for row in mounts if str(self.sandboxes) in row}

    def judge(self, mode: str, program: Program) -> tuple[str, float]:
        """Runs a program. Returns "yes" if it was contained, else what went wrong; and its overrun (s)."""
        words = sandbox.choose_mode(mode)
        start = time.monotonic()
        output = sandbox.run_program(self.fill_in(program.code), program.timeout_s, "", words)
        overrun = time.monotonic() - start - program.timeout_s
        if re.search("^ESCAPED", output, re.MULTILINE) or self.secret in output:
            return "no", overrun
        return "yes" if re.search(program.expected, output) else f"unclear: {output[-300:]!r}", overrun


def run_programs(mode: str, only=("",)) -> dict:
    """Runs the programs in one mode: the verdict on each, what they left behind, and the late calls.

    Raises OSError if this mode is not available.
    """
    sandbox.choose_mode(mode)
    programs = read_programs(only)
    usual_folder = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="hostile-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        target = Target(Path(folder))
        tempfile.tempdir = str(target.sandboxes)
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            judged = list(pool.map(lambda program: target.judge(mode, program), programs.values()))
        tempfile.tempdir = usual_folder
        time.sleep(0.5)  # the kernel removes some things with a delay
        left = sorted(map(str, target.before ^ target.state()))
    verdicts = {name: verdict for name, (verdict, _) in zip(programs, judged)}
    late = [f"{name}: {overrun:.1f} s" for name, (_, overrun) in zip(programs, judged) if overrun > SLACK]
    return {"verdicts": verdicts, "left": left, "late": late}


# ---------------------------------------------- run ---------------------------------------------------------
def main():
    from bench import measure  # imports torch, which users of the functions above need not have

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="*", default=["namespaces", "plain"], help="values of SANDBOX")
    parser.add_argument("--expressions", type=int, default=100_000, help="number of random expressions")
    parser.add_argument("--output", type=Path, default=ROOT / "assets/records/hostile.json")
    flags = parser.parse_args()

    rewards.math("\\boxed{1}", "1")  # starts the process that grades LaTeX
    by_verifier = {}
    wrong = []
    for case in read_texts():
        score, seconds = score_text(case)
        row = {"verifier": case["verifier"], "texts": 0, "correct": 0, "wrong scores": 0, "slowest s": 0.0}
        row = by_verifier.setdefault(case["verifier"], row)
        row["texts"] += 1
        row["correct"] += case["score"] == 1
        row["wrong scores"] += score != case["score"]
        row["slowest s"] = max(row["slowest s"], round(seconds, 4))
        if score != case["score"]:
            wrong.append(case | {"text": case["text"][:100], "found": score})
    found, valid = disagreements(flags.expressions, seed=0)
    row = {"expressions": flags.expressions, "with a value": valid, "disagreements with Python": len(found)}
    tables = {"Hostile texts": list(by_verifier.values()), "Hostile programs": []}

    verdicts = {}
    for mode in flags.modes:
        start = time.monotonic()
        result = run_programs(mode)
        verdicts[mode] = result["verdicts"]
        row = {"mode": mode.split()[0], "user": "root" if os.getuid() == 0 else "ordinary"}
        row |= {"programs": len(verdicts[mode]), "contained": list(verdicts[mode].values()).count("yes")}
        row |= {"left behind": len(result["left"]), "late": len(result["late"])}
        tables["Hostile programs"].append(row | {"s": round(time.monotonic() - start)})
        escaped = [f"{name}: {verdict}" for name, verdict in verdicts[mode].items() if verdict != "yes"]
        print(*escaped, *result["left"], *result["late"], sep="\n")
    print(*wrong, *map(ascii, found[:10]), sep="\n")
    for rows in filter(None, [*tables.values(), [row]]):
        measure.show(rows)
    measure.record(flags.output, tables, expressions=row, verdicts=verdicts)
    sys.exit(bool(wrong or found))


if __name__ == "__main__":
    main()
