"""What a lone train.py leaves out of its log: seconds per phase, MFU, messages about noteworthy steps,
per-token numbers, the first sample in full, the run's curves.

Of a step's time_step, time_rollout is sampling with rewards and tools, time_update the backward passes and
the optimizer, time_logprobs the rest of Trainer.learn (the reference's and the old log-probs), time_push the
weight sync; they are the slowest rank's. time_reward adds up the samples of all ranks, which overlap.

MFU (model FLOPs utilisation; Chowdhery et al., arXiv:2204.02311, appendix B) is the share of a GPU's peak
that the arithmetic of the model itself reaches: what gradient checkpointing computes twice counts once.
"""

import os
import platform
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import train
from train import RANK, flag, reduce_over

# Dense bf16 FLOP/s per card, by a part of its name (from the makers' data sheets). Other cards have no MFU.
PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "H800": 989e12,
    "H20": 148e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
# Thresholds, as shares: of completions, of tokens, of the first step's entropy, of groups.
TRUNCATED = 0.3
CLIPPED = 0.2
COLLAPSED = 0.2
NO_SIGNAL = 0.5
# A finding is reported again when it has grown by this factor and this much, or after this many
# steps without it.
WORSE_FACTOR = 1.5
WORSE_BY = 0.05
FORGET_AFTER = 10


@dataclass
class Flags:
    token_groups: int = flag(2, "groups per step with per-token details in samples.jsonl")


def forward_flops(config, lengths: list[int], trained: int) -> float:
    """FLOPs of one forward pass over sequences of these lengths, with the head at `trained` of their tokens.

    A multiplication and an addition count as two. Counted are the layers' matrices, causal attention (a token
    sees half of its sequence on average) and the head; norms, rotations and activations are below 1 %.
    """
    hidden = config.hidden_size
    heads = config.num_attention_heads
    kv_heads = config.num_key_value_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    projections = 2 * hidden * width * (heads + kv_heads)  # weights of q, o, k and v
    mlp = 3 * hidden * config.intermediate_size
    matrices = 2 * (projections + mlp) * sum(lengths)
    attention = sum(4 * heads * width * length * (length + 1) / 2 for length in lengths)
    head = 2 * hidden * config.vocab_size * trained
    return config.num_hidden_layers * (matrices + attention) + head


def peak_flops(card: str) -> float | None:
    """Peak FLOP/s of a card, by its name; None where it is unknown."""
    return next((peak for name, peak in PEAKS.items() if name in card), None)


