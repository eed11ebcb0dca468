"""Calls the user's functions, and trusts nothing that comes back."""
import asyncio
import inspect
import math
import numbers
import signal
import threading
from contextlib import contextmanager
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


@contextmanager
def deadline(seconds: float):
    """Raises TimeoutError in a block that takes longer, in Python or in a wait; a thread of its own has no deadline."""
    def late(*_):
        raise TimeoutError(f"it took more than {seconds:g} s (--reward_timeout)")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    older = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, older)


async def judge(sample, reward_fn, seconds: float):
    """Sets sample.rewards. Where reward_fn fails, or takes longer than that, they are 0 and sample.failure says why."""
    try:
        sample.rewards = await score(sample, reward_fn, seconds)
    except UserError as error:
        sample.failure, sample.rewards = str(error), [0.0] * count_steps(sample)


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
    try:
        with deadline(seconds):
            found = reward_fn(sample)
        if inspect.isawaitable(found):
            found = await asyncio.wait_for(found, seconds)
    except Exception as error:
        raise UserError(f"reward_fn raised {type(error).__name__}: {error}; the row was {sample.row}") from error
    steps = count_steps(sample)
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
