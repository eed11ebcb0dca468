"""Flags to start with, for each Qwen2.5 on machines of 1, 2, 4 and 8 GPUs: the tables of docs/gpus.md.

    python -m tools.gpus          # or those whose names begin with another prefix:
    python -m tools.gpus Qwen3.5

They are the first that fit according to tools.plan, in this order: micro-batches of 8,192 tokens or more,
tensor parallelism as small as possible (it is host-bound), the actor on the GPU rather than offloaded, and as
much memory for SGLang as is left.
"""

import json
import sys
from dataclasses import replace
from itertools import product

from tools import plan
from tools.shapes import HYBRIDS, SIZES, known_config
from train import Config

CARDS = (24, 48, 80)  # GB
COUNTS = (1, 2, 4, 8)
SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2)  # mem_fraction_static
BUDGETS = (16384, 8192, 4096, 2048)  # tokens per micro-batch
ENOUGH = 32  # full-length sequences that SGLang's cache must hold to be worth its share


def first_that_fits(name: str, gb: int, count: int) -> plan.PlanConfig | None:
    """The flags for a model on so many GPUs, or None."""
    model_config = known_config(name)
    base = plan.PlanConfig(
        **{"model": name, "processes": count, "gpu_gb": gb, "device": "cuda", "dtype": "bfloat16"},
        engine="sglang",
        eval_data="",
    )
    for budgets in (BUDGETS[:2], BUDGETS[2:]):
        for tp, budget, offload, share in product(COUNTS, budgets, (False, True), SHARES):
            config = with_flags(base, tp, budget, offload, share)
            if tp <= count and is_good(config, model_config):
                return config
    return None


def with_flags(base: plan.PlanConfig, tp: int, budget: int, offload: bool, share: float) -> plan.PlanConfig:
    """The config with other values of these flags."""
    arguments = json.dumps({"mem_fraction_static": share})
    flags = {"tp_size": tp, "tokens_per_micro_batch": budget, "offload": offload, "sglang_args": arguments}
    return replace(base, **flags)


def is_good(config: plan.PlanConfig, model_config) -> bool:
    """Whether it fits, and SGLang's cache holds enough."""
    if not plan.fits(config, model_config):
        return False
    return plan.cached(config, plan.sizes(config, model_config, config.processes)) >= ENOUGH


def described(config: plan.PlanConfig | None) -> str:
    """A cell of the table: what differs from the defaults."""
    if config is None:
        return "does not fit"
    share = json.loads(config.sglang_args)["mem_fraction_static"]
    words = [f"tp {config.tp_size}"] * (config.tp_size > 1) + ["offload"] * config.offload
    if config.tokens_per_micro_batch != Config.tokens_per_micro_batch:
        words.append(f"{config.tokens_per_micro_batch // 1024}k tokens")
    return ", ".join([*words, f"share {share:g}"])


def main():
    """Prints the table in Markdown."""
    print("| model | GB | " + " | ".join(f"{count} GPU{'s' * (count > 1)}" for count in COUNTS) + " |")
    print("|---" * (2 + len(COUNTS)) + "|")
    prefix = sys.argv[1] if len(sys.argv) > 1 else "Qwen2.5"
    for name, gb in product([name for name in SIZES | HYBRIDS if name.startswith(prefix)], CARDS):
        cells = [described(first_that_fits(name, gb, count)) for count in COUNTS]
        print(f"| {name} | {gb} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
