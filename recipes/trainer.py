"""The Trainer behind recipes/algorithms.py: each choice of its table takes effect in one of these methods.

Groups stay on the data-parallel rank that sampled them. Statistics over the batch are small sums over the
ranks, so results do not depend on the number of ranks.
"""

import math
from collections import Counter
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

import train
from extras.variants import set_weights
from recipes import formulas
from train import Sample, Trainer, call, reduce_over


def add_column(name: str):
    """Adds a column to the tokens of all samples made from now on."""
    if name not in dict(train.TOKEN):
        train.TOKEN.append((name, np.float32))


def store(samples: list[Sample], name: str, values: torch.Tensor):
    """Writes values [N] of the trained tokens of samples into a column of their tokens."""
    counts = [int(sample.tokens["mask"].sum()) for sample in samples]
    for sample, part in zip(samples, values.cpu().split(counts)):
        sample.tokens[name][sample.tokens["mask"] == 1] = part.numpy()


def column(batch, name: str) -> torch.Tensor:
    """A column of the trained tokens of a micro-batch, [N]; 0 in a filler."""
    values = formulas.trained(batch.samples)[name].copy() if batch.samples else np.zeros(1)
    return torch.from_numpy(values).to(batch.weights)


def set_step_weights(samples: list[Sample], total: float):
    """Sets weights that count all steps the same, given the number of steps on all ranks."""
    for sample in samples:
        turns, mask = sample.tokens["turn"], sample.tokens["mask"]
        counts = np.maximum(np.bincount(turns, mask), 1)
        sample.tokens["weight"] = mask / (total * counts[turns])


def carries_signal(group: list[Sample]) -> bool:
    """Whether rewards differ. A failed group counts, too: its failure must not be sampled away."""
    return any(sample.failure for sample in group) or len({sample.reward for sample in group}) > 1


class AlgorithmTrainer(Trainer):
    """A Trainer for all rows of recipes/algorithms.py. Its reward_fn may return a list, a number per turn."""

    has_variants = True

    def __init__(self, config, *arguments):
        if config.kl_coef and config.kl_in == "reward":
            add_column("ref_logprob")
        super().__init__(config, *arguments)

    # ------------------------------------------- rollout ---------------------------------------------
    def rollout(self) -> list[Sample]:
        """Samples groups; with --dynamic_sampling (DAPO, eq. 11) draws again while some carry no signal."""
        size = self.config.prompts_per_step
        samples = []
        signal = {}  # number of a prompt -> 1 if its group carries a signal; the same on all ranks
        for _ in range(1 + self.config.dynamic_sampling):
            places = range(self.prompts_drawn, self.prompts_drawn + size)
            drawn = super().rollout()
            samples += drawn
            mine = {place: [sample for sample in drawn if sample.key[0] == place] for place in places}
            found = reduce_over(self.mesh["dp"], [carries_signal(group) for group in mine.values()])
            signal |= dict(zip(places, found))
            chosen = self.choose(signal)
            if all(signal[place] for place in chosen):
                break
        return [sample for sample in samples if sample.key[0] in chosen]

    def choose(self, signal: dict[int, float]) -> set[int]:
        """The places of a step's groups, those with signal first; each update keeps its number of them."""
        updates = self.config.updates_per_step
        first_draw = list(signal)[: self.config.prompts_per_step]
        chosen = set()
        for i, count in Counter(place % updates for place in first_draw).items():
            places = [place for place in signal if place % updates == i]
            places.sort(key=lambda place: not signal[place])  # stable: earlier draws first
            chosen.update(places[:count])
        return chosen

    async def score(self, sample: Sample):
        """Sets sample.rewards, one per turn, and their sum; a single number is the last turn's."""
        rewards = await call(self.reward_fn, sample, self.config.reward_timeout)
        if not isinstance(rewards, list):
            rewards = [0.0] * (len(sample.turns) - 1) + [rewards]
        if len(rewards) != len(sample.turns):
            raise ValueError(f"reward_fn returned {len(rewards)} rewards for {len(sample.turns)} turns")
        if not all(map(math.isfinite, [*rewards, *sample.metrics.values()])):
            raise ValueError(f"reward_fn returned {rewards} with the metrics {sample.metrics}")
        sample.metrics = {name: float(number) for name, number in sample.metrics.items()}
        sample.rewards = [float(reward) for reward in rewards]
        sample.reward = sum(sample.rewards)

    # -------------------------------------------- update ---------------------------------------------
    def learn(self, samples: list[Sample]) -> dict[str, float]:
        """Updates the actor; first computes the reference's log-probs if rewards include the divergence."""
        if self.config.kl_coef and self.config.kl_in == "reward":
            self.store_values(samples, "ref_logprob", lambda batch: self.reference.logprobs(batch)[0])
        return super().learn(samples)

    def compare(self, samples: list[Sample]):
        """Sets each trained token's advantage."""
        owners, steps = formulas.number_units(samples)
        returns = [formulas.token_returns(sample, self.config) for sample in samples]
        returns = torch.from_numpy(np.concatenate([np.zeros(0), *returns]))
        advantages = formulas.above_baseline(returns, owners, self.config)
        advantages = formulas.normalize_batch(advantages, steps, self.config.normalize, self.mesh["dp"])
        store(samples, "advantage", advantages)

    def micro_batches(self, samples: list[Sample]) -> list:
        """This rank's micro-batches of one optimizer step, with the units that each token is part of."""
        config = self.config
        counted = [sample for sample in samples if not (config.mask_truncated and sample.truncated)]
        tokens = sum(sample.tokens["mask"].sum() for sample in counted)
        steps = sum(len(sample.rewards) for sample in counted)
        count, tokens, steps = reduce_over(self.mesh["dp"], [len(counted), tokens, steps])
        if config.aggregation == "step":
            set_step_weights(counted, steps)
        else:
            set_weights(counted, config, count, tokens)
        always = config.entropy_coef or (config.kl_coef and config.kl_in == "loss")
        return self.pack([sample for sample in counted if always or sample.tokens["advantage"].any()])

    def pack(self, samples: list[Sample]) -> list:
        """Micro-batches of this rank's samples, as many as on every rank."""
        pack = partial(self.batch_class.pack, samples, self.config.tokens_per_micro_batch)
        (least,) = reduce_over(self.mesh["dp"], [len(pack(1))], dist.ReduceOp.MAX)
        batches = [self.batch_class(part, self.config.device) for part in pack(int(least))]
        for batch in batches:
            filler = torch.zeros_like(batch.source)
            owners, steps = formulas.number_units(batch.samples) if batch.samples else (filler, filler)
            batch.owners = owners.to(self.config.device)
            batch.steps = steps.to(self.config.device)
        return batches

    @torch.no_grad()
    def store_values(self, samples: list[Sample], name: str, model):
        """Writes model(batch) [N] of all samples into a column of their tokens; all ranks call it."""
        for batch in self.pack([sample for sample in samples if not sample.failure]):
            values = model(batch)  # on all ranks, fillers included: FSDP gathers weights
            if batch.samples:
                store(batch.samples, name, values)

    def loss(self, logprobs, entropy, batch) -> tuple[torch.Tensor, dict]:
        """The loss of a micro-batch, and the metrics to average, [N] each."""
        return formulas.policy_loss(logprobs, entropy, batch, self.config)

    def record(self, sample: Sample) -> dict:
        """The core's record, with the reward of each turn where there are several."""
        rewards = getattr(sample, "rewards", [])
        return super().record(sample) | ({"rewards": rewards} if len(rewards) > 1 else {})
