"""Partial rollouts: a step does not wait for the longest completions; the next step continues them.

    torchrun --standalone --nproc_per_node=4 -m recipes.partial_rollouts --oversample 2

APRIL (Zhou et al., arXiv:2509.18521): the engine plays --oversample times as many groups as a step trains.
Once enough of them are complete, it stops. What it has sampled of the others stays, and the next step, whose
weights are new, continues it. Each token keeps the version of its weights and the log-prob with which it was
sampled: its importance ratio starts there. Tokens more than --max_staleness pushes old have no gradient.

A step trains the groups that are complete first, in the order of their prompts: short ones come earlier, long
ones later, each once. An env_step is called again for the turns of a continued episode; if it then answers
differently, the episode is sampled anew from there.
"""

import asyncio
import math
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import train
from recipes.partial_engine import ENGINES
from recipes.problems import ProblemDataset, reward_fn
from recipes.trainer import column
from train import RANK, Config, Sample, Trainer, UserError, encode_prompt, flag, main, reduce_over


@dataclass
class PartialConfig(Config):
    """The core's flags, and how far a rollout reaches into the next ones."""

    oversample: float = flag(2.0, "groups in play, as a multiple of --prompts_per_step")
    max_staleness: int = flag(4, "largest age of a trained token, in pushes; older ones have no gradient")

    def __post_init__(self):
        if self.engine not in ENGINES:
            raise UserError("--engine must be sglang or local; with servers use recipes/one_step_off.py")
        if self.oversample < 1:
            raise UserError(f"--oversample must be 1 or more, not {self.oversample:g}")
        if self.max_staleness < 0:
            raise UserError(f"--max_staleness must be 0 or more, not {self.max_staleness}")


