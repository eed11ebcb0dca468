"""Settings of AdamW that train.py fixes: --lr_schedule, --adam_beta1, --adam_beta2, --weight_decay.

They hold for every model that learns, so also for the critic of recipes/ppo.py.

--lr_schedule cosine    the learning rate falls to 0 by the end of the run instead of staying at its peak
--weight_decay d        each update first multiplies all that is trained by 1 - lr d (arXiv:1711.05101): also
                        norms and biases, as in trainers that give AdamW all parameters of an FSDP model, and
                        the matrices of LoRA. Megatron leaves norms and biases out.

At the learning rates of reinforcement learning the decay hardly matters: 250 updates with a rate of 1e-6 and
a decay of 0.1 shrink a weight by 0.0025 %.
"""

import math
from dataclasses import dataclass
from typing import Literal

from train import Actor, flag


@dataclass
class Flags:
    lr_schedule: Literal["constant_with_warmup", "cosine"] = flag("constant_with_warmup", "shape of --lr")
    adam_beta1: float = flag(0.9, "decay rate of AdamW's mean of gradients")
    adam_beta2: float = flag(0.99, "decay rate of AdamW's mean of squared gradients")
    weight_decay: float = flag(0.0, "AdamW's weight decay, per update and times the learning rate")


def cosine(update: int, warmup: int, updates: int) -> float:
    """The learning rate of an update, counted from 0, as a share of its peak."""
    if update < warmup:
        return (update + 1) / warmup
    return (1 + math.cos(math.pi * (update - warmup) / max(1, updates - warmup))) / 2


def extend(trainer_class: type) -> type:
    """A trainer whose optimizers have these settings."""

    class OptimizerTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            for actor in [value for value in vars(self).values() if isinstance(value, Actor)]:
                for group in actor.optimizer.param_groups:
                    group["betas"] = (config.adam_beta1, config.adam_beta2)
                    group["weight_decay"] = config.weight_decay
                if config.lr_schedule == "cosine":
                    self.follow_cosine(actor)

        def follow_cosine(self, actor: Actor):
            """Replaces the schedule of an actor that has made no update yet."""
            warmup = self.config.warmup_steps
            updates = self.config.steps * self.config.updates_per_step
            actor.scheduler.lr_lambdas = [lambda update: cosine(update, warmup, updates)]
            for group in actor.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * cosine(0, warmup, updates)

    return OptimizerTrainer
