"""Tests of tools/samples.py, tools/view.py with its page, and tools/curve.py."""

import base64
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from shutil import which

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is not a folder is refused at once

import numpy as np
import pytest
from transformers import AutoTokenizer

from tools import curve, view
from tools.samples import SamplesError, of_steps, over_tokens, spread

TINY = Path(__file__).parent.parent / "assets/tiny"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "{data}{script}{hash}\\1",
    "a\u2028b\u2029c\x00d\x1b[31m\u202ee\r\n",
    "naïve 😀 日本語",
    "\\u003c/script> &lt;b&gt; \"'`${1}",
]
NAN = pytest.approx(math.nan, nan_ok=True)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def record_of(place: int, index: int, text: str = "so", **others) -> dict:
    """A sample as train.py writes it, without its step: text alone, unless `others` has ids."""
    return {"key": [place, index], "reward": 1.0, "text": text, "row": {"target": place}} | others


def a_run(folder: Path, steps: dict[int, list[dict]], group_size: int = 2) -> Path:
    """A folder as train.py leaves it, but for weights: config.json and samples.jsonl."""
    records = [{"step": step} | record for step, records in steps.items() for record in records]
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(json.dumps({"model": str(TINY), "group_size": group_size}))
    return folder


def viewed(run: Path, **options) -> tuple[str, dict]:
    """The page's block of data up to where a browser ends it, as text and as an object."""
    view.write_view(run, run / "samples.html", **options)
    block = (run / "samples.html").read_text().partition('id="data">')[2].partition("</script")[0]
    return block, json.loads(block)


def joined(page: dict, tokens: list[int]) -> str:
    """What places in the page's vocabulary spell together, without special tokens."""
    parts = [page["vocabulary"][token] for token in tokens if token not in page["special"]]
    return b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in parts).decode()


# ---------------------------------------------- the page -----------------------------------------------
@pytest.mark.parametrize("with_tokens", [True, False])
def test_what_a_model_wrote_stays_text(tokenizer, tmp_path, with_tokens):
    records = []
    for i, text in enumerate(HOSTILE):
        ids = tokenizer.encode(text)
        tokens = {"ids": [*ids, *ids, 2], "trained": [[len(ids), 2 * len(ids) + 1]]} if with_tokens else {}
        others = {"row": {text: text, "lone": "\ud800"}, "metrics": {text: math.nan}, "failure": text}
        records.append(record_of(i, 0, text, **tokens, **others))
    block, page = viewed(a_run(tmp_path, {1: records}))
    assert "<" not in block and block.isascii()
    for record, shown in zip(records, page["samples"], strict=True):
        group = page["groups"][shown["group"]]
        if with_tokens:
            assert joined(page, shown["tokens"]) == joined(page, group["prompt"]) == record["text"]
        else:
            assert shown["turns"] == [record["text"]] and group["prompt"] == []
        assert group["row"] == record["row"] and shown["failure"] == record["text"]
        assert shown["metrics"] == {record["text"]: "NaN"}
    html = (tmp_path / "samples.html").read_text()
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html and "<!--<" not in html
    (allowed,) = re.findall(r"script-src '(.*?)'", html)
    script = html.rpartition("<script>")[2].partition("</script>")[0]
    assert allowed == "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def test_numbers_stand_at_their_tokens(tmp_path):
    # Two tokens of the prompt; then trained, trained, the environment's, trained. The 99th percentile of the
    # magnitudes 1, 2 and 3 is 2.98, on the way from 2 to 3.
    record = record_of(
        0,
        0,
        ids=[5, 6, 7, 8, 9, 10],
        trained=[[2, 4], [5, 6]],
        logprobs=[-1, -2, -3],
        versions=4,
        turn_ids=[0, 0, 1],
        advantages=[0.5, 0.5, -0.5],
        entropy=2.0,
        rewards=[1.0, 2.0],
        truncated=True,
        solved=True,
        remark="not a number",
    )
    _, page = viewed(a_run(tmp_path, {3: [record]}))
    (group,) = page["groups"]
    (shown,) = page["samples"]
    assert group == {"step": 3, "number": 1, "prompt": group["prompt"], "row": {"target": 0}}
    assert (len(group["prompt"]), len(shown["tokens"])) == (2, 4)
    assert shown["trained"] == [[0, 2], [3, 4]] and shown["rewards"] == [1.0, 2.0] and shown["truncated"]
    columns = shown["columns"]
    assert columns.keys() == {"logprobs", "versions", "turn_ids", "advantages", "entropy", "solved"}
    constants = [columns["versions"], columns["entropy"], columns["solved"]]  # of all trained tokens
    assert constants == [4.0, 2.0, 1.0] and {type(constant) for constant in constants} == {float}
    expected = {
        "logprobs": [-1, -2, NAN, -3],
        "turn_ids": [0, 0, NAN, 1],
        "advantages": [0.5, 0.5, NAN, -0.5],
    }
    for name, values in expected.items():
        assert np.frombuffer(base64.b64decode(columns[name]), "<f4").tolist() == values, name
    assert page["columns"]["logprobs"] == {"low": -2.98, "high": 0}
    assert page["columns"]["advantages"] == {"low": -0.5, "high": 0.5}


