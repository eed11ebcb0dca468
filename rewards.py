"""Ready-made verifiers: functions of the text that a model wrote and of what is right, to a number.

A model's text is untrusted input: nothing here evaluates it as Python. Arithmetic goes through a parser of our own,
over exact fractions and with bounds on its size. No torch, and nothing of `train`: a verifier can be tested alone.
Programs that a model wrote are for `run_python(code, timeout_s)`, which runs them apart from everything.
"""
import re
from fractions import Fraction

from tools.grader import grade
from tools.sandbox import run_python

__all__ = ["countdown", "countdown_habits", "gsm8k_last_number", "gsm8k_boxed", "math", "run_python"]

TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])")
SIGN = r"[-−](?:\\?\$)?"         # also of -$5
NUMBER = re.compile(rf"(?:(?<![0-9)]){SIGN})?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")       # in 5-6 the last is 6
INTEGER = re.compile(r"[-−]?[0-9]+")
PLAIN = str.maketrans({"−": "-", ",": "", "$": "", "\\": ""})
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)      # with a backslash before it, it is no brace
MAX_EXPRESSION = 200    # characters; an answer to countdown is far shorter
MAX_DIGITS = 18         # of one number in it
MAX_TEXT = 100_000      # characters of a text that are searched for lines or numbers
MAX_LATEX = 500         # characters; the longest answer in MATH has 159


# ------------------------------------------------ countdown -----------------------------------------------------------
def countdown(text: str, nums: list[int], target: int) -> float:
    """1.0 exactly when the last <answer> uses each of `nums` once and equals `target` in exact arithmetic, else 0.0.

    Only what stands left of an optional `=` counts. Allowed are whole numbers, + - * /, a leading sign and parentheses.
    """
    _, opened, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    if not (opened and closed):
        return 0.0
    try:
        value, used = evaluate(answer.split("=")[0])
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == Fraction(target) and sorted(used) == sorted(map(int, nums)))


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of an arithmetic expression, and the numbers in it in their order.

    Recursive descent over `sum := product (+|- product)*`, `product := factor (*|/ factor)*`, and
    `factor := number | (sum) | +-factor`. Raises ValueError for anything else or too long, ZeroDivisionError.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(f"an expression of {len(expression)} characters; at most {MAX_EXPRESSION} are read")
    tokens, end = [], 0
    for match in iter(lambda: TOKEN.match(expression, end), None):
        tokens.append(match[1])
        end = match.end()
    if expression[end:].strip():
        raise ValueError(f"cannot read {expression[end:].strip()!r}")
    if tokens.count("(") != tokens.count(")"):      # so what follows is never deeper than half of MAX_EXPRESSION
        raise ValueError("a parenthesis has no other")
    tokens.reverse()    # a stack: the next token is its last
    used = []

    def total() -> Fraction:
        value = product()
        while tokens and tokens[-1] in "+-":
            value = value + product() if tokens.pop() == "+" else value - product()
        return value

    def product() -> Fraction:
        value = factor()
        while tokens and tokens[-1] in "*/":
            value = value * factor() if tokens.pop() == "*" else value / factor()
        return value

    def factor() -> Fraction:
        token = tokens.pop() if tokens else ""
        if token in ("+", "-"):
            return factor() if token == "+" else -factor()
        if token == "(":
            value = total()
            if not tokens or tokens.pop() != ")":
                raise ValueError("a parenthesis closes too early")
            return value
        if not token.isdecimal() or len(token) > MAX_DIGITS:
            raise ValueError(f"expected a number of at most {MAX_DIGITS} digits, found {token!r}")
        used.append(int(token))
        return Fraction(int(token))

    value = total()
    if tokens:
        raise ValueError(f"expected the end, found {tokens[-1]!r}")
    return value, used


