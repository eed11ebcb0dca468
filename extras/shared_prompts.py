"""--share_prompts: an update computes the prompt of a group once, not once per completion.

A prompt's states do not depend on what follows it. A micro-batch lays out a group of three as

    tokens     | prompt, completion 1 | completion 2  | completion 3  |
    positions  | 0 ... P ...          | P ...         | P ...         |
    keys       | prompt, completion 1 | prompt,       | prompt,       |
               |                      | completion 2  | completion 3  |

so that it has P + R1 + R2 + R3 tokens instead of 3 P + R1 + R2 + R3. The state of the prompt's last token
predicts the first token of every completion, and its gradient is their sum. A prompt is what precedes the
first trained token. Log-probs, losses and gradients are those of the plain layout, up to rounding.
"""

from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace

import numpy as np
import torch

from train import Batch, Sample, flag


@dataclass
class Flags:
    share_prompts: bool = flag(True, "computation of each prompt once per group in updates")


def prompt_length(sample: Sample) -> int:
    """Tokens before the first that is trained; 0 if none is."""
    return int(sample.tokens["mask"].argmax())


def size(samples: list[Sample]) -> int:
    """Tokens of samples with the same prompt."""
    prompt = prompt_length(samples[0])
    return prompt + sum(len(sample.tokens) - prompt for sample in samples)


def by_prompt(samples: list[Sample]) -> list[list[Sample]]:
    """Samples with the same prompt together, the longest first."""
    groups = {}
    for sample in sorted(samples, key=lambda sample: len(sample.tokens), reverse=True):
        prompt = sample.tokens["id"][: prompt_length(sample)]
        groups.setdefault(prompt.tobytes(), []).append(sample)
    return list(groups.values())


class SharedBatch(Batch):
    """A micro-batch in which each prompt has its tokens once."""

    def __init__(self, samples: list[Sample], device: str):
        super().__init__(samples, device)
        if not samples:
            return  # the filler stays as it is
        places = {}  # prompt -> where its tokens are
        ids, keys, source = [], [], []
        self.shared = []  # of each sample, how many tokens another one has
        length = 0
        for sample in samples:
            mask = sample.tokens["mask"]
            prompt = sample.tokens["id"][: prompt_length(sample)]
            shared = places.get(prompt.tobytes(), np.arange(0))
            new = sample.tokens["id"][len(shared) :]
            seen = np.append(shared, np.arange(length, length + len(new)))
            places[prompt.tobytes()] = seen[: len(prompt)]
            self.shared.append(len(shared))
            ids.append(new)
            keys.append(seen)
            source.append(seen[mask.nonzero()[0] - 1])
            length += len(new)
        lengths, key_lengths = [list(map(len, parts)) for parts in (ids, keys)]
        positions = [np.arange(n - t, n) for t, n in zip(lengths, key_lengths)]
        self.ids = torch.tensor(np.concatenate(ids).astype(np.int64)[None], device=device)  # [1, T]
        self.source = torch.tensor(np.concatenate(source), device=device)  # [N]
        self.layout = {"longest": max(key_lengths)}
        arrays = {"position_ids": np.concatenate(positions)[None], "keys": np.concatenate(keys)}
        arrays["bounds"] = np.cumsum([0, *lengths], dtype=np.int32)
        arrays["key_bounds"] = np.cumsum([0, *key_lengths], dtype=np.int32)
        self.layout |= {name: torch.tensor(array, device=device) for name, array in arrays.items()}

    @staticmethod
    def pack(samples: list[Sample], budget: int, least: int) -> list[list[Sample]]:
        """Batch.pack, with groups in one piece, or in as few as fit into the budget."""
        parts = []
        for group in by_prompt(samples):
            for number in count(1):
                split = [group[i::number] for i in range(number)]
                if size(split[0]) <= budget or number == len(group):
                    break
            parts += [SimpleNamespace(tokens=range(size(part)), samples=part) for part in split]
        packs = Batch.pack(parts, budget, least)
        return [[sample for part in parts for sample in part.samples] for parts in packs]


def extend(trainer_class: type) -> type:
    """A trainer whose micro-batches share prompts."""

    class SharingTrainer(trainer_class):
        def __init__(self, config, *arguments):
            if config.share_prompts:
                self.batch_class = SharedBatch
            super().__init__(config, *arguments)

        def shared_tokens(self, sample: Sample) -> int:
            """For extras/balance.py: what a group's samples have once."""
            return prompt_length(sample) if self.config.share_prompts else 0

    return SharingTrainer
