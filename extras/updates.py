"""--updates_per_step: several optimizer steps per rollout, each on its share of the groups.

From the second one on, the policy has moved since it sampled: pi_old is what it was before the first one, and
the ratio of the loss is no longer 1 (PPO, arXiv:1707.06347 sec. 3).
"""

from dataclasses import dataclass

import numpy as np
import torch

from train import Sample, flag


@dataclass
class Flags:
    updates_per_step: int = flag(1, "optimizer steps per rollout, each on its share of the prompts")


def extend(trainer_class: type) -> type:
    """A trainer that takes these steps."""

    class UpdatingTrainer(trainer_class):
        def own_prompts(self, prompts: list[tuple[int, int]]) -> list[tuple[int, int]]:
            """This rank's part of prompts (number, row), with as many for every update as possible."""
            # Of 8 prompts for 2 updates on 2 ranks, update 0 uses 0, 2, 4, 6, and rank 0 plays 0, 1, 4, 5.
            dp, updates = self.mesh["dp"], self.config.updates_per_step
            return [prompt for prompt in prompts if prompt[0] // updates % dp.size() == dp.get_local_rank()]

        def micro_batches(self, samples: list[Sample]) -> list:
            """The micro-batches of all updates, each with the number of its update; pi_old is set."""
            updates = self.config.updates_per_step
            batches = []
            for i in range(updates):
                part = [sample for sample in samples if sample.key[0] % updates == i]
                for batch in super().micro_batches(part):
                    batch.update = i
                    batches.append(batch)
            self.set_old_logprobs([batch for batch in batches if batch.update > 0])
            return batches

        @torch.no_grad()
        def set_old_logprobs(self, batches: list):
            """Sets pi_old of the later updates; in the first one, the actor is still pi_old."""
            for batch in batches:
                batch.old_logprobs, _ = self.actor.model.logprobs(batch)

        def update(self, batches: list) -> dict[str, float]:
            """All updates. Returns the means of their metrics."""
            history = []
            for i in range(self.config.updates_per_step):
                history.append(super().update([batch for batch in batches if batch.update == i]))
            means = {name: np.mean([metrics[name] for metrics in history]) for name in history[0]}
            return means | {"logprob_diff": history[0]["logprob_diff"]}  # as without further updates

    return UpdatingTrainer
