"""--compile True: torch.compile of each layer of the actor and the reference.

Graphs have dynamic shapes, because every micro-batch has another length. Attention over packed samples stays
outside of them (train.packed_attention). The first step takes about a minute longer. Tensor-parallel layers
cannot be compiled so: torch 2.13 recurses without end, and extras/checks.py refuses it. Without this file the
flag does nothing.
"""


def compile_layers(model):
    """Compiles each layer in place: names of parameters and FSDP's hooks stay as they are."""
    for layer in model.model.layers:
        layer.compile(dynamic=True)


def extend(trainer_class: type) -> type:
    """A trainer whose layers are compiled before they first run."""

    class CompilingTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            if config.compile:
                compile_layers(self.actor.model)
                if self.reference:
                    compile_layers(self.reference)

    return CompilingTrainer
