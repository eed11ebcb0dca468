"""Tests of tools/one_step.py: docs/one_step.md is what it makes, and a wrong number in train.py stops it."""

import re

import pytest

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
    for name in ("group_advantages", "set_weights", "pack", "Batch", "grpo_loss", "reward_fn"):
        assert f"`{name}`" in PAGE and hasattr(train, name)


def biased_advantages(rewards, group_size):
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / groups.std(1, correction=0, keepdim=True)).flatten()


def one_weight_for_all(samples, count):
    for sample in samples:
        sample.tokens["weight"] = sample.tokens["mask"] / sum(one.tokens["mask"].sum() for one in samples)


def unclipped_loss(logprobs, entropy, batch, config):
    loss = -(batch.weights * (logprobs - batch.old_logprobs).exp() * batch.advantages).sum()
    return loss, {"clip_fraction": logprobs > 0}


class PermutedBatch(train.Batch):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.weights = self.weights.flip(0)


class OtherAdam(train.torch.optim.AdamW):
    def __init__(self, parameters, betas, **options):
        super().__init__(parameters, betas=(0.9, 0.999), **options)


@pytest.mark.parametrize(
    "place, name, wrong, message",
    [
        (train, "group_advantages", biased_advantages, "advantage: "),
        (train, "set_weights", one_weight_for_all, "weight: "),
        (train, "Batch", PermutedBatch, "weight: "),
        (train, "grpo_loss", unclipped_loss, "is_clipped: "),
        (train.torch.optim, "AdamW", OtherAdam, "second move of a weight: "),
    ],
)
def test_a_wrong_number_in_train_py_stops_it(place, name, wrong, message, monkeypatch):
    monkeypatch.setattr(place, name, wrong)
    with pytest.raises(AssertionError, match=f"^{message}.* by hand, .* in train.py"):
        one_step.make_page()
