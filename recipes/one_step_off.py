"""One step off: SGLang samples the next batch while the actor learns from this one.

    torchrun --standalone --nproc_per_node=4 -m recipes.one_step_off --engine http://other-box:30000

It requires servers on separate GPUs. `train.py` waits for a rollout, then for an update; here both run at
once, and a rollout in flight continues with new weights when they arrive (its cache is computed again). So a
batch comes from a mixture of policies, at most --max_staleness pushes old. Each token carries the version of
its weights, and the ratio of the loss starts from the log-probs that the sampler itself reported, as in
Noukhovitch et al., arXiv:2410.18252, and AReaL, arXiv:2505.24298. `logprob_diff` is 0 by that choice.
"""

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch.distributed as dist

from recipes.problems import ProblemDataset, reward_fn
from train import Config, Sample, Trainer, UserError, encode_prompt, flag, main, reduce_over


@dataclass
class OneStepOffConfig(Config):
    """The core's flags, and how far ahead to sample."""

    max_staleness: int = flag(1, "batches sampled ahead: the largest age of a token, in pushes")

    def __post_init__(self):
        if not self.engine.startswith("http"):
            raise UserError("--engine must name servers, http://host:port[,...]: they sample all the time")
        if getattr(self, "offload", False):
            raise UserError("--offload has no effect here: the actor learns while the servers sample")
        if self.max_staleness < 0:
            raise UserError(f"--max_staleness must be 0 or more, not {self.max_staleness}")


async def play_all(episodes: list) -> list[Sample]:
    """Plays episodes at once."""
    return await asyncio.gather(*episodes)


class OneStepOff(Trainer):
    """A Trainer whose rollouts begin ahead of time, on a thread of their own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sampled = 0  # rollouts that this process has returned
        self.ahead = deque()
        threading.Thread(target=self.engine.loop.run_forever, daemon=True).start()

    def begin(self, dataset, prompts: list, group_size: int, temperature: float) -> Future:
        """Begins group_size episodes per prompt (number, row) on the engine's thread."""
        episodes = []
        for number, row in self.engine.local_prompts(prompts):
            prompt = dataset[row]
            prompt.append(encode_prompt(self.tokenizer, prompt.messages))
            fits = len(prompt.tokens) <= self.prompt_limit
            for i in range(group_size if fits else 0):
                sample = deepcopy(prompt)
                sample.key = (number, i)
                episodes.append(self.episode(sample, temperature))
        return asyncio.run_coroutine_threadsafe(play_all(episodes), self.engine.loop)

    def finish(self, future: Future) -> list[Sample]:
        """Waits for episodes. Returns this data-parallel rank's samples."""
        parts = [None] * self.mesh["tp"].size()
        dist.all_gather_object(parts, future.result(), group=self.mesh["tp"].get_group())
        return sorted(sum(parts, []), key=lambda sample: sample.key)

    def sample(self, *arguments) -> list[Sample]:
        """Plays episodes and waits for them, for example in an evaluation."""
        return self.finish(self.begin(*arguments))

    def rollout(self) -> list[Sample]:
        """The samples of a rollout that was begun --max_staleness steps ago; begins the next one."""
        config = self.config
        remaining = config.steps - max(0, self.first_step - 1) - self.sampled
        while len(self.ahead) < min(1 + config.max_staleness, remaining):
            prompts = list(islice(self.prompts, config.prompts_per_step))
            prompts = self.own_prompts(prompts)
            self.ahead.append(self.begin(self.data, prompts, config.group_size, config.temperature))
        self.sampled += 1
        self.prompts_drawn += config.prompts_per_step  # only returned rollouts: begun ones are not saved
        return self.finish(self.ahead.popleft())

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Updates the actor, and logs how old the samples are."""
        return self.staleness(samples) | super().learn(samples)

    def forward(self, batch):
        """The ratio starts from the sampler's log-probs, whatever weights it used."""
        batch.old_logprobs = batch.engine_logprobs
        return super().forward(batch)

    def staleness(self, samples: list[Sample]) -> dict[str, float]:
        """The age of trained tokens in pushes, over all ranks. Raises UserError if it is out of bounds."""
        newest = self.engine.version
        tokens = [sample.tokens[sample.tokens["mask"] == 1] for sample in samples if not sample.failure]
        ages = newest - np.concatenate([part["version"] for part in tokens] or [np.full(1, newest)])
        extremes = reduce_over(self.mesh["dp"], [-ages.min(), ages.max()], dist.ReduceOp.MAX)
        lowest, highest = -extremes[0], extremes[1]
        if not 0 <= lowest <= highest <= self.config.max_staleness:
            raise UserError(
                f"tokens are {lowest:g} to {highest:g} pushes old, but --max_staleness is "
                f"{self.config.max_staleness}: does another run push to the same server?"
            )
        total, count = reduce_over(self.mesh["dp"], [ages.sum(), len(ages)])
        return {"staleness": total / count, "staleness_max": highest}


if __name__ == "__main__":
    main(OneStepOffConfig, ProblemDataset, reward_fn, trainer=OneStepOff)
