"""--gate: stops a run whose engine does not sample from the actor's own weights, and names the likely cause.

The core compares the log-probs of every rollout before the optimizer step (Trainer.check_engine). This file
adds probes, in which the engine continues a few prompts and the actor scores the same tokens: at the start,
after pushes for at most SHARE of the steps' time, and once the core's check has fired, to find the cause.

| fault                              | caught                                      | before it is learned   |
|------------------------------------|---------------------------------------------|------------------------|
| another model, dtype               | at the start                                | yes                    |
| another temperature                | at the start; later by the next rollout     | yes                    |
| top_p, top_k, min_p                | at the start: they change no log-prob       | not if they come later |
| damaged or missing tensor          | by the next probe or rollout                | yes, above the bound   |
| base weights (an engine restarted) | by the next probe or rollout                | yes, above the bound   |
| stale weights, above the bound     | by the next probe or rollout                | yes                    |
| stale weights, below the bound     | by the next probe, if its answers are the   | no: off-policy within  |
|                                    | same to the last bit, or by version numbers | the bound              |
| in long sequences only (rope, the  | by the next rollout                         | yes, above the bound   |
| cache, a changed chat template)    |                                             |                        |

"Above the bound" means a mean difference above train.BOUND: 1e-4 nats per token in float32, 0.05 in bfloat16.
"""

import asyncio
import time
from collections import Counter
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

import train
from train import BOUND, UserError, flag

PROMPTS = 8  # per probe
TOKENS = 8  # per prompt
DRAWS = 512  # single tokens, drawn to see the tail of a distribution
SHARE = 0.05  # largest share of the steps' time so far for probes after pushes


@dataclass
class Flags:
    gate: Literal["stop", "warn", "off"] = flag(
        "stop", "what to do if the engine's log-probs differ from the actor's"
    )


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

    def moved(self, past: "Scores | None", side: str) -> float:
        """How far a side's log-probs have moved from past ones; infinite if the tokens are not the same."""
        if past is None or not torch.equal(self.ids, past.ids):
            return float("inf")
        return (getattr(self, side) - getattr(past, side)).abs().mean().item()


