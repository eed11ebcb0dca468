"""Any environment of GEM (arXiv:2510.01051), by its id: games, reasoning-gym tasks and others.

    pip install gem-llm
    torchrun --standalone --nproc_per_node=4 -m recipes.gem_env --data game:GuessTheNumber-v0-easy \\
        --max_turns 4 --gamma 0.9

A row is a seed: --data ID has the seeds from 0, ID@5000 those from 5000 (for --eval_data). An episode is
`env.reset`, then an `env.step` for each turn of the policy, in threads, so that a slow environment does not
delay the others. The whole conversation stays in the context, GEM's `concat_chat`. Rewards are the
environment's, one per turn; `rebn` turns them into GEM's own advantages: returns discounted by --gamma,
normalized over the batch. Unlike in GEM's trainer, all turns of an episode are one sequence, whose prefix is
computed once.
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

from recipes.algorithms import ALGORITHMS, AlgorithmConfig, AlgorithmTrainer
from recipes.turns import user_turn
from train import Sample, UserError, flag, main

SEEDS = 1024  # rows per dataset


@dataclass
class GemConfig(AlgorithmConfig):
    """The flags of recipes/algorithms.py, with GEM's algorithm by default."""

    algo: Literal[tuple(ALGORITHMS)] = flag("rebn", "row of the table of algorithms")
    data: str = flag("game:GuessTheNumber-v0-easy", "GEM environment id, optionally @first_seed")
    eval_data: str = flag("", "like --data, with other seeds; empty: no evaluation")
    max_turns: int = flag(4, "policy turns per episode")

    def __post_init__(self):
        if getattr(self, "reward_workers", 0):
            raise UserError("--reward_workers must be 0: an environment lives in the trainer's own process")
        super().__post_init__()


def make(name: str):
    """An environment. Raises UserError if none has that name."""
    try:
        import gem  # optional, and slow to import

        return gem.make(name)
    except ImportError as error:
        raise UserError(f"gem is not installed ({error}): pip install gem-llm") from error
    except Exception as error:
        raise UserError(f"--data {name}: gem.make raised {type(error).__name__}: {error}") from error


class GemDataset:
    """Seeds of an environment."""

    def __init__(self, source: str):
        self.source = source
        self.name, _, first = source.partition("@")
        self.first = int(first or 0)

    def __len__(self) -> int:
        return SEEDS

    def __getitem__(self, index: int) -> Sample:
        """The first observation as the prompt."""
        seed = self.first + index
        text, info = make(self.name).reset(seed=seed)
        return Sample([{"role": "user", "content": shown(text, info)}], {"env": self.name, "seed": seed})


def shown(text: str, info: dict) -> str:
    """An observation with what GEM puts around it."""
    return "\n".join(filter(None, (info.get("prefix"), text, info.get("suffix"))))


async def env_step(sample: Sample) -> str | None:
    """Plays the policy's turn in the sample's own environment."""
    state = sample.state
    if "env" not in state:
        state["env"] = await asyncio.to_thread(make, sample.row["env"])
        state["rewards"] = []
        await asyncio.to_thread(state["env"].reset, seed=sample.row["seed"])
    text, reward, terminated, truncated, info = await asyncio.to_thread(state["env"].step, sample.turns[-1])
    state["rewards"].append(float(reward))
    return None if terminated or truncated else user_turn(shown(text, info))


def reward_fn(sample: Sample) -> list[float]:
    """The environment's rewards; 0 for a truncated turn, which it never saw."""
    rewards = sample.state.get("rewards", [])
    sample.metrics |= {"turns": len(sample.turns), "return": sum(rewards)}
    return rewards + [0.0] * (len(sample.turns) - len(rewards))


if __name__ == "__main__":
    main(GemConfig, GemDataset, reward_fn, env_step, AlgorithmTrainer)
