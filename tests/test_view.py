"""Tests of tools/view.py with its page."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from shutil import which

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is not a folder is refused at once

import pytest
from transformers import AutoTokenizer

from tools import view

TINY = Path(__file__).parent.parent / "assets/tiny"
HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "\"'> onclick=alert(1) {{ nonce }}{% raw %}\\1",
    "a\u2028b\u2029c\x00d\x1b[31m\u202ee\r",
    "naïve 😀 日本語 &lt;b&gt; ${1}",
]
TAGS = "html meta title style header h1 div label select option span form input button details summary"
TAGS = {*TAGS.split(), "article", "i", "script"}


class Page(HTMLParser):
    """What a browser sees of a page: tags, attributes, and the texts of samples and tokens."""

    def __init__(self, path: Path):
        super().__init__()
        self.tags = []
        self.attributes = []
        self.articles = []  # [attributes, text, tokens] of each sample
        self.inside = []  # the tags that are open, from the sample's on
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "article":
            self.articles.append([dict(attributes), "", []])
        if tag == "article" or self.inside:
            self.inside.append(tag)
        if tag == "i":
            self.articles[-1][2].append("")

    def handle_endtag(self, tag):
        if self.inside:
            assert self.inside.pop() == tag

    def handle_data(self, text):
        if self.inside:
            self.articles[-1][1] += text
        if self.inside[-1:] == ["i"]:
            self.articles[-1][2][-1] += text


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def record_of(place: int, index: int, text: str = "so", **others) -> dict:
    """A sample as train.py writes it, without its step: text alone, unless `others` has ids."""
    sample = {"key": [place, index], "reward": 1.0, "text": text, "row": {"target": place}}
    return sample | {"failure": "", "metrics": {}} | others


def viewed(folder: Path, steps: dict[int, list[dict]], end: str = "", chosen: str = "", limit=1000) -> Page:
    """The page of a run with these samples by step; `end` follows them in samples.jsonl."""
    records = [{"step": step} | record for step, records in steps.items() for record in records]
    (folder / "samples.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + end)
    (folder / "config.json").write_text(json.dumps({"model": str(TINY)}))
    said = view.write_view(folder, chosen, limit, "")
    page = Page(folder / "samples.html")
    page.said = said.partition(": ")[2]
    return page


# ---------------------------------------------- the page -----------------------------------------------
@pytest.mark.parametrize("with_tokens", [True, False])
def test_what_a_model_wrote_stays_text(tokenizer, tmp_path, with_tokens):
    records = []
    for i, text in enumerate(HOSTILE):
        ids = tokenizer.encode(text)
        tokens = {"ids": [*ids, *ids, 2], "trained": [[len(ids), 2 * len(ids) + 1]], "advantages": 0.5}
        others = {"row": {text: text, "lone": "\ud800"}, "metrics": {text: float("nan")}, "failure": text}
        records.append(record_of(i, 0, text, **(tokens if with_tokens else {}), **others))
    page = viewed(tmp_path, {1: records})
    assert TAGS.issuperset(page.tags) and page.tags.count("script") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "href")]
    (policy,) = [value for name, value in page.attributes if name == "content" and "script-src" in value]
    (nonce,) = [value for name, value in page.attributes if name == "nonce"]
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'"
    assert len(nonce) == 32 and f'nonce="{nonce}"' not in page.html.partition("<script")[0]
    for text, (_, shown, tokens) in zip(HOSTILE, page.articles, strict=True):
        assert shown.count(view.visible(text)) == 3  # the completion, the failure, the name of a metric
        assert "".join(tokens) == (view.visible(text) + "<|im_end|>") * with_tokens
    assert "a\\u{2028}b\\u{2029}c\\u{0}d\\u{1b}[31m\\u{202e}e\\u{d}" == view.visible(HOSTILE[4])


def test_numbers_stand_at_their_tokens(tmp_path, tokenizer):
    # Two tokens of the prompt; then trained, trained, the environment's, trained. The 99th percentile of the
    # magnitudes 1, 2 and 3 is 2.98, on the way from 2 to 3.
    record = record_of(0, 0, ids=[5, 6, 7, 8, 9, 10], trained=[[2, 4], [5, 6]], logprobs=[-1, -2, -3])
    record |= {"turn_ids": [0, 0, 1], "entropy": 2.0, "logprob_diff": [1, float("nan"), 3]}
    page = viewed(tmp_path, {3: [record | {"metrics": {"solved": 0.12345}}]})
    ((attributes, text, tokens),) = page.articles
    expected = {"logprobs": [-1, -2, -3], "turn_ids": [0, 0, 1], "entropy": [2], "logprob_diff": [1, None, 3]}
    assert json.loads(attributes["data-columns"]) == expected
    assert tokens == [tokenizer.decode([token]) for token in (7, 8, 10)]
    assert tokenizer.decode([9]) in text and "0.123" in text
    assert '<option value="logprobs" data-bound="2.98">engine&#39;s log-prob</option>' in page.html
    assert f'<div class="text given">{tokenizer.decode([5, 6])}</div>' in page.html


def test_tokens_spell_parts_of_characters(tokenizer):
    decode = view.load_decoder(str(TINY))
    ids = tokenizer.encode("a😀 b")
    assert view.spell(ids, decode)[0] == "a" and "".join(view.spell(ids, decode)) == "a😀 b"
    smile = tokenizer.encode("😀")
    assert view.spell([*smile, 2], decode) == [*[""] * (len(smile) - 1), "😀", "<|im_end|>"]
    assert view.spell(smile[:-1], decode)[-1] == "\ufffd"  # cut off inside a character


def test_samples_of_a_group_stand_together_the_best_first(tmp_path):
    tokens = {"ids": [5, 6, 7], "trained": [[2, 3]], "logprobs": -1.0, "reward": 0.0}
    records = [record_of(0, 0, reward=-1.5), record_of(1, 0, **tokens), record_of(0, 1, reward=2.0)]
    page = viewed(tmp_path, {1: [*records, record_of(1, 1)], 2: [record_of(9, 0, "ninth")]})
    rewards = [float(attributes["data-reward"]) for attributes, *_ in page.articles]
    assert rewards == [2.0, -1.5, 1.0, 0.0, 1.0] and page.tags.count("details") == 2 * 3
    assert [len(tokens) for *_, tokens in page.articles] == [0, 0, 0, 1, 0]
    assert "Step 1, prompt 0: mean reward 0.25 of" in page.html
    assert "Step 2, prompt 9: mean reward 1 of" in page.html


# ---------------------------------------------- which samples ------------------------------------------
def test_a_long_run_makes_a_page_of_some_steps(tmp_path):
    ten = dict.fromkeys(range(1, 11), 4)
    for steps, chosen in {"3:5": [3, 4, 5], "7": [7], "9:": [9, 10], ":2": [1, 2], "": [*ten]}.items():
        assert view.choose(ten, steps, 40) == chosen, steps
    assert view.choose(ten, "", 39) == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert view.choose(ten, "2:", 12) == [2, 6, 10] and view.choose(ten, "", 3) == [1, 10]
    page = viewed(tmp_path, dict.fromkeys(ten, [record_of(i // 2, i % 2) for i in range(4)]), limit=12)
    told = "12 of 40 samples, from 3 steps; select others with --steps FIRST:LAST, more with --limit N"
    assert page.said == told and len(page.articles) == 12


@pytest.mark.parametrize("end", ['{"step": 1, "key', "\0\0\n", '{"step": 1, "a"}\n'])
def test_damaged_lines_are_skipped_and_counted(tmp_path, end):
    page = viewed(tmp_path, {1: [record_of(0, 0)]}, end)
    assert page.said == "1 of 1 samples; 1 damaged or unfinished lines skipped" and len(page.articles) == 1


GOOD = json.dumps({"step": 1, "ids": [5, 6], "trained": [[1, 2]]} | record_of(0, 0))


@pytest.mark.parametrize(
    "content, flags, message",
    [
        (None, [], "does not exist"),
        ("", [], "no samples yet"),
        ('{"step": 1, "a"}', [], "no samples yet"),
        (GOOD, ["--steps", "2"], "--steps 2: the run has samples of steps 1 to 1"),
        (GOOD, ["--steps", "a"], "--steps a"),
        (GOOD, ["--tokenizer", "no/such/model"], "no tokenizer in no/such/model"),
    ],
)
def test_a_run_without_samples_ends_in_one_line(tmp_path, monkeypatch, capsys, content, flags, message):
    if content is not None:
        viewed(tmp_path, {1: [record_of(0, 0)]})  # leaves a config
        (tmp_path / "samples.jsonl").write_text(content)
        (tmp_path / "samples.html").unlink()
    monkeypatch.setattr(sys, "argv", ["view", str(tmp_path), *flags])
    with pytest.raises(SystemExit) as ended:
        view.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "samples.html").exists()


@pytest.mark.slow
@pytest.mark.skipif(not which("chromium"), reason="needs a browser")
def test_a_browser_colors_the_tokens(tmp_path):
    tokens = {"ids": [5, 6, 7, 8], "trained": [[1, 4]], "advantages": [0.5, -0.5, 0.0]}
    viewed(tmp_path, {1: [record_of(0, 0, **tokens)]})
    chromium = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
    command = [*chromium, "--dump-dom", (tmp_path / "samples.html").as_uri()]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    assert page.count("rgba(60, 130, 240, 0.7)") == page.count("rgba(235, 115, 45, 0.7)") == 1
    assert "1 of 1 samples" in page