class Gate:
    """Compares engine and actor on a few tokens, and remembers the first probe and the last one.

    `play(rows, temperature, limit)` lets the engine continue the prompts of these rows and returns samples;
    `score(samples, temperature)` returns ids [N] and the log-probs [N] of both sides; `push_again()` puts the
    engine to sleep and pushes the weights once more. All ranks call every method together.
    """

    def __init__(self, config, tied: bool, play, score, push_again):
        self.mode = config.gate
        self.temperature = config.temperature
        self.dtype = config.dtype
        self.bound = BOUND[config.dtype]
        self.tied = tied
        self.play = play
        self.score = score
        self.push_again = push_again
        self.first = None  # Scores of the first probe
        self.last = None  # Scores of the last probe in which the engine had moved
        self.pushes = 0

    # ---- Probes ------------------------------------------------------------------------------------------
    def check_weights(self) -> float:
        """A probe after a push. Reports a difference, and returns it."""
        is_first = self.first is None
        gap, cause = self.probe_weights()
        if cause and self.mode == "stop" and not is_first:
            cause = self.try_again(cause)
        return self.report(gap, cause)

    def check_sampling(self):
        """Probes what greedy tokens cannot show: the temperature, and whether unlikely tokens come up."""
        self.report(*self.temperature_cause())
        self.report(*self.tail_cause())

    def probe_weights(self) -> tuple[float, str]:
        """The gap of greedily sampled tokens, the largest over all ranks, and its likely cause or ""."""
        samples = self.play(range(PROMPTS), 0.0, TOKENS)
        now = Scores(*self.score(samples, 1.0))
        failure = next((sample.failure for sample in samples if sample.failure), "")
        gap, cause = over_ranks(now.gap, failure or self.version_cause(samples) or self.weights_cause(now))
        self.first = self.first or now
        if now.moved(self.last, "engine") != 0:  # otherwise let the actor's small steps add up
            self.last = now
        return gap, cause

    def try_again(self, cause: str) -> str:
        """Pushes once more. Returns the cause, and whether that cures it."""
        self.push_again()
        _, remaining = self.probe_weights()
        if remaining:
            return f"{remaining} (a second push does not cure it)"
        if cause.startswith("damaged"):  # weights from between the last two probes look the same
            cause = "stale or damaged weights: the last push did not reach the engine, or only in part"
        return f"{cause} (a second push cures it)"

    def explain(self, gap: float, early_gap: float) -> str:
        """The likely cause of a rollout whose log-probs differ by `gap`, from fresh weights and new probes.

        `early_gap` is that of the first tokens of its completions.
        """
        self.push_again()
        _, cause = self.probe_weights()
        if cause:
            return f"{cause} (a second push does not cure it)"
        for _, cause in (self.temperature_cause(), self.tail_cause()):
            if cause:
                return cause
        if over_ranks(early_gap)[0] > self.bound / 2:
            return "stale weights: the last push did not reach the engine (a second push cures it)"
        return (
            "a difference in later tokens only (the first few are right): look for what affects long or "
            "multi-turn sequences (rope scaling, the engine's cache, changes by a chat template)"
        )

    # ---- Causes ------------------------------------------------------------------------------------------
    def version_cause(self, samples: list) -> str:
        """What the engine itself reports about its weights, unless they are the newest."""
        trained = [sample.tokens[sample.tokens["mask"] == 1] for sample in samples]
        versions = {version for tokens in trained for version in tokens["version"].tolist()}
        if versions <= {self.pushes}:
            return ""
        return f"stale weights: after push {self.pushes} the engine reports those of push {min(versions)}"

    def weights_cause(self, now: Scores) -> str:
        """Why the engine's weights are not the actor's, or ""."""
        if not now.actor.isfinite().all():
            return "a broken actor: its own log-probs are not finite; lower --lr"
        engine_moved = now.moved(self.last, "engine")
        actor_moved = now.moved(self.last, "actor")
        if engine_moved == 0 and actor_moved > self.bound / 10:
            return (
                "stale weights: the actor has learned, and the engine's answers are the same to the last "
                "bit; the last push did not reach it"
            )
        if now.gap <= self.bound:
            return ""
        if self.last is None and self.dtype == "float32" and now.gap <= BOUND["bfloat16"]:
            return "dtype: the difference has the size of rounding to bfloat16, and the run is in float32"
        if self.last is None:
            return (
                "another model: even before the first step the engine's answers are not those of --model; "
                "check its model and dtype, and what changes its prompts (a chat template, an extra BOS)"
            )
        if engine_moved < actor_moved / 10:
            return "stale weights: the engine answers as before the last push, which did not reach it"
        if now.moved(self.first, "engine") < now.moved(self.first, "actor") / 10:
            return (
                "base weights: the engine answers as at the start of the run; it has loaded the model again"
            )
        cause = "damaged weights: at least one tensor was lost or changed on its way to the engine"
        if self.tied:
            cause += "; this model ties its head to its embedding: check that the engine's head follows"
        return cause

    def temperature_cause(self) -> tuple[float, str]:
        """The gap of sampled tokens at the run's temperature, and its likely cause or ""."""
        samples = self.play(range(PROMPTS), self.temperature, TOKENS)
        gap, _ = over_ranks(Scores(*self.score(samples, self.temperature)).gap)
        if gap <= self.bound:
            return gap, ""
        # 0.2 to 3 times --temperature
        grid = [round(self.temperature * factor / 20, 3) for factor in range(4, 61)]
        gaps = [over_ranks(Scores(*self.score(samples, one)).gap)[0] for one in grid]
        likely = grid[gaps.index(min(gaps))]
        if min(gaps) < gap / 4:
            found = f"the engine seems to sample at {likely}, and --temperature is {self.temperature}"
            return gap, f"temperature: {found}"
        return gap, (
            "sampling: greedy tokens have the right log-probs, sampled tokens do not; look for top_p, top_k, "
            "penalties or a logit bias in the engine's settings"
        )

    def tail_cause(self) -> tuple[float, str]:
        """Probability of tokens that never come up, beyond the expected one, and its likely cause or "".

        By Good and Turing (Good 1953, doi:10.1093/biomet/40.3-4.237), the share of tokens that came up once
        estimates the probability of all that never did. If the tail is cut off, theirs is higher.
        """
        temperature = self.telling_temperature()
        drawn = self.play([0] * DRAWS, temperature, 1)
        tokens = [sample.tokens[-1] for sample in drawn if not sample.failure]
        counts = list(Counter(token["id"].item() for token in tokens).values())
        once, twice = counts.count(1), counts.count(2)
        seen = {token["id"].item(): token["logprob"].item() for token in tokens}
        unseen = 1 - torch.tensor(list(seen.values())).exp().sum().item()
        expected = once / max(1, len(tokens))
        noise = (once + 2 * twice + 1) ** 0.5 / max(1, len(tokens))
        excess = unseen - expected
        cause = ""
        if excess > 5 * noise + 0.02:
            cause = (
                f"top_p, top_k or min_p: tokens with {unseen:.0%} of the probability never came up in "
                f"{len(tokens)} draws, {expected:.0%} were expected: the engine cuts off the unlikely ones"
            )
        return over_ranks(excess, cause)

    def telling_temperature(self) -> float:
        """One at which the tail of the first prompt's next token has some of the probability, but not all."""
        low, high = 0.25, 16.0
        for _ in range(8):
            temperature = (low * high) ** 0.5
            drawn = self.play([0] * 64, temperature, 1)
            surprise = -sum(sample.tokens["logprob"][-1].item() for sample in drawn) / len(drawn)
            if 0.5 <= surprise <= 1.5:
                break
            if surprise < 0.5:
                low = temperature
            else:
                high = temperature
        return temperature

    def report(self, gap: float, cause: str) -> float:
        """Ends the run, or prints a warning, if there is a cause. Returns the gap."""
        if not cause:
            return gap
        message = (
            f"--gate: engine and actor disagree by {gap:.1e} (bound {self.bound:g}). Likely cause: {cause}."
        )
        if self.mode == "stop":
            raise UserError(f"{message} --gate warn continues")
        if dist.get_rank() == 0:
            tqdm.write(message)
        return gap


