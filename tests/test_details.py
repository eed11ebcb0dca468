"""Tests of extras/details.py: what samples.jsonl keeps of tokens, by hand."""

import json

import numpy as np

import train
from extras import details
from extras.details import marked, token_details
from tests.conftest import Config, some_samples
from train import Sample


def test_what_is_kept_of_tokens_by_hand():
    sample = Sample([], {})
    sample.append([5])
    assert token_details(sample.tokens, {}) == {"ids": [5], "trained": []}
    sample.append([6, 7], mask=1, version=4, logprob=[-1, -2], advantage=0.5)
    sample.append([8])
    sample.append([9], mask=1, version=4, logprob=-3, advantage=0.5, turn=1)
    sample.append([10], turn=1)
    entropy = np.array([1, 2, 3], np.float32)
    kept = token_details(sample.tokens, {"entropy": entropy, "logprob_diff": 0 * entropy})
    assert kept == {
        "ids": [5, 6, 7, 8, 9, 10],
        "trained": [[1, 3], [4, 5]],
        "versions": 4,
        "advantages": 0.5,
        "logprobs": [-1.0, -2.0, -3.0],
        "turn_ids": [0, 0, 1],
        "entropy": [1.0, 2.0, 3.0],
        "logprob_diff": 0.0,
    }
    assert json.loads(json.dumps(kept)) == kept


def test_only_what_was_in_this_steps_update_has_statistics():
    """Several updates per step, each with micro-batches; a sample without an advantage is in none of them."""

    class Core:
        def __init__(self, config):
            self.config = config

        def forward(self, batch):
            return 0.0, {name: batch.targets + 0.5 for name in ("entropy", "logprob_diff", "clip_fraction")}

        def learn(self, samples):
            for part in (samples[:3], samples[3:], []):
                self.forward(train.Batch(part, "cpu"))
            return {"loss": 1.0}

        def record(self, sample):
            return {"key": sample.key}

    trainer = details.extend(Core)(Config(prompts_per_step=2, token_groups=1))
    samples = some_samples(4, 2)  # those of two steps
    assert trainer.learn(samples[:4]) == {"loss": 1.0} and not trainer.passes
    records = [trainer.record(sample) for sample in samples]
    assert ["ids" in record for record in records] == [True, True, False, False] * 2
    assert ["entropy" in record for record in records] == [True, True] + [False] * 6
    ids = samples[1].tokens["id"][samples[1].tokens["mask"] == 1]
    assert records[1]["entropy"] == records[1]["logprob_diff"] == (ids + 0.5).tolist()
    trainer.learn([])
    assert "entropy" not in trainer.record(samples[1])  # the next step keeps nothing of this one


def test_trained_tokens_are_marked(tokenizer):
    sample = Sample([], {})
    for text, mask in (("1+2", 0), ("=", 1), ("3", 1), ("4", 0), ("5", 1)):
        sample.append(tokenizer.encode(text), mask=mask)
    assert marked(sample.tokens, tokenizer) == "1+2«=3»4«5»"
