"""Tests of tools/one_step.py: docs/one_step.md is what it makes, and a wrong number in train.py stops it."""

import re

import pytest
import torch

import train
from tests.conftest import HERE
from tools import one_step

PAGE = (HERE / "docs/one_step.md").read_text()
NUMBER = r"-?\d+\.\d+"


@pytest.fixture(autouse=True)
def alone(mesh, monkeypatch):
    monkeypatch.setattr(train, "init_distributed", lambda config: mesh)


def test_the_page_is_what_the_tool_makes_up_to_the_last_digits():
    made = one_step.make_page()
    assert re.sub(NUMBER, "#", made) == re.sub(NUMBER, "#", PAGE)
    for new, old in zip(re.findall(NUMBER, made), re.findall(NUMBER, PAGE)):
        last_digit = 10.0 ** -len(old.partition(".")[2])
        assert float(new) == pytest.approx(float(old), rel=5e-3, abs=2 * last_digit)


def test_at_the_rate_of_the_job_nothing_is_clipped_and_the_right_completion_rises(tmp_path, monkeypatch):
    monkeypatch.setitem(one_step.FLAGS, "lr", 1e-4)
    updates = one_step.observe(tmp_path).updates
    assert not any(token.is_clipped for update in updates[:2] for token in update.tokens)
    first, second, third = (sum(t.new for t in one.tokens if t.completion == 3) for one in updates)
    assert first < second < third


def test_the_functions_that_the_page_names_exist():
    methods = re.findall(r"`(Trainer|Actor)\.(\w+)`", PAGE)
    assert len(methods) > 5 and all(hasattr(getattr(train, owner), name) for owner, name in methods)
    for name in ("group_advantages", "set_weights", "Batch", "grpo_loss", "reward_fn"):
        assert f"`{name}`" in PAGE and hasattr(train, name)


def scaled(function):
    return lambda *arguments, **options: 1.01 * function(*arguments, **options)


def one_weight_for_all(samples, count):
    for sample in samples:
        sample.tokens["weight"] = sample.tokens["mask"] / count


def unclipped_loss(logprobs, entropy, batch, config):
    loss = -(batch.weights * (logprobs - batch.old_logprobs).exp() * batch.advantages).sum()
    return loss, {"clip_fraction": logprobs > 0}


def other_adam(parameters, betas, adam=torch.optim.AdamW, **options):
    return adam(parameters, betas=(0.9, 0.999), **options)


@pytest.mark.parametrize(
    "place, name, wrong, message",
    [
        (train, "group_advantages", scaled(train.group_advantages), "advantage: "),
        (train, "set_weights", one_weight_for_all, "weight: "),
        (train, "grpo_loss", unclipped_loss, "is_clipped: "),
        (torch.optim, "AdamW", other_adam, "second move of a weight: "),
    ],
)
def test_a_wrong_number_in_train_py_stops_it(place, name, wrong, message, monkeypatch):
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(AssertionError, match=f"^{message}.* by hand, .* in train.py"):
        one_step.make_page()
