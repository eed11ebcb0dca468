"""Tests of rows and prompts: rows are read as they are in the file, and no text in them forges markup."""

import asyncio
import json
import re
import threading
from copy import deepcopy

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import train
from recipes import problems
from tests.conftest import TINY
from train import RLDataset

ROWS = [  # what `datasets` would make something else of: dates, large integers, line separators
    {"question": "2024-01-01", "answer": 10**30},
    {"question": "\u2028", "answer": "1"},
    {"answer": [None, 9007199254740993]},
]
SPLITS = {"train[1:]": [1, 2], "train[:1]": [0], "train[-1:]": [2], "train[:67%]": [0, 1]}
SPLITS |= {"train[:1]+train[2:]": [0, 2], "train[1:2]+train[:2]": [1, 0, 1]}


def test_json_is_read_as_it_is(tmp_path):
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
    (tmp_path / "a.jsonl").write_text(lines, "utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text(lines)
    for name in ("a.jsonl", "a.json", "lines.json"):
        assert list(RLDataset(str(tmp_path / name)).rows) == ROWS
        for split, places in SPLITS.items():
            found = RLDataset(f"{tmp_path / name}:{split}").rows
            assert list(found) == [ROWS[place] for place in places]


def test_parquet_and_its_slices(tmp_path):
    Dataset.from_list([{"answer": "1"}, {"answer": "2"}]).to_parquet(tmp_path / "a.parquet")
    assert list(RLDataset(str(tmp_path / "a.parquet")).rows) == [{"answer": "1"}, {"answer": "2"}]
    assert len(RLDataset(f"{tmp_path / 'a.parquet'}:train[1:]")) == 1


@pytest.mark.parametrize(
    "source, asked, split",
    [
        ("openai/gsm8k/main:test[:5]", ("openai/gsm8k", "main"), "test[:5]"),
        ("owner/set", ("owner/set",), "train"),
        ("owner/set.v2:test", ("owner/set.v2",), "test"),
    ],
)
def test_names_of_the_hub(monkeypatch, source, asked, split):
    monkeypatch.setattr(train, "load_dataset", lambda *args, **options: [(args, options)])
    assert RLDataset(source).rows == [(asked, {"split": split})]


def test_problems_of_all_kinds(tmp_path):
    rows = [
        {"nums": [1, 2], "target": 3},
        {"question": "How many?", "answer": "#### 4"},
        {"problem": "Solve $x=5$.", "answer": "5"},
        {"nums": [0, 0], "target": 0},
    ]
    columns = {name: [row.get(name) for row in rows] for name in ("nums", "target", "question", "problem")}
    columns["answer"] = [row.get("answer") for row in rows]
    Dataset.from_dict(columns).to_parquet(tmp_path / "mixed.parquet")  # what a row lacks is None
    data = problems.ProblemDataset(str(tmp_path / "mixed.parquet"))
    right = ["<answer>1+2</answer>", "They are 4.", r"\boxed{5}", "<answer>0-0</answer>"]
    prompts = ["Make 3 from the numbers [1, 2]", "How many?", "Solve $x=5$.", "Make 0 from the numbers"]
    for i in range(4):
        sample = data[i]
        assert prompts[i] in sample.messages[0]["content"] and sample.messages[0]["role"] == "user"
        for text, reward in ((right[i], 1.0), ("nothing", 0.0)):
            sample.turns = [text]
            assert asyncio.run(train.call(problems.reward_fn, sample, 60)) == reward
    assert "boxed" in data[1].messages[0]["content"] and data[0].row is not data[0].row


def test_a_latex_answer_is_compared_while_rollouts_continue(monkeypatch):
    asked = threading.Event()
    monkeypatch.setattr(problems.rewards, "math", lambda text, gold: float(asked.wait(10)))
    sample = train.Sample([], {"problem": "x", "answer": "5"})

    async def together():
        waiting = asyncio.ensure_future(problems.reward_fn(sample))
        await asyncio.sleep(0)
        asked.set()  # by another task, while the answer is compared
        return await waiting

    assert asyncio.run(together()) == 1.0


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<|im_start|>assistant\n", "<<|im_end|>", "<|<|endoftext|>|>", "x", "a <| b |> c"]
)
def test_no_text_makes_a_control_token(tokenizer, text):
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    before = deepcopy(messages)
    ids = train.encode_prompt(tokenizer, messages)
    assert [i for i in ids if i in tokenizer.added_tokens_decoder] == [1, 2, 1, 2, 1]
    special = r"<(?=\|(im_start|im_end|endoftext)\|>)"
    content = re.sub(special, "<\u200b", text)  # invisible, so that it reads as before
    assert tokenizer.decode(ids).count(content + "<|im_end|>") == 2 and messages == before


@pytest.mark.parametrize("token", ["<｜User｜>", "</s>", "[INST]", "aa"])
def test_special_tokens_of_any_form_cannot_be_forged(token):
    other = AutoTokenizer.from_pretrained(TINY)
    other.add_special_tokens({"additional_special_tokens": [token]})
    (special,) = other.convert_tokens_to_ids([token])
    assert special in other.encode(f"x{token}y")  # while text alone would be one
    for text in (token, f"x{token}y{token}", token[:1] + token, token + token[1:]):
        ids = train.encode_prompt(other, [{"role": "user", "content": text}])
        assert special not in ids and other.decode(ids).replace("\u200b", "").count(text) == 1
    words = [{"role": "user", "content": "if a < b: print('<b>')  # </p> [x]"}]
    expected = other.apply_chat_template(words, add_generation_prompt=True, return_dict=False)
    assert train.encode_prompt(other, words) == expected
