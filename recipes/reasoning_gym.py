"""Any task of reasoning-gym (arXiv:2505.24760), made on the fly and judged by the task's own scorer.

    pip install reasoning-gym
    torchrun --standalone --nproc_per_node=4 -m recipes.reasoning_gym --data chain_sum --eval_data chain_sum@1

--data NAME has 1024 problems of seed 0, NAME@1 as many of seed 1: others, for an evaluation. The reward is what the
task's `score_answer` says of the text in the last <answer> </answer>, from 0 to 1.
"""
from functools import cached_property

from tools.inputs import UserError
from train import Sample, main

PROMPT = "{}\nThink first, and put the final answer alone into <answer> </answer> tags."
PROBLEMS = 1024


class GymDataset:
    """Problems of a task and a seed."""

    def __init__(self, source: str):
        self.source = source
        self.name, _, seed = source.partition("@")
        self.seed = int(seed or 0)
        self.problems

    @cached_property
    def problems(self):
        """The task. Raises UserError where there is none of that name."""
        try:
            import reasoning_gym        # optional, and slow to import
            return reasoning_gym.create_dataset(self.name, seed=self.seed, size=PROBLEMS)
        except ImportError as error:
            raise UserError(f"reasoning-gym is not installed ({error}): pip install reasoning-gym") from error
        except Exception as error:
            raise UserError(f"--data {self.source}: {type(error).__name__}: {error}") from error

    def __len__(self) -> int:
        return PROBLEMS

    def __getitem__(self, index: int) -> Sample:
        """The problem as the prompt; the row has what the scorer wants."""
        entry = self.problems[index]
        return Sample([{"role": "user", "content": PROMPT.format(entry["question"])}], dict(entry) | {
            "task": self.name, "scorer": Scorer(self)})


class Scorer:
    """The scorer of a dataset; copies of it are itself, and the log shows its name."""

    def __init__(self, dataset: GymDataset):
        self.dataset = dataset

    def __deepcopy__(self, memo):
        return self

    def __repr__(self) -> str:
        return f"the scorer of {self.dataset.source}"

    def __call__(self, answer: str | None, entry: dict) -> float:
        return float(self.dataset.problems.score_answer(answer=answer, entry=entry))


def reward_fn(sample: Sample) -> float:
    """The task's own score."""
    _, opened, rest = sample.text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    entry = {name: value for name, value in sample.row.items() if name not in ("task", "scorer")}
    return sample.row["scorer"](answer.strip() if opened and closed else None, entry)


if __name__ == "__main__":
    main(dataset_class=GymDataset, reward_fn=reward_fn)
