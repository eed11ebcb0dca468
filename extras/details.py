"""--token_groups: per-token numbers in samples.jsonl, for tools/view.py; the first sample on the screen.

A detailed sample also has its ids, the runs [start, end] of trained tokens, and per trained token the
engine's log-prob, the advantage, the weight version, the turn, and, if it was part of the update, the entropy
and the log-prob difference: a list [N], or one number if all are the same.
"""

from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from train import RANK, flag

# Columns of Sample.tokens and their names in samples.jsonl
COLUMNS = {"logprob": "logprobs", "advantage": "advantages", "version": "versions", "turn": "turn_ids"}
STATISTICS = ("entropy", "logprob_diff")  # of the loss


@dataclass
class Flags:
    token_groups: int = flag(2, "groups per step with per-token details in samples.jsonl")


def token_details(tokens: np.ndarray, statistics: dict[str, np.ndarray]) -> dict:
    """What samples.jsonl keeps of tokens [T], with statistics [N] of the trained ones."""
    mask = tokens["mask"].astype(bool)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    details = {"ids": tokens["id"].tolist(), "trained": edges.reshape(-1, 2).tolist()}
    if mask.any():
        numbers = {name: tokens[column][mask] for column, name in COLUMNS.items()}
        for name, values in (numbers | statistics).items():
            same = (values == values[0]).all()
            details[name] = values[0].item() if same else values.tolist()
    return details


def marked(tokens: np.ndarray, tokenizer) -> str:
    """The text of tokens [T], special tokens too, with each run of trained tokens in « »."""
    mask = tokens["mask"].astype(bool)
    edges = np.flatnonzero(np.diff(mask)) + 1
    text = ""
    for run in np.split(tokens, edges):
        part = tokenizer.decode(run["id"])
        text += f"«{part}»" if run["mask"].any() else part
    return text


def extend(trainer_class: type) -> type:
    """A trainer that logs some samples token by token."""

    class DetailingTrainer(trainer_class):
        def __init__(self, config, *arguments):
            self.passes = []  # micro-batches with samples to detail, and their statistics
            self.statistics = {}  # sample.key -> {name: [N]} of the last update
            super().__init__(config, *arguments)

        def is_detailed(self, sample) -> bool:
            """Whether a sample is among the first --token_groups groups of a step."""
            return sample.key[0] % self.config.prompts_per_step < self.config.token_groups

        def forward(self, batch):
            loss, stats = super().forward(batch)
            if any(map(self.is_detailed, batch.samples)):
                kept = {name: stats[name].detach() for name in STATISTICS if name in stats}
                self.passes.append((batch, kept))  # stays on its device: no synchronization
            return loss, stats

        def learn(self, samples: list) -> dict[str, float]:
            metrics = super().learn(samples)
            self.statistics = {}
            for batch, stats in self.passes:
                lengths = [int(sample.tokens["mask"].sum()) for sample in batch.samples]
                for name, values in stats.items():
                    for sample, part in zip(batch.samples, values.float().cpu().split(lengths)):
                        self.statistics.setdefault(sample.key, {})[name] = part.numpy()
            self.passes.clear()
            return metrics

        def record(self, sample) -> dict:
            record = super().record(sample)
            if self.is_detailed(sample):
                record |= token_details(sample.tokens, self.statistics.get(sample.key, {}))
            return record

        def write(self, step: int, metrics: dict[str, float], samples: list):
            if step == 1 and RANK == 0 and samples:
                text = marked(samples[0].tokens, self.tokenizer)
                reward = f"{samples[0].reward:g}"
                tqdm.write(f"\n{text}\n\n(the first sample, reward {reward}; tokens in « » are trained)\n")
            super().write(step, metrics, samples)

    return DetailingTrainer
