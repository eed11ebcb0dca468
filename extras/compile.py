"""--compile True: torch.compile of each layer of the actor and the reference.

Graphs have dynamic shapes, because every micro-batch has a different length. Attention over packed samples
stays outside of them (train.packed_attention). The first step takes about a minute longer. Tensor-parallel
layers cannot be compiled this way: torch 2.13 and 2.14 recurse endlessly over DTensors of changing lengths.
"""

from dataclasses import dataclass

from train import UserError, flag


@dataclass
class Flags:
    compile: bool = flag(False, "torch.compile of each layer")


def compile_layers(model):
    """Compiles each layer in place: names of parameters and FSDP's hooks stay as they are."""
    for layer in model.model.layers:
        layer.compile(dynamic=True)


def extend(trainer_class: type) -> type:
    """A trainer whose layers are compiled before they first run."""

    class CompilingTrainer(trainer_class):
        def __init__(self, config, *arguments):
            if config.compile and config.tp_size > 1:
                raise UserError("--compile: torch cannot compile tensor-parallel layers; set --tp_size 1")
            super().__init__(config, *arguments)
            models = [self.actor.model, getattr(self, "reference", None)] if config.compile else []
            for model in filter(None, models):
                compile_layers(model)

    return CompilingTrainer
