"""Moves samples between the ranks of a machine before an update, so that none waits for the fullest.

Groups stay on the rank that sampled them until their advantages are known. In an update all ranks wait for
the one with the most tokens in every micro-batch: with eight groups per rank, a seventh to a third of the
time (bench/cost.py). Between ranks of one machine a few samples are moved; the loss divides by global counts,
so gradients change only by their summation order. Load is not balanced across machines, nor across
tensor-parallel groups that span machines. Without this file ranks keep what they sampled.
"""

import os
from copy import copy
from functools import cached_property

import torch
import torch.distributed as dist

CLOSE = 0.02  # share of the mean; smaller differences are left alone


def moves(loads: list[int], movable: list[list[int]]) -> list[tuple[int, int, int]]:
    """Chooses the samples to move, as (from rank, index there, to rank).

    loads are the tokens of each rank, movable the lengths of those of its samples that may leave it.
    """
    loads = list(loads)
    left = [dict(enumerate(lengths)) for lengths in movable]
    found = []
    while True:
        fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
        gap = loads[fullest] - loads[emptiest]
        fitting = [i for i, length in left[fullest].items() if length < gap]
        if not fitting or gap * len(loads) < CLOSE * sum(loads):
            return found
        best = min(fitting, key=lambda i: abs(gap - 2 * left[fullest][i]))  # closest to half the gap
        length = left[fullest].pop(best)
        loads[fullest] -= length
        loads[emptiest] += length
        found.append((fullest, best, emptiest))


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

        def exchange(self, samples: list) -> list:
            """This rank's samples after the moves."""
            useful = [sample for sample in samples if sample.tokens["advantage"].any()]
            movable = [sample for sample in useful if not self.is_detailed(sample)]
            lengths = [len(sample.tokens) for sample in movable]
            load = sum(len(sample.tokens) for sample in useful)
            known = [None] * self.neighbors.size()
            dist.all_gather_object(known, (load, lengths), group=self.neighbors)
            me = self.neighbors.rank()
            planned = moves([load for load, _ in known], [lengths for _, lengths in known])
            if not planned:  # all ranks agree on this
                return samples
            leaving = [(target, movable[i]) for rank, i, target in planned if rank == me]
            parts = [None] * self.neighbors.size()
            sent = [(target, without_row(sample)) for target, sample in leaving]
            dist.all_gather_object(parts, sent, group=self.neighbors)
            gone = {id(sample) for _, sample in leaving}
            arrived = [sample for part in parts for target, sample in part if target == me]
            return [sample for sample in samples if id(sample) not in gone] + arrived

    return BalancingTrainer
