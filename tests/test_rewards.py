"""Tests of rewards.py: hand-computed scores, hostile completions, and the process that grades LaTeX."""

import inspect
import itertools
import os
import shutil
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings, strategies

import rewards
from bench import hostile
from tests.conftest import run


# ---------------------------------------------- scores ------------------------------------------------------
@pytest.mark.parametrize(
    "answer, nums, target, score",
    [
        ("12-1+4", [1, 4, 12], 15, 1),
        ("(12-1)*4 = 44", [1, 4, 12], 44, 1),
        ("-3+5", [5, 3], 2, 1),
        ("8/3/(8/3)", [8, 3, 8, 3], 1, 1),
        ("12-1", [1, 4, 12], 11, 0),  # 4 is missing
        ("12-1+4", [1, 4, 12], 16, 0),
        ("3+3+4", [3, 4, 5], 10, 0),
        ("1.5*2", [1, 5, 2], 3, 0),
        ("=5", [5], 5, 0),
        ("1+2=9=3", [1, 2], 3, 1),
        ("1</answer><answer>2", [2], 2, 1),
        ("٣+٤", [3, 4], 7, 0),
        ("9" * 18, [int("9" * 18)], int("9" * 18), 1),
        ("9" * 19, [int("9" * 19)], int("9" * 19), 0),
    ],
)
def test_countdown(answer, nums, target, score):
    assert rewards.countdown(f"<think>hm</think> <answer>{answer}</answer>", nums, target) == score


def test_blanks_do_not_count_towards_the_length_of_an_expression():
    padded = " \n".join("3 + 4 + 5".split()).replace(" ", " " * 300)
    assert len(padded) > 5 * rewards.MAX_EXPRESSION
    assert rewards.countdown(f"<answer>{padded}</answer>", [3, 4, 5], 12) == 1
    longest = "-" * (rewards.MAX_EXPRESSION - 5) + "3+4+5"  # an odd number of signs: -3+4+5 = 6
    assert rewards.countdown(f"<answer>{' '.join(longest)}</answer>", [3, 4, 5], 6) == 1
    with pytest.raises(ValueError, match="201 characters"):
        rewards.evaluate(" ".join("-" + longest))


def test_countdown_habits():
    text = (
        "<think>9+4-1 = 13-1 = 12 no\n9-4+1 = 5+1 = 6 yes\n9+4+1 = 13+1 = 15 no\n9-4-1 = 5-1 = 4 no</think>\n"
        "<answer>9-4+1</answer>"
    )
    # Of four attempts, one has wrong arithmetic (13+1 = 15). Every verdict fits the result before it. Another
    # attempt follows the only yes, and two of the three noes.
    expected = {"arithmetic": 3 / 4, "verdicts": 1.0, "stops_after_hit": 0.0, "goes_on_after_miss": 2 / 3}
    assert rewards.countdown_habits(text, 6) == pytest.approx(expected)
    assert rewards.countdown_habits(text, "6") == pytest.approx(expected)
    assert rewards.countdown_habits("<think>9+4 = 13 no</think>", 13)["verdicts"] == 0
    assert rewards.countdown_habits("free prose, no attempt", 6) == {}


@pytest.mark.parametrize(
    "text, gold, score",
    [
        ("so 72.", "48+24 = <<48+24=72>>72\n#### 72", 1),
        ("It is $1,072.00", "#### 1072", 1),
        ("It is 4.", 4, 1),  # not every dataset stores a string
        ("\\boxed{72}", "#### 72", 1),
        ("5-6", "#### 6", 1),
        ("(5)-6", "6", 1),
        ("= -6", "6", 0),
        ("1" + " " * 10**5 + "2", "2", 1),
    ],
)
def test_gsm8k_last_number(text, gold, score):
    assert rewards.gsm8k_last_number(text, gold) == score


@pytest.mark.parametrize(
    "text, gold, score",
    [
        (r"so \boxed{72}", "#### 72", 1),
        (r"\boxed{1,234}.", "1234", 1),
        (r"\boxed{5}", "#### 6", 0),
        (r"\boxed{5} and \boxed{6}", "6", 1),  # the last one counts
        (r"\boxed{-3}", "-3", 1),
        (r"\boxed{} 72", "72", 1),  # the first integer after it
        (r"\boxed{7.5}", "7", 1),
    ],
)
def test_gsm8k_boxed(text, gold, score):
    assert rewards.gsm8k_boxed(text, gold) == score


def test_a_reference_answer_without_a_number_is_an_error():
    for gold in ("1" * 100, "no number"):
        with pytest.raises(ValueError, match="no number"):
            rewards.gsm8k_last_number("1" * 100, gold)
        with pytest.raises(ValueError, match="no number"):
            rewards.gsm8k_boxed("\\boxed{" + "1" * 100, gold)


@pytest.mark.parametrize(
    "text, gold, score",
    [
        (r"\boxed{3}, no: \boxed{4}", "4", 1),
        (r"\boxed{4}, no: \boxed{3}", "4", 0),
        (r"so \boxed{\frac{1}{2}}", 0.5, 1),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"\left( 3, \frac{\pi}{2} \right)", 1),
        ("it is 0.5", "0.5", 0),
    ],
)
def test_math(text, gold, score):
    assert rewards.math(text, gold) == score


