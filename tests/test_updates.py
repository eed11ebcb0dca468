"""Tests of several updates per rollout (extras/updates.py)."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import VariantTrainer, plain_logprobs, some_samples


def test_later_updates_start_from_the_old_policy(small):
    trainer, samples, seen = small(updates_per_step=2), some_samples(), []
    trainer.check_engine = lambda gap: None
    for i, sample in enumerate(samples):
        sample.reward = float(i % 2 + i)
    model = AutoModelForCausalLM.from_pretrained(trainer.config.model)

    def forward(batch):
        seen.append((batch, batch.old_logprobs))
        return VariantTrainer.forward(trainer, batch)

    trainer.forward = forward
    metrics = trainer.learn(samples)
    (first, first_old), (second, second_old) = seen
    assert {sample.key[0] for sample in first.samples} == {0, 2, 4}
    assert {sample.key[0] for sample in second.samples} == {1, 3, 5}
    for batch in (first, second):  # each update has averages of its own
        assert [one.tokens["weight"].sum() for one in batch.samples] == pytest.approx([1 / 6] * 6)
    assert first_old is None  # on-policy: its own pass is the old one
    plain = torch.cat([plain_logprobs(model, sample) for sample in second.samples])
    torch.testing.assert_close(second_old, plain, rtol=1e-5, atol=2e-5)
    assert metrics["clip_fraction"] > 0 and trainer.actor.scheduler.last_epoch == 2
    first_gap = torch.cat([plain_logprobs(model, sample) for sample in first.samples]) - first.engine_logprobs
    assert metrics["logprob_diff"] == pytest.approx(first_gap.abs().mean().item(), rel=1e-4)  # of the first
