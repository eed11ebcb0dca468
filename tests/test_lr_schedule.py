"""Tests of extras/lr_schedule.py."""

import math

import pytest

from extras import lr_schedule
from tests.conftest import VariantTrainer


@pytest.mark.parametrize("schedule", ["cosine", "constant_with_warmup"])
def test_rates_by_hand(whole, schedule):
    trainer_class = lr_schedule.extend(VariantTrainer)
    flags = {"lr": 0.5, "warmup_steps": 4, "steps": 8, "updates_per_step": 2, "lr_schedule": schedule}
    actor = whole(trainer_class=trainer_class, **flags).actor
    rates = []
    for _ in range(16):
        rates.append(actor.optimizer.param_groups[0]["lr"])
        actor.optimizer.step()
        actor.scheduler.step()
    assert rates[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    if schedule == "cosine":
        assert rates[4:6] == pytest.approx([0.5, 0.5 * (1 + math.cos(math.pi / 12)) / 2])
        assert rates[10] == pytest.approx(0.25) and 0 < rates[15] < 0.02
    else:
        assert rates[4:] == pytest.approx([0.5] * 12)