def test_boxed():
    assert rewards.boxed("boxed{4}") is None and rewards.boxed(r"\boxed{4\}") is None
    assert rewards.boxed("\\boxed{" + "4" * 500 + "}") == "4" * 500
    assert rewards.boxed("\\boxed{" + "4" * 501 + "}") is None


# ---------------------------------------------- hostile completions -----------------------------------------
CASES = hostile.read_texts()
SLOW_LATEX = [case for case in CASES if case["kind"] == "LaTeX, slow"]


def wrong_scores(cases: list[dict]) -> list[dict]:
    """Those of the cases that get a wrong score. They are scored in a thread, as callers may."""
    with ThreadPoolExecutor(1) as pool:
        scores = list(pool.map(lambda case: hostile.score_text(case)[0], cases, timeout=900))
    return [case for case, score in zip(cases, scores) if score != case["score"]]


@pytest.mark.parametrize("verifier", ["countdown", "gsm8k_last_number", "gsm8k_boxed", "math"])
def test_hostile_completions_get_the_right_score(verifier):
    cases = [case for case in CASES if case["verifier"] == verifier and case not in SLOW_LATEX]
    assert len(cases) > 45 and len({case["score"] for case in cases}) > 1
    assert wrong_scores(cases) == []


@pytest.mark.slow
def test_all_of_the_hostile_texts():
    assert len(CASES) == 616 and len(SLOW_LATEX) == 36
    assert wrong_scores(SLOW_LATEX) == []
    wrong, valid = hostile.disagreements(50_000, seed=1)
    assert wrong == [] and 20_000 < valid < 30_000


def test_arithmetic_agrees_with_python():
    wrong, valid = hostile.disagreements(3000, seed=1)
    assert wrong == [] and 1000 < valid < 2000


HOSTILE_TRACES = ["", "\0", "\ud800 no", "1 yes", "= yes", "==== no", "9**9**9 = 1 yes", "1/0 = 1/0 yes"]
HOSTILE_TRACES += ["1" * 10**6 + " yes", "1=" * 10**6 + "1 yes", "1+1=2 yes\n" * 10**5, "(" * 10**6 + " no"]
HOSTILE_TRACES += ["no\n" * 10**6, " yes" * 10**6, "<think>" * 10**5, "</think>" * 10**5, "1\u20281=1 no"]


def test_habits_of_hostile_traces_are_shares():
    for trace in HOSTILE_TRACES:
        assert all(0 <= share <= 1 for share in rewards.countdown_habits(trace, 4).values()), trace[:50]


def test_a_caller_may_be_deep_in_the_stack():
    text = "<answer>" + "(" * 97 + "5" + ")" * 97 + "</answer>"

    def deep(levels: int):
        return deep(levels - 1) if levels else rewards.countdown(text, [5], 5)

    used = len(inspect.stack())
    assert deep(sys.getrecursionlimit() - used - 330) == 1
    unbalanced = "<answer>" + "(" * 195 + "5</answer>"  # must not be parsed: three frames per level
    text = unbalanced
    assert deep(sys.getrecursionlimit() - used - 330) == 0


CHARACTERS = strategies.one_of(
    strategies.sampled_from("0123456789+-*/()=.,{}\\$%−<> \n"), strategies.characters()
)
TAGS = "<answer> </answer> \\boxed{ } #### <think> </think> 3+4+5 18 ** \\frac".split()
PIECES = strategies.one_of(strategies.text(CHARACTERS), strategies.sampled_from(TAGS))
TEXTS = strategies.lists(PIECES).map("".join)
EXAMPLES = settings(max_examples=200, deadline=None, derandomize=True)


@EXAMPLES
@given(TEXTS)
def test_no_text_makes_a_verifier_raise_or_return_another_value(text):
    assert rewards.countdown(text, [3, 4, 5], 12) in (0.0, 1.0)
    assert rewards.gsm8k_last_number(text, "#### 18") in (0.0, 1.0)
    assert rewards.gsm8k_boxed(text, "#### 18") in (-1, 0, 1)
    assert all(0 <= share <= 1 for share in rewards.countdown_habits(text, 12).values())


@settings(EXAMPLES, max_examples=40)
@given(TEXTS)
def test_no_latex_makes_the_verifier_raise_or_return_another_value(text):
    assert rewards.math(f"\\boxed{{{text}}}", "4") in (0.0, 1.0)


@EXAMPLES
@given(
    TEXTS,
    strategies.sampled_from(["3+4+5", "(5 + 4)+3=12", "3*4*5", "3+3+4"]),
    strategies.sampled_from(["", " ", "\n\t"]),
)
def test_only_the_last_answer_counts_and_blanks_do_not(before, answer, blanks):
    score = rewards.countdown(f"<answer>{answer}</answer>", [3, 4, 5], 12)
    padded = f"{before}<answer>{blanks}{answer}{blanks}</answer>{blanks}"
    assert rewards.countdown(padded, [5, 3, 4], 12) == score
    number = {1.0: "18", 0.0: "17"}[score]
    assert rewards.gsm8k_last_number(f"{before} {number}{blanks}", "#### 18") == score
    assert rewards.gsm8k_boxed(f"{before}\\boxed{{{blanks}{number}{blanks}}}", "#### 18") == score
    assert rewards.boxed(f"{before}\\boxed{blanks}{{{number}}}{before.replace('boxed', '')}") == number


