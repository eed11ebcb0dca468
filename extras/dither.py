"""--dither True: bfloat16 weights start anywhere in their rounding cells, so that small updates count.

The optimizer steps in fp32, but layers and engines compute with weights rounded to bf16, whose neighbours
are 1/256 to 1/128 of a weight apart: for a weight of 0.02 about a hundred steps at a learning rate of 1e-6.
A checkpoint in bf16 starts in the middle of every such cell, so that at first about 99 % of what a step
changes is rounded away (arXiv:2602.03839 sec. 3). Here each weight of the actor gets a random place in its
cell. Rounded, all are what they were; but now an update by a hundredth of a cell moves one weight in a
hundred by a whole cell, which is right on average. Quantizers of sound and images call this dither.

Weights that are no bf16 numbers stay as they are, and so do the reference, frozen weights, and all weights
in fp32.
"""

from dataclasses import dataclass
from zlib import crc32

import torch
from torch.distributed.tensor import DTensor

from train import flag

HALF = 2**15  # of a rounding cell, in units of the last bit of fp32


@dataclass
class Flags:
    dither: bool = flag(True, "weights of a bfloat16 run start anywhere in their rounding cells")


def dither(weight: torch.Tensor, generator: torch.Generator):
    """Moves fp32 weights that are bf16 numbers to random places in their rounding cells, in place."""
    bits = weight.view(torch.int32)  # of one sign, numbers are in the order of their bits
    movable = (bits & 0xFFFF == 0) & (weight != 0)
    shift = {"generator": generator, "device": weight.device, "dtype": torch.int32}
    bits += movable * torch.randint(1 - HALF, HALF, weight.shape, **shift)


def part_of(weight: DTensor) -> list[int]:
    """Which part of a weight this rank holds; the same on ranks that hold copies of one another."""
    places = zip(weight.device_mesh.get_coordinate(), weight.placements)
    return [place for place, placement in places if not placement.is_replicate()]


def add(weight: torch.Tensor, update: torch.Tensor, name: str):
    """Adds an fp32 update to a weight in place; a bf16 weight with a name gets the same places each time."""
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
