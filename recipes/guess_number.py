"""A game of several turns: guess a number from 1 to 32, told "higher" or "lower" after each guess.

    python -m tools.make_start guesser --output runs/guesser  # a tiny model that plays almost at random
    torchrun --standalone --nproc_per_node=2 -m recipes.guess_number --model runs/guesser --device cpu \\
        --steps 40 --prompts_per_step 32 --updates_per_step 4 --max_new_tokens 8 --lr 1e-3 --gamma 0.9

It shows what a game needs: a dataset whose rows are secrets, an `env_step` that answers a guess, and a
reward. The only reward is 1 for the right guess, at its turn. With --gamma 0.9 earlier turns are worth less,
so that good questions pay off. `rebn` compares each turn's return with all others of the batch, so it needs
no groups.
"""

import re
from dataclasses import dataclass
from typing import Literal

from recipes.algorithms import ALGORITHMS, AlgorithmConfig, AlgorithmTrainer
from recipes.turns import user_turn
from train import Sample, flag, main

HIGHEST = 32


@dataclass
class GuessConfig(AlgorithmConfig):
    """The flags of recipes/algorithms.py, with other defaults."""

    algo: Literal[tuple(ALGORITHMS)] = flag("rebn", "row of the table of algorithms")
    max_turns: int = flag(8, "guesses per game")


class Secrets:
    """Every number once."""

    def __init__(self, source: str):
        self.source = source

    def __len__(self) -> int:
        return HIGHEST

    def __getitem__(self, index: int) -> Sample:
        """The secret is in the row, not in the prompt."""
        content = f"Guess a number from 1 to {HIGHEST}."
        return Sample([{"role": "user", "content": content}], {"secret": index + 1})


def guess_of(turn: str) -> int | None:
    """The last number in a turn."""
    numbers = re.findall(r"[0-9]{1,9}", turn)
    return int(numbers[-1]) if numbers else None


async def env_step(sample: Sample) -> str | None:
    """Says "higher" or "lower"; None after the right guess."""
    guess = guess_of(sample.turns[-1])
    secret = sample.row["secret"]
    if guess is None:
        return user_turn("a number")
    if guess == secret:
        return None
    return user_turn("higher" if guess < secret else "lower")


def reward_fn(sample: Sample) -> list[float]:
    """One number per turn: 1 for the right guess."""
    right = [float(guess_of(turn) == sample.row["secret"]) for turn in sample.turns]
    sample.metrics |= {"solved": right[-1], "turns": len(right)}
    return right


if __name__ == "__main__":
    main(GuessConfig, Secrets, reward_fn, env_step, AlgorithmTrainer)
