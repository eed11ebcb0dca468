"""Tests of extras/curve.py."""

import json
import sys
import warnings

import pytest

from extras import curve


def test_the_curve_shows_all_metrics_of_the_reward_function():
    names = {"step", "reward", "eval_score", "eval_pass@4", "time_new", "loss", "entropy", "hits", "a_habit"}
    panels = {title: metrics for title, _, metrics in curve.panels_of(names)}
    assert panels == {
        "Reward": ["reward", "eval_score", "eval_pass@4"],
        "Metrics of the reward function": ["a_habit", "hits"],
        "Entropy": ["entropy"],
    }
    assert curve.panels_of(set()) == []


def run_of(folder, steps: int, logprob_diff: float = 1e-6):
    """A run's folder, with this many steps in metrics.jsonl."""
    folder.mkdir(exist_ok=True)
    records = [{"step": step, "reward": 0.5, "logprob_diff": logprob_diff} for step in range(steps)]
    records += [{"step": steps, folder.name: 1.0}] if steps else []  # a metric that no other run has
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_the_curve_of_several_runs(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    output = tmp_path / "curve.png"
    curve.draw([run_of(tmp_path / "empty", 0)], output)  # a run that was stopped in its first step
    assert not output.exists()
    runs = [run_of(tmp_path / "a", 3), run_of(tmp_path / "b", 1)]
    monkeypatch.setattr(sys, "argv", ["curve", *map(str, runs), "--output", str(output)])
    curve.main()
    assert output.read_bytes().startswith(b"\x89PNG")
    with warnings.catch_warnings(action="error"):
        curve.draw([run_of(tmp_path / "b", 1, logprob_diff=0.0)], tmp_path / "zero.png")  # no logarithm
    with pytest.raises(FileNotFoundError, match="no_run"):
        curve.draw([tmp_path / "no_run"], output)


def test_a_curve_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")

    class Core:
        folder = tmp_path

        def fit(self):
            pass

    trainer = curve.extend(Core)()
    trainer.fit()  # no metrics.jsonl
    assert "curve.png was not drawn: FileNotFoundError" in capsys.readouterr().out
    run_of(tmp_path, 3)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
        trainer.fit()
    assert not (tmp_path / "curve.png").exists()
    trainer.fit()
    assert (tmp_path / "curve.png").exists() and capsys.readouterr().out == ""
