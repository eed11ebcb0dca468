"""--lr_schedule cosine: the learning rate falls to 0 by the end of the run instead of staying at its peak."""

import math
from dataclasses import dataclass
from typing import Literal

from train import Actor, flag


@dataclass
class Flags:
    lr_schedule: Literal["constant_with_warmup", "cosine"] = flag("constant_with_warmup", "shape of --lr")


def cosine(update: int, warmup: int, updates: int) -> float:
    """The learning rate of an update, counted from 0, as a share of its peak."""
    if update < warmup:
        return (update + 1) / warmup
    return (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup))) / 2


def extend(trainer_class: type) -> type:
    """A trainer whose learning rates follow --lr_schedule."""

    class ScheduledTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            updates = config.steps * config.updates_per_step
            actors = [value for value in vars(self).values() if isinstance(value, Actor)]
            for actor in actors if config.lr_schedule == "cosine" else []:
                actor.scheduler.lr_lambdas = [lambda update: cosine(update, config.warmup_steps, updates)]
                for group in actor.optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * cosine(0, config.warmup_steps, updates)

    return ScheduledTrainer
