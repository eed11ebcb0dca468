"""Text to ids, in such a way that what a user, a tool or a web page wrote never acts as the chat's own markup.

A tokenizer takes the name of a control token, such as <|im_end|>, for the token itself, wherever it stands. So a name
inside a message is broken by a guard before the template is rendered, and no piece of text between two guards has a
whole name left. Without such names ids are those of `apply_chat_template`.
"""
import re

GUARD = "\udfff"        # half of a surrogate pair: it has no bytes in UTF-8, so that no text can need it


def encode_prompt(tokenizer, sample) -> list[int]:
    """Ids [T] of the chat, with the header of the assistant's turn at the end. Its messages make no control token.

    What a template does with messages happens here, once: Qwen3's leaves the thoughts of earlier assistant turns out.
    """
    names = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
    messages = guarded(sample.messages, re.compile("|".join(names) or "(?!)"))      # (?!) is never found
    return encode(tokenizer, tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def encode(tokenizer, text: str) -> list[int]:
    """Ids [T] of a text, with its control tokens but for guarded ones; halves of surrogate pairs are left out."""
    pieces = (piece.encode(errors="ignore").decode() for piece in text.split(GUARD))
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


def guarded(value, names: re.Pattern):
    """The same with a guard in each of these names; lists and dictionaries of texts are gone through."""
    if isinstance(value, str):
        return names.sub(lambda name: name[0][:1] + GUARD + name[0][1:], value)
    if isinstance(value, list):
        return [guarded(item, names) for item in value]
    if isinstance(value, dict):
        return {key: guarded(item, names) for key, item in value.items()}
    return value
