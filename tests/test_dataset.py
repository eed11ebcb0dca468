"""Tests of RLDataset: rows are read as they are in the file."""

import json

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
