r"""GSM8K as two published systems train on it: their prompt, their reward, their evaluation.

    torchrun --standalone --nproc_per_node=4 -m recipes.gsm8k --protocol tapeagents

tapeagents   (ServiceNow, examples/rl_gsm8k) The answer is the first whole number after the last \boxed:
             +1 right, 0 wrong, -1 if there is none or the completion is truncated. Evaluated greedily.
oat          (sail-sg, docs/reasoning_examples) The answer is the last number of the text: 1 or 0. Evaluated
             with 16 samples of each problem at a temperature of 0.35 (avg@16).

Evaluation starts before the first step, so that the base model is measured in the same way. eval_score counts
right answers, whatever the protocol's reward. Left out on purpose: Oat's top_p of 0.9, in training and
evaluation, which would sample from another policy than the one that is trained.
"""

from dataclasses import dataclass
from typing import Literal

import rewards
from recipes.evaluate import Evaluator
from train import Config, RLDataset, Sample, UserError, flag, main

PROMPT = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def tapeagents(sample: Sample) -> float:
    """+1, 0 or -1."""
    return -1 if sample.truncated else rewards.gsm8k_boxed(sample.text, sample.row["answer"])


def oat(sample: Sample) -> float:
    """1 or 0."""
    return rewards.gsm8k_last_number(sample.text, sample.row["answer"])


PROTOCOLS = {  # the reward, and how to evaluate unless a flag says otherwise
    "tapeagents": (tapeagents, {"eval_samples": 1, "eval_temperature": 0.0}),
    "oat": (oat, {"eval_samples": 16, "eval_temperature": 0.35}),
}


@dataclass
class GSM8KConfig(Config):
    """The core's flags, and a protocol."""

    data: str = flag("openai/gsm8k/main", "file or owner/name[/config][:split]")
    eval_data: str = flag("openai/gsm8k/main:test", "like --data; empty: no evaluation")
    protocol: Literal[tuple(PROTOCOLS)] = flag("tapeagents", "system whose reward and evaluation to use")
    eval_samples: int | None = flag(None, "completions per prompt in an evaluation; None: the protocol's")
    eval_temperature: float | None = flag(None, "sampling temperature of evaluations; None: the protocol's")

    def __post_init__(self):
        for name, value in PROTOCOLS[self.protocol][1].items():
            if getattr(self, name) is None:
                setattr(self, name, value)


class GSM8KDataset(RLDataset):
    """Rows of question and answer, with one prompt for both protocols."""

    prompt = PROMPT
    protocol = "tapeagents"

    def __getitem__(self, index: int) -> Sample:
        row = dict(self.rows[index])
        if not row.get("question") or row.get("answer") is None:
            raise UserError(f"--data {self.source}: row {index} needs question and answer")
        row["protocol"] = self.protocol
        return Sample([{"role": "user", "content": self.prompt.format(row["question"])}], row)


def reward_fn(sample: Sample) -> float:
    """The protocol's reward; its meaning is logged."""
    reward = PROTOCOLS[sample.row["protocol"]][0](sample)
    sample.metrics |= {"solved": float(reward == 1), "unreadable": float(reward == -1)}
    return reward


class GSM8K(Evaluator):
    """Rewards by the protocol; an evaluation counts right answers."""

    def __init__(self, config, dataset_class, *arguments):
        dataset_class.protocol = config.protocol
        super().__init__(config, dataset_class, *arguments)

    def sample(self, dataset, *arguments) -> list[Sample]:
        """In an evaluation the reward is whether the answer is right."""
        samples = super().sample(dataset, *arguments)
        for sample in samples if dataset is self.eval_data else []:
            sample.reward = sample.metrics.get("solved", 0.0)
        return samples


if __name__ == "__main__":
    main(GSM8KConfig, GSM8KDataset, reward_fn, trainer=GSM8K)
