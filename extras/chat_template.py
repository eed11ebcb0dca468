"""--chat_template_kwargs: arguments of the chat template, for every chat that a run encodes.

--chat_template_kwargs '{"enable_thinking": false}'    # Qwen3 and later: answer without thinking
"""

import functools
import json
import re
from dataclasses import dataclass

from train import UserError, flag

OWN = ("messages", "add_generation_prompt")  # what train.encode_prompt sets


@dataclass
class Flags:
    chat_template_kwargs: str = flag("", 'JSON: arguments of the chat template, {"enable_thinking": false}')


def set_arguments(tokenizer, config):
    """Makes them the tokenizer's own. Raises UserError for a name that its template does not read."""
    arguments = json.loads(config.chat_template_kwargs or "{}")
    for name in arguments:
        is_read = re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template())
        if name in OWN or not is_read:  # a template overlooks what it does not read
            raise UserError(f"--chat_template_kwargs: the chat template of --model takes no {name!r}")
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **arguments)


def extend(trainer_class: type) -> type:
    """A trainer whose tokenizer has these arguments from the start."""

    class ChatTemplateTrainer(trainer_class):
        def make_engine(self):  # the first method that is called once there is a tokenizer
            set_arguments(self.tokenizer, self.config)
            return super().make_engine()

    return ChatTemplateTrainer
