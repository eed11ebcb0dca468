"""Evaluation without training: avg@n and pass@k on the evaluation data.

    torchrun --standalone --nproc_per_node=4 -m recipes.evaluate --model Qwen/Qwen3-1.7B --eval_samples 16 \\
        --eval_temperature 0.6 --eval_data openai/gsm8k/main:test \\
        --chat_template_kwargs '{"enable_thinking": false}'  # it would think for more than --max_new_tokens

eval_score is avg@n, the mean reward over n = --eval_samples completions per prompt. eval_pass@k is the mean
reward of the best of k of them, for k = 2, 4, .. n. --steps above 0 also trains, with these evaluations.
"""

import math
from dataclasses import dataclass

import numpy as np

from recipes.problems import ProblemDataset, reward_fn
from train import Config, Trainer, UserError, flag, main, reduce_over


@dataclass
class EvaluateConfig(Config):
    """The core's flags, and the number of completions."""

    data: str = flag("", "training data if --steps is above 0; empty: as --eval_data")
    steps: int = flag(0, "training steps; 0: evaluation only")
    eval_samples: int = flag(1, "completions per evaluated prompt: n of avg@n, the largest k of pass@k")

    def __post_init__(self):
        self.data = self.data or self.eval_data
        if self.eval_samples > 1 and self.eval_temperature == 0:
            raise UserError("--eval_samples above 1 requires --eval_temperature above 0: else all are equal")


def best_of(rewards: list[float]) -> dict[str, float]:
    """Rewards [n] of one prompt -> the mean best reward over all choices of k of them, for k = 2, 4, .. n.

    With rewards of 0 and 1 it is pass@k (Chen et al., arXiv:2107.03374 eq. 1).
    """
    n = len(rewards)
    best = {}
    for k in sorted({2**i for i in range(1, n.bit_length())} | {n} - {1}):
        # the chance that place i in ascending order holds the best of k
        chances = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
        best[f"eval_pass@{k}"] = float(np.dot(chances, sorted(rewards)))
    return best


class Evaluator(Trainer):
    """A Trainer whose evaluations sample several completions per prompt; without steps it only evaluates."""

    def evaluate(self) -> dict[str, float]:
        """The mean reward (avg@n) and pass@k on the evaluation data."""
        size = self.config.eval_samples
        prompts = self.own_prompts([(row, row) for row in range(len(self.eval_data))])
        samples = self.sample(self.eval_data, prompts, size, self.config.eval_temperature)
        failures = self.check_failures(samples)  # these count as 0
        rewards = np.array([sample.reward for sample in samples]).reshape(-1, size).tolist()
        totals = dict.fromkeys(["eval_score", *best_of([0.0] * size)], 0.0)
        for group in rewards:
            for name, value in {"eval_score": np.mean(group), **best_of(group)}.items():
                totals[name] += value
        *sums, count = reduce_over(self.mesh["dp"], [*totals.values(), len(rewards)])
        means = {name: total / count for name, total in zip(totals, sums)}
        return means | {"eval_failures": failures}


if __name__ == "__main__":
    main(EvaluateConfig, ProblemDataset, reward_fn, trainer=Evaluator)
