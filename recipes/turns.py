"""What stands between two turns of the policy, in the chat markup of Qwen (ChatML)."""


def user_turn(text: str) -> str:
    """A user's message, and the header of the policy's next turn. Markup inside the text is made harmless."""
    return f"\n<|im_start|>user\n{text.replace('<|', '< |')}<|im_end|>\n<|im_start|>assistant\n"