# ---------------------------------------------- the process that grades LaTeX -------------------------------
def started_grader() -> rewards.Grader:
    """Return this process's grader, with a worker running."""
    assert rewards.math("\\boxed{4}", "4") == 1
    return rewards.grader_of(os.getpid())


def test_a_worker_that_takes_too_long_or_dies_is_replaced():
    grader = started_grader()
    worker = grader.worker
    assert wrong_scores(SLOW_LATEX[:1]) == []
    assert worker.poll() == -signal.SIGPROF  # the CPU-time limit, not the wall-clock one
    for _ in range(2):
        assert rewards.math("\\boxed{4}", "4") == 1 and rewards.math("\\boxed{5}", "4") == 0
        grader.worker.kill()
        grader.worker.wait()


def test_the_kernel_kills_a_worker_that_waits_too_long(tmp_path, monkeypatch):
    source = Path(rewards.__file__).read_text()
    changes = {"= latex_equal(answer, gold)": "= latex_equal(answer, gold) or signal.pause()"}
    for before, after in (changes | {"WALL_SECONDS = 60 ": "WALL_SECONDS = 0.5 "}).items():
        assert source.count(before) == 1
        source = source.replace(before, after)
    (tmp_path / "hanging.py").write_text(source)
    monkeypatch.setattr(rewards, "__file__", str(tmp_path / "hanging.py"))  # which the worker runs
    grader = rewards.Grader()
    assert grader.grade("4", "4")
    worker = grader.worker
    assert not grader.grade("5", "4") and worker.returncode == -signal.SIGALRM
    assert grader.grade("4", "4")
    grader.stop_worker()


def test_an_interrupted_question_leaves_no_reply_behind(monkeypatch):
    grader = started_grader()
    worker = grader.worker

    def interrupt():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "stdout", SimpleNamespace(readline=interrupt, close=lambda: None))
        with pytest.raises(KeyboardInterrupt):
            grader.grade("2", "2")
    assert worker.poll() is not None
    worker.stdout.close()
    assert not grader.grade("3", "4") and grader.grade("5", "5")


def test_answers_from_many_threads_are_not_mixed_up():
    pairs = list(itertools.product(map(str, range(10)), repeat=2))
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda pair: rewards.math(f"\\boxed{{{pair[0]}}}", pair[1]), pairs))
    assert scores == [float(answer == gold) for answer, gold in pairs]


def test_a_grader_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(rewards.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="is math-verify installed"):
        rewards.Grader().grade("1", "1")


ALLOWED = {"12": "12", "3/4": "3/4", "1.50": "1.50000000000000", "x": "x"}
REFUSED = ["__import__('os').getpid()", "2**9", "f(1)", "(1).__class__", "[1]", "1 if 2 else 3"]
PARSE = """
import sys, rewards
rewards.restrict_sympy_eval()
from sympy.parsing.sympy_parser import parse_expr
for text in sys.argv[1:]:
    try:
        print(parse_expr(text))
    except ValueError:
        print("refused")
"""


def test_sympy_evaluates_only_literals():
    lines = run("-c", PARSE, *ALLOWED, *REFUSED).stdout.splitlines()
    assert lines == [*ALLOWED.values(), *["refused"] * len(REFUSED)]


# ---------------------------------------------- rewards.py on its own ---------------------------------------
ALONE = r"""
import os, sys, time
import rewards
print(os.path.samefile(rewards.__file__, "rewards.py"), rewards.countdown("<answer>1+2</answer>", [1, 2], 3))
print(rewards.math(r"\boxed{\frac12}", "0.5"), rewards.math(r"\boxed{3}", "4"))
print([name for name in ("torch", "sympy", "math_verify", "numpy") if name in sys.modules])
pid = rewards.grader_of(os.getpid()).worker.pid
if os.fork() == 0:
    score = rewards.math(r"\boxed{5}", "5")
    print(score, pid != rewards.grader_of(os.getpid()).worker.pid, flush=True)
    os._exit(0)
os.wait()
print(pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_rewards_alone_in_a_folder_grades_and_leaves_no_process_behind(tmp_path):
    shutil.copy(rewards.__file__, tmp_path / "rewards.py")
    lines = run("-c", ALONE, cwd=tmp_path).stdout.splitlines()
    assert lines[:2] == ["True 1.0", "1.0 0.0"]
    assert lines[2] == "[]"  # a verifier is cheap to import
    assert lines[3] == "1.0 True"  # a forked process has its own worker
    with suppress(psutil.NoSuchProcess):  # its trainer was killed by SIGKILL
        psutil.Process(int(lines[4])).wait(60)
