"""--gate: stops a run whose engine does not sample from the actor's own weights, and names the likely cause.

The core compares the log-probs of every rollout before the optimizer step (Trainer.check_engine). This file
adds probes, in which the engine continues a few prompts and the actor scores the same tokens: at the start,
after pushes with pauses between them, and once the core's check has fired, to find the cause.
docs/engines.md lists which fault is caught when. Differences up to train.BOUND count as rounding.
"""

import asyncio
import math
import time
from copy import copy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

import train
from train import BOUND, UserError, flag

PROMPTS = 8  # per probe
TOKENS = 8  # per prompt
DRAWS = 1024  # of one token, to see whether unlikely ones come up
PAUSE = 20  # between two probes, as a multiple of the time that the last one took


@dataclass
class Flags:
    gate: Literal["stop", "warn", "off"] = flag("stop", "reaction to an engine with other log-probs")


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean |difference| of log-probs [N]."""
    return (one - other).abs().mean().item()


@dataclass
class Scores:
    """The same N tokens, scored by both sides; every tensor is [N]."""

    ids: torch.Tensor
    engine: torch.Tensor
    actor: torch.Tensor
    entropy: torch.Tensor  # of the actor's distribution that each token is from

    @property
    def gap(self) -> float:
        return distance(self.engine, self.actor)

    def moved(self, past: "Scores | None") -> tuple[float, float]:
        """How far the log-probs of engine and actor have moved; infinitely if the tokens are others."""
        if past is None or not torch.equal(self.ids, past.ids):
            return math.inf, math.inf
        return distance(self.engine, past.engine), distance(self.actor, past.actor)


async def gather(coroutines: list) -> list:
    return await asyncio.gather(*coroutines)


def over_ranks(gap: float, cause: str = "") -> tuple[float, str]:
    """The largest gap over all ranks (NaN if there is one), and the first cause that any rank has."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (gap, cause))
    gaps, causes = zip(*parts)
    return torch.tensor(gaps).max().item(), next(filter(None, causes), "")


