"""--help in groups, a flag per paragraph, the most commonly changed ones first.

The groups are the comments between the fields of Config, and the files in extras/ that add flags; the flags
of a recipe come before them.
"""

import inspect
import re
import shutil
import sys
import textwrap
from dataclasses import fields

from transformers.hf_argparser import HfArgumentParser

import train

FIRST = (
    "model data eval_data engine prompts_per_step group_size max_new_tokens lr steps tp_size "
    "tokens_per_micro_batch output_dir resume"
).split()
USAGE = "usage: torchrun --standalone --nproc_per_node=N {} [--FLAG VALUE ...]"


def groups_of(config_class: type) -> dict[str, list[str]]:
    """Flag names by title: the most important, then the recipe's, the core's by comment, and the extras'."""
    names = {field.name for field in fields(config_class)}
    groups = {"the flags that people change": [name for name in FIRST if name in names]}
    groups["flags of this recipe"] = []
    for owner in config_class.__mro__:
        if "__dataclass_fields__" not in vars(owner) or not vars(owner).get("__annotations__"):
            continue
        title = "flags of this recipe"
        if owner.__module__.startswith("extras."):
            title = owner.__module__.replace(".", "/") + ".py"
        for line in inspect.getsource(owner).splitlines():
            comment = re.fullmatch(r"    # (.+)", line)
            title = comment[1] if comment and owner is train.Config else title
            name = re.match(r"    (\w+): ", line)
            if name and not any(name[1] in known for known in groups.values()):
                groups.setdefault(title, []).append(name[1])
    return {title: names for title, names in groups.items() if names}


def format_help(parser: HfArgumentParser) -> str:
    """The text of --help."""
    width = min(shutil.get_terminal_size().columns, 110)
    actions = {action.dest: action for action in reversed(parser._actions)}  # leaves out --no_NAME
    module = sys.modules["__main__"].__spec__  # set by python -m
    recipe = (sys.modules["__main__"].__doc__ or "") if module else ""
    lines = [
        recipe,
        USAGE.format(f"-m {module.name}" if module else parser.prog),
        "",
        "--help shows this and exits. Defaults are in brackets. Without a GPU and",
        "without --model, assets/embedded.json sets others.",
    ]
    for title, names in groups_of(parser.dataclass_types[0]).items():
        lines += ["", f"{title}:"]
        for name in names:
            choices = f": {', '.join(actions[name].choices)}" if actions[name].choices else ""
            default = actions[name].default if actions[name].default != "" else "empty"
            text = f"{actions[name].help}{choices} [{default}]"
            indent = " " * 27
            lines += textwrap.wrap(
                f"  {f'--{name}':24} {text}", width, subsequent_indent=indent, break_long_words=False
            )
    return "\n".join(lines).lstrip("\n") + "\n"


def extend(trainer_class: type) -> type:
    """A trainer whose parser formats its help as above."""

    class Parser(trainer_class.parser_class):
        def format_help(self) -> str:
            return format_help(self)

    class HelpfulTrainer(trainer_class):
        parser_class = Parser

    return HelpfulTrainer