def over_ranks(gap: float, cause: str = "") -> tuple[float, str]:
    """The largest gap over all ranks (NaN if there is one), and the first cause that any rank has."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (gap, cause))
    gaps, causes = zip(*parts)
    return torch.tensor(gaps).max().item(), next(filter(None, causes), "")


# ---- Between a gate and a trainer ------------------------------------------------------------------------
class Probe:
    """How the gate of a Trainer plays and scores."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.config = trainer.config
        self.prompts = {}  # row -> sample

    def prompt(self, row: int):
        """A new sample that begins with the prompt of a row; a long prompt is cut."""
        trainer = self.trainer
        row = row % len(trainer.data)
        if row not in self.prompts:
            prompt = trainer.data[row]
            ids = train.encode_prompt(trainer.tokenizer, prompt.messages)
            prompt.append(ids[-trainer.prompt_limit :])
            self.prompts[row] = prompt
        return deepcopy(self.prompts[row])

    def play(self, rows, temperature: float, limit: int) -> list:
        """Samples at most `limit` tokens for each prompt; all ranks of a tensor-parallel group get all."""
        trainer = self.trainer
        limit = min(limit, self.config.max_new_tokens)
        numbered = trainer.engine.local_prompts(list(enumerate(rows)))
        episodes = [self.episode(self.prompt(row), seed, temperature, limit) for seed, row in numbered]
        samples = run_on(trainer.engine.loop, episodes)
        parts = [samples] * trainer.mesh["tp"].size()
        if len(parts) > 1:
            dist.all_gather_object(parts, samples, group=trainer.mesh["tp"].get_group())
        return sorted(sum(parts, []), key=lambda sample: sample.key)

    async def episode(self, sample, seed: int, temperature: float, limit: int):
        """One turn of the policy; an error is the sample's failure."""
        trainer = self.trainer
        sample.key = (seed, 0)
        config = copy(self.config)
        config.max_new_tokens = limit
        try:
            await train.rollout(sample, trainer.engine, trainer.tokenizer, config, temperature)
        except UserError:
            raise
        except Exception as error:
            sample.failure = f"{type(error).__name__}: {error}"
        sample.row, sample.state = {}, {}  # other ranks cannot have what only this process can use
        return sample

    @torch.no_grad()
    def score(self, samples: list, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids [N] of the tokens that an engine made, its log-probs [N], and the actor's [N]."""
        model = self.trainer.actor.model
        complete = [sample for sample in samples if not sample.failure]
        batch = train.Batch(complete, self.config.device)
        logprobs, _ = model.logprobs(batch, temperature=temperature)
        model.reshard()  # or the root's gathered weights would stay until a backward pass
        count = len(logprobs) if complete else 0  # without samples the batch is a filler
        return batch.targets[:count].cpu(), batch.engine_logprobs[:count].cpu(), logprobs[:count].cpu()

    def early_gap(self, samples: list) -> float:
        """The gap of the first tokens of a few completions of a rollout; 0 without samples."""
        few = []
        for sample in samples[:: max(1, len(samples) // PROMPTS)]:
            trained = sample.tokens["mask"].nonzero()[0]
            if len(trained) and not sample.failure:
                clipped = copy(sample)
                clipped.tokens = sample.tokens[: trained[0] + TOKENS]
                few.append(clipped)
        scores = Scores(*self.score(few, self.config.temperature))
        return scores.gap if few else 0.0


def run_on(loop, coroutines: list) -> list:
    """The results of coroutines on an event loop, which may be running in another thread."""

    async def together():
        return await asyncio.gather(*coroutines)

    if loop.is_running():
        return asyncio.run_coroutine_threadsafe(together(), loop).result()
    return loop.run_until_complete(together())


class Budget:
    """Allows probes after pushes as long as they take at most SHARE of the steps' time so far."""

    def __init__(self):
        self.steps = 0.0  # seconds of finished steps
        self.began = 0.0  # when this step began
        self.probes = 0.0  # seconds of probes after pushes
        self.cost = 0.0  # seconds of the last probe

    def allows(self) -> bool:
        """Whether all ranks can afford another probe; the slowest one decides."""
        elapsed = self.steps + time.perf_counter() - self.began
        seconds = torch.tensor([self.probes + self.cost, -elapsed], dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        probes, shortest = seconds.tolist()
        return probes <= SHARE * -shortest


def extend(trainer_class: type) -> type:
    """A trainer that probes its engine, and names the cause when the core's check fires."""

    class GatedTrainer(trainer_class):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.probe = Probe(self)
            tied = self.actor.model.config.tie_word_embeddings
            self.gate = Gate(self.config, tied, self.probe.play, self.probe.score, self.push_again)
            self.budget = Budget()
            self.gate_metrics = {}

        def step(self):
            self.budget.began = time.perf_counter()
            found = super().step()
            self.budget.steps += time.perf_counter() - self.budget.began
            return found

        def publish(self):
            """Pushes the weights, and probes the engine at the start and whenever the budget allows."""
            super().publish()
            self.gate.pushes += 1
            if self.config.gate == "off":
                return
            is_start = self.gate.first is None
            if not is_start and not self.budget.allows():
                return
            start = time.perf_counter()
            gap = self.gate.check_weights()
            self.budget.cost = time.perf_counter() - start
            if is_start:
                self.gate.check_sampling()
            else:
                self.budget.probes += self.budget.cost
            self.gate_metrics = {"gate_diff": gap, "time_gate": time.perf_counter() - start}

        def push_again(self):
            """Pushes the same weights once more, to find out what that changes."""
            self.engine.sleep()
            super().publish()
            self.gate.pushes += 1

        def learn(self, samples: list) -> dict[str, float]:
            self.rollout_samples = samples
            return super().learn(samples)

        def check_engine(self, gap: float):
            """Ends the run before the optimizer step, with the cause, if a rollout's log-probs differ."""
            if self.config.gate == "off" or gap <= self.gate.bound:
                return
            cause = "not investigated; --gate stop ends the run and finds it"
            if self.config.gate == "stop":
                self.actor.optimizer.zero_grad()  # frees memory for the engine; the run ends here
                cause = self.gate.explain(gap, self.probe.early_gap(self.rollout_samples))
            self.gate.report(gap, cause)

        def write(self, step: int, metrics: dict[str, float], samples: list):
            metrics |= self.gate_metrics
            self.gate_metrics = {}
            super().write(step, metrics, samples)

    return GatedTrainer
