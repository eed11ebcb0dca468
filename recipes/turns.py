"""The text between two turns of the policy, in the chat markup of Qwen (ChatML).

An env_step returns user_turn("higher"), for example; recipes/guess_number.py is a complete example:

    torchrun --standalone --nproc_per_node=2 -m recipes.guess_number --max_turns 8
"""

import re

from extras.turns import HEADER


def user_turn(text: str) -> str:
    """A user's message, and the header of the policy's next turn.

    No text can forge a control token of Qwen: as in train.encode_prompt, a zero-width space breaks it.
    """
    guarded = re.sub(r"<(?=\|\w+\|>)", "<\u200b", text)
    return f"\n<|im_start|>user\n{guarded}<|im_end|>\n{HEADER}"
