"""Variants of GRPO's loss: --normalize_std, --aggregation, --kl_coef, --entropy_coef, --tis_cap.

The core's loss is that of its docstring: advantages divided by the std of their group, and the mean over
samples of each sample's mean over tokens. Here

    --normalize_std False       A_i = r_i - mean: Dr. GRPO (arXiv:2503.20783)
    --aggregation token         1/sum_i |o_i| sum_i sum_t: DAPO (arXiv:2503.14476 eq. 8)
    --aggregation constant      1/B sum_i 1/max_new_tokens sum_t: Dr. GRPO, sec. 3.2
    --kl_coef c                 + c KL(policy || initial policy), k3 of joschu.net/blog/kl-approx.html
    --entropy_coef c            - c entropy
    --tis_cap c                 the surrogate times min(c, pi_old / pi_engine): truncated importance sampling
                                (fengyao.notion.site/off-policy-rl)

A recipe whose own loss has these terms sets `has_variants = True`; it gets only the reference and its
log-probs.
"""

from copy import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from train import Sample, Trainer, UserError, flag, reduce_over


@dataclass
class Flags:
    normalize_std: bool = flag(True, "division of advantages by their group's std (False: Dr. GRPO)")
    aggregation: Literal["sequence", "token", "constant"] = flag(
        "sequence", "loss average; see extras/variants.py"
    )
    kl_coef: float = flag(0.0, "weight of KL(policy || initial policy); 0 loads no reference model")
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    tis_cap: float = flag(0.0, "cap of the actor-to-engine importance weight, for example 2; 0: off")


def centered_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Rewards [B] of whole groups -> advantages [B], not divided by the std of their group."""
    groups = rewards.view(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    all_equal = (groups == groups[:, :1]).all(dim=1, keepdim=True)  # exactly 0, however the mean was rounded
    return centered.masked_fill(all_equal, 0.0).flatten()


def set_weights(samples: list[Sample], config, count: float, tokens: float):
    """Sets each trained token's share of the loss, given the samples and trained tokens of all ranks."""
    for sample in samples:
        if config.aggregation == "sequence":
            denominator = count * sample.tokens["mask"].sum()
        elif config.aggregation == "token":
            denominator = tokens
        else:
            denominator = count * config.max_new_tokens
        sample.tokens["weight"] = sample.tokens["mask"] / denominator


def extend(trainer_class: type) -> type:
    """A trainer with these terms in its loss."""

    class ReferenceTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            self.reference = self.load_policy() if config.kl_coef else None

        @torch.no_grad()
        def micro_batches(self, samples: list[Sample]) -> list:
            """Micro-batches with the reference's log-probs."""
            batches = super().micro_batches(samples)
            for batch in batches if self.reference else []:
                batch.ref_logprobs, _ = self.reference.logprobs(batch)
                self.reference.reshard()  # or its root would stay gathered during the update
            return batches

    if getattr(trainer_class, "has_variants", False):
        return ReferenceTrainer

    class VariantTrainer(ReferenceTrainer):
        def __init__(self, config, *arguments):
            says = "has no effect here: this Trainer has"
            if not config.normalize_std and trainer_class.compare is not Trainer.compare:
                raise UserError(f"--normalize_std {says} a compare of its own")
            if config.aggregation != "sequence" and trainer_class.micro_batches is not Trainer.micro_batches:
                raise UserError(f"--aggregation {says} a micro_batches of its own")
            super().__init__(config, *arguments)

        def compare(self, samples: list[Sample]):
            """Sets advantages according to --normalize_std."""
            super().compare(samples)
            if self.config.normalize_std:
                return
            rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
            advantages = centered_advantages(rewards, self.config.group_size)
            for sample, advantage in zip(samples, advantages.tolist()):
                sample.tokens["advantage"] = advantage

        def micro_batches(self, samples: list[Sample]) -> list:
            """Micro-batches with the weights of --aggregation."""
            self.trains_all = bool(
                trainer_class.trains_all or self.config.kl_coef or self.config.entropy_coef
            )
            batches = super().micro_batches(samples)
            if self.config.aggregation != "sequence":
                self.change_weights(samples, batches)
            return batches

        def change_weights(self, samples: list[Sample], batches: list):
            """Replaces the weights that the core has set."""
            trained = sum(sample.tokens["mask"].sum() for sample in samples)
            set_weights(samples, self.config, *reduce_over(self.mesh["dp"], [len(samples), trained]))
            for batch in batches:
                parts = [sample.tokens["weight"][sample.tokens["mask"] == 1] for sample in batch.samples]
                if parts:
                    batch.weights = torch.from_numpy(np.concatenate(parts)).to(batch.weights)

        def loss(self, logprobs, entropy, batch):
            """The core's loss, with further terms."""
            config = self.config
            scaled = copy(batch)
            if config.tis_cap:
                scaled.weights = batch.weights * self.importance(batch)
            loss, stats = super().loss(logprobs, entropy, scaled)
            terms = torch.zeros_like(logprobs)
            if config.kl_coef:
                gap = batch.ref_logprobs - logprobs
                kl = gap.exp() - gap - 1
                terms = terms + config.kl_coef * kl
                stats["kl"] = kl.detach()
            if config.entropy_coef:
                terms = terms - config.entropy_coef * entropy
            return loss + (batch.weights * terms).sum(), stats

        def importance(self, batch) -> torch.Tensor:
            """Truncated weights [N] of the old policy against the engine."""
            return (batch.old_logprobs - batch.engine_logprobs).exp().clamp(max=self.config.tis_cap)

    return VariantTrainer
