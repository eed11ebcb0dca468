"""Calls the user's functions, and trusts nothing that comes back."""
import asyncio
import inspect
import math
import numbers
import time
from itertools import compress
from operator import mul
from statistics import fmean

from tools.inputs import UserError
from tools.waits import deadline


async def ask(env_step, sample, seconds: float) -> str | None:
    """What env_step, if there is one, answers a turn; None ends the episode.

    Where it fails, or takes longer than that, sample.failure says why, and the episode ends.
    """
    start = time.perf_counter()
    try:
        reply = await asyncio.wait_for(env_step(sample), seconds) if env_step else None
    except Exception as error:
        sample.failure = f"env_step {what_happened(error, start, seconds)}; the row was {sample.row}"
        return None
    if not isinstance(reply, str | None):
        sample.failure = f"env_step must return a text or None, not {reply!r}; the row was {sample.row}"
        return None
    return reply


def too_late():
    """Raises TimeoutError; what_happened says the rest."""
    raise TimeoutError


def what_happened(error: Exception, start: float, seconds: float) -> str:
    """The end of a sentence on a function of the user's that was called at `start`, and had so long."""
    if isinstance(error, TimeoutError) and time.perf_counter() - start >= seconds:
        return f"took more than {seconds:g} s (--reward_timeout)"
    return f"raised {type(error).__name__}: {error}"


async def judge(sample, reward_fn, seconds: float) -> float:
    """Sets sample.rewards. Returns the seconds that took.

    Where reward_fn fails, or takes longer than `seconds`, the rewards are 0 and sample.failure says why.
    """
    start, steps = time.perf_counter(), list(sample.steps)
    try:
        sample.rewards = await score(sample, reward_fn, seconds)
    except UserError as error:
        sample.steps = steps            # whatever reward_fn made of them
        sample.metrics = {name: float(value) for name, value in sample.metrics.items() if is_finite(value)}
        fail(sample, str(error))
    return time.perf_counter() - start


def fail(sample, why: str):
    """Marks a sample as one that has no rewards, for the first reason that came up."""
    sample.failure = sample.failure or why
    sample.rewards = [0.0] * count_steps(sample)


def check_turn(ids: list[int], logprobs: list[float], versions: list[int]) -> str:
    """Why a turn cannot be learned from: an engine that has no log-probs for it (TRL #6266), or no tokens; or ""."""
    if not len(ids) == len(logprobs) == len(versions):
        return f"the engine gave {len(ids)} tokens, {len(logprobs)} log-probs and {len(versions)} versions of weights"
    if not ids:
        return "the engine gave no tokens"
    return "" if all(map(math.isfinite, logprobs)) else "the engine gave log-probs that are no numbers"


def without_failures(samples: list) -> list:
    """Those of the groups in which no sample has failed."""
    failed = {sample.key[:1] for sample in samples if sample.failure}
    return [sample for sample in samples if sample.key[:1] not in failed]


def check_failures(samples: list, share: float):
    """Raises UserError if more than that share of samples has failed."""
    failures = [sample.failure for sample in samples if sample.failure]
    if len(failures) > share * len(samples):
        raise UserError(f"{failures[0]} ({len(failures)} of {len(samples)} samples failed; --max_reward_failures "
                        f"{share:g})")


def check_skipped(count: int, most: int):
    """Raises UserError after so many steps in a row without a finite gradient."""
    if count >= most:
        raise UserError(f"{count} steps in a row had no finite gradient, and changed nothing: look at the last step of "
                        "samples.jsonl, lower --lr, or raise --max_skipped_steps")


def count_steps(sample) -> int:
    """How many steps have a reward."""
    return len(set(compress(sample.steps, sample.mask))) or 1


async def score(sample, reward_fn, seconds: float = 60.0) -> list[float]:
    """The rewards, one a step; a single number is the last step's. Raises UserError for anything else."""
    start = time.perf_counter()
    try:
        with deadline(seconds, too_late):
            found = reward_fn(sample)
        if inspect.isawaitable(found):
            found = await asyncio.wait_for(found, seconds)
        sample.steps = list(map(int, sample.steps))     # of whichever library its numbers are
    except Exception as error:
        raise UserError(f"reward_fn {what_happened(error, start, seconds)}; the row was {sample.row}") from error
    if len(sample.steps) != len(sample.ids):
        raise UserError(f"reward_fn made {len(sample.steps)} of sample.steps for {len(sample.ids)} tokens")
    steps = count_steps(sample)
    rewards = found if isinstance(found, list) else [0.0] * (steps - 1) + [found]
    if len(rewards) != steps or not all(map(is_finite, rewards)):
        wanted = f"{steps} finite numbers, one a step" if isinstance(found, list) else "one finite number"
        raise UserError(f"reward_fn must return {wanted}, not {found!r}; the row was {sample.row}")
    for name, value in sample.metrics.items():
        if not is_finite(value):
            raise UserError(f"sample.metrics takes finite numbers, not {value!r} as {name!r}; the row was {sample.row}")
    sample.metrics = {name: float(value) for name, value in sample.metrics.items()}
    return [float(reward) for reward in rewards]


def is_finite(value) -> bool:
    """Whether it is a number, of whichever library, and neither infinite nor NaN."""
    return isinstance(value, numbers.Real) and math.isfinite(value)


def best_of(groups: list[list[float]]) -> dict[str, float]:
    """Rewards of n samples of each prompt -> {"eval_pass@k": mean reward of the best of k of them} for k = 2, 4, .. n.

    Over all choices of k among the n; with rewards of 0 and 1 it is pass@k (Chen et al., arXiv:2107.03374, eq. 1).
    """
    n, found = len(groups[0]), {}
    for k in sorted({*(2 ** i for i in range(1, n.bit_length())), n} - {1}):
        chances = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]     # that place i of n, sorted, is the best
        found[f"eval_pass@{k}"] = fmean(sum(map(mul, chances, sorted(group))) for group in groups)
    return found
