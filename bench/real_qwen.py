"""A real Qwen learns a short task, on a CPU if need be: full fine-tuning or LoRA, with any engine.

    OMP_NUM_THREADS=2 python -m bench.real_qwen --model FOLDER [--task add] [--lora_rank 8] [--control True]
    python -m bench.real_qwen --summarize RUN [RUN ...] [--output assets/records/real_qwen.json]

reverse     four numbers in reverse order
add         the sum of two numbers of three digits

Answers take at most 24 tokens, so that a step of a 0.5B takes half a minute to a minute on two cores; try
--dtype bfloat16, and glibc's large pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1 THP_MEM_ALLOC_ENABLE=1).
The rows are made here, and no held-out row is trained on. Evaluations are greedy; the first and the last one
also sample four completions per row (eval_sampled). Any of the --lora_ flags switches to recipes/lora.py and
its tenfold learning rate. --control True trains on the coin of bench/learning.py: nothing must climb.

--teacher FOLDER switches to recipes/distill.py, in which no reward is trained on.

--summarize records finished runs, also those of recipes/gsm8k.py, in a table per task: each run is named by
its flags, seconds are the median over its steps, and memory is the peak of any step.
"""

import argparse
import json
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Literal

from bench.learning import CoinTrainer, curve, history_of, summary
from bench.measure import RECORDS, record, show
from recipes.distill import Distill, DistillConfig
from recipes.lora import LoRAConfig, LoRATrainer
from train import Config, RLDataset, Sample, Trainer, flag, main, reduce_over

HELD_OUT = 64  # rows
SAMPLES = 4  # per held-out row in the first and last evaluation
CURVES = ["step", "eval_score", "solved", "entropy"]
PROMPTS = {
    "reverse": "Write these numbers in reverse order: {}, {}, {}, {}. "
    "Reply with the numbers only, separated by commas.",
    "add": "What is {} + {}? Reply with the number only.",
}


# ----------------------------------------------------------------------------- the tasks ------------------
def reverse_rows() -> list[dict]:
    """Sets of four numbers from 1 to 99, in random order."""
    generator = random.Random(0)
    sets = dict.fromkeys(tuple(sorted(generator.sample(range(1, 100), 4))) for _ in range(2200))
    shuffled = [generator.sample(one, 4) for one in sets]
    return [{"numbers": numbers, "answer": numbers[::-1]} for numbers in shuffled]


def add_rows() -> list[dict]:
    """Pairs of numbers from 100 to 999, in random order."""
    generator = random.Random(0)
    pairs = dict.fromkeys(tuple(sorted(generator.choices(range(100, 1000), k=2))) for _ in range(2200))
    return [{"numbers": generator.sample(pair, 2), "answer": [sum(pair)]} for pair in pairs]


ROWS = {"reverse": reverse_rows, "add": add_rows}


def score(sample: Sample) -> float:
    """1 for exactly the answer, 0 for anything else."""
    if not re.fullmatch(r"\d+(, ?\d+)*", sample.text.strip()):
        return 0.0
    return float([int(number) for number in sample.text.split(",")] == sample.row["answer"])


class TaskDataset(RLDataset):
    """The rows of a task, "TASK:train" or "TASK:test"."""

    def __init__(self, source: str):
        task, split = source.split(":")
        rows = ROWS[task]()
        self.source = source
        self.prompt = PROMPTS[task]
        self.rows = rows[HELD_OUT:] if split == "train" else rows[:HELD_OUT]

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        no_system = {"role": "system", "content": ""}  # the template's own costs 15 of 60 tokens
        question = {"role": "user", "content": self.prompt.format(*row["numbers"])}
        return Sample([no_system, question], dict(row))


