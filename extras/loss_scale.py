"""--dtype float16: the loss is scaled, so that small gradients do not vanish.

float16 has three more bits of mantissa than bfloat16, and with them an eighth of its rounding, but nothing
below 6e-8: the weight of a token in the loss, 1/(B |o|), is about 1e-6. So each backward pass starts with
`value` times the loss, and the sum of the gradients, which FSDP builds in fp32, is divided by it before it is
clipped and logged (arXiv:1710.03740 sec. 3.2). The value is a power of 2: it rounds nothing by itself.

Where the norm of the gradient is not finite, the optimizer step is left out and the scale is halved; it is
doubled after INTERVAL good steps. All ranks see the same norm. torch.amp.GradScaler does the same and waits
for 2,000 steps: more than most runs here have, so that a single overflow would lower the scale for good. At
most one update in INTERVAL is lost to a scale that is tried too early.

A recipe's critic has a scale of its own. Each is part of a checkpoint.
"""

import math
from dataclasses import dataclass

import torch

from train import Actor

INTERVAL = 200  # good steps before the scale is doubled


@dataclass
class LossScale:
    """What the loss is multiplied by, and the optimizer steps since it changed."""

    value: float = 2.0**16
    good_steps: int = 0

    def update(self, is_finite: bool):
        """Follows an optimizer step, by whether its gradient was finite."""
        self.good_steps += 1
        if not is_finite:
            self.value /= 2
            self.good_steps = 0
        elif self.good_steps == INTERVAL:
            self.value *= 2
            self.good_steps = 0


def scaling(actor_class: type) -> type:
    """An actor that scales its loss."""

    class ScalingActor(actor_class):
        loss_scale: LossScale

        def backward(self, batches: list, loss_fn) -> dict[str, float]:
            """Adds up gradients of the scaled loss; what is returned is not scaled."""
            scale = self.loss_scale.value

            def scaled_loss(batch):
                loss, stats = loss_fn(batch)
                return loss * scale, stats

            metrics = super().backward(batches, scaled_loss)
            return metrics | {"loss": metrics["loss"] / scale, "loss_scale": scale}

        def optimizer_step(self) -> float:
            """Updates the weights from unscaled gradients. Returns their global norm."""
            gradients = [weight.grad for weight in self.parameters.values() if weight.grad is not None]
            torch._foreach_div_(gradients, self.loss_scale.value)
            norm = super().optimizer_step()
            self.loss_scale.update(math.isfinite(norm))
            return norm

    return ScalingActor


def scale_loss(actor: Actor):
    """Makes an actor scale its loss; in place, because recipes make actors of classes of their own."""
    actor.__class__ = scaling(type(actor))
    actor.loss_scale = LossScale()


def extend(trainer_class: type) -> type:
    """A trainer whose actors scale their losses in float16."""

    class ScalingTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            actors = [value for value in vars(self).values() if isinstance(value, Actor)]
            for actor in actors if config.dtype == "float16" else []:
                scale_loss(actor)

    return ScalingTrainer
