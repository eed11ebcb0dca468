"""--offload True: the actor, its optimizer and the reference are in CPU memory while the engine samples.

During a push only the parameters are on the GPU beside the engine: the optimizer's state and the reference
leave before it.
"""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from train import Actor, flag

AWAY = "cpu"  # where everything is while the engine samples


@dataclass
class Flags:
    offload: bool = flag(False, "actor and optimizer in CPU memory during rollouts")


def move_optimizer(optimizer, device: str):
    """Moves an optimizer's state (for Adam: moments and step counts)."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.to(device)


def extend(trainer_class: type) -> type:
    """A trainer whose models take turns with the engine on the GPU."""

    class OffloadingTrainer(trainer_class):
        def actors(self) -> list[Actor]:
            """The actor, and those that a recipe has beside it, for example a critic."""
            return [value for value in vars(self).values() if isinstance(value, Actor)]

        def move_actors(self, device: str):
            """Moves the parameters that are trained."""
            if self.config.offload:
                for actor in self.actors():
                    actor.model.to(device)
                torch.cuda.empty_cache()

        def move_others(self, device: str):
            """Moves what only an update requires: the state of optimizers, and models that do not learn."""
            if self.config.offload:
                for actor in self.actors():
                    move_optimizer(actor.optimizer, device)
                for value in vars(self).values():
                    if isinstance(value, FSDPModule):  # the reference
                        value.to(device)
                torch.cuda.empty_cache()

        def step(self) -> tuple[dict[str, float], list]:
            """A step. If a signal ends its rollout, the parameters return: a checkpoint may be saved next."""
            try:
                return super().step()
            except BaseException:
                self.move_actors(self.config.device)  # beside the engine, as after an evaluation
                raise

        def sample(self, *arguments):
            self.move_others(AWAY)  # before the first step they are still there
            self.move_actors(AWAY)
            return super().sample(*arguments)

        def learn(self, samples: list) -> dict[str, float]:
            self.move_actors(self.config.device)
            self.move_others(self.config.device)
            metrics = super().learn(samples)
            self.move_others(AWAY)
            return metrics

        def publish(self):
            self.move_actors(self.config.device)
            super().publish()

        def evaluate(self) -> dict[str, float]:
            """An evaluation, after which the parameters return: the model may be saved next."""
            metrics = super().evaluate()
            self.move_actors(self.config.device)
            return metrics

    return OffloadingTrainer
