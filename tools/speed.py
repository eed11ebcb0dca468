"""A step in numbers: means over its tokens; tokens a second by phase, idle share, memory, the MFU of the update.

MFU (Chowdhery et al., arXiv:2204.02311, appendix B) is the share of a GPU's peak that the model's own arithmetic takes:
what gradient checkpointing computes twice counts once. `forward_flops` counts in the open.
"""
import os
import platform
import resource
import time
from collections import Counter
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tools.ranks import reduce

# Dense bf16 FLOP/s of one card, by what its name contains (the makers' data sheets); without an entry there is no MFU.
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12,
         "A800": 312e12, "H800": 989e12, "H20": 148e12, "L40S": 362e12, "A10G": 70e12, "A10": 125e12, "L4": 121e12,
         "RTX 4090": 165e12, "RTX 3090": 71e12}


class Stopwatch(Counter):
    """Seconds by phase: `with timed("update"):` adds those of the block to timed["time_update"]."""

    @contextmanager
    def __call__(self, phase: str):
        start = time.perf_counter()
        yield
        self[f"time_{phase}"] += time.perf_counter() - start


def forward_flops(config, lengths: list[int], trained: int) -> float:
    """FLOPs of one forward pass over sequences of these lengths, with the head at `trained` of their tokens.

    A multiplication and an addition are two. Counted are the matrices of the layers, causal attention (each token sees
    half of its sequence on average) and the head; norms, rotations and activations are below a hundredth.
    """
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    matrices = 2 * hidden * width * (heads + kv_heads) + 3 * hidden * config.intermediate_size      # q, o, k, v; MLP
    attention = sum(4 * heads * width * length * (length + 1) / 2 for length in lengths)
    return (config.num_hidden_layers * (2 * matrices * sum(lengths) + attention)
            + 2 * hidden * config.vocab_size * trained)


def peak_gb() -> float:
    """The most memory that this process has held so far, in GB: on the GPU if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def hardware() -> dict:
    """What this run is on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return dict(device=device, processes=dist.get_world_size(), cores=os.cpu_count(), torch=torch.__version__)


def update_metrics(sums: dict[str, float], updates: int) -> dict[str, float]:
    """Means over the trained tokens of all ranks, from what `Actor.loss` counts."""
    tokens, compared = sums["tokens"] or 1, sums["compared"] or 1
    means = dict(loss=sums["loss"] / updates, entropy=sums["entropy"] / tokens, clip_fraction=sums["cut"] / tokens,
                 logprob_diff=sums["gap"] / compared, logprob_diff_exp=sums["exp_gap"] / compared)
    return means | ({"kl": sums["kl"] / tokens} if "kl" in sums else {})


def speed(config, samples: list, times: dict[str, float], dp) -> dict[str, float]:
    """What a step's time and memory went into, over all ranks of the mesh dp; `times` are in seconds.

    Tokens a second are of all ranks together. Trained on is what the update runs through, prompts included; samples
    without advantage are not among it. Idle is the share of the time that ranks wait for the slowest one's rollout.
    """
    learned = [sample for sample in samples if any(sample.advantages)]
    lengths = [len(sample.ids) for sample in learned]
    (wait,), (memory,) = reduce([times["time_wait"]], dp), reduce([peak_gb()], dp, dist.ReduceOp.MAX)
    metrics = times | {
        "idle": wait / dp.size() / times["time_step"], "peak_gb": memory,
        "rollout_tokens_per_s": sum(sum(sample.mask) for sample in samples)
        / (times["time_rollout"] + times["time_wait"]),
        "train_tokens_per_s": sum(lengths) / (times["time_logprobs"] + times["time_update"])}
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((flops for card, flops in PEAKS.items() if card in name), None)
    if peak:
        flops = 3 * forward_flops(config, lengths, sum(sum(sample.mask) for sample in learned))     # backward: twice
        metrics["mfu"] = flops / times["time_update"] / dist.get_world_size() / peak
    return metrics
