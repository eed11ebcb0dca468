"""Tests of samples that fail: rewards that are no numbers, deadlines, errors of a user's function."""

import asyncio
import math

import numpy as np
import pytest

from tests.conftest import COUNTDOWN
from train import Config, RLDataset, Sample, Trainer, UserError


def score(reward_fn, metrics=(), **flags) -> Sample:
    trainer = object.__new__(Trainer)
    trainer.config, trainer.reward_fn = Config(**flags), reward_fn
    sample = Sample([], {}, metrics=dict(metrics))
    asyncio.run(trainer.score(sample))
    return sample


def test_rewards_are_any_finite_numbers():
    async def later(sample):
        await asyncio.sleep(0)
        return 2

    assert score(later).reward == 2.0 and score(lambda sample: True).reward == 1.0
    assert isinstance(score(lambda sample: np.float32(0.5)).reward, float)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="reward_fn returned"):
            score(lambda sample: bad)
        with pytest.raises(ValueError, match="metrics"):
            score(lambda sample: 1.0, {"a": bad})
    with pytest.raises(TypeError):
        score(lambda sample: "1.0")
    with pytest.raises(ValueError, match="reward_fn returned no finite numbers: None"):
        score(lambda sample: None)


def test_an_async_reward_has_a_deadline():
    async def slow(sample):
        await asyncio.sleep(0.2)
        return 1.0

    with pytest.raises(TimeoutError):
        score(slow, reward_timeout=0.01)
    assert score(slow, reward_timeout=5).reward == 1.0
    assert score(slow, reward_timeout=0.01, reward_workers=1).reward == 1.0  # the workers keep it themselves


def test_an_error_fails_its_sample_alone(whole):
    def reward_fn(sample):
        return 1 / sample.key[1] if sample.key[0] == 1 else 0.5

    samples = whole(reward_fn, max_new_tokens=2).sample(
        [RLDataset(f"{COUNTDOWN}/test.jsonl")[0]] * 2, [(0, 0), (1, 1)], 2, 1.0
    )
    assert [sample.reward for sample in samples] == [0.5, 0.5, 0.0, 1.0]
    assert [bool(sample.failure) for sample in samples] == [False, False, True, False]
    assert "ZeroDivisionError" in samples[2].failure and "1 / sample.key[1]" in samples[2].failure


def test_a_users_error_ends_the_run(whole):
    def reward_fn(sample):
        raise UserError("no judge")

    with pytest.raises(UserError, match="no judge"):
        whole(reward_fn, max_new_tokens=2).rollout()
