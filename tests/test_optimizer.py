"""Tests of extras/optimizer.py."""

import math

import pytest
import torch

import train
from extras import optimizer
from recipes.ppo import PPO, PPOConfig
from tests.conftest import VariantTrainer, add_flags


@pytest.mark.parametrize("schedule", ["cosine", "constant_with_warmup"])
def test_rates_by_hand(whole, schedule):
    trainer_class = optimizer.extend(VariantTrainer)
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


def settings(actor: train.Actor) -> tuple:
    """Betas and weight decay of the only group of an optimizer."""
    (group,) = actor.optimizer.param_groups
    return *group["betas"], group["weight_decay"]


def test_the_defaults_are_those_of_train_alone(whole):
    alone = settings(whole(trainer_class=train.Trainer).actor)
    assert settings(whole(trainer_class=optimizer.extend(train.Trainer)).actor) == alone == (0.9, 0.99, 0.0)


def test_an_update_by_hand(whole):
    """Two updates with gradients 1 and 2, from Loshchilov and Hutter, algorithm 2; also of a norm."""
    flags = {"lr": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.75, "weight_decay": 0.25}
    actor = whole(trainer_class=optimizer.extend(VariantTrainer), **flags).actor
    names = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")
    weights = [actor.parameters[name].to_local() for name in names]
    expected = [weight.detach().clone() for weight in weights]
    m = v = 0.0
    for number, gradient in ((1, 1.0), (2, 2.0)):
        m = 0.5 * m + 0.5 * gradient
        v = 0.75 * v + 0.25 * gradient**2
        step = (m / (1 - 0.5**number)) / (math.sqrt(v / (1 - 0.75**number)) + 1e-8)
        expected = [(1 - 0.1 * 0.25) * weight - 0.1 * step for weight in expected]
        for parameter in actor.parameters.values():
            parameter.grad = torch.full_like(parameter, gradient)
        actor.optimizer.step()
    for weight, right in zip(weights, expected):
        torch.testing.assert_close(weight.detach(), right)


def test_a_critic_has_the_same_settings(whole, columns):
    config_class = add_flags(PPOConfig)
    flags = {"adam_beta2": 0.98, "weight_decay": 0.1, "critic_lr": 0.5, "lr_schedule": "cosine"}
    trainer = whole(trainer_class=optimizer.extend(PPO), config=config_class, **flags)
    assert settings(trainer.critic) == settings(trainer.actor) == (0.9, 0.98, 0.1)
    rates = [actor.optimizer.param_groups[0]["lr"] for actor in (trainer.actor, trainer.critic)]
    assert rates == [1e-3, 0.5]  # without a warm-up each begins at its own peak
