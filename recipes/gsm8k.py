r"""GSM8K as two published systems do it: their prompt, their reward, their evaluation.

    torchrun --standalone --nproc_per_node=4 -m recipes.gsm8k --protocol tapeagents --data openai/gsm8k/main

tapeagents   (ServiceNow, examples/rl_gsm8k) The answer is the first whole number after the last \boxed: +1 right, 0
             wrong, -1 if there is none or the completion was cut off. Evaluated greedily on the whole test set.
oat          (sail-sg, docs/reasoning_examples) The answer is the last number of the text: 1 or 0. Evaluated by 16
             samples of each problem at a temperature of 0.35 (avg@16).

The evaluation is on the test split and starts before the first step, so the base model is measured by the same one.
eval_score counts right answers, whatever a protocol rewards. Kept apart on purpose: Oat's top_p of 0.9, in training and
evaluation, which would sample from another policy than the one that is trained.
"""
from dataclasses import dataclass
from typing import Literal


import rewards
from tools.inputs import UserError, flag
from train import Config, RLDataset, Sample, Trainer, main

PROMPT = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def tapeagents(sample: Sample) -> float:
    """+1, 0 or -1."""
    return -1 if sample.truncated else rewards.gsm8k_boxed(sample.text, sample.row["answer"])


def oat(sample: Sample) -> float:
    """1 or 0."""
    return rewards.gsm8k_last_number(sample.text, sample.row["answer"])


PROTOCOLS = {   # the reward, and what an evaluation samples
    "tapeagents": (tapeagents, dict(eval_samples=1, eval_temperature=0.0)),
    "oat": (oat, dict(eval_samples=16, eval_temperature=0.35)),
}


@dataclass
class GSM8KConfig(Config):
    """What train.py has, and a protocol."""
    protocol: Literal[tuple(PROTOCOLS)] = flag("tapeagents", "whose reward and evaluation")

    def __post_init__(self):
        for name, value in PROTOCOLS[self.protocol][1].items():
            setattr(self, name, value)
        if self.data == "openai/gsm8k/main" and not self.eval_data:
            self.eval_data = "openai/gsm8k/main:test"
        super().__post_init__()


class GSM8KDataset(RLDataset):
    """Rows of question and answer, with one prompt for both protocols."""

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        if not row.get("question") or row.get("answer") is None:
            raise UserError(f"{self.source}: row {index} needs question and answer, as openai/gsm8k/main has them")
        return Sample([{"role": "user", "content": PROMPT.format(row["question"])}], row)


class GSM8K(Trainer):
    """Rewards by the protocol; an evaluation counts what is right."""

    def __init__(self, config, dataset_class, reward_fn, env_step):
        super().__init__(config, dataset_class, self.reward, env_step)

    def reward(self, sample: Sample) -> float:
        """The protocol's, and for the log what it is made of."""
        reward = PROTOCOLS[self.config.protocol][0](sample)
        sample.metrics |= {"solved": float(reward == 1), "unreadable": float(reward == -1)}
        return reward

    def act(self, dataset, *arguments) -> list[Sample]:
        """Of an evaluation's samples the reward is whether they are right."""
        samples = super().act(dataset, *arguments)
        for sample in samples if dataset is self.eval_data else ():
            sample.rewards = [sample.metrics.get("solved", 0.0)]
        return samples


if __name__ == "__main__":
    main(GSM8KConfig, GSM8KDataset, trainer_class=GSM8K)
