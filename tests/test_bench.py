"""Tests of bench/: every benchmark imports, says how it is run, counts correctly; the page is up to date."""

import importlib
import inspect
import json
import random
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import cost, learning, measure, real_qwen, report
from extras import add_flags
from train import Config, Sample

HERE = Path(__file__).parent.parent
MODULES = sorted(path.stem for path in (HERE / "bench").glob("*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_imports_and_names_its_command(name):
    try:
        module = importlib.import_module(f"bench.{name}")
    except ModuleNotFoundError as error:
        if (HERE / f"{error.name.replace('.', '/')}.py").exists():
            raise
        pytest.skip(f"requires {error.name}")
    assert module.__doc__
    if "__main__" in inspect.getsource(module):
        assert f"-m bench.{name}" in module.__doc__


# ------------------------------------------------ the page ----------------------------------------------
def test_the_page_of_results_is_what_the_records_say():
    assert report.PAGE.read_text() == report.render(), "run python -m bench.report"
    assert len(report.PAGE.read_text().splitlines()) <= 200


def test_a_record_becomes_a_section(tmp_path, monkeypatch):
    monkeypatch.setattr(measure.sys, "orig_argv", ["/usr/bin/python3", "-m", "bench.learning", "--a", "b c"])
    rows = [{"run": "a", "tokens": 12345, "share": 0.97654, "seconds": 12345.6}, {"run": "b", "tokens": None}]
    measure.record(tmp_path / "trial.json", {"Of a step": rows}, curves={"a": [[1.0]]})
    measure.record(tmp_path / "games.json", {"": [{"run": "c", "difference": 0.0000123}]})
    kept = json.loads((tmp_path / "trial.json").read_text())
    assert kept["tables"] == {"Of a step": rows} and kept["curves"] == {"a": [[1.0]]}
    assert kept["command"] == "python -m bench.learning --a 'b c'"
    page = report.render(tmp_path)
    lines = page[page.index("## Trial") :].splitlines()
    assert learning.__doc__.startswith(lines[1][:50])
    assert lines[-4:] == [
        "| **Of a step**: run | tokens | share | seconds |",
        "| --- | ---: | ---: | ---: |",
        "| a | 12,345 | 0.977 | 12,300 |",
        "| b |  |",
    ]
    assert "| c | 1.23e-05 |" in page and page.count("\n## ") == 2  # no others are recorded
    shared = [" ".join(kept[name].split()) for name in ("commit", "machine")]
    assert [" ".join(page.split()).count(fact) for fact in shared] == [1, 1]
    (tmp_path / "trial.json").write_text(json.dumps(kept | {"commit": "bbbbbbb"}))
    page = report.render(tmp_path)  # records of different commits name their own
    assert "(commit bbbbbbb)" in page and f"commit {kept['commit']}" in " ".join(page.split())


# ------------------------------------------------ learning ----------------------------------------------
@pytest.mark.parametrize("name", learning.TABLES)
def test_the_commands_of_a_table_have_flags_that_exist(name):
    table = learning.TABLES[name]
    for row in table.rows:
        words = learning.command(table, row, 1, Path("out"), Path("start"), None)
        assert words[words.index("--output_dir") + 1] == "out" and "START" not in " ".join(words)
        recipe = re.search(r"-m (recipes\.\w+)", table.rows[row])
        module = importlib.import_module(recipe[1] if recipe else "train")
        known = {"--standalone", "--nproc_per_node", "--coin"}
        for found in vars(module).values():
            if isinstance(found, type) and issubclass(found, Config):
                known |= {f"--{field.name}" for field in fields(add_flags(found))}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known


def test_a_row_of_a_learning_table_by_hand(tmp_path):
    lines = [{"step": 0, "eval_score": 0.2}, *({"step": i, "reward": i / 10} for i in range(1, 8))]
    lines[7] |= {"eval_score": 0.4, "solved": 0.9}
    lines[4] |= {"eval_score": 0.6}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = learning.history_of(tmp_path)
    assert learning.summary(history, {**learning.HELD_OUT, **learning.SOLVED}) == {
        **{"held-out, start": 0.2, "end": 0.4, "best": 0.6},
        **{"solved, first step": 0.1, "last five": pytest.approx((0.3 + 0.4 + 0.5 + 0.6 + 0.9) / 5)},
    }
    assert learning.curve(history, ["step", "reward", "solved"])[6:] == [[6, 0.6, 0.6], [7, 0.7, 0.9]]
    assert learning.curve(history, ["step", "reward"])[0] == [0, None]


def test_the_coin_knows_nothing_of_the_answer(monkeypatch):
    compared = []
    monkeypatch.setattr(learning.train.Trainer, "compare", lambda self, samples: compared.extend(samples))
    trainer = object.__new__(learning.CoinTrainer)
    trainer.config = SimpleNamespace(seed=3)
    samples = [Sample([], {}, key=(i, 0)) for i in range(2000)]
    for sample in samples:
        sample.reward = random.random()
    true = {sample.key: sample.reward for sample in samples}
    trainer.compare(samples[:500])  # in any order, on any rank
    trainer.compare(samples[:499:-1])
    assert {sample.key: sample.metrics["solved"] for sample in compared} == true
    coins = {sample.key: sample.reward for sample in samples}
    assert set(coins.values()) == {0.0, 1.0}
    assert sum(coins.values()) / 2000 == pytest.approx(learning.CHANCE, abs=0.03)
    trainer.compare(samples)
    assert coins == {sample.key: sample.reward for sample in samples}


# ------------------------------------------------ a real Qwen -------------------------------------------
@pytest.mark.parametrize("task", real_qwen.ROWS)
def test_held_out_rows_are_not_trained_on(task):
    parts = {split: real_qwen.TaskDataset(f"{task}:{split}") for split in ("train", "test")}
    sets = {split: {tuple(sorted(row["numbers"])) for row in data.rows} for split, data in parts.items()}
    assert len(sets["test"]) == real_qwen.HELD_OUT and not sets["train"] & sets["test"]
    row = parts["train"].rows[0]
    answer = ", ".join(map(str, row["answer"]))
    assert answer in (f"{sum(row['numbers'])}", ", ".join(map(str, reversed(row["numbers"]))))
    for text, right in ((answer, 1), (f" {answer}\n", 1), (answer + ".", 0), ("", 0), ("1", 0)):
        assert real_qwen.score(SimpleNamespace(text=text, row=row)) == right


def test_a_row_of_a_finished_run_by_hand():
    history = [{"step": 0, "eval_score": 0.5, "eval_sampled": 0.25}]
    for step in range(1, 8):
        history.append({"step": step, "solved": step / 10, "time_step": float(step), "peak_gb": 9.0 - step})
    history[7] |= {"eval_score": 1.0}
    assert learning.summary(history, real_qwen.COLUMNS) == {
        **{"steps": 7, "held-out, greedy": ".50 1.00", "sampled": ".25"},
        **{"in training, by five steps": ".30 .65", "seconds per step": 4.0, "GB": 8.0},
    }
    config = {"engine": "sglang", "tp_size": 2, "dtype": "float32", "dither": True, "lr": 1e-6, "seed": 1}
    assert real_qwen.name_of(config) == "full, SGLang, tp 2, float32, lr 1e-06, seed 1"
    config |= {"engine": "local", "dtype": "bfloat16", "dither": False, "control": True, "lora_rank": 8}
    assert real_qwen.name_of(config) == "LoRA r 8, coin, no dither, lr 1e-06, seed 1"


# ---------------------------------------------- the cost ------------------------------------------------
def test_time_is_booked_to_the_innermost_part(monkeypatch):
    clock = cost.Clock()
    now = [0.0]
    monkeypatch.setattr(clock, "read", lambda: (now[0], now[0] / 2))

    def wait(seconds):
        now[0] += seconds

    step = SimpleNamespace(inner=wait)
    clock.attach(step, "inner", "inner")
    with clock.part("outer"):
        wait(1)
        step.inner(2)
        wait(4)
    wait(8)  # outside of every part
    assert dict(clock.wall) == {"outer": 5.0, "inner": 2.0}
    assert dict(clock.cpu) == {"outer": 2.5, "inner": 1.0}
    parts = {"model": 3.0, "push": 1.0, "log": 4.0}
    around = {"push": 1.0, "log": 4.0, "all of these": 5.0, "step": 8.0}
    assert cost.totals(Counter(parts)) == around


@pytest.mark.parametrize(
    "lengths, share",
    [
        ([[10], [10]], 0.0),
        ([[10], [5]], 0.25),  # one rank waits for half of the pass
        ([[8000, 8000], [8000]], 0.25),  # two passes, and nothing to do in the second one
        ([[100, 100], [50, 30]], 0.3),
    ],
)
def test_ranks_wait_for_the_fullest_one(lengths, share):
    ranks = [[of_tokens(0, length) for length in one] for one in lengths]
    assert cost.time_and_wait(ranks, False)[1] == pytest.approx(share)


def of_tokens(prompt: int, length: int) -> Sample:
    """A sample of a group that is known by the length of its prompt."""
    sample = Sample([], {}, key=(prompt, length))
    sample.append([7] * (prompt + length))
    sample.tokens["mask"][prompt:] = 1
    return sample


def test_a_prompt_is_computed_once_per_group():
    ranks = [[of_tokens(50, 10), of_tokens(50, 30)], [of_tokens(40, 20)]]
    assert cost.time_and_wait(ranks, False) == (140, pytest.approx(1 - 200 / 280))
    assert cost.time_and_wait(ranks, True) == (90, pytest.approx(1 - 150 / 180))


def test_balancing_keeps_every_sample():
    ranks = [[of_tokens(1, 8), of_tokens(2, 6), of_tokens(3, 4)], [of_tokens(4, 0)], [of_tokens(5, 0)]]
    after = cost.balanced(ranks, 0)
    assert sorted(one.key for rank in after for one in rank) == [(1, 8), (2, 6), (3, 4), (4, 0), (5, 0)]
    assert [sum(len(one.tokens) for one in rank) for rank in after] == [12, 9, 12]
    assert [len(rank) for rank in ranks] == [3, 1, 1]