def hardware() -> dict:
    """The machine of this run, for files that compare runs."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU",
        "processes": dist.get_world_size() if dist.is_initialized() else 1,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def draw_curve(folder: Path):
    """Draws curve.png of the run in `folder`; a run never fails because its curve cannot be drawn."""
    try:
        from tools.curve import draw

        draw([Path(folder)], Path(folder) / "curve.png")
    except ImportError:  # without matplotlib, or without tools/
        pass
    except Exception as error:
        print(f"curve.png was not drawn: {type(error).__name__}: {error}", flush=True)


# In samples.jsonl: the columns of Sample.tokens that are kept for trained tokens, under these names.
COLUMNS = {
    "logprob": "logprobs",
    "advantage": "advantages",
    "entropy": "entropy",
    "logprob_diff": "logprob_diff",
    "version": "versions",
    "turn": "turn_ids",
}


def token_details(tokens: np.ndarray) -> dict:
    """What samples.jsonl keeps of tokens [T]: ids [T], the runs [start, end] of trained ones, their numbers.

    A column is a list [N] over the trained tokens, or one number if all are the same.
    """
    mask = tokens["mask"].astype(bool)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    details = {"ids": tokens["id"].tolist(), "trained": edges.reshape(-1, 2).tolist()}
    for column, name in COLUMNS.items():
        if column in tokens.dtype.names and mask.any():
            values = tokens[column][mask]
            same = (values == values[0]).all()
            details[name] = values[0].item() if same else values.tolist()
    return details


class Finding(NamedTuple):
    """Something to report about a step."""

    kind: str
    severity: float  # in 0..1; the same kind is news again only if clearly worse
    sentence: str


class Monitor:
    """Used by rank 0 after each step; `state` returns what a resumed run starts from."""

    def __init__(self, config: dict, first_entropy=None, low=None, high=None, reported=None):
        self.config = config
        self.first_entropy = first_entropy  # at the first step
        self.low = low  # smallest reward so far
        self.high = high
        self.reported = reported or {}  # kind -> [severity when last reported, steps since it was last found]

    def state(self) -> dict:
        """The arguments that continue this monitor in another process; JSON can hold them."""
        return {
            "first_entropy": self.first_entropy,
            "low": self.low,
            "high": self.high,
            "reported": {kind: list(values) for kind, values in self.reported.items()},
        }

    def speed(self, record: dict, model_config, lengths: list[int], trained: int, processes: int) -> dict:
        """{"mfu": ...} of the update, where the card's peak is known; else {}.

        `lengths` are the token counts of the sequences that the update ran through, on all ranks, and
        `trained` is the number of their trained tokens.
        """
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        peak = peak_flops(card)
        seconds = record.get("time_update")
        if not peak or not seconds:
            return {}
        # the backward pass costs two forward passes
        flops = 3 * forward_flops(model_config, lengths, trained)
        return {"mfu": flops / seconds / processes / peak}

    def diagnose(self, record: dict, rewards: list[list[float]], failures: list[str]) -> str:
        """Sentences about a step, from its metrics, rewards by group and failures; "" if there is no news."""
        is_first = self.first_entropy is None
        if is_first:
            self.first_entropy = record.get("entropy", 0.0)
        every_reward = [reward for group in rewards for reward in group]
        if every_reward:
            self.low = min(every_reward if self.low is None else [self.low, *every_reward])
            self.high = max(every_reward if self.high is None else [self.high, *every_reward])
        groups = self.count_groups(rewards)
        findings = [
            *failure_findings(failures, len(every_reward)),
            *self.signal(groups, is_first),
            *self.loss_near_zero(record, is_first),
            *self.truncation(record),
            *self.clipping(record),
            *self.entropy_collapse(record, groups),
        ]
        return " ".join(finding.sentence for finding in self.news(findings))

    def news(self, findings: list[Finding]) -> list[Finding]:
        """The findings to report: new ones, clearly worse ones, and those back after FORGET_AFTER steps."""
        found = {finding.kind for finding in findings}
        for kind in list(self.reported):
            if kind in found:
                self.reported[kind][1] = 0
            else:
                self.reported[kind][1] += 1
            if self.reported[kind][1] >= FORGET_AFTER:
                del self.reported[kind]
        new = []
        for finding in findings:
            last = self.reported.get(finding.kind)
            if last is None or finding.severity > max(WORSE_FACTOR * last[0], last[0] + WORSE_BY):
                self.reported[finding.kind] = [finding.severity, 0]
                new.append(finding)
        return new

    def count_groups(self, rewards: list[list[float]]) -> Counter:
        """The number of groups with a "signal", or whose rewards are all "correct", "wrong" or "equal"."""
        counts = Counter()
        for group in rewards:
            if len(set(group)) > 1:
                counts["signal"] += 1
            elif self.low == self.high or group[0] not in (self.low, self.high):
                counts["equal"] += 1
            elif group[0] == self.high:
                counts["correct"] += 1
            else:
                counts["wrong"] += 1
        return counts

    def signal(self, groups: Counter, is_first: bool) -> Iterator[Finding]:
        """How many groups carry a signal: at the first step, and when most carry none."""
        total = groups.total()
        if not total or self.config.get("baseline") == "none":  # then nothing is compared within a group
            return
        others = [f"{groups[kind]} all {kind}" for kind in ("correct", "wrong", "equal") if groups[kind]]
        share = 1 - groups["signal"] / total
        if not groups["signal"]:
            cure = "harder" if groups["correct"] > groups["wrong"] else "easier"
            sentence = (
                f"None of the {total} groups carries a signal ({', '.join(others)}), so there is nothing to "
                f"learn from this step: use {cure} prompts or raise --group_size."
            )
            yield Finding("no signal", share, sentence)
        elif is_first or share > NO_SIGNAL:
            reasons = f" ({', '.join(others)})" if others else ""
            yield Finding("signal", share, f"{groups['signal']} of {total} groups carry a signal{reasons}.")

    def loss_near_zero(self, record: dict, is_first: bool) -> Iterator[Finding]:
        """Answers what everyone asks at the first step."""
        on_policy = self.config.get("updates_per_step") == 1 and not self.config.get("kl_coef")
        if is_first and on_policy and abs(record.get("loss", 1.0)) < 1e-3:
            sentence = (
                "A loss near 0 is expected: before the update every ratio is 1, and the advantages of a "
                "group sum to 0. The gradient is not 0; watch the reward."
            )
            yield Finding("loss", 0.0, sentence)

    def truncation(self, record: dict) -> Iterator[Finding]:
        """Completions that the length limit cut off."""
        share = record.get("truncated", 0.0)
        if share > TRUNCATED:
            sentence = (
                f"{share:.0%} of the completions were cut off: raise --max_new_tokens, or check "
                "samples.jsonl for completions that never end."
            )
            yield Finding("truncated", share, sentence)

    def clipping(self, record: dict) -> Iterator[Finding]:
        """Updates that the clip holds back. Ratios of whole sequences are clipped often, by design."""
        share = record.get("clip_fraction", 0.0)
        if share > CLIPPED and self.config.get("ratio", "token") == "token":
            sentence = f"{share:.0%} of the tokens were clipped: lower --lr or --updates_per_step."
            yield Finding("clipped", share, sentence)

    def entropy_collapse(self, record: dict, groups: Counter) -> Iterator[Finding]:
        """Low entropy is fine once the task is solved; before that, it ends learning."""
        left = record.get("entropy", self.first_entropy) / (self.first_entropy or 1.0)
        unsolved = groups["wrong"] + groups["equal"]
        if left < COLLAPSED and unsolved > groups.total() / 2:
            sentence = (
                f"Entropy fell to {left:.0%} of its value at the first step, and most groups are uniform "
                "without being correct: lower --lr, or raise --clip_high, --entropy_coef or --temperature."
            )
            yield Finding("entropy", 0.01 / max(left, 0.01), sentence)  # each halving is worse, down to 1 %


def failure_findings(failures: list[str], total: int) -> Iterator[Finding]:
    """One finding for each of the three most common causes among the failed samples."""
    examples = {}
    for failure in failures:
        *where, said = failure.strip().splitlines()  # the last line of code, and what it raised
        cause = said.partition(":")[0][:60]  # "TimeoutError: 60 s passed" -> "TimeoutError"
        place = f" ({where[0].strip()})" if where else ""
        examples.setdefault(cause, []).append(said.rstrip(".") + place)
    by_count = sorted(examples.items(), key=lambda item: -len(item[1]))
    for cause, alike in by_count[:3]:
        example = alike[0]
        if len(alike) == 1:
            sentence = f"1 sample failed, and its group was left out of the update: {example}."
        else:
            sentence = (
                f"{len(alike)} samples failed, and their groups were left out of the update: {example}."
            )
        yield Finding(f"failed: {cause}", len(alike) / max(1, total), sentence)


def peak_gb() -> float:
    """The peak memory of this process so far, in GB; GPU memory if there is a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def marked(tokens: np.ndarray, tokenizer) -> str:
    """The text of tokens [T], special tokens too, with each run of trained tokens in « »."""
    mask = tokens["mask"].astype(bool)
    edges = np.flatnonzero(np.diff(mask)) + 1
    text = ""
    for run in np.split(tokens, edges):
        part = tokenizer.decode(run["id"])
        text += f"«{part}»" if run["mask"].any() else part
    return text


