"""--help in groups, a flag per paragraph, with the flags that people change first.

The groups are the comments between the fields of Config; the flags of a recipe come before them.
"""

import inspect
import os
import re
import shutil
import sys
import textwrap

from transformers.hf_argparser import HfArgumentParser

import train

FIRST = (
    "model data eval_data engine prompts_per_step group_size max_new_tokens lr steps tp_size "
    "tokens_per_micro_batch output_dir resume"
).split()
USAGE = "usage: torchrun --standalone --nproc_per_node=N {} [--FLAG VALUE ...]"


def groups_of(config_class: type) -> dict[str, list[str]]:
    """Titles -> names of flags: the most important ones, then those of a recipe, then the rest by comment."""
    groups = {"the flags that people change": list(FIRST), "flags of this recipe": []}
    for owner in config_class.__mro__:
        title = "flags of this recipe"
        for line in inspect.getsource(owner).splitlines() if issubclass(owner, train.Config) else ():
            comment = re.fullmatch(r"    # (.+)", line)
            title = comment[1] if comment and owner is train.Config else title
            name = re.match(r"    (\w+): ", line)
            if name and not any(name[1] in names for names in groups.values()):
                groups.setdefault(title, []).append(name[1])
    return {title: names for title, names in groups.items() if names}


def format_help(parser: HfArgumentParser) -> str:
    """The text of --help."""
    width = min(shutil.get_terminal_size().columns, 110)
    actions = {action.dest: action for action in reversed(parser._actions)}  # without --no_NAME
    here = os.path.relpath(train.EMBEDDED.parent)
    module = sys.modules["__main__"].__spec__  # set by python -m
    recipe = (sys.modules["__main__"].__doc__ or "") if module else ""
    lines = [
        recipe,
        USAGE.format(f"-m {module.name}" if module else parser.prog),
        "",
        "--help shows this and exits. Defaults stand in brackets.",
    ]
    for title, names in groups_of(parser.dataclass_types[0]).items():
        lines += ["", f"{title}:"]
        for name in names:
            choices = f": {', '.join(actions[name].choices)}" if actions[name].choices else ""
            default = str(actions[name].default).replace(here, "assets") or "empty"
            text = f"{actions[name].help}{choices} [{default}]"
            indent = " " * 27
            lines += textwrap.wrap(
                f"  {f'--{name}':24} {text}", width, subsequent_indent=indent, break_long_words=False
            )
    return "\n".join(lines).lstrip("\n") + "\n"


def extend(trainer_class: type) -> type:
    """The same trainer; HfArgumentParser formats its help as above from now on."""
    HfArgumentParser.format_help = format_help
    return trainer_class
