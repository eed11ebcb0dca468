"""A real Qwen learns a short task, on a CPU if need be: full fine-tuning or LoRA, with any engine.

    OMP_NUM_THREADS=2 python -m bench.real_qwen --model FOLDER [--task sort] [--lora_rank 8] [--control True]

Answers take at most 24 tokens, so that a step of a 0.5B takes half a minute to a minute on two cores; try
--dtype bfloat16, and glibc's large pages (GLIBC_TUNABLES=glibc.malloc.hugetlb=1 THP_MEM_ALLOC_ENABLE=1).
The rows are made here, and no held-out row is trained on. Evaluations are greedy; the first and the last one
also sample four completions per row (eval_sampled).

countdown   one expression of two given numbers that equals a target, with + - or *; "= target" may follow
sort        four numbers in ascending order
reverse     four numbers in reverse order
add         the sum of two numbers of three digits

--control True trains on a coin instead of the reward (bench/random_reward.py): nothing must climb. Any of the
--lora_ flags switches to recipes/lora.py and its tenfold learning rate.
"""

import itertools
import random
import re
import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np

import rewards
from bench.random_reward import CoinTrainer
from recipes.lora import LoRAConfig, LoRATrainer
from train import Config, RLDataset, Sample, Trainer, flag, main, reduce_over

HELD_OUT = 64  # rows
SAMPLES = 4  # per held-out row in the first and last evaluation
PROMPTS = {
    "countdown": (
        "Write one arithmetic expression that uses the numbers {} and {} once each and equals {}. "
        "Reply with the expression only."
    ),
    "sort": (
        "Sort these numbers in ascending order: {}, {}, {}, {}. "
        "Reply with the numbers only, separated by commas."
    ),
    "reverse": (
        "Write these numbers in reverse order: {}, {}, {}, {}. "
        "Reply with the numbers only, separated by commas."
    ),
    "add": "What is {} + {}? Reply with the number only.",
}


def countdown_rows() -> list[dict]:
    """Every pair of numbers from 2 to 40 with every operation, in random order."""
    rows = []
    for b, a in itertools.combinations_with_replacement(range(2, 41), 2):
        rows += [{"numbers": [a, b], "target": target} for target in (a + b, a - b, a * b)]
    generator = random.Random(0)
    generator.shuffle(rows)
    for row in rows:
        generator.shuffle(row["numbers"])
    return rows


def list_rows(answer) -> list[dict]:
    """Sets of four numbers from 1 to 99, in random order, with answer(numbers)."""
    generator = random.Random(0)
    sets = dict.fromkeys(tuple(sorted(generator.sample(range(1, 100), 4))) for _ in range(2200))
    shuffled = [generator.sample(one, 4) for one in sets]
    return [{"numbers": numbers, "answer": answer(numbers)} for numbers in shuffled]


def add_rows() -> list[dict]:
    """Pairs of numbers from 100 to 999, in random order."""
    generator = random.Random(0)
    pairs = dict.fromkeys(tuple(sorted(generator.choices(range(100, 1000), k=2))) for _ in range(2200))
    return [{"numbers": generator.sample(pair, 2), "answer": [sum(pair)]} for pair in pairs]


ROWS = {
    "countdown": countdown_rows,
    "sort": lambda: list_rows(sorted),
    "reverse": lambda: list_rows(lambda numbers: numbers[::-1]),
    "add": add_rows,
}


def score(text: str, row: dict) -> float:
    """1 for exactly the answer, 0 for anything else."""
    if "answer" in row:
        found = re.fullmatch(r"\d+(, ?\d+)*", text.strip())
        return float(bool(found) and [int(one) for one in text.split(",")] == row["answer"])
    try:
        value, used = rewards.evaluate(text.split("=")[0].strip())
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == row["target"] and sorted(used) == sorted(row["numbers"]))


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
        content = self.prompt.format(*row["numbers"], row.get("target"))
        no_system = {"role": "system", "content": ""}  # the template's own costs 15 of 60 tokens
        return Sample([no_system, {"role": "user", "content": content}], dict(row))


def configured(parent: type) -> type:
    """The flags of train.py or recipes/lora.py, with what a small machine can do in half a minute a step."""

    @dataclass
    class RealConfig(parent):
        task: Literal[tuple(ROWS)] = flag("countdown", "what to learn")
        control: bool = flag(False, "training on a coin instead of the reward")
        data: str = flag("", "made from --task")
        eval_data: str = flag("", "made from --task")
        engine: str = flag("local", "local, sglang, or URLs of servers")
        prompts_per_step: int = flag(8, "prompts per step, over all ranks")
        max_new_tokens: int = flag(24, "longest completion, in tokens")
        lr: float = flag(1.5e-5 if parent is LoRAConfig else 1.5e-6, "peak learning rate of AdamW")
        steps: int = flag(40, "training steps")

        def __post_init__(self):
            self.data, self.eval_data = f"{self.task}:train", f"{self.task}:test"
            if parent is LoRAConfig:
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
                mean = np.array([sum(sample.reward for sample in samples), len(samples)], float)
                total, count = reduce_over(self.mesh["dp"], mean.tolist())
                metrics["eval_sampled"] = total / count
            return metrics

    return RealTrainer


if __name__ == "__main__":
    words = " ".join(sys.argv)
    lora = "--lora_" in words
    trainer = evaluating(LoRATrainer if lora else Trainer)
    if re.search(r"--control[ =]True", words):
        trainer = type("ControlTrainer", (CoinTrainer, trainer), {})
    config_class = configured(LoRAConfig if lora else Config)
    main(config_class, TaskDataset, lambda sample: score(sample.text, sample.row), trainer=trainer)