class Gate:
    """Compares engine and actor on a few tokens, and remembers the first probe and the last one.

    `push_again()` puts the engine to sleep and pushes the weights once more. All ranks call every method
    together.
    """

    def __init__(self, trainer, push_again):
        self.trainer = trainer
        self.config = trainer.config
        self.bound = BOUND[trainer.config.dtype]
        self.push_again = push_again
        self.first = None  # Scores of the first probe
        self.last = None  # Scores of the last probe in which the engine had moved

    # ---- Samples and scores ------------------------------------------------------------------------------
    def play(self, rows, temperature: float, limit: int = TOKENS) -> list:
        """Samples at most `limit` tokens per prompt; all ranks of a tensor-parallel group get all samples."""
        trainer = self.trainer
        numbered = trainer.engine.local_prompts(list(enumerate(rows)))
        episodes = [self.episode(*pair, temperature, limit) for pair in numbered]
        loop, together = trainer.engine.loop, gather(episodes)
        if loop.is_running():  # in another thread
            samples = asyncio.run_coroutine_threadsafe(together, loop).result()
        else:
            samples = loop.run_until_complete(together)
        parts = [samples] * trainer.mesh["tp"].size()
        if len(parts) > 1:
            dist.all_gather_object(parts, samples, group=trainer.mesh["tp"].get_group())
        return sorted(sum(parts, []), key=lambda sample: sample.key)

    async def episode(self, seed: int, row: int, temperature: float, limit: int):
        """A turn of the policy after the prompt of a row; an error is the sample's failure."""
        trainer = self.trainer
        sample = trainer.data[row % len(trainer.data)]
        sample.append(train.encode_prompt(trainer.tokenizer, sample.messages)[-trainer.prompt_limit :])
        sample.key = (seed, 0)
        config = copy(self.config)
        config.max_new_tokens = min(limit, config.max_new_tokens)
        try:
            await train.rollout(sample, trainer.engine, trainer.tokenizer, config, temperature)
        except UserError:
            raise
        except Exception as error:
            sample.failure = f"{type(error).__name__}: {error}"
        sample.row, sample.state = {}, {}  # other ranks cannot have what only this process can use
        return sample

    @torch.no_grad()
    def score(self, samples: list, temperature: float) -> Scores:
        """Both sides' log-probs of the tokens that the engine made."""
        model = self.trainer.actor.model
        complete = [sample for sample in samples if not sample.failure]
        batch = train.Batch(complete, self.config.device)
        logprobs, entropy = model.logprobs(batch, temperature=temperature)
        model.reshard()  # or the root's gathered weights would stay until a backward pass
        count = len(logprobs) if complete else 0  # without samples the batch is a filler
        tensors = (batch.targets, batch.engine_logprobs, logprobs, entropy)
        return Scores(*[tensor[:count].cpu() for tensor in tensors])

    def early_gap(self, samples: list) -> float:
        """The gap of the first tokens of a few completions of a rollout, over all ranks."""
        few = []
        for sample in samples[:: max(1, len(samples) // PROMPTS)]:
            trained = sample.tokens["mask"].nonzero()[0]
            if len(trained) and not sample.failure:
                clipped = copy(sample)
                clipped.tokens = sample.tokens[: trained[0] + TOKENS]
                few.append(clipped)
        scores = self.score(few, self.config.temperature)
        return over_ranks(scores.gap if few else 0.0)[0]

    # ---- Probes ------------------------------------------------------------------------------------------
    def check_weights(self) -> float:
        """A probe after a push. Reports a difference, and returns it."""
        is_first = self.first is None
        gap, cause = self.probe_weights()
        if cause and self.config.gate == "stop" and not is_first:
            cause = self.try_again(cause)
        self.report(gap, cause)
        return gap

    def check_sampling(self):
        """Probes what greedy tokens cannot show: the temperature, and whether unlikely tokens come up."""
        self.report(*self.temperature_cause())
        self.report(*self.tail_cause())

    def probe_weights(self) -> tuple[float, str]:
        """The gap of greedily sampled tokens, the largest over all ranks, and its likely cause or ""."""
        samples = self.play(range(PROMPTS), 0.0)
        now = self.score(samples, 1.0)
        failure = next((sample.failure for sample in samples if sample.failure), "")
        gap, cause = over_ranks(now.gap, failure or self.version_cause(samples) or self.weights_cause(now))
        self.first = self.first or now
        engine_moved, _ = now.moved(self.last)
        if engine_moved != 0:  # otherwise let the actor's small steps add up
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
        return cause and f"{cause} (a second push cures it)"

    def explain(self, samples: list) -> str:
        """The likely cause of a rollout whose log-probs differ, from fresh weights and new probes."""
        cause = self.try_again("") or self.temperature_cause()[1] or self.tail_cause()[1]
        if cause:
            return cause
        if self.early_gap(samples) > self.bound / 2:
            return "stale weights: the last push did not reach the engine (a second push cures it)"
        where = "rope scaling, the engine's cache, changes by a chat template"
        return (
            f"a difference in later tokens only (the first few are right): look at long sequences ({where})"
        )

    def report(self, gap: float, cause: str):
        """Ends the run, or prints a warning, if there is a cause."""
        found = f"engine and actor disagree by {gap:.1e} (bound {self.bound:g}). Likely cause: {cause}."
        if cause and self.config.gate == "stop":
            raise UserError(f"--gate: {found} --gate warn continues")
        if cause and dist.get_rank() == 0:
            tqdm.write(f"--gate: {found}")

    # ---- Causes ------------------------------------------------------------------------------------------
    def version_cause(self, samples: list) -> str:
        """What the engine itself reports about its weights, unless they are the newest."""
        newest = self.trainer.engine.version
        trained = [sample.tokens[sample.tokens["mask"] == 1] for sample in samples]
        versions = {version for tokens in trained for version in tokens["version"].tolist()}
        if versions <= {newest}:
            return ""
        return f"stale weights: after push {newest} the engine reports those of push {min(versions)}"

    def weights_cause(self, now: Scores) -> str:
        """Why the engine's weights are not the actor's, or ""."""
        if not now.actor.isfinite().all():
            return "a broken actor: its own log-probs are not finite; lower --lr"
        engine_moved, actor_moved = now.moved(self.last)
        if engine_moved == 0 and actor_moved > self.bound / 10:
            return "stale weights: the actor has learned, and the engine answers the same to the last bit"
        if now.gap <= self.bound:
            return ""
        dtype = self.config.dtype
        if self.last is None and dtype != "bfloat16" and now.gap <= BOUND["bfloat16"]:
            return f"dtype: the difference has the size of rounding to bfloat16, and the run is in {dtype}"
        if self.last is None:
            advice = "check the engine's model and dtype, and what changes its prompts (an extra BOS)"
            return f"another model: even before the first step its answers are not those of --model; {advice}"
        if engine_moved < actor_moved / 10:
            return "stale weights: the engine answers as before the last push, which did not reach it"
        engine_moved, actor_moved = now.moved(self.first)
        if engine_moved < actor_moved / 10:
            return "base weights: the engine answers as at the start of the run; did it load the model again?"
        cause = "damaged weights: at least one tensor was lost or changed on its way to the engine"
        if self.trainer.actor.model.config.tie_word_embeddings:
            cause += "; this model ties its head to its embedding: check that the engine's head follows"
        return cause

    def temperature_cause(self) -> tuple[float, str]:
        """The gap of sampled tokens at the run's temperature, and its likely cause or ""."""
        temperature = self.config.temperature
        samples = self.play(range(PROMPTS), temperature)
        gap, _ = over_ranks(self.score(samples, temperature).gap)
        if gap <= self.bound:
            return gap, ""
        grid = [round(temperature * i / 20, 3) for i in range(4, 61)]
        gaps = {other: over_ranks(self.score(samples, other).gap)[0] for other in grid}
        likely = min(grid, key=gaps.get)
        if gaps[likely] < gap / 4:
            found = f"the engine seems to sample at {likely}, and --temperature is {temperature}"
            return gap, f"temperature: {found}"
        found = "greedy tokens have the right log-probs, sampled tokens do not"
        return gap, f"sampling: {found}; look for top_p, top_k, penalties or a logit bias in the engine"

    def tail_cause(self) -> tuple[float, str]:
        """How far the mean surprise of sampled tokens is below their entropy, and its likely cause or "".

        Both are equal, unless the engine never samples unlikely tokens but reports log-probs of the whole
        distribution. All draws are of the first prompt's next token, at a temperature that gives unlikely
        tokens some of the probability.
        """
        one = self.play([0], 1.0, 1)
        for i in range(50):
            temperature = 0.25 * 1.1**i
            entropy, _ = over_ranks(self.score(one, temperature).entropy.sum().item())
            if entropy > 1:
                break
        drawn = self.play([0] * DRAWS, temperature, 1)
        surprise = -torch.tensor([sample.tokens["logprob"][-1] for sample in drawn if not sample.failure])
        noise = surprise.std() / len(surprise) ** 0.5
        lack = entropy - surprise.mean().item()
        is_far = lack > 6 * noise + 0.02  # far out, because a few rare tokens can dominate the mean
        means = f"{-surprise.mean():.2f} instead of {-entropy:.2f}"
        cause = f"top_p, top_k or min_p: {len(surprise)} sampled tokens have a mean log-prob of {means}"
        return over_ranks(lack, cause if is_far else "")


def extend(trainer_class: type) -> type:
    """A trainer that probes its engine, and names the cause when the core's check fires."""

    class GatedTrainer(trainer_class):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.gate = Gate(self, self.push_again)
            self.gate_metrics = {}
            self.next_probe = 0.0

        def publish(self):
            """Pushes the weights, and probes the engine at the start and whenever there is time for it."""
            super().publish()
            start = time.perf_counter()
            if self.config.gate == "off" or over_ranks(self.next_probe - start)[0] > 0:
                return
            is_start = self.gate.first is None
            gap = self.gate.check_weights()
            end = time.perf_counter()
            self.next_probe = end + PAUSE * (end - start)
            if is_start:
                self.gate.check_sampling()
            self.gate_metrics = {"gate_diff": gap, "time_gate": time.perf_counter() - start}

        def push_again(self):
            """Pushes the same weights once more, to find out what that changes."""
            self.engine.sleep()
            super().publish()

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
                cause = self.gate.explain(self.rollout_samples)
            self.gate.report(gap, cause)

        def write(self, step: int, metrics: dict[str, float], samples: list):
            metrics |= self.gate_metrics
            self.gate_metrics = {}
            super().write(step, metrics, samples)

    return GatedTrainer