def test_samples_with_and_without_tokens_share_a_page(tmp_path):
    tokens = {"ids": [5, 6, 7], "trained": [[2, 3]], "logprobs": -1.0}
    records = [record_of(0, 0, **tokens), record_of(0, 1, **tokens)]
    records += [
        record_of(1, 0, "ab", turns=["a", "b"], rewards=[0.5, 0.5], response_length=9),
        record_of(1, 1),
    ]
    _, page = viewed(a_run(tmp_path, {1: records}))
    assert [len(group["prompt"]) for group in page["groups"]] == [2, 0]
    assert ["tokens" in sample for sample in page["samples"]] == [True, True, False, False]
    assert page["samples"][2] == {
        "reward": 1.0,
        "rewards": [0.5, 0.5],
        "response_length": 9,
        "group": 1,
        "turns": ["a", "b"],
    }
    assert page["columns"].keys() == {"logprobs"} and len(page["vocabulary"]) == 3


def test_texts_alone_need_no_tokenizer(tmp_path):
    run = a_run(tmp_path, {1: [record_of(0, 0)]})
    _, page = viewed(run, tokenizer="no/such/model")
    assert page["vocabulary"] == [] and page["columns"] == {} and page["samples"][0]["turns"] == ["so"]
    run = a_run(tmp_path, {1: [record_of(0, 0, ids=[5, 6], trained=[[1, 2]])]})
    with pytest.raises(SamplesError, match="no/such/model"):
        viewed(run, tokenizer="no/such/model")


def test_groups_are_told_apart_by_key_or_place(tmp_path):
    # The same prompt everywhere, as in a game whose secrets differ. Older runs may lack keys, or repeat the
    # key of a group that was sampled anew.
    expected = [0, 0, 1, 1, 2, 2, 3, 3]
    keys = [[(0, 0), (0, 1), (1, 0), (1, 1)], [(), (), (), ()], [(5, 0), (5, 1), (5, 0), (5, 1)]]
    for of_step in keys:
        records = [record_of(0, 0, row={}, key=key) for key in of_step]
        _, page = viewed(a_run(tmp_path, {1: records, 2: records}))
        assert [sample["group"] for sample in page["samples"]] == expected, of_step
        numbers = [(group["step"], group["number"]) for group in page["groups"]]
        assert numbers == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_older_files_are_still_readable(tmp_path):
    old = {
        "messages": [],
        "row": {},
        "ids": [5, 6, 7],
        "logprobs": -1.0,
        "versions": 1,
        "steps": 0,
        "text": "b",
    }
    old |= {"turns": ["b"], "key": [4, 0], "truncated": False, "failure": "", "rewards": [1.0]}
    old |= {"advantages": [0.5, 0.25], "trained": [[1, 3]], "reward": 1.0}
    _, page = viewed(a_run(tmp_path, {1: [old]}))
    (shown,) = page["samples"]
    assert shown["columns"].keys() == {"logprobs", "versions", "steps", "advantages"}
    assert (shown["failure"], shown["truncated"], len(shown["tokens"])) == ("", False, 2)


