"""--dither True: weights start at random points of their bf16 rounding cells, so that small updates count.

The optimizer steps in fp32, but layers and engines compute with weights rounded to bf16, whose neighbours are
1/256 to 1/128 of a weight apart: for a weight of 0.02 about a hundred steps at a learning rate of 1e-6. The
weights of a bf16 checkpoint are in the middle of their rounding cells, so at first about 99 % of each step's
change is rounded away (arXiv:2602.03839 sec. 3). Here each weight of the actor gets a random place in its
cell. Rounded, the weights are unchanged; but now an update by a hundredth of a cell moves one weight in a
hundred by a whole cell, which is right on average. Audio and image quantizers call this dither.

Weights that are not exactly representable in bf16 are left unchanged, and so are the reference, frozen
weights, and all weights of fp32 runs.
"""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from train import flag

HALF = 2**15  # half a rounding cell, in units of the last bit of fp32


@dataclass
class Flags:
    dither: bool = flag(True, "bfloat16 only: random start of each weight within its rounding cell")


def dither(weight: torch.Tensor, generator: torch.Generator):
    """Moves fp32 weights that bf16 represents exactly to random points of their rounding cells, in place."""
    bits = weight.view(torch.int32)  # floats of one sign are ordered as their bits
    movable = (bits & 0xFFFF == 0) & (weight != 0)
    shift = {"generator": generator, "device": weight.device, "dtype": torch.int32}
    bits += movable * torch.randint(1 - HALF, HALF, weight.shape, **shift)


def part_of(weight: DTensor) -> list[int]:
    """Which part of a weight this rank holds; the same on ranks that hold copies of one another."""
    places = zip(weight.device_mesh.get_coordinate(), weight.placements)
    return [place for place, placement in places if not placement.is_replicate()]


def add(weight: torch.Tensor, update: torch.Tensor, name: str):
    """Adds an fp32 update to a weight in place; a named bf16 weight is dithered in the same way each time."""
    whole = weight.float()
    if name and weight.dtype == torch.bfloat16:
        dither(whole, torch.Generator(weight.device).manual_seed(crc32(name.encode())))
    weight.copy_(whole + update)


def dither_all(weights: list[DTensor], seed: int):
    """Dithers this rank's parts of sharded weights."""
    for i, weight in enumerate(weights):
        local = weight.detach().to_local()
        generator = torch.Generator(local.device)
        dither(local, generator.manual_seed(hash((seed, i, *part_of(weight)))))


def extend(trainer_class: type) -> type:
    """A trainer whose actor starts dithered."""

    class DitheringTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            if config.dither and config.dtype == "bfloat16":
                dither_all(list(self.actor.parameters.values()), config.seed)

    return DitheringTrainer
