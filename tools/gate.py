"""The gate: what the engine samples must come from the actor's own weights and at the actor's own temperature.

After every push each rank lets its engine continue a few prompts greedily, and the actor scores the same tokens. At
the start two more things are looked at, which the same few tokens cannot show: whether samples have the run's
temperature, and whether the unlikely tokens are really sampled. A verdict names the likely cause.
"""
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from tools.inputs import UserError
from tools.runlog import say

# Of the mean |difference| of log-probs, in nats a token. Measured on a CPU: 1e-7 in fp32 between the actor and sglang;
# in bf16, 0.003 to 0.008 for greedy and 0.012 to 0.022 for sampled tokens of a Qwen2.5-0.5B, one pass against decoding.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}
PROMPTS, TOKENS = 8, 8          # of the greedy probe
DRAWS = 512                     # single tokens, drawn to see the tail


@dataclass
class Scores:
    """The same N tokens, scored by both sides; every tensor is [N]."""
    ids: torch.Tensor
    engine: torch.Tensor
    actor: torch.Tensor

    @property
    def gap(self) -> float:
        """Mean |difference| of their log-probs."""
        return (self.engine - self.actor).abs().mean().item()

    def moved(self, past: "Scores", side: str) -> float:
        """How far a side's log-probs of the same tokens are from what they were; infinite for other tokens."""
        if past is None or not torch.equal(self.ids, past.ids):
            return float("inf")
        return (getattr(self, side) - getattr(past, side)).abs().mean().item()


