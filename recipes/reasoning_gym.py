"""Any task of reasoning-gym (arXiv:2505.24760), generated as needed and judged by the task's own scorer.

    pip install reasoning-gym
    torchrun --standalone --nproc_per_node=4 -m recipes.reasoning_gym --data chain_sum --eval_data chain_sum@1

--data NAME gives 1024 problems with seed 0; NAME@1 as many others with seed 1, for evaluation. The reward is
the task's `score_answer` of the text in the last <answer> </answer>, from 0 to 1.
"""

from dataclasses import dataclass
from functools import cache

from train import Config, Sample, UserError, flag, main

PROMPT = "{}\nThink first, and put the final answer alone into <answer> </answer> tags."
PROBLEMS = 1024


@dataclass
class GymConfig(Config):
    """The core's flags, with a task as data."""

    data: str = flag("chain_sum", "name of a task, optionally @seed")
    eval_data: str = flag("chain_sum@1", "like --data, with another seed; empty: no evaluation")


@cache
def problems_of(source: str):
    """The problems of "NAME[@seed]". Raises UserError if there is no such task."""
    name, _, seed = source.partition("@")
    try:
        import reasoning_gym  # optional, and slow to import

        return reasoning_gym.create_dataset(name, seed=int(seed or 0), size=PROBLEMS)
    except ImportError as error:
        raise UserError(f"reasoning-gym is not installed ({error}): pip install reasoning-gym") from error
    except Exception as error:
        raise UserError(f"--data {source}: {type(error).__name__}: {error}") from error


class GymDataset:
    """Problems of a task and a seed."""

    def __init__(self, source: str):
        self.source = source
        self.problems = problems_of(source)

    def __len__(self) -> int:
        return PROBLEMS

    def __getitem__(self, index: int) -> Sample:
        """The problem as the prompt; the row says where the scorer finds it again."""
        problem = self.problems[index]
        row = dict(problem) | {"source": self.source, "index": index}
        return Sample([{"role": "user", "content": PROMPT.format(problem["question"])}], row)


def reward_fn(sample: Sample) -> float:
    """The task's own score."""
    _, opened, rest = sample.text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    problems = problems_of(sample.row["source"])
    found = answer.strip() if opened and closed else None
    return float(problems.score_answer(answer=found, entry=problems[sample.row["index"]]))


if __name__ == "__main__":
    main(GymConfig, GymDataset, reward_fn)
