"""The job of a machine without a GPU: a tiny Qwen learns countdown, unless --model is given.

Its flags, in assets/embedded.json, precede those of the command line, which therefore win.
"""

import json
import os
import sys
from pathlib import Path

import train

FILE = Path(__file__).parent.parent / "assets/embedded.json"


def add_flags(arguments: list[str]) -> list[str]:
    """The command line, preceded by the embedded job's flags if it is to run."""
    given = {argument.split("=")[0] for argument in arguments}
    if train.GPU or "--model" in given or not FILE.exists():
        return arguments
    flags = json.loads(FILE.read_text().replace("ASSETS", os.path.relpath(FILE.parent)))
    if "--data" in given:
        del flags["data"], flags["eval_data"]  # the two belong together
    return [f"--{name}={value}" for name, value in flags.items()] + arguments


def extend(trainer_class: type) -> type:
    """Returns the same trainer; adds flags to sys.argv."""
    sys.argv[1:] = add_flags(sys.argv[1:])
    return trainer_class
