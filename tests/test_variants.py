"""Tests of extras/variants.py: terms that join GRPO's loss. Gradients over ranks are in tests/parity.py."""

import math
from types import SimpleNamespace

import pytest
import torch

from extras import variants
from tests.conftest import Config, VariantTrainer, some_samples
from train import Trainer, UserError


def loss_of_one(ratio=1.0, entropy=0.0, ref=-1.0, engine=-1.0, **flags):
    """Loss, gradients and statistics of a token of weight 1 and advantage 1, whose old log-prob is -1."""
    logprobs = torch.tensor([-1 + math.log(ratio)], requires_grad=True)
    entropies = torch.full((1,), entropy, requires_grad=True)
    batch = SimpleNamespace(advantages=torch.ones(1), weights=torch.ones(1), old_logprobs=-torch.ones(1))
    batch.engine_logprobs = torch.tensor([engine])
    batch.ref_logprobs = torch.tensor([ref])
    trainer = object.__new__(VariantTrainer)
    trainer.config = Config(**flags)
    loss, stats = trainer.loss(logprobs, entropies, batch)
    loss.backward()
    return loss.item(), logprobs.grad.item(), entropies.grad, stats


LOSSES = [  # flags -> loss, gradient with respect to the log-prob
    # The engine had the token at -1 - log 3, three times less likely than the old policy.
    ({"engine": -1 - math.log(3)}, -1, -1),
    ({"engine": -1 - math.log(3), "tis_cap": 2.0}, -2, -2),
    ({"engine": -1 - math.log(3), "tis_cap": 5.0}, -3, -3),
    ({"engine": -1 + math.log(2), "tis_cap": 2.0}, -0.5, -0.5),
    ({"ratio": 1.5, "engine": -1 - math.log(3), "tis_cap": 2.0}, -2.56, 0),  # the clip is inside
    # The reference has it at -1 - log 2: k3 = 1/2 - 1 + log 2, with the gradient 1 - 1/2 = 1/2.
    ({"ref": -1 - math.log(2), "kl_coef": 0.1}, -1 + 0.1 * (math.log(2) - 0.5), -0.95),
    # At -1 + log 2: k3 = 2 - 1 - log 2, with the gradient 1 - 2 = -1.
    ({"ref": -1 + math.log(2), "kl_coef": 0.1}, -1 + 0.1 * (1 - math.log(2)), -1.1),
    ({"entropy": 2.0, "entropy_coef": 0.01}, -1.02, -1),
    # The cap scales the surrogate alone: -2 + 0.1 (log 2 - 1/2) - 0.02.
    ({"engine": -1 - math.log(3), "tis_cap": 2.0, "ref": -1 - math.log(2), "kl_coef": 0.1}
     | {"entropy": 2.0, "entropy_coef": 0.01}, -2.02 + 0.1 * (math.log(2) - 0.5), -1.95),
]  # fmt: skip


@pytest.mark.parametrize("flags, loss, gradient", LOSSES)
def test_loss_by_hand(flags, loss, gradient):
    found, slope, entropy_slope, stats = loss_of_one(**flags)
    assert (found, slope) == pytest.approx((loss, gradient), abs=1e-6)
    if "entropy_coef" in flags:
        assert entropy_slope.item() == pytest.approx(-0.01)
    if "kl_coef" in flags:
        gap = flags["ref"] + 1
        assert stats["kl"].item() == pytest.approx(math.exp(gap) - gap - 1)


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
def test_micro_batches_have_the_weights_of_the_aggregation(small, aggregation):
    trainer = small(aggregation=aggregation, tokens_per_micro_batch=40, max_new_tokens=8)
    samples = some_samples()
    batches = trainer.micro_batches(samples)
    trained = sum(sample.tokens["mask"].sum() for sample in samples)
    expected = {"token": 1 / trained, "constant": 1 / 12 / 8}
    assert len(batches) > 2
    for batch in batches:
        lengths = [int(sample.tokens["mask"].sum()) for sample in batch.samples]
        for length, part in zip(lengths, batch.weights.split(lengths)):
            assert part.tolist() == pytest.approx([expected.get(aggregation, 1 / 12 / length)] * length)


def test_advantages_without_the_std(small):
    trainer = small(normalize_std=False)
    samples = some_samples(groups=3)
    for sample, reward in zip(samples, (1.0, 0.0, 5.0, 2.0, 0.1, 0.1)):
        sample.reward = reward
    trainer.compare(samples)
    found = [set(sample.tokens["advantage"]) for sample in samples]
    assert found == [{0.5}, {-0.5}, {1.5}, {-1.5}, {0.0}, {0.0}]


class Recipe(Trainer):
    def compare(self, samples):
        """One of its own."""

    def micro_batches(self, samples):
        """One of its own."""


@pytest.mark.parametrize(
    "flags, said",
    [({"normalize_std": False}, "--normalize_std has no effect here: .* compare of its own")]
    + [({"aggregation": "token"}, "--aggregation has no effect here: .* micro_batches of its own")],
)
def test_what_a_recipe_does_itself_is_not_replaced(whole, flags, said):
    with pytest.raises(UserError, match=said):
        whole(trainer_class=variants.extend(Recipe), **flags)


def test_a_recipe_with_these_terms_gets_the_reference_alone(whole):
    trainer_class = variants.extend(type("Own", (Trainer,), {"has_variants": True}))
    assert trainer_class.loss is Trainer.loss and trainer_class.compare is Trainer.compare
    assert whole(trainer_class=trainer_class, kl_coef=0.1).reference is not None
    assert whole(trainer_class=trainer_class).reference is None
