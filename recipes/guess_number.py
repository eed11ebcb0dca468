"""A game of several turns: guess a number from 1 to 32, told "higher" or "lower" after each guess.

    python -m tools.make_guesser --output runs/guesser                      # a tiny model that plays almost at random
    torchrun --standalone --nproc_per_node=2 -m recipes.guess_number --model runs/guesser --device cpu --steps 40 \\
        --prompts_per_step 32 --updates_per_step 4 --max_turns 8 --max_new_tokens 8 --lr 1e-3 --gamma 0.9

It shows what a game needs: a dataset whose rows are secrets, `env_step`, which answers a guess, and a reward. The only
reward is 1 for the right guess, at its turn; by --gamma 0.9 an earlier turn than that is worth less, so that asking
well pays. `rebn` compares each turn's return with all others of the batch, so that no groups are needed.
"""
import re
from dataclasses import dataclass

from recipes.turns import user_turn
from train import Config, Sample, main

HIGHEST = 32


@dataclass
class GuessConfig(Config):
    """Other defaults."""
    def __post_init__(self):
        self.algo = "rebn" if self.algo == "grpo" else self.algo
        super().__post_init__()


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
    """The last number of a turn."""
    numbers = re.findall(r"[0-9]{1,9}", turn)
    return int(numbers[-1]) if numbers else None


async def env_step(sample: Sample) -> str | None:
    """Higher or lower; nothing after the right guess."""
    guess, secret = guess_of(sample.turns[-1]), sample.row["secret"]
    if guess is None:
        return user_turn("a number")
    return None if guess == secret else user_turn("higher" if guess < secret else "lower")


def reward_fn(sample: Sample) -> list[float]:
    """One number a turn: 1 for the right guess."""
    right = [float(guess_of(turn) == sample.row["secret"]) for turn in sample.turns]
    sample.metrics |= {"solved": right[-1], "turns": len(right)}
    return right


if __name__ == "__main__":
    main(GuessConfig, Secrets, reward_fn, env_step)
