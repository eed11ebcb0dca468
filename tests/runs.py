"""Runs in processes of their own, and what they leave behind, compared to the bit."""

import subprocess
import time
from itertools import zip_longest
from pathlib import Path

import torch
from safetensors.torch import load_file

from extras.checkpoint import checkpoints
from tests.conftest import ENVIRONMENT, HERE, read_rows, words

# Metrics that begin like this depend on the clock; a probe of the gate runs if there is time.
MEASURED = tuple("time_ idle_rollout peak_gb rollout_tokens_per_s train_tokens_per_s mfu gate_diff".split())
EQUAL = {"metrics": 0, "samples": 0, "tensors": 0}


def start(log: Path, *command, processes: int = 0, **environment) -> subprocess.Popen:
    """Starts python, or torchrun with so many processes, in a session of its own; a file gets its output."""
    options = {"cwd": HERE, "env": ENVIRONMENT | environment, "start_new_session": True}
    with log.open("w") as file:
        return subprocess.Popen(words(processes, command), **options, stdout=file, stderr=file)


def wait_for(condition, process: subprocess.Popen, seconds: float = 300):
    """Waits until a condition holds, while a process lives."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the process ended"
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


def count_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def read_metrics(folder: Path) -> list[dict]:
    """The records of a run, without what it measured."""
    records = read_rows(folder / "metrics.jsonl")
    return [{name: x for name, x in record.items() if not name.startswith(MEASURED)} for record in records]


def read_samples(folder: Path) -> list[dict]:
    """The samples of a run; of a failure, only that there is one, because it names its place in the code."""
    samples = read_rows(folder / "samples.jsonl")
    return [sample | {"failure": bool(sample["failure"])} for sample in samples]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint, if there is one, and of the exported model."""
    tensors = {}
    for place in [folder / "model", *checkpoints(folder)[-1:]]:
        for path in place.rglob("*.safetensors"):
            for name, tensor in load_file(path).items():
                tensors[f"{path.relative_to(folder)} {name}"] = tensor
    return tensors


def differences(one: Path, other: Path) -> dict[str, int]:
    """How many records, samples and tensors of two runs are not equal to the bit. Both have some of each."""
    counts = {}
    for name, read in (("metrics", read_metrics), ("samples", read_samples)):
        first, second = read(one), read(other)
        assert first
        counts[name] = sum(a != b for a, b in zip_longest(first, second))
    first, second = read_tensors(one), read_tensors(other)
    assert first
    same = [name for name in first.keys() & second.keys() if torch.equal(first[name], second[name])]
    return counts | {"tensors": len(first.keys() | second.keys()) - len(same)}
