"""What a lone train.py lacks: further flags, and classes that wrap its Trainer.

A module here may have a dataclass `Flags`, whose fields become command-line flags, and a function
`extend(trainer_class) -> trainer_class`. `local_engine` and `servers`, which --engine loads, have neither;
`sandbox` is for recipes.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

ORDER = (  # later ones wrap earlier ones
    "help",
    "wandb_log",
    "sglang_cpu",
    "hybrid",
    "variants",
    "turns",
    "chat_template",
    "optimizer",
    "dither",
    "loss_scale",
    "compile",
    "offload",
    "balance",
    "head",
    "shared_prompts",
    "watchdog",
    "curve",
    "monitor",
    "details",
    "gate",
    "reward_workers",
    "updates",
    "checkpoint",
    "embedded",  # its flags precede those of a checkpoint
    "checks",
)


def load_all() -> list:
    """The modules of ORDER that exist."""
    folder = Path(__file__).parent
    return [importlib.import_module(f"extras.{name}") for name in ORDER if (folder / f"{name}.py").exists()]


def add_flags(config_class: type) -> type:
    """The config class with the flags of all modules; what it declares itself has priority."""
    declared = [module.Flags for module in load_all() if hasattr(module, "Flags")]
    flags = [flags for flags in declared if not issubclass(config_class, flags)]  # a recipe may have some
    return dataclass(type(config_class.__name__, (config_class, *flags), {}))


def extend(config_class: type, trainer_class: type) -> tuple[type, type]:
    """Both classes, as main uses them."""
    for module in load_all():
        if hasattr(module, "extend"):
            trainer_class = module.extend(trainer_class)
    return add_flags(config_class), trainer_class
