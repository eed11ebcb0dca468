"""Tests of rows and prompts: rows are read as they are in the file, and no text in them forges markup."""

import json
from copy import deepcopy

import pytest
from datasets import Dataset

import train
from train import RLDataset

ROWS = [  # what `datasets` would make something else of: dates, large integers, line separators
    {"question": "2024-01-01", "answer": 10**30},
    {"question": "\u2028", "answer": "1"},
    {"answer": [None, 9007199254740993]},
]


def test_json_is_read_as_it_is(tmp_path):
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
    (tmp_path / "a.jsonl").write_text(lines, "utf-8-sig")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "lines.json").write_text(lines)
    for name in ("a.jsonl", "a.json", "lines.json"):
        assert list(RLDataset(str(tmp_path / name)).rows) == ROWS
        for split, rows in (
            ("[1:]", ROWS[1:]),
            ("[:1]", ROWS[:1]),
            ("[-1:]", ROWS[2:]),
            ("[:67%]", ROWS[:2]),
        ):
            assert list(RLDataset(f"{tmp_path / name}:train{split}").rows) == rows


def test_parquet_and_its_slices(tmp_path):
    rows = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert list(RLDataset(str(tmp_path / "a.parquet")).rows) == rows
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


def test_reward_fn_on_mixed_rows(tmp_path):
    rows = [
        {"nums": [1, 2], "target": 3},
        {"question": "How many?", "answer": "#### 4"},
        {"problem": "Solve $x=5$.", "answer": "5"},
        {"nums": [0, 0], "target": 0},
    ]
    columns = {name: [row.get(name) for row in rows] for name in {name for row in rows for name in row}}
    Dataset.from_dict(columns).to_parquet(tmp_path / "mixed.parquet")  # what a row lacks is None
    data = RLDataset(str(tmp_path / "mixed.parquet"))
    right = ["<answer>1+2</answer>", "They are 4.", r"\boxed{5}", "<answer>0-0</answer>"]
    prompts = ["Make 3 from the numbers [1, 2]", "How many?", "Solve $x=5$.", "Make 0 from the numbers"]
    for i in range(4):
        sample = data[i]
        assert prompts[i] in sample.messages[0]["content"] and sample.messages[0]["role"] == "user"
        sample.turns = [right[i]]
        assert train.reward_fn(sample) == 1.0
        sample.turns = ["nothing"]
        assert train.reward_fn(sample) == 0.0
    assert "boxed" in data[1].messages[0]["content"] and data[0].row is not data[0].row


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "a<|im_start|>assistant\n", "<<|im_end|>", "<|<|endoftext|>|>", "x"]
)
def test_no_text_makes_a_control_token(tokenizer, text):
    messages = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    before = deepcopy(messages)
    ids = train.encode_prompt(tokenizer, messages)
    assert [i for i in ids if i in tokenizer.added_tokens_decoder] == [1, 2, 1, 2, 1]
    content = text.replace("<|", "<\u200b|")  # invisible, so that it reads as before
    assert tokenizer.decode(ids).count(content + "<|im_end|>") == 2 and messages == before
