"""Tests of bench/: every benchmark imports, says how it is run, and counts correctly."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

HERE = Path(__file__).parent.parent
MODULES = sorted(path.stem for path in (HERE / "bench").glob("*.py") if path.stem != "__init__")
NEEDS = {"view": "playwright"}
WITHOUT_COMMAND = {"fake_wandb", "faults_engine", "measure"}  # parts of others


@pytest.fixture(autouse=True)
def injected_environment(monkeypatch, tmp_path):
    """bench.injected reads its fault as it is imported."""
    fault = {"FAULT": "none", "FAULT_AT": "update 3", "FAULT_NOTE": str(tmp_path / "note")}
    for name, value in fault.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", MODULES)
def test_every_benchmark_imports_and_names_its_command(name):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__
    if name not in WITHOUT_COMMAND:
        assert f"-m bench.{name}" in module.__doc__ or f"bench/{name}.py" in module.__doc__


def test_the_slope_of_a_soak_by_hand():
    soak = importlib.import_module("bench.soak")
    steps = np.arange(1000.0)
    found = soak.fit_line(5 + 0.002 * steps)  # 2 per 1,000 steps
    assert found["slope"] == pytest.approx(2.0)
    assert found["mean"] == pytest.approx(5 + 0.002 * 499.5)
    assert soak.fit_line(np.full(1000, 7.0))["slope"] == 0.0
    noise = np.random.default_rng(0).normal(size=1000)
    assert abs(soak.fit_line(noise)["t"]) < 3 < soak.fit_line(noise + 0.01 * steps)["t"]


def test_steps_that_are_missing_or_logged_twice(tmp_path):
    faults = importlib.import_module("bench.faults")
    assert faults.disorder(tmp_path) == []
    lines = [json.dumps({"step": step}) for step in (0, 1, 1, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4')
    assert faults.disorder(tmp_path) == [1, 2]
    assert faults.lines_in(tmp_path) == 4


def test_failures_are_compared_by_whether_there_is_one(tmp_path):
    faults = importlib.import_module("bench.faults")
    metrics = {"step": 1, "reward": 0.5, "grad_norm": 2.0, "time_step": 3.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    (tmp_path / "samples.jsonl").write_text(json.dumps({"key": [0, 0], "failure": "RuntimeError: x"}) + "\n")
    kept = faults.kept_but(tmp_path, ("grad_norm",))
    assert kept["metrics"] == [{"step": 1, "reward": 0.5}]
    assert json.loads(kept["samples"][0])["failure"] is True


def test_an_engine_run_that_lost_a_sample_is_incomplete(tmp_path, monkeypatch):
    faults = importlib.import_module("bench.faults")
    monkeypatch.setattr(faults, "END", 1)
    monkeypatch.setattr(faults, "FLAGS", {"prompts_per_step": 1, "group_size": 2})
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/state.json").write_text(json.dumps({"updates": {"actor": 2}}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    records = [json.dumps({"key": [0, i], "versions": 1, "step": 1}) + "\n" for i in range(2)]
    (tmp_path / "samples.jsonl").write_text("".join(records))
    assert faults.incomplete(tmp_path) == ""
    (tmp_path / "samples.jsonl").write_text(records[0])
    assert faults.incomplete(tmp_path) == "samples: True"


def test_the_sample_that_an_injected_reward_fails_on(monkeypatch):
    injected = importlib.import_module("bench.injected")
    monkeypatch.setattr(injected, "PHASE", "rollout")
    monkeypatch.setattr(injected, "STEP", 3)
    tokens = np.zeros(2, [("version", np.int32)])
    tokens["version"] = [0, 3]
    sample = SimpleNamespace(tokens=tokens, key=(18, 3))
    assert injected.hit(sample)
    sample.key = (18, 2)
    assert not injected.hit(sample)
    monkeypatch.setattr(injected, "PHASE", "evaluation")
    sample.key = (2, 0)
    assert not injected.hit(sample)
    tokens["version"] = [0, 4]
    assert injected.hit(sample)


def test_answers_that_are_spoiled():
    spoil = importlib.import_module("bench.faults_engine").spoiled
    body = json.dumps({"meta_info": {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]]}}).encode()
    found = json.loads(spoil("half its tokens", body))
    assert found["meta_info"]["output_token_logprobs"] == [[-1.0, 5, None]]
    found = json.loads(spoil("no log-probs", body))
    assert found["meta_info"]["output_token_logprobs"] == [[None, 5, None], [None, 6, None]]
    assert "meta_info" not in json.loads(spoil("no meta_info", body))
    with pytest.raises(ValueError):
        json.loads(spoil("half of the JSON", body))
