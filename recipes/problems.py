"""Problems with a checked answer: GSM8K, MATH and countdown, told apart by the columns of a row.

    torchrun --standalone --nproc_per_node=4 -m recipes.problems --data openai/gsm8k/main

Rows with question and answer are GSM8K's: the last number of the text counts. Rows with problem and answer
are MATH's: the last \\boxed{} counts. Rows with nums and target are countdown's, as in train.py.
"""

import asyncio

import rewards
import train
from train import RLDataset, Sample, main

PROMPT = "{}\nThink step by step, and put the final answer into \\boxed{{}}."


class ProblemDataset(RLDataset):
    """Rows of any of the three kinds."""

    def __getitem__(self, index: int) -> Sample:
        row = dict(self.rows[index])
        if row.get("target") is not None:
            return super().__getitem__(index)
        content = PROMPT.format(row.get("question") or row["problem"])
        return Sample([{"role": "user", "content": content}], row)


def reward_fn(sample: Sample):
    """1 for a right answer, else 0."""
    row = sample.row
    if row.get("target") is not None:
        return train.reward_fn(sample)
    if row.get("question") is not None:
        return rewards.gsm8k_last_number(sample.text, row["answer"])
    return asyncio.to_thread(rewards.math, sample.text, row["answer"])  # slow: rollouts continue meanwhile


if __name__ == "__main__":
    main(dataset=ProblemDataset, reward_fn=reward_fn)
