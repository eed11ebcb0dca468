"""The sizes of well-known Qwens, so that they can be planned and rehearsed without the Hub."""

from transformers import Qwen2Config, Qwen3_5TextConfig, Qwen3Config

# Hidden size, MLP size, layers, query heads, key-value heads, tied embeddings; from their config.json.
SIZES = {
    "Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, True),
    "Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, True),
    "Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, True),
    "Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, False),
    "Qwen2.5-14B-Instruct": (5120, 13824, 48, 40, 8, False),
    "Qwen2.5-32B-Instruct": (5120, 27648, 64, 40, 8, False),
    "Qwen3-0.6B": (1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": (2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": (4096, 12288, 36, 32, 8, False),
    "Qwen3-14B": (5120, 17408, 40, 40, 8, False),
    "Qwen3-32B": (5120, 25600, 64, 64, 8, False),
}

# The same, and the key heads and value heads of linear layers; from the model cards. Qwen3_5TextConfig is by
# default the 9B: width 256 of a head, 128 of a linear one, and 3 of 4 layers linear, as in all of these.
HYBRIDS = {
    "Qwen3.5-0.8B": (1024, 3584, 24, 8, 2, True, 16, 16),
    "Qwen3.5-2B": (2048, 6144, 24, 8, 2, True, 16, 16),
    "Qwen3.5-4B": (2560, 9216, 32, 16, 4, True, 16, 32),
    "Qwen3.5-9B": (4096, 12288, 32, 16, 4, False, 16, 32),
    "Qwen3.5-27B": (5120, 17408, 64, 24, 4, False, 16, 48),
    "Qwen3.6-27B": (5120, 17408, 64, 24, 4, False, 16, 48),
    "Qwen3.8-27B": (5120, 17408, 64, 24, 4, False, 16, 48),
}


def known_config(name: str):
    """The config of a model by its Hub name, with or without the owner; None if it is not in the table."""
    name = name.rsplit("/", 1)[-1]
    found = SIZES.get(name) or HYBRIDS.get(name)
    if not found:
        return None
    hidden, mlp, layers, heads, kv_heads, tied, *linear = found
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    if linear:
        sizes |= {"linear_num_key_heads": linear[0], "linear_num_value_heads": linear[1]}
        return Qwen3_5TextConfig(**sizes, max_position_embeddings=262144)  # which has the common numbers
    if name.startswith("Qwen3"):
        return Qwen3Config(**sizes, vocab_size=151936, head_dim=128, max_position_embeddings=40960)
    vocab = 151936 if tied else 152064
    return Qwen2Config(**sizes, vocab_size=vocab, max_position_embeddings=32768)