# Per token of a loss, for samples.jsonl; columns of Sample.tokens.
PER_TOKEN = ("entropy", "logprob_diff")


def write_back(batch, stats: dict[str, torch.Tensor]):
    """Copies statistics [N] of a micro-batch into the tokens of its samples."""
    rows = batch.source.cpu().numpy() + 1
    starts = batch.bounds.tolist()
    for name, values in stats.items():
        column = np.zeros(starts[-1], np.float32)
        column[rows] = values.float().cpu().numpy()
        for sample, start in zip(batch.samples, starts):
            sample.tokens[name] = column[start : start + len(sample.tokens)]


def extend(trainer_class: type) -> type:
    """A trainer with a monitor on rank 0 (`self.monitor`), and with numbers per token in samples.jsonl."""
    known = {name for name, _ in train.TOKEN}
    train.TOKEN += [(name, np.float32) for name in PER_TOKEN if name not in known]

    class MonitoredTrainer(trainer_class):
        def __init__(self, config, *arguments):
            self.seconds = Counter()  # by phase of a step, on this rank
            self.passes = []  # micro-batches with samples to log, and their statistics
            self.gaps = []  # largest differences of log-probs, by micro-batch
            self.largest_gap = 0.0  # in the step
            self.tokens = 0  # in this rank's update of the step
            self.update_began = None
            super().__init__(config, *arguments)
            self.monitor = Monitor(asdict(config))

        def open_log(self):
            super().open_log()
            shutil.copy(train.__file__, self.folder / "train.py")

        # ---- Times -----------------------------------------------------------------------------------
        def step(self):
            self.seconds.clear()
            start = time.perf_counter()
            metrics, samples = super().step()
            self.seconds["step"] = time.perf_counter() - start
            return metrics | self.speed(samples), samples

        def rollout(self) -> list:
            start = time.perf_counter()
            samples = super().rollout()
            self.seconds["rollout"] = time.perf_counter() - start
            self.seconds["reward"] = self.seconds.pop("score", 0.0)  # excludes evaluations
            return samples

        async def score(self, sample):
            start = time.perf_counter()
            try:
                await super().score(sample)
            finally:
                self.seconds["score"] += time.perf_counter() - start

        def publish(self):
            start = time.perf_counter()
            super().publish()
            self.seconds["push"] += time.perf_counter() - start

        def learn(self, samples: list) -> dict[str, float]:
            """The update. Backward passes begin with the first `forward`, after all other log-probs."""
            start = time.perf_counter()
            self.update_began = None
            self.tokens = 0
            metrics = super().learn(samples)
            end = time.perf_counter()
            self.seconds["logprobs"] = (self.update_began or end) - start
            self.seconds["update"] = end - (self.update_began or end)
            self.largest_gap = torch.stack(self.gaps).max().item() if self.gaps else 0.0
            self.gaps.clear()
            for batch, stats in self.passes:
                write_back(batch, stats)
            self.passes.clear()
            return metrics

        def micro_batches(self, samples: list) -> list:
            batches = super().micro_batches(samples)
            self.tokens += sum(batch.ids.numel() for batch in batches if batch.samples)
            return batches

        def forward(self, batch):
            if self.update_began is None:
                if torch.cuda.is_available():
                    torch.cuda.synchronize()  # log-probs may still be on their way
                self.update_began = time.perf_counter()
            loss, stats = super().forward(batch)
            gaps = stats["logprob_diff"] * (batch.weights > 0)  # excludes fillers
            self.gaps.append(gaps.max())  # stays on its device: no synchronization
            if any(map(self.is_detailed, batch.samples)):
                kept = {name: stats[name].detach() for name in PER_TOKEN if name in stats}
                self.passes.append((batch, kept))
            return loss, stats

        def speed(self, samples: list) -> dict[str, float]:
            """Seconds by phase, tokens per second, idle shares, a rank's peak memory, the largest gap."""
            dp = self.mesh["dp"]
            sampled = sum(int(sample.tokens["mask"].sum()) for sample in samples)
            names = ("rollout", "logprobs", "update", "push", "step")
            sums = reduce_over(dp, [sampled, self.tokens, self.seconds["reward"], self.seconds["rollout"]])
            largest = [*(self.seconds[name] for name in names), peak_gb(), self.tokens, self.largest_gap]
            slowest = reduce_over(dp, largest, dist.ReduceOp.MAX)
            metrics = {f"time_{name}": seconds for name, seconds in zip(names, slowest)}
            updating = metrics["time_logprobs"] + metrics["time_update"]
            return metrics | {
                "time_reward": sums[2],
                "rollout_tokens_per_s": sums[0] / max(metrics["time_rollout"], 1e-9),
                "train_tokens_per_s": sums[1] / max(updating, 1e-9),
                "idle_rollout": 1 - sums[3] / dp.size() / max(slowest[0], 1e-9),  # waiting for the slowest
                "idle_update": 1 - sums[1] / dp.size() / max(slowest[6], 1),  # by tokens
                "peak_gb": slowest[5],
                "logprob_diff_max": slowest[7],
            }

        # ---- The log ---------------------------------------------------------------------------------
        def is_detailed(self, sample) -> bool:
            """Whether samples.jsonl keeps numbers per token: in the first --token_groups groups of a step."""
            return sample.key[0] % self.config.prompts_per_step < self.config.token_groups

        def record(self, sample) -> dict:
            """The core's record, with details of each token in some groups."""
            record = super().record(sample)
            if self.is_detailed(sample):
                record |= token_details(sample.tokens)
                if not sample.tokens["entropy"].any():  # it was not part of the update
                    for name in PER_TOKEN:
                        record.pop(name, None)
            return record

        def write(self, step: int, metrics: dict[str, float], samples: list):
            """Logs a step, with its MFU, and prints what is news."""
            if step == 1 and RANK == 0 and samples:
                text = marked(samples[0].tokens, self.tokenizer)
                reward = f"{samples[0].reward:g}"
                tqdm.write(f"\n{text}\n\n(the first sample, reward {reward}; tokens in « » are trained)\n")
            counts = gather_counts(samples, self.mesh)
            if counts and counts["rewards"]:
                config = self.actor.model.config
                sizes = (counts["lengths"], counts["trained"], dist.get_world_size())
                metrics |= self.monitor.speed(metrics, config, *sizes)
            super().write(step, metrics, samples)
            if counts and counts["rewards"]:
                news = self.monitor.diagnose(metrics, counts["rewards"], counts["failures"])
                if news:
                    tqdm.write(f"step {step} | {news}")

        def fit(self):
            super().fit()
            if RANK == 0:
                draw_curve(self.folder)
                tqdm.write(f"Done: {self.folder}/model; python -m tools.view {self.folder} shows the samples")

    return MonitoredTrainer


def gather_counts(samples: list, mesh) -> dict | None:
    """On rank 0 rewards by group, failures, lengths and trained tokens over all ranks; elsewhere None."""
    groups = {}
    counts = {"rewards": [], "failures": [], "lengths": [], "trained": 0}
    mine = samples if mesh["tp"].get_local_rank() == 0 else []
    failed = {sample.key[0] for sample in mine if sample.failure}  # groups that are left out of the loss
    for sample in mine:
        if sample.key[0] not in failed:
            groups.setdefault(sample.key[0], []).append(sample.reward)
        if sample.failure:
            counts["failures"].append(sample.failure)
        if sample.tokens["advantage"].any():  # others are not part of the update
            counts["lengths"].append(len(sample.tokens))
            counts["trained"] += int(sample.tokens["mask"].sum())
    counts["rewards"] = list(groups.values())
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(counts, parts)
    if parts is None:
        return None
    return {name: sum((part[name] for part in parts), type(counts[name])()) for name in counts}
