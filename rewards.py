"""Ready-made verifiers: functions of the text that a model wrote and of what is right, to a number.

A model's text is untrusted input: nothing here evaluates it as Python. Arithmetic goes through a parser of our own,
over exact fractions and with bounds on its size. No torch, and nothing of `train`: a verifier can be tested alone.
"""
import re
from fractions import Fraction

TOKEN = re.compile(r"\s*([0-9]+|[-+*/()])", re.ASCII)
NUMBER = re.compile(r"(?:(?<![0-9)])-)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)", re.ASCII)      # in 5-6 the last is 6
INTEGER = re.compile(r"-?[0-9]+", re.ASCII)
MAX_EXPRESSION = 200    # characters; an answer to countdown is far shorter
MAX_DIGITS = 18         # of one number in it


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
                raise ValueError("a parenthesis is not closed")
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
    """
    lines = [line.rpartition(" ") for line in text.split("</think>")[0].removeprefix("<think>").splitlines()]
    attempts = [(sides_of(equation), verdict) for equation, _, verdict in lines if verdict in ("yes", "no")]
    last = len(attempts) - 1
    shares = {
        "arithmetic": [None not in sides and len(set(sides)) == 1 for sides, _ in attempts],
        "verdicts": [(sides[-1] == target) == (verdict == "yes") for sides, verdict in attempts],
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

    Thousands' commas do not count, and 72.0 is 72. `gold` may also be the bare number.
    """
    found = NUMBER.findall(text)
    if not found:
        return 0.0
    right = NUMBER.findall(str(gold).split("####")[-1])
    if not right:
        raise ValueError(f"no number in the answer {gold!r}")
    return float(as_fraction(found[-1]) == as_fraction(right[-1]))


def gsm8k_boxed(text: str, gold: str) -> int:
    r"""1 when the first whole number after the last \boxed is the gold one, 0 when another, -1 when there is none.

    TapeAgents' protocol for GSM8K (examples/rl_gsm8k); thousands' commas do not count, `gold` as in gsm8k_last_number.
    """
    right = NUMBER.findall(str(gold).split("####")[-1])
    if not right:
        raise ValueError(f"no number in the answer {gold!r}")
    _, boxed, rest = text.rpartition("\\boxed")
    found = INTEGER.search(rest.replace(",", ""))
    if not boxed or not found:
        return -1
    return int(as_fraction(found[0]) == as_fraction(right[-1]))


def as_fraction(number: str) -> Fraction | None:
    """An exact number from digits with commas and a point; None when it is absurdly long."""
    return Fraction(number.replace(",", "")) if len(number) <= 60 else None


def math(text: str, gold: str) -> float:
    r"""1.0 when the text's last \boxed{} is mathematically the gold answer (LaTeX), else 0.0; graded by math-verify."""
    from math_verify import LatexExtractionConfig, parse, verify     # slow to import: only where it is used

    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    answer = parse(text[max(text.rfind("\\boxed"), 0):], extraction_config=boxed, extraction_mode="first_match")
    return float(bool(answer) and verify(parse(f"\\boxed{{{gold}}}"), answer))
