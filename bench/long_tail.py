"""How fast are rollouts with a long tail, if the next step continues what is not complete?

    python -m bench.long_tail [--rounds 5] [--factors "1 1.5 2"] [--output assets/records/long_tail.json]

recipes/partial_rollouts.py samples on one CPU thread with the embedded model. A completion ends at its own
length, drawn from a log-normal distribution, with half of the variance of the logarithm between prompts. In
each round, every factor of --oversample samples a few steps in turn; the factor 1 waits for all completions,
as train.py does. Nothing is trained or pushed; the version only counts the steps. The tokens of complete
groups are counted. A ratio is the median of the rounds' own ratios of tokens per second to the first factor.

A forward pass of the engine decodes one token of every episode that is not finished. Where its time hardly
depends on their number, as on a GPU with room, tokens per pass are the speed. On a CPU they are not: a small
wave is cheap, and every row of a wave pays for the keys of its longest one.
"""

import tempfile
from collections import Counter
from statistics import median

import numpy as np

import train
from bench.cost import make_trainer
from bench.measure import in_turn, options, ratio, record, show
from recipes.partial_engine import PartialLocal
from recipes.partial_rollouts import PartialConfig, PartialRollouts

MEDIAN, SIGMA, LONGEST = 40, 1.0, 400  # tokens of completions; SIGMA of the logarithm
STEPS = 1  # rollouts per measurement
PROMPTS, GROUP = 16, 8  # groups per step, completions per group


class LongTail(PartialLocal):
    """A local engine whose completions have log-normal lengths."""

    passes = 0

    def __init__(self, engine):
        super().__init__(engine)
        engine.stops = {None}
        forward = engine.forward

        def counted(*arguments):
            self.passes += 1
            return forward(*arguments)

        engine.forward = counted

    async def generate(self, ids, temperature: float, seed: int, max_new_tokens: int):
        difficulty = np.random.default_rng(int(np.sum(ids))).normal()  # of the prompt
        own = np.random.default_rng(abs(seed)).normal()
        length = int(MEDIAN * np.exp(SIGMA * (difficulty + own) / 2**0.5))
        return await super().generate(ids, temperature, seed, min(max(1, length), max_new_tokens))


class Rollouts:
    """What a factor of --oversample has sampled so far."""

    def __init__(self, folder: str, oversample: float):
        flags = {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": LONGEST, "gate": "off"}
        flags |= {"oversample": oversample}
        self.trainer = make_trainer(f"{folder}/{oversample:g}", PartialConfig, PartialRollouts, **flags)
        self.trainer.engine = LongTail(self.trainer.engine.engine)
        self.tokens = []  # of each measurement
        self.ages = Counter()
        self.busy = 0.0
        self.slots = 0.0

    def sample(self):
        """One measurement."""
        self.tokens.append(0)
        for _ in range(STEPS):
            self.trainer.engine.version += 1
            for sample in self.trainer.rollout():
                versions = sample.tokens["version"][sample.tokens["mask"] == 1]
                self.ages.update((self.trainer.engine.version - versions).tolist())
                self.tokens[-1] += len(versions)
            self.busy += self.trainer.engine.busy_seconds
            self.slots += self.trainer.engine.slot_seconds


def main():
    """Measures all factors, prints the table and writes the numbers."""
    flags = options(__doc__, "long_tail", factors=("1 1.5 2", "values of --oversample"))
    meshes = train.init_distributed(PartialConfig(engine="local", device="cpu"))
    train.init_distributed = lambda config: meshes  # several trainers in this process
    with tempfile.TemporaryDirectory() as folder:
        found = {factor: Rollouts(folder, factor) for factor in map(float, flags.factors.split())}
        times = in_turn({factor: one.sample for factor, one in found.items()}, flags.rounds)
    rows = []
    costs = {}  # seconds per token, of each round
    for factor, one in found.items():
        costs[factor] = {}
        for clock, seconds in times[factor].items():
            costs[factor][clock] = [taken / tokens for taken, tokens in zip(seconds, one.tokens[1:])]
        first = costs[next(iter(found))]
        total = sum(one.ages.values())
        row = {"--oversample": factor, "tokens per CPU s": 1 / median(costs[factor]["cpu"])}
        row |= {"CPU ratio": ratio(first["cpu"], costs[factor]["cpu"])}
        row |= {"wall ratio": ratio(first["wall"], costs[factor]["wall"])}
        row |= {"tokens per pass": total / one.trainer.engine.passes}
        row |= {"% of slots idle": 100 * (1 - one.busy / one.slots)}
        row |= {f"% of age {age}": 100 * one.ages[age] / total for age in range(4)}
        rows.append(row | {"% older": 100 * sum(n for age, n in one.ages.items() if age > 3) / total})
    show(rows)
    title = f"Rollouts with completions of a median of {MEDIAN} tokens, sigma {SIGMA:g}, at most {LONGEST}"
    record(flags.output, {title: rows}, costs={f"{factor:g}": cost for factor, cost in costs.items()})


if __name__ == "__main__":
    main()
