"""Tests of samples that fail: rewards that are no numbers, deadlines, errors of a user's function."""

import asyncio
import json
import math
import pickle
import threading

import numpy as np
import pytest
import torch

import train
from tests.conftest import Config
from train import Sample, Trainer, UserError


def score(reward_fn, metrics=(), **flags) -> Sample:
    trainer = object.__new__(Trainer)
    trainer.config = Config(**flags)
    trainer.reward_fn = reward_fn
    sample = Sample([], {}, metrics=dict(metrics))
    asyncio.run(trainer.score(sample))
    return sample


async def later(sample):
    await asyncio.sleep(0)
    return 2


def test_rewards_are_any_finite_numbers():
    for number in (True, np.float32(0.5), np.bool_(True), torch.tensor(0.25), torch.tensor([1]), 10**30):
        sample = score(lambda sample: number, {"a": number})
        for found in (sample.reward, sample.metrics["a"]):
            assert type(found) is float and found == float(number)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="reward_fn returned"):
            score(lambda sample: bad)
        with pytest.raises(ValueError, match="metrics"):
            score(lambda sample: 1.0, {"a": bad})
    for bad in ("1.0", [1.0], {}):
        with pytest.raises(TypeError):
            score(lambda sample: bad)
    with pytest.raises(ValueError, match="reward_fn returned no finite numbers: None"):
        score(lambda sample: None)


def test_a_reward_may_be_anything_awaitable():
    class Awaitable:
        def __await__(self):
            return later(None).__await__()

    for reward_fn in (later, lambda sample: Awaitable(), lambda sample: asyncio.ensure_future(later(sample))):
        assert score(reward_fn).reward == 2.0


def test_an_async_reward_has_a_deadline():
    async def slow(sample):
        await asyncio.sleep(0.1)
        return 1.0

    with pytest.raises(TimeoutError):
        score(slow, reward_timeout=0.01)
    assert score(slow, reward_timeout=5).reward == 1.0


def test_an_error_fails_its_sample_alone(whole):
    def reward_fn(sample):
        sample.metrics["half"] = "done"
        if sample.key[0] == 1:
            return 1 / sample.key[1]
        sample.metrics.clear()
        return 0.5

    trainer = whole(reward_fn, max_new_tokens=2)
    samples = trainer.sample(trainer.data, [(0, 0), (1, 1)], 2, 1.0)
    assert [sample.reward for sample in samples[:2]] == [0.5, 0.5]
    assert [bool(sample.failure) for sample in samples] == [False, False, True, True]
    assert "ZeroDivisionError" in samples[2].failure and "1 / sample.key[1]" in samples[2].failure
    assert samples[2].metrics == {}  # what it wrote before is not averaged


def test_the_first_failure_is_shown_at_once_with_the_users_line(whole, monkeypatch):
    shown, seen = [], []
    monkeypatch.setattr(train.tqdm, "write", shown.append)

    def reward_fn(sample):
        seen.append(len(shown))
        return json.loads("{")  # the error's innermost line is not the user's

    trainer = whole(reward_fn, max_new_tokens=2)
    shown.clear()
    samples = trainer.rollout()
    (text,) = shown
    assert 'return json.loads("{")' in text and __file__ in text and "JSONDecodeError" in text
    assert seen[:2] == [0, 1]  # before the second sample was scored
    assert "decoder.py" not in samples[0].failure
    trainer.rollout()
    assert len(shown) == 1


@pytest.mark.parametrize("failing, ends", [(0, False), (1, False), (2, True), (10, True)])
def test_the_core_ends_a_run_in_which_more_than_a_tenth_of_a_step_fails(whole, failing, ends):
    trainer = whole(trainer_class=Trainer)
    samples = [Sample([], {}, failure="NameError: x" * (i < failing)) for i in range(10)]
    for job in (trainer.check_failures, trainer.learn):
        if ends:
            with pytest.raises(UserError, match=f"^{failing} of 10 samples failed, too many: NameError: x"):
                job(samples)
    if not ends:
        assert trainer.check_failures(samples) == failing / 10


@pytest.mark.parametrize("error", [SystemExit("no answer"), asyncio.CancelledError()])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_that_exits_fails_its_sample(whole, error, is_async):
    def reward_fn(sample):
        raise error if sample.key[1] else ValueError("no")

    async def async_fn(sample):
        await asyncio.sleep(0)
        reward_fn(sample)

    samples = whole(async_fn if is_async else reward_fn, max_new_tokens=2, prompts_per_step=1).rollout()
    assert [type(error).__name__ in sample.failure for sample in samples] == [False, True]


def test_a_users_error_ends_the_run(whole):
    def reward_fn(sample):
        raise UserError("no judge")

    with pytest.raises(UserError, match="no judge"):
        whole(reward_fn, max_new_tokens=2).rollout()


def test_only_what_an_update_needs_can_cross_ranks(whole):
    def reward_fn(sample):
        sample.state["lock"] = threading.Lock()
        sample.row |= {"judge": lambda: 1, "when": {1, 2}, "odds": math.inf}
        return 1.0

    samples = whole(reward_fn, max_new_tokens=2).rollout()
    assert pickle.loads(pickle.dumps(samples))[0].state == {}
    assert samples[0].row["nums"] and "lambda" in samples[0].row["judge"]
    assert samples[0].row["odds"] == "Infinity" and json.dumps(samples[0].row)


def test_the_log_is_json_and_keeps_the_trainers_own_names(whole):
    trainer = whole()
    samples = [Sample([], {}, key=(0, i), reward=1.0) for i in range(2)]
    for sample in samples:
        sample.metrics = {"loss": 42.0, "reward": 7.0, "habit": 0.5}
    trainer.write(1, {"loss": 0.25, "grad_norm": math.inf, "kl": math.nan}, samples)
    (line,) = (trainer.folder / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert (found["loss"], found["sample_loss"]) == (0.25, 42.0)
    assert (found["reward"], found["sample_reward"], found["habit"]) == (1.0, 7.0, 0.5)
    assert found["grad_norm"] is None and found["kl"] is None
