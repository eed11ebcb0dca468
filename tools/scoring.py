"""Calls the user's functions, and trusts nothing that comes back."""
import inspect
import math
import numbers
from itertools import compress
from operator import mul
from statistics import fmean

from tools.inputs import UserError


async def ask(env_step, sample) -> str | None:
    """What env_step, if there is one, answers a turn. Raises UserError where that is neither a text nor None."""
    try:
        reply = await env_step(sample) if env_step else None
    except Exception as error:
        raise UserError(f"env_step raised {type(error).__name__}: {error}; the row was {sample.row}") from error
    if not isinstance(reply, str | None):
        raise UserError(f"env_step must return a text or None, not {reply!r}; the row was {sample.row}")
    return reply


async def score(sample, reward_fn) -> list[float]:
    """The rewards, one a step; a single number is the last step's. Raises UserError for anything else."""
    try:
        found = reward_fn(sample)
        found = await found if inspect.isawaitable(found) else found
    except Exception as error:
        raise UserError(f"reward_fn raised {type(error).__name__}: {error}; the row was {sample.row}") from error
    steps = len(set(compress(sample.steps, sample.mask))) or 1
    rewards = found if isinstance(found, list) else [0.0] * (steps - 1) + [found]
    if len(rewards) != steps or not all(isinstance(r, numbers.Real) and math.isfinite(r) for r in rewards):
        wanted = f"{steps} finite numbers, one a step" if isinstance(found, list) else "one finite number"
        raise UserError(f"reward_fn must return {wanted}, not {found!r}; the row was {sample.row}")
    return [float(reward) for reward in rewards]


def best_of(groups: list[list[float]]) -> dict[str, float]:
    """Rewards of n samples of each prompt -> {"eval_pass@k": mean reward of the best of k of them} for k = 2, 4, .. n.

    Over all choices of k among the n; with rewards of 0 and 1 it is pass@k (Chen et al., arXiv:2107.03374, eq. 1).
    """
    n, found = len(groups[0]), {}
    for k in sorted({*(2 ** i for i in range(1, n.bit_length())), n} - {1}):
        chances = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]     # that place i of n, sorted, is the best
        found[f"eval_pass@{k}"] = fmean(sum(map(mul, chances, sorted(group))) for group in groups)
    return found
