r"""Any environment of GEM (arXiv:2510.01051), by its id: games, reasoning-gym tasks, whatever `gem.make` knows.

    pip install gem-llm
    torchrun --standalone --nproc_per_node=4 -m recipes.gem_env --data game:GuessTheNumber-v0-easy \
        --max_turns 4 --gamma 0.9

A row is a seed: --data ID has the seeds from 0 on, ID@5000 those from 5000 on (for --eval_data). An episode is
`env.reset`, then an `env.step` for each turn of the policy, in threads, so that a slow environment delays no other; the
whole conversation stays in the context, GEM's `concat_chat`. Rewards are those of the environment, one a turn; `rebn`
turns them into advantages, which are GEM's own: returns discounted by --gamma, normalised over the batch.
Unlike GEM's trainer, all turns of an episode are one sequence, whose prefix is computed once.
"""
import asyncio
from dataclasses import dataclass

from recipes.turns import user_turn
from tools.inputs import UserError, flag
from train import Config, Sample, main

SEEDS = 1024            # rows of a dataset


@dataclass
class GemConfig(Config):
    """What train.py has, with GEM's algorithm by default."""
    reward_workers: int = flag(0, "none: an environment lives in the trainer's own process")

    def __post_init__(self):
        self.algo = "rebn" if self.algo == "grpo" else self.algo
        super().__post_init__()


def make(name: str):
    """An environment. Raises UserError where there is none of that name."""
    try:
        import gem          # optional, and slow to import
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
    """An observation with what GEM says around it."""
    return "\n".join(filter(None, (info.get("prefix"), text, info.get("suffix"))))


async def env_step(sample: Sample) -> str | None:
    """Plays the policy's turn in the sample's own environment."""
    state = sample.state
    if "env" not in state:
        state["env"], state["rewards"] = await asyncio.to_thread(make, sample.row["env"]), []
        await asyncio.to_thread(state["env"].reset, seed=sample.row["seed"])
    text, reward, terminated, truncated, info = await asyncio.to_thread(state["env"].step, sample.turns[-1])
    state["rewards"].append(float(reward))
    return None if terminated or truncated else user_turn(shown(text, info))


def reward_fn(sample: Sample) -> list[float]:
    """The environment's rewards; 0 for a turn that was cut off, which it never saw."""
    found = sample.state.get("rewards", [])
    sample.metrics |= {"turns": len(sample.turns), "return": sum(found)}
    return found + [0.0] * (len(sample.turns) - len(found))


if __name__ == "__main__":
    main(GemConfig, GemDataset, reward_fn, env_step)
