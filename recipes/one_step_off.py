"""One step off: SGLang samples the next batch while the actor learns from this one.

    torchrun --standalone --nproc_per_node=4 -m recipes.one_step_off --engine http://other-box:30000

It needs servers of their own GPUs. `train.py` waits for a rollout, then for an update; here the two go on at once, and
a rollout that is under way when new weights come goes on with those (its cache is made anew). So a batch is a mixture
of policies, at most --max_staleness pushes old: each token carries the version of its weights, and the ratio of the
loss starts from the log-probs that the sampler itself reported, as in Noukhovitch et al., arXiv:2410.18252, and AReaL,
arXiv:2505.24298. `logprob_diff` is 0 by that choice; `gate_diff` still says whether each push arrived.
"""
import asyncio
import threading
from collections import deque
from dataclasses import dataclass
from statistics import fmean

import torch

from tools.inputs import UserError, flag, prompt_order
from train import Batch, Config, Sample, Trainer, gather, main


@dataclass
class OneStepOffConfig(Config):
    """What train.py has, and how far ahead to sample."""
    max_staleness: int = flag(1, "batches sampled ahead: no token is more pushes older than the actor")

    def __post_init__(self):
        super().__post_init__()
        if not self.engine.startswith("http"):
            raise UserError("--engine must name servers, http://host:port[,http://...]: they sample all the time")
        if self.offload:
            raise UserError("--offload has no use here: the actor learns while the servers sample")
        if self.dynamic_sampling:
            raise UserError("--dynamic_sampling must be 0 here: what to sample is not known ahead of time")
        if self.max_staleness < 0:
            raise UserError(f"--max_staleness must be 0 or more, not {self.max_staleness}")


class OneStepOff(Trainer):
    """Trainer.step, with the rollouts begun ahead of time on a thread of their own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.begun, self.ahead = 0, deque()
        threading.Thread(target=self.engine.loop.run_forever, daemon=True).start()

    def begin(self, last: int):
        """Begins the rollouts up to number `last`, as far as they are not."""
        config = self.config
        self.begun = max(self.begun, self.draws - 1)        # after --resume
        for draw in range(self.begun + 1, min(last, config.steps) + 1):
            prompts = prompt_order(draw, len(self.data), config)
            episodes = self.episodes(self.data, prompts, config.group_size, config.temperature)
            self.ahead.append(asyncio.run_coroutine_threadsafe(together(episodes), self.engine.loop))
            self.begun = draw

    def rollout(self) -> list[Sample]:
        """The samples of a rollout that was begun some steps ago, of all ranks."""
        self.draws += 1
        self.begin(self.draws + self.config.max_staleness)
        with self.timed("rollout"):         # what is left of it to wait for
            samples = gather(self.ahead.popleft().result(), self.mesh["tp"])
        with self.timed("wait"):
            return sorted(gather(samples, self.mesh["dp"]), key=lambda sample: sample.key)

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """As ever, and says how old the samples are."""
        return self.staleness(samples) | super().learn(samples)

    def old_logprobs(self, batch: Batch, update: int) -> torch.Tensor:
        """The policy that the ratio starts from, [N], is the sampler: whatever mixture of weights that was."""
        return batch.engine_logprobs

    def staleness(self, samples: list[Sample]) -> dict[str, float]:
        """By how many pushes the trained tokens are older than the actor, over all ranks; bounded, or it raises."""
        lags = [self.engine.version - version for sample in samples if not sample.failure
                for version, trained in zip(sample.versions, sample.mask) if trained] or [0]
        if not 0 <= min(lags) <= max(lags) <= self.config.max_staleness:
            raise UserError(f"tokens are {min(lags)} to {max(lags)} pushes old, --max_staleness is "
                            f"{self.config.max_staleness}: does another run push to the same server?")
        return {"staleness": fmean(lags), "staleness_max": max(lags)}


async def together(episodes: list) -> list[Sample]:
    """Plays episodes at once."""
    return await asyncio.gather(*episodes)


if __name__ == "__main__":
    main(OneStepOffConfig, trainer_class=OneStepOff)
