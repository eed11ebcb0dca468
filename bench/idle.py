"""How long ranks wait for each other in an update, with groups where they were sampled and with balancing.

    python -m bench.idle [--rounds 7] [--output assets/idle.json]

Lengths of completions are log-normal: those of a prompt share a difficulty, so groups differ, and within a
group they differ again. Each rank packs its samples with train.pack into as many micro-batches as the fullest
rank needs. In each pass all ranks wait for the one with the most tokens, because FSDP's collectives join them
there; the time of a pass is taken as proportional to its tokens. This counts tokens; it times nothing.

"as sampled": without balancing. "8 ranks": with the moves of extras/balance.py inside a machine. "all ranks":
as if samples were spread evenly over all machines.
"""

import statistics
from types import SimpleNamespace

import numpy as np

from bench.measure import options, show, write
from extras.balance import moves
from train import pack

PROMPT, MEDIAN, LONGEST = 300, 600, 4096  # tokens
GROUP = 8
MACHINE = 8  # ranks


def draw_groups(generator, prompts: int, sigma: float) -> list[list[SimpleNamespace]]:
    """Samples that have only a length; half of the variance of its logarithm lies between prompts."""
    difficulty = generator.normal(0, sigma / 2**0.5, (prompts, 1))
    lengths = MEDIAN * np.exp(difficulty + generator.normal(0, sigma / 2**0.5, (prompts, GROUP)))
    lengths = PROMPT + np.minimum(lengths, LONGEST).astype(int)
    return [[SimpleNamespace(tokens=range(length)) for length in row] for row in lengths]


def moved(ranks: list[list], machine: int) -> list[list]:
    """Samples moved between the ranks of each machine as extras/balance.py does."""
    out = []
    for first in range(0, len(ranks), machine):
        part = [list(samples) for samples in ranks[first : first + machine]]
        lengths = [[len(sample.tokens) for sample in samples] for samples in part]
        kept = [dict(enumerate(samples)) for samples in part]
        for source, index, target in moves([sum(one) for one in lengths], lengths):
            part[target].append(kept[source][index])
            part[source].remove(kept[source][index])
        out += part
    return out


def spread(ranks: list[list], machine: int) -> list[list]:
    """Samples moved between so many neighbors, evenly by tokens."""
    out = []
    for first in range(0, len(ranks), machine):
        part = ranks[first : first + machine]
        out += pack(sum(part, []), 10**12, len(part))
    return out


def idle_share(ranks: list[list], budget: int) -> float:
    """The share of its time that the average rank waits."""
    count = max(len(pack(samples, budget, 1)) for samples in ranks)
    packs = [pack(samples, budget, count) for samples in ranks]
    tokens = [[sum(len(sample.tokens) for sample in part) for part in parts] for parts in packs]
    passes = max(map(len, tokens))
    tokens = np.array([sorted(parts, reverse=True) + [0] * (passes - len(parts)) for parts in tokens])
    return 1 - tokens.mean() / tokens.max(axis=0).mean()


def main():
    """Draws steps, and counts."""
    flags = options(__doc__, "idle")
    rows = []
    for ranks, groups, sigma, budget in (
        (4, 16, 0.5, 8192),
        (8, 8, 0.5, 8192),
        (8, 8, 1.0, 8192),
        (8, 8, 1.0, 16384),
        (8, 32, 1.0, 8192),
        (64, 8, 1.0, 8192),
        (64, 8, 1.0, 16384),
    ):
        generator = np.random.default_rng(0)
        found = {"as sampled": [], "8 ranks": [], "all ranks": []}
        for _ in range(flags.rounds):
            drawn = draw_groups(generator, ranks * groups, sigma)
            own = [sum(drawn[rank::ranks], []) for rank in range(ranks)]
            found["as sampled"].append(idle_share(own, budget))
            found["8 ranks"].append(idle_share(moved(own, MACHINE), budget))
            found["all ranks"].append(idle_share(spread(own, ranks), budget))
        row = {"ranks": ranks, "groups_per_rank": groups, "sigma": sigma, "budget": budget}
        rows.append(row | {name: round(statistics.mean(shares), 3) for name, shares in found.items()})
    show(rows)
    write(flags.output, rows=rows)


if __name__ == "__main__":
    main()
