"""Finished runs of bench/real_qwen.py or recipes/gsm8k.py in one table, picture and file.

    python -m bench.real_curves RUN [RUN ...] [--output assets/real_qwen.json]

Each run is named by its flags: the task, adapters, what differs from the usual. Seconds and differences of
log-probs are medians over the steps, as other work may run on the machine; memory is the peak of any step.
"""

import argparse
import json
import statistics
from pathlib import Path

from bench.measure import ASSETS, report
from tools.curve import read

PANELS = {
    "eval_score": "held-out rows solved (greedy)",
    "reward": "training rows solved (sampled)",
    "entropy": "entropy, nats per token",
}


def name_of(config: dict) -> str:
    """What a run is, from its flags."""
    engine = "" if config["engine"] == "local" else f"SGLang, tp {config['tp_size']}"
    parts = [
        config.get("task", "GSM8K"),
        f"LoRA r {config['lora_rank']}" if "lora_rank" in config else "",
        "coin" if config.get("control") else "",
        engine,
        config["dtype"] if config["dtype"] != "bfloat16" else "",
        "" if config["dither"] else "no dither",
        f"lr {config['lr']:g}",
        f"entropy bonus {config['entropy_coef']:g}" if config["entropy_coef"] else "",
    ]
    return ", ".join(filter(None, parts))


def numbers(run: dict) -> dict[str, float]:
    """A row of the table."""
    history = run["history"]
    steps = [record for record in history if "time_step" in record]
    scores = [record["eval_score"] for record in history if "eval_score" in record]
    sampled = [record["eval_sampled"] for record in history if "eval_sampled" in record]
    middle = {
        name: statistics.median(record[name] for record in steps)
        for name in ("time_rollout", "time_update", "time_push", "time_step", "logprob_diff")
    }
    return {
        "steps": len(steps),
        "greedy": " ".join(f"{score:.3f}" for score in scores),
        "sampled": " ".join(f"{score:.3f}" for score in sampled),
        **middle,
        "peak_gb": max(record["peak_gb"] for record in steps),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of finished runs")
    parser.add_argument("--output", type=Path, default=ASSETS / "real_qwen.json", help="file for the numbers")
    flags = parser.parse_args()
    found = {}
    for folder in flags.runs:
        config = json.loads((folder / "config.json").read_text())
        history = read(folder)
        for record in history:
            if "solved" in record:  # the reward is a coin, or may be -1
                record["reward"] = record["solved"]
        found[name_of(config), config["seed"]] = {"history": history}
    report(flags.output, PANELS, found, numbers)