def countdown_habits(text: str, target: int) -> dict[str, float]:
    """How a trace of attempts, a line each such as `12+4-1 = 16-1 = 15 no`, goes; shares in [0, 1] where defined.

    `arithmetic`: attempts whose sides are all equal. `verdicts`: each yes and no that is right about its line's result.
    `stops_after_hit`: a yes that no attempt follows. `goes_on_after_miss`: a no that an attempt follows.
    Only the first MAX_TEXT characters are looked at.
    """
    trace = text[:MAX_TEXT].split("</think>")[0].removeprefix("<think>")
    lines = [line.rpartition(" ") for line in trace.splitlines()]
    attempts = [(sides_of(equation), verdict) for equation, _, verdict in lines if verdict in ("yes", "no")]
    last = len(attempts) - 1
    shares = {
        "arithmetic": [None not in sides and len(set(sides)) == 1 for sides, _ in attempts],
        "verdicts": [(sides[-1] == Fraction(target)) == (verdict == "yes") for sides, verdict in attempts],
        "stops_after_hit": [i == last for i, (_, verdict) in enumerate(attempts) if verdict == "yes"],
        "goes_on_after_miss": [i < last for i, (_, verdict) in enumerate(attempts) if verdict == "no"],
    }
    return {name: sum(values) / len(values) for name, values in shares.items() if values}


def sides_of(equation: str) -> list[Fraction | None]:
    """The values of `a = b = ...`, None for a side that cannot be read."""
    values = []
    for side in equation.split("="):
        try:
            values.append(evaluate(side)[0])
        except (ValueError, ZeroDivisionError):
            values.append(None)
    return values


# ------------------------------------------------ word problems -------------------------------------------------------
def gsm8k_last_number(text: str, gold: str) -> float:
    """1.0 when the last number of the text is the one after `####` in a GSM8K solution (arXiv:2110.14168), else 0.0.

    Thousands' commas do not count, and 72.0 is 72. `gold` may also be the bare number. Of the text the last MAX_TEXT
    characters are looked at.
    """
    right, found = gold_number(gold), NUMBER.findall(text[-MAX_TEXT:])
    return float(bool(found) and as_fraction(found[-1]) == right)


def gsm8k_boxed(text: str, gold: str) -> int:
    r"""1 when the first whole number after the last \boxed is the gold one, 0 when another, -1 when there is none.

    TapeAgents' protocol for GSM8K (examples/rl_gsm8k); thousands' commas do not count, `gold` as in gsm8k_last_number.
    """
    right = gold_number(gold)
    _, box, rest = text.rpartition("\\boxed")
    found = INTEGER.search(rest.replace(",", ""))
    if not box or not found:
        return -1
    return int(as_fraction(found[0]) == right)


def gold_number(gold: str) -> Fraction:
    """The last number, of what is behind #### where there is that. Raises ValueError when there is none."""
    found = NUMBER.findall(str(gold).split("####")[-1])
    value = as_fraction(found[-1]) if found else None
    if value is None:
        raise ValueError(f"no number in the answer {gold!r}")
    return value


def as_fraction(number: str) -> Fraction | None:
    """What NUMBER has found, exactly; None when it is absurdly long, and then it equals nothing."""
    return Fraction(number.translate(PLAIN)) if len(number) <= 60 else None


def math(text: str, gold: str) -> float:
    r"""1.0 when the text's last \boxed{} is mathematically the gold answer (LaTeX), else 0.0; graded by math-verify.

    That happens in another process, where an answer that takes too long is wrong (tools/grader.py), from any thread.
    """
    answer = boxed(text)
    return float(bool(answer) and grade(answer, str(gold)))


def boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds; None where there is none, or it is not closed within MAX_LATEX characters."""
    _, found, rest = text.rpartition("\\boxed")
    rest = rest.lstrip()
    if not found or not rest.startswith("{"):
        return None
    depth = 0
    for match in BRACE.finditer(rest, 0, MAX_LATEX + 2):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return rest[1:match.start()]
    return None