def test_parts_of_characters_are_bytes(tokenizer):
    smile = view.spell(tokenizer, tokenizer.encode("😀"))
    assert len(smile) > 1 and bytes(byte for part in smile for byte in part) == "😀".encode()
    assert view.spell(tokenizer, tokenizer.encode(" no")) == [" no"]
    assert view.spell(tokenizer, [2]) == ["<|im_end|>"]
    assert view.spell(tokenizer, [10**6]) == ["[no token 1000000]"]


# ---------------------------------------------- samples.jsonl ------------------------------------------
def test_one_number_stands_for_all_trained_tokens():
    mask = np.array([True, False, True])
    assert over_tokens(2.5, mask).tolist() == [2.5, NAN, 2.5]
    assert over_tokens([1, "NaN"], mask).tolist() == [1, NAN, NAN]  # what load_samples makes of NaN
    assert over_tokens([1, 2, 3], mask) is over_tokens("text", mask) is over_tokens(None, mask) is None


def test_steps_are_spread_over_a_run(tmp_path):
    found = {step: list(range(4)) for step in range(1, 11)}
    assert spread(found, 0, 2) == spread(found, 40, 2) == found
    assert spread(found, 12, 2) == {1: found[1], 5: found[5], 10: found[10]}  # 12 // 4 steps, 9 // 2 apart
    assert spread(found, 7, 2) == {1: [0, 1], 10: [0, 1]}  # less than two whole steps: a group of each
    assert spread({8: [0, 1, 2]}, 1, 2) == {8: [0]}
    selections = {
        "3:5": [3, 4, 5],
        "7": [7],
        "9:": [9, 10],
        ":2": [1, 2],
        "": [*found],
        "0": None,
        "11:": None,
    }
    for steps, chosen in selections.items():
        if chosen is None:
            with pytest.raises(SamplesError, match="steps 1 to 10"):
                of_steps(found, steps)
        else:
            assert list(of_steps(found, steps)) == chosen, steps
    records = [record_of(i // 2, i % 2) for i in range(4)]
    run = a_run(tmp_path, {step: records for step in range(1, 11)})
    with (run / "samples.jsonl").open("a") as file:
        file.write('{"step": 11, "key')  # still being written
    assert viewed(run)[1]["note"] == "all 40 samples"
    page = viewed(run, limit=12)[1]
    assert page["note"].startswith("12 of 40 samples, from steps 1, 5, 10; select others with --steps")
    assert [group["step"] for group in page["groups"]] == [1, 1, 5, 5, 10, 10]
    assert {group["step"] for group in viewed(run, steps="4:6")[1]["groups"]} == {4, 5, 6}
    assert viewed(run, steps="7")[1]["note"].startswith("4 of 40 samples, from step 7;")


GOOD = '{"step": 1, "ids": [5], "trained": []}\n'


@pytest.mark.parametrize(
    "content, flags, message",
    [
        (None, [], "does not exist"),
        ("", [], "no samples yet"),
        ('{"a": 1}\n', [], "line 1"),
        ('{"step": 1, "ids"\n', [], "sample 1 of step 1 is not JSON"),
        ('{"step": 1, "ids": []}\n', [], "neither a text nor ids"),
        (GOOD, ["--steps", "2"], "--steps 2"),
        (GOOD, ["--steps", "a"], "--steps a"),
        (GOOD, ["--limit", "-1"], "--limit -1"),
        (GOOD, ["--tokenizer", "no/such/model"], "--tokenizer"),
    ],
)
def test_a_run_without_samples_ends_in_one_line(tmp_path, monkeypatch, capsys, content, flags, message):
    run = a_run(tmp_path, {})
    (run / "samples.jsonl").unlink() if content is None else (run / "samples.jsonl").write_text(content)
    monkeypatch.setattr(sys, "argv", ["view", str(run), "--output", str(run / "samples.html"), *flags])
    with pytest.raises(SystemExit) as ended:
        view.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not (run / "samples.html").exists()


# ---------------------------------------------- in a browser -------------------------------------------
def dumped(page: Path) -> str:
    """What Chromium makes of a page, without its script and data."""
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    done = subprocess.run(
        [*chromium, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=60
    )
    return done.stdout.partition("<script")[0]


@pytest.mark.slow
@pytest.mark.skipif(not which("chromium"), reason="needs a browser")
def test_a_browser_shows_text_as_text(tokenizer, tmp_path):
    ids = tokenizer.encode("".join(HOSTILE))
    tokens = {"ids": [5, *ids, 2], "trained": [[1, len(ids) + 2]], "advantages": 0.5}
    viewed(a_run(tmp_path, {1: [record_of(0, 0, "".join(HOSTILE), **tokens)]}))
    page = dumped(tmp_path / "samples.html")
    assert "<img" not in page and "&lt;" in page and "\\u{202e}" in page
    assert page.count('class="token much" style="--heat: 72%;"') == len(ids)
    assert page.count('class="token special much"') == 1  # the end of the turn


@pytest.mark.slow
@pytest.mark.skipif(not which("chromium"), reason="needs a browser")
def test_a_browser_shows_samples_without_tokens(tmp_path):
    hostile = "".join(HOSTILE)
    records = [record_of(3, 0, hostile, failure="it <b>failed</b>"), record_of(3, 1, "xy", turns=["x", "y"])]
    records[1] |= {"rewards": [0.25, 0.75], "truncated": True, "response_length": 17}
    viewed(a_run(tmp_path, {1: records}))
    page = dumped(tmp_path / "samples.html")
    assert "<img" not in page and "&lt;img src=x" in page and "\\u{202e}" in page
    assert "Text only: per-token details are kept for the first --token_groups groups" in page
    assert "it &lt;b&gt;failed&lt;/b&gt;" in page and "turn 2, reward 0.75" in page
    assert "17 tokens" in page and "NaN" not in page and "cut off" in page and 'class="token"' not in page


# ---------------------------------------------- curves -------------------------------------------------
def test_the_curve_shows_all_metrics_of_the_reward_function():
    names = {"step", "reward", "eval_score", "eval_pass@4", "time_new", "loss", "entropy", "hits", "a_habit"}
    panels = {title: metrics for title, _, metrics in curve.panels_of(names)}
    assert panels == {
        "Reward": ["reward", "eval_score", "eval_pass@4"],
        "Metrics of the reward function": ["a_habit", "hits"],
        "Entropy": ["entropy"],
    }
    assert curve.panels_of(set()) == []


def test_the_curve_of_several_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    for name in ("a", "b", "empty"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()
    curve.draw([tmp_path / "empty"], tmp_path / "curve.png")  # a run that was stopped in its first step
    assert not (tmp_path / "curve.png").exists()
    for name, steps in (("a", 3), ("b", 1)):
        records = [{"step": step, "reward": 0.5, "logprob_diff": 1e-6} for step in range(steps)]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    arguments = ["curve", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "curve.png")]
    monkeypatch.setattr(sys, "argv", arguments)
    curve.main()
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "b/metrics.jsonl").write_text('{"step": 1, "logprob_diff": 0.0}')
    with warnings.catch_warnings(action="error"):
        curve.draw([tmp_path / "b"], tmp_path / "zero.png")  # no logarithm
    monkeypatch.setattr(sys, "argv", ["curve", str(tmp_path / "no_run")])
    with pytest.raises(SystemExit) as ended:
        curve.main()
    assert ended.value.code == 2 and "no_run" in capsys.readouterr().err