class Gate:
    """Compares engine and actor by a few tokens, and remembers what it saw at the start and after the last push.

    `play(rows, temperature, limit)` lets the engine continue the prompts of these rows and returns the samples;
    `score(samples, temperature)` returns their ids [N] and the log-probs [N] of both sides. All ranks call together.
    """

    def __init__(self, config, tied: bool, play, score):
        self.mode, self.temperature, self.dtype, self.tied = config.gate, config.temperature, config.dtype, tied
        self.bound, self.play, self.score = BOUNDS[config.dtype], play, score
        self.first = self.last = None
        self.pushes = 0

    def check(self, start: bool) -> dict[str, float]:
        """After a push. Raises UserError, or only says so, when engine and actor disagree; gate_diff is by how much."""
        self.pushes += 1
        if self.mode == "off":
            return {}
        samples = self.play(range(PROMPTS), 0.0, TOKENS)
        now = Scores(*self.score(samples, 1.0))
        failure = next((sample.failure for sample in samples if sample.failure), None)
        worst = self.judge(now.gap, failure or self.version_cause(samples) or self.weights_cause(now))
        self.first = self.first or now
        if not self.still(now):     # else the actor's way from there adds up, however small its steps are
            self.last = now
        if start:
            self.check_temperature()
            self.check_tail()
        return {"gate_diff": worst}

    def version_cause(self, samples: list) -> str | None:
        """What the engine itself says of its weights, if it is not that they are the newest."""
        versions = {version for sample in samples for version, trained in zip(sample.versions, sample.mask) if trained}
        if versions <= {self.pushes}:
            return None
        return f"stale weights: after push {self.pushes} the engine says it has those of push {min(versions)}"

    def still(self, now: Scores) -> bool:
        """Whether the engine's answers are what they were, to the last bit."""
        return now.moved(self.last, "engine") == 0

    def weights_cause(self, now: Scores) -> str | None:
        """Why the engine's weights are not the actor's, or None."""
        if self.still(now) and now.moved(self.last, "actor") > self.bound / 10:
            return "stale weights: the actor has learned and the engine's answers are the same to the last bit; the " \
                   "last push did not reach it"
        if now.gap <= self.bound:
            return None
        if self.last is None and self.dtype == "float32" and now.gap <= BOUNDS["bfloat16"]:
            return "dtype: the difference is of the size that rounding to bfloat16 makes; the run is in float32"
        if self.last is None:
            return "another model: even before the first step the engine's answers are not those of --model; look at " \
                   "the server's model, its dtype, and what changes its prompts (a chat template, an extra BOS)"
        if now.moved(self.last, "engine") < now.moved(self.last, "actor") / 10:
            return "stale weights: the engine answers as before the last push, which did not reach it"
        if now.moved(self.first, "engine") < now.moved(self.first, "actor") / 10:
            return "base weights: the engine answers as at the start of the run; it has loaded the model's folder anew"
        head = "; this model ties its head to its embedding: see whether the engine's head follows" if self.tied else ""
        return f"damaged weights: at least one tensor was lost or changed on its way to the engine{head}"

    def check_temperature(self):
        """Sampled tokens must have the log-probs that the actor gives them at the run's temperature."""
        samples = self.play(range(PROMPTS), self.temperature, TOKENS)
        gap = Scores(*self.score(samples, self.temperature)).gap
        if over_ranks(gap)[1] <= self.bound:
            return
        grid = [round(self.temperature * factor / 20, 3) for factor in range(4, 61)]    # 0.2 to 3 times as high
        gaps = [Scores(*self.score(samples, temperature)).gap for temperature in grid]
        likely = grid[min(range(len(grid)), key=gaps.__getitem__)]
        if min(gaps) < gap / 4:
            cause = f"temperature: the engine seems to sample at {likely}, --temperature is {self.temperature}"
        else:
            cause = "sampling: greedy tokens have the right log-probs and sampled ones have not; look for top_p, " \
                    "top_k, penalties or a logit bias among the engine's settings"
        self.judge(gap, cause if not gap <= self.bound else None)

    def check_tail(self):
        """Unlikely tokens must come up as often as their probability says: a nucleus would never sample them.

        By Good and Turing (Good 1953, doi:10.1093/biomet/40.3-4.237) the share of tokens that came up once estimates
        the probability of all that never came up. Cut the tail off, and what never came up has more.
        """
        low, high = 0.25, 16.0
        for _ in range(8):      # a temperature at which the tail of the prompt's first token is neither nothing nor all
            temperature = (low * high) ** 0.5
            surprise = -sum(sample.logprobs[-1] for sample in self.play([0] * 64, temperature, 1)) / 64
            if 0.5 <= surprise <= 1.5:
                break
            low, high = (temperature, high) if surprise < 0.5 else (low, temperature)
        drawn = [(sample.ids[-1], sample.logprobs[-1]) for sample in self.play([0] * DRAWS, temperature, 1)]
        counts = list(Counter(i for i, _ in drawn).values())
        once, twice = counts.count(1), counts.count(2)
        unseen = 1 - sum(torch.tensor(list(dict(drawn).values())).exp().tolist())
        excess, noise = unseen - once / len(drawn), (once + 2 * twice + 1) ** 0.5 / len(drawn)
        self.judge(excess, f"top_p, top_k or min_p: tokens with {unseen:.0%} of the probability never came up in "
                   f"{len(drawn)} draws, {once / len(drawn):.0%} were expected: the engine cuts the unlikely ones off"
                   if excess > 5 * noise + 0.02 else None)

    def judge(self, gap: float, cause: str | None) -> float:
        """Stops all ranks for the cause of any of them. Returns the largest gap over the ranks."""
        cause, worst = over_ranks(gap, cause)
        if cause:
            message = f"the gate: engine and actor disagree by {worst:.1e}. Likely {cause}. (--gate warn goes on)"
            if self.mode == "stop":
                raise UserError(message)
            if dist.get_rank() == 0:
                say(message)
        return worst

    def judge_rollout(self, gap: float):
        """The same for the mean |difference| over a rollout's trained tokens, the same number on every rank."""
        if self.mode == "off" or not gap > self.bound:      # without a finite gradient it may be no number
            return
        self.check_temperature()
        self.judge(gap, "a rollout that is no sample of the policy, though a few tokens are: look at what only long or "
                        "multi-turn sequences have (the engine's cache, rope scaling, changes by a template)")


class Probe:
    """How the gate of a train.Trainer plays and scores; `rollout` and `make_batch` are those of train.py."""

    def __init__(self, trainer, rollout, make_batch):
        self.trainer, self.rollout, self.make_batch = trainer, rollout, make_batch

    def play(self, rows: list[int], temperature: float, limit: int) -> list:
        """What the engine of this rank makes of some prompts, at most `limit` tokens of each."""
        trainer = self.trainer
        return trainer.play([self.rollout(
            trainer.data[row % len(trainer.data)], trainer.tokenizer,
            lambda ids, turn, seed=seed: trainer.engine.generate(ids, temperature, seed, limit), None, 1, trainer.room)
            for seed, row in list(enumerate(rows))[trainer.engine.share]])

    @torch.no_grad()
    def score(self, samples: list, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [N] of the tokens that an engine made, its log-probs [N], and the actor's [N]."""
        actor, batch = self.trainer.actor, self.make_batch(samples, self.trainer.config.device)
        logprobs, _ = actor.logprobs(batch, temperature=temperature)
        actor.model.reshard()           # else what the root has gathered stays until a backward pass
        return batch.targets.cpu(), batch.engine_logprobs.cpu(), logprobs.cpu()


def over_ranks(gap: float, cause: str | None = None) -> tuple[str | None, float]:
    """The first cause that any rank has, and the largest gap."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (cause, gap))
    causes, gaps = zip(*parts)
    return next(filter(None, causes), None), max(gaps)