# ----------------------------------------------------------------------------- a run ----------------------
def configured(parent: type) -> type:
    """The flags of train.py or recipes/lora.py, with what a small machine can do in half a minute a step."""

    @dataclass
    class RealConfig(parent):
        task: Literal[tuple(ROWS)] = flag("reverse", "what to learn")
        control: bool = flag(False, "training on a coin instead of the reward")
        data: str = flag("", "made from --task")
        eval_data: str = flag("", "made from --task")
        engine: str = flag("local", "local, sglang, or URLs of servers")
        prompts_per_step: int = flag(8, "prompts per step, over all ranks")
        max_new_tokens: int = flag(24, "longest completion, in tokens")
        lr: float = flag(1.5e-5 if parent is LoRAConfig else 1.5e-6, "peak learning rate of AdamW")
        steps: int = flag(40, "training steps")

        def __post_init__(self):
            self.data = f"{self.task}:train"
            self.eval_data = f"{self.task}:test"
            if parent is not Config:
                super().__post_init__()

    return RealConfig


def evaluating(parent: type) -> type:
    """A trainer whose first and last evaluation also sample."""

    class RealTrainer(parent):
        evaluations = 0

        def evaluate(self) -> dict[str, float]:
            metrics = super().evaluate()
            self.evaluations += 1
            last = 1 + -(-self.config.steps // self.config.eval_every)
            if self.evaluations in (1, last):
                prompts = self.own_prompts([(row, row) for row in range(len(self.eval_data))])
                samples = self.sample(self.eval_data, prompts, SAMPLES, 1.0)
                solved = sum(sample.reward for sample in samples)
                total, count = reduce_over(self.mesh["dp"], [solved, len(samples)])
                metrics["eval_sampled"] = total / count
            return metrics

    return RealTrainer


def train_model():
    """Trains with the flags of the command line."""
    words = " ".join(sys.argv)
    parent, trainer = Config, Trainer
    if "--lora_" in words:
        parent, trainer = LoRAConfig, LoRATrainer
    if "--teacher" in words:
        parent, trainer = DistillConfig, Distill
    trainer = evaluating(trainer)
    if re.search(r"--control[ =]True", words):
        trainer = type("ControlTrainer", (CoinTrainer, trainer), {})
    main(configured(parent), TaskDataset, score, trainer=trainer)


# ----------------------------------------------------------------------------- finished runs --------------
def name_of(config: dict) -> str:
    """What a run is, from its flags."""
    parts = [
        f"LoRA r {config['lora_rank']}" if "lora_rank" in config else "full",
        "coin" if config.get("control") else "",
        f"taught by {Path(config['teacher']).name}" if "teacher" in config else "",
        "" if config["engine"] == "local" else f"SGLang, tp {config['tp_size']}",
        config["dtype"] if config["dtype"] != "bfloat16" else "",
        "" if config["dither"] else "no dither",
        f"lr {config['lr']:g}",
        f"seed {config['seed']}" if config["seed"] else "",
    ]
    return ", ".join(filter(None, parts))


def shown(values: list[float]) -> str:
    """Values side by side in one cell."""
    return " ".join(f"{value:.2f}" for value in values).replace("0.", ".")


def by_fives(values: list[float]) -> str:
    """The means over every five steps."""
    return shown([fmean(values[i : i + 5]) for i in range(0, len(values), 5)])


COLUMNS = {
    "steps": (len, "time_step"),
    "held-out, greedy": (shown, "eval_score"),
    "sampled": (shown, "eval_sampled"),
    "in training, by five steps": (by_fives, "solved"),
    "seconds per step": (median, "time_step"),
    "GB": (max, "peak_gb"),
}


def summarize():
    """Records finished runs, named by the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--summarize", nargs="+", type=Path, required=True, metavar="RUN")
    parser.add_argument("--output", type=Path, default=RECORDS / "real_qwen.json")
    flags = parser.parse_args()
    rows = []
    curves = {}
    for folder in flags.summarize:
        config = json.loads((folder / "config.json").read_text())
        history = history_of(folder)
        task = config.get("task", "GSM8K")
        rows.append({"task": task, "run": name_of(config)} | summary(history, COLUMNS))
        curves[f"{task}, {name_of(config)}"] = curve(history, CURVES)
    if rows:
        show(rows)
    record(flags.output, {"": rows}, curve_columns=CURVES, curves=curves)


if __name__ == "__main__":
    if "--summarize" in sys.argv:
        summarize()
    else:
        train_model()