class PartialRollouts(Trainer):
    """A Trainer whose rollouts end early. Every rank of the engine stops once its own share is complete."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.engine = ENGINES[self.config.engine](self.engine)
        self.groups = []  # (number, row) in play on this rank, by number
        self.finished = {}  # sample.key -> its finished samples
        self.trained = 0  # prompts that earlier rollouts of all ranks have returned

    def rollout(self) -> list[Sample]:
        """The samples of the groups that are complete first, as many as without --oversample."""
        size = self.config.prompts_per_step
        missing = self.trained + math.ceil(self.config.oversample * size) - self.prompts_drawn
        drawn = list(islice(self.prompts, max(0, missing)))
        self.prompts_drawn += len(drawn)
        self.groups += self.engine.local_prompts(self.own_prompts(drawn))
        share = self.own_prompts([(number, 0) for number in range(self.trained, self.trained + size)])
        self.trained += size
        return self.sample(self.data, share, self.config.group_size, self.config.temperature)

    def sample(self, dataset, prompts: list, group_size: int, temperature: float) -> list[Sample]:
        """Plays the groups of this rank until as many are complete as there are prompts; or an evaluation."""
        if dataset is not self.data:
            return super().sample(dataset, prompts, group_size, temperature)
        target = len(self.engine.local_prompts(prompts))
        samples = self.engine.loop.run_until_complete(self.play_groups(target, temperature))
        parts = [None] * self.mesh["tp"].size()
        dist.all_gather_object(parts, samples, group=self.mesh["tp"].get_group())
        return sorted(sum(parts, []), key=lambda sample: sample.key)

    async def play_groups(self, target: int, temperature: float) -> list[Sample]:
        """Plays all groups until `target` of them are complete. Returns the samples of the first of those."""
        episodes = [self.begin_group(*group, temperature) for group in self.groups]
        self.engine.start(sum(map(len, episodes)))
        tasks = [asyncio.gather(*group) for group in episodes]
        first = islice(asyncio.as_completed(tasks), target)
        for task in tqdm(first, desc="rollout", total=target, **train.PROGRESS):
            await task
        complete = [group for group, task in zip(self.groups, tasks) if task.done()][:target]
        await self.engine.stop(tasks)
        self.groups = [group for group in self.groups if group not in complete]
        numbers = {number for number, _ in complete}
        samples = [sample for key, sample in self.finished.items() if key[0] in numbers]
        for sample in samples:
            self.forget(sample)
        return samples

    def begin_group(self, number: int, row: int, temperature: float) -> list:
        """The episodes of a group that are not finished, as coroutines; none if its prompt is too long."""
        prompt = self.data[row]
        prompt.append(encode_prompt(self.tokenizer, prompt.messages))
        size = self.config.group_size if len(prompt.tokens) <= self.prompt_limit else 0
        episodes = []
        for i in range(size):
            if (number, i) not in self.finished:
                sample = deepcopy(prompt)
                sample.key = (number, i)
                episodes.append(self.finish(sample, temperature))
        return episodes

    async def finish(self, sample: Sample, temperature: float):
        """Plays an episode to its end, and keeps it until its group is trained."""
        self.finished[sample.key] = await self.episode(sample, temperature)

    def forget(self, sample: Sample):
        """Drops what was kept of a sample that is trained now."""
        del self.finished[sample.key]
        for turn in range(len(sample.turns) + 1):
            self.engine.turns.pop(hash((self.config.seed, *sample.key, turn)), None)  # seeds of train.rollout

    def forward(self, batch) -> tuple[torch.Tensor, dict]:
        """The loss with ratios to the sampler's log-probs. Newest tokens are compared with the actor's."""
        logprobs, entropy = self.actor.model.logprobs(batch)
        actor_logprobs = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        ages = self.engine.version - column(batch, "version")  # [N]
        batch.old_logprobs = batch.engine_logprobs
        batch.advantages = batch.advantages * (ages <= self.config.max_staleness)
        loss, stats = self.loss(logprobs, entropy, batch)
        gaps = (actor_logprobs - batch.engine_logprobs).abs()
        is_newest = ages == 0
        mean_gap = (gaps * is_newest).sum() / is_newest.sum().clamp(min=1)
        return loss, stats | {"logprob_diff": gaps.where(is_newest, mean_gap)}  # which older ones count as

    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Updates the actor. Logs trained tokens by age in pushes, and what the rollout has left."""
        oldest = self.config.max_staleness + 1  # stands for all ages beyond the limit
        counts = np.zeros(oldest + 1)
        for sample in samples:
            if not sample.failure:
                versions = sample.tokens["version"][sample.tokens["mask"] == 1]
                ages = np.minimum(self.engine.version - versions, oldest)
                counts += np.bincount(ages, minlength=oldest + 1)
        sums = [*counts, self.engine.busy_seconds, self.engine.slot_seconds]
        *counts, busy, slots = reduce_over(self.mesh["dp"], sums)
        *ages, too_old = np.array(counts) / max(sum(counts), 1)
        metrics = {f"age_{age}": share for age, share in enumerate(ages)} | {"too_old_tokens": too_old}
        metrics |= {"idle_rollout_slots": 1 - busy / max(slots, 1e-9), "leftover_tokens": self.leftover()}
        return metrics | super().learn(samples)

    def leftover(self) -> float:
        """Tokens of unfinished groups, over all ranks."""
        tokens = sum(len(turn["id"]) for turn in self.engine.turns.values())
        return reduce_over(self.mesh["dp"], reduce_over(self.mesh["tp"], [tokens]))[0]

    def fit(self):
        super().fit()
        tokens = self.leftover()
        if RANK == 0:
            tqdm.write(f"{tokens:g} tokens of unfinished groups were sampled and not trained")

    def carried(self) -> dict:
        """For extras/checkpoint.py: what the next rollout continues, as JSON. Rewards are computed again."""
        turns = list(self.engine.turns.items())
        return {"groups": list(self.groups), "trained": self.trained, "turns": turns}

    def restore_carried(self, parts: list[dict] | None):
        """Continues what `carried` returned, per rank. If the number of ranks has changed, groups restart."""
        if not parts or not parts[0]:  # of another recipe
            self.trained = self.prompts_drawn
            return
        self.trained = parts[0]["trained"]
        if len(parts) == dist.get_world_size():
            self.groups = [tuple(group) for group in parts[dist.get_rank()]["groups"]]
            self.engine.turns = dict(parts[dist.get_rank()]["turns"])
        else:
            groups = sorted(tuple(group) for part in parts for group in part["groups"])
            self.groups = self.engine.local_prompts(self.own_prompts(groups))


if __name__ == "__main__":
    main(PartialConfig, ProblemDataset, reward_fn, trainer=PartialRollouts)
