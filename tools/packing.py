"""Samples without padding: which of them share a micro-batch, and where each token then lies.

A sample is anything that has lists per token, ids and mask among them. T counts the tokens of a micro-batch, N those
that are trained.
"""
import itertools
import math
from heapq import heapreplace

import numpy
import torch
from torch.nn.functional import pad

from tools.ranks import gather


def pack(samples: list, budget: int, ranks: int) -> list[list]:
    """Splits samples into micro-batches of about equal size and at most `budget` tokens, as many for each rank.

    A sample above the budget gets one of its own. The longest goes first, always to the emptiest micro-batch (Graham
    1969, doi:10.1137/0117039). Where samples are fewer than ranks, some stay empty.
    """
    samples = sorted(samples, key=lambda sample: len(sample.ids), reverse=True)
    fewest = math.ceil(sum(min(len(sample.ids), budget) for sample in samples) / budget / ranks) or 1
    for count in itertools.count(fewest * ranks, ranks):
        packs, sizes = [[] for _ in range(count)], [(0, i) for i in range(count)]
        for sample in samples:
            size, i = sizes[0]
            heapreplace(sizes, (size + len(sample.ids), i))
            packs[i].append(sample)
        if all(size <= budget or len(packs[i]) == 1 for size, i in sizes):
            return [packs[i] for _, i in sorted(sizes, reverse=True)]   # those of a round are alike: ranks wait


def laid_out(samples: list, name: str) -> torch.Tensor:
    """What samples have by this name, end to end, fp64 [T]. An empty list stands for zeros."""
    lists = (getattr(sample, name) or [0] * len(sample.ids) for sample in samples)
    values = numpy.fromiter(itertools.chain.from_iterable(lists), numpy.float64)    # several times as fast as a list
    return torch.from_numpy(values)


def lay_out(samples: list) -> dict[str, torch.Tensor]:
    """Where the tokens of samples lie, end to end: what train.Batch says of ids, positions, bounds and what is [N]."""
    bounds = pad(torch.tensor([len(sample.ids) for sample in samples]).cumsum(0), (1, 0))
    owners = torch.arange(len(samples)).repeat_interleave(bounds.diff())
    ids, trained = laid_out(samples, "ids").long(), laid_out(samples, "mask").nonzero()[:, 0]
    place = torch.stack([owners, laid_out(samples, "steps").long()])[:, trained]
    begins = place.diff(prepend=torch.full((2, 1), -1)).any(0)          # a new sequence, or a new step
    return dict(ids=ids[None], positions=(torch.arange(len(ids)) - bounds[owners])[None], bounds=bounds.int(),
                source=trained - 1, targets=ids[trained], sequences=place[0], steps=begins.cumsum(0) - 1,
                weights=torch.ones(len(trained)))


def column(batch, name: str) -> torch.Tensor:
    """What a batch's samples have by this name, for its trained tokens, [N]."""
    return laid_out(batch.samples, name).float().to(batch.ids.device)[batch.source + 1]


def by_sample(batch, values: torch.Tensor) -> list[list[float]]:
    """Values of a batch's trained tokens, [N] -> a list [T] for each of its samples, 0 where nothing is trained."""
    flat = values.new_zeros(batch.ids.numel()).index_put((batch.source + 1,), values)
    return [part.tolist() for part in flat.split(batch.bounds.diff().tolist())]


def per_sample(samples: list, batches: list, values: list[torch.Tensor], dp) -> list[list[float]]:
    """Values [N] of each batch, of all ranks of the mesh dp -> a list [T] for each sample; empty if in no batch."""
    place, found = {id(sample): i for i, sample in enumerate(samples)}, []
    for batch, of_batch in zip(batches, values):
        found += zip((place[id(sample)] for sample in batch.samples), by_sample(batch, of_batch))
    found = dict(gather(found, dp))
    return [found.get(i, []) for i in range(len(samples))]


def hand_back(samples: list, batches: list, names: tuple[str, ...], dp):
    """Gives samples, as lists [T], what batches have by these names, [N], to six decimals: they are to look at."""
    for name in names:
        rounded = [getattr(batch, name).double().round(decimals=6) for batch in batches]
        for sample, values in zip(samples, per_sample(samples, batches, rounded, dp)):
            setattr(sample, name, values)
