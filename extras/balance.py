"""Moves samples between the ranks of a machine before an update, so that none waits for the fullest.

Groups stay on the rank that sampled them until their advantages are known. In an update all ranks wait for
the one with the most tokens in every micro-batch: with eight groups per rank, a seventh to a third of the
time (bench/cost.py). Between ranks of one machine groups are moved, or parts of groups where that saves more
than a second copy of their prompt costs; the loss divides by global counts, so gradients change only by their
summation order. Load is not balanced across machines, nor across
tensor-parallel groups that span machines. Without this file ranks keep what they sampled.
"""

import os
from copy import copy
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist

CLOSE = 0.01  # share of the mean; a smaller gain is no reason to move samples


def moves(loads: list[int], groups: list[list[tuple[int, list[int]]]]) -> list[tuple[int, int, int, int]]:
    """Chooses what to move, as (from rank, group there, number of its first samples left, to rank).

    loads are the tokens of each rank. groups are what may leave it: of each group the tokens that its samples
    share, and the other tokens of each sample. A part of a group takes a copy of the shared tokens along.
    """
    loads = list(loads)
    left = [dict(enumerate(own)) for own in groups]
    found = []
    while True:
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        best, move = loads[fullest], None
        for group, (shared, rests) in left[fullest].items():
            for n, moved in enumerate(accumulate(rests), 1):
                keeps = loads[fullest] - moved - shared * (n == len(rests))
                gets = loads[emptiest] + moved + shared
                if max(keeps, gets) < best:
                    best, move = max(keeps, gets), (group, n, keeps, gets)
        if (loads[fullest] - best) * len(loads) <= CLOSE * sum(loads):
            return found
        group, n, loads[fullest], loads[emptiest] = move
        shared, rests = left[fullest].pop(group)
        if n < len(rests):
            left[fullest][group] = shared, rests[n:]
        found.append((fullest, group, n, emptiest))


def without_row(sample):
    """A copy with only what an update needs: a row or state may be large, or tied to this process."""
    other = copy(sample)
    other.messages, other.row, other.state = [], {}, {}
    return other


def extend(trainer_class: type) -> type:
    """A trainer whose ranks share samples within a machine; a recipe opts out with `balanced = False`."""

    class BalancingTrainer(trainer_class):
        balanced = getattr(trainer_class, "balanced", True)

        @cached_property
        def neighbors(self):
            """The ranks of this machine with the same part of the model, or None if there are no others."""
            size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            tp = self.mesh["tp"].size()
            world = dist.get_world_size()
            sizes = torch.tensor([size, -size])
            dist.all_reduce(sizes, dist.ReduceOp.MAX)  # machines may have different numbers of processes
            largest, smallest = sizes[0].item(), -sizes[1].item()
            if not self.balanced or largest != smallest or size // tp < 2 or size % tp or world % size:
                return None
            firsts = [first + part for first in range(0, world, size) for part in range(tp)]
            groups = [list(range(first, first - first % size + size, tp)) for first in firsts]
            return dist.new_subgroups_by_enumeration(groups, backend="gloo")[0]

        def micro_batches(self, samples: list) -> list:
            """Micro-batches of about as many tokens as those of the other ranks of this machine."""
            return super().micro_batches(self.exchange(samples) if self.neighbors else samples)

        def is_detailed(self, sample) -> bool:
            """Whether a sample is logged token by token, and must stay; extras/details.py overrides this."""
            return False

        def shared_tokens(self, sample) -> int:
            """Tokens that a group's samples have once in a micro-batch; extras/shared_prompts.py has some."""
            return 0

        def exchange(self, samples: list) -> list:
            """This rank's samples after the moves."""
            groups = {}
            for sample in samples:
                if sample.tokens["advantage"].any():
                    groups.setdefault(sample.key[0], []).append(sample)
            sizes = {}
            for key, group in groups.items():
                shared = self.shared_tokens(group[0])
                sizes[key] = shared, [len(sample.tokens) - shared for sample in group]
            load = sum(shared + sum(rests) for shared, rests in sizes.values())
            movable = [key for key, group in groups.items() if not self.is_detailed(group[0])]
            known = [None] * self.neighbors.size()
            mine = load, [sizes[key] for key in movable]
            dist.all_gather_object(known, mine, group=self.neighbors)
            planned = moves(*zip(*known))
            if not planned:  # all ranks agree on this
                return samples
            leaving = []
            for rank, index, n, target in planned:
                if rank == self.neighbors.rank():
                    group = groups[movable[index]]
                    leaving += [(target, sample) for sample in group[:n]]
                    del group[:n]
            parts = [None] * self.neighbors.size()
            sent = [(target, without_row(sample)) for target, sample in leaving]
            dist.all_gather_object(parts, sent, group=self.neighbors)
            gone = {id(sample) for _, sample in leaving}
            arrived = [one for part in parts for target, one in part if target == self.neighbors.rank()]
            return [sample for sample in samples if id(sample) not in gone] + arrived

    return BalancingTrainer
