"""Tests of extras/wandb_log.py. That the last numbers survive SGLang's end is in test_sglang_cpu.py."""

import pytest
import wandb

from extras import wandb_log
from tests.conftest import VariantTrainer
from train import UserError


def test_a_run_logs_offline_where_wandb_cannot_be_reached(monkeypatch, tmp_path, capsys):
    asked = []

    def init(mode, **options):
        asked.append((mode, options["settings"].finish_timeout))
        if mode == "online":
            raise error

    monkeypatch.setattr(wandb, "init", init)
    error = wandb.errors.CommError("connection refused")
    wandb_log.start("online", project="grpo", dir=tmp_path)
    assert asked == [("online", 60), ("offline", 60)]
    assert f"wandb: connection refused; logged in {tmp_path}/wandb" in capsys.readouterr().out
    error = wandb.errors.AuthenticationError("no such key")
    with pytest.raises(UserError, match="--wandb online: no such key"):
        wandb_log.start("online", project="grpo", dir=tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """What is asked of Weights & Biases, whose `run` stays set when it has ended."""
    calls = []
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "init", lambda **options: monkeypatch.setattr(wandb, "run", options["mode"]))
    monkeypatch.setattr(wandb, "log", lambda metrics, step: calls.append((step, metrics["loss"])))
    monkeypatch.setattr(wandb, "teardown", lambda code: calls.append(f"end with {code}"))
    return calls


def make(whole, calls, **flags):
    trainer = whole(trainer_class=wandb_log.extend(VariantTrainer), steps=2, **flags)
    trainer.step = lambda: ({"loss": 0.5}, [])
    trainer.eval_data = []
    write = trainer.write
    trainer.write = lambda step, metrics, samples: write(step, {"loss": 0.5}, samples)
    trainer.engine.close = lambda: calls.append("engine closed")
    return trainer


def test_numbers_are_logged_and_the_log_ends_before_the_engine(whole, calls):
    make(whole, calls, wandb="offline").fit()
    assert calls == [(0, 0.5), (1, 0.5), (2, 0.5), "end with 0", "engine closed"]


@pytest.mark.parametrize("error, code", [(UserError("over"), 1), (KeyboardInterrupt(), 0)])
def test_a_run_that_is_ended_early_ends_its_log(whole, calls, error, code):
    trainer = make(whole, calls, wandb="online")

    def publish():
        raise error

    trainer.publish = publish
    with pytest.raises(type(error)):
        trainer.fit()
    assert calls == [f"end with {code}"]


def test_without_the_flag_a_run_of_the_users_own_is_left_alone(whole, calls, monkeypatch):
    monkeypatch.setattr(wandb, "init", pytest.fail)
    monkeypatch.setattr(wandb, "run", "the user's own")
    make(whole, calls).fit()
    assert calls == ["engine closed"]
