"""What stands between two turns of the policy, in the chat markup of Qwen (ChatML)."""
from tools.markup import GUARD


def user_turn(text: str) -> str:
    """A user's message, and the header of the policy's next turn. Markup inside the text stays text, to the letter."""
    return f"\n<|im_start|>user\n{text.replace('<|', f'<{GUARD}|')}<|im_end|>\n<|im_start|>assistant\n"
