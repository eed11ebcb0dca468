"""CPU seconds per step of everything around the model, for 512 samples of 1,224 tokens on one core.

    python -m bench.around [--rounds 3] [--repeats 3] [--old CHECKOUT] [--steps 6] [--output FILE]

The first table measures each part alone: making the episodes' arrays, the exchange of samples within a
tensor-parallel group (pickling them and reading them back, as torch.distributed does), advantages, weights,
packing, tensors of the micro-batches, statistics of the monitor, records for rank 0, and the files. With
--old, the same work of another checkout of this repository, which must be of commit fb47f14, stands beside
it; both run in turn in processes of their own. The second table is the share of these parts in the steps of
the embedded job (see bench/overhead.py).
"""

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

SAMPLES, GROUP, PROMPT, COMPLETION, BUDGET = 512, 8, 200, 1024, 8192
TEXT = (
    "Let me try (12 + 3) * 4 / 5 - 6, which is not yet 24. " * 76
)  # about 4 kB, as 1,024 tokens of Qwen are


class Parts:
    """CPU seconds by part, in the order in which they were measured."""

    def __init__(self):
        self.seconds = {}

    def __call__(self, name: str, action):
        """Measures an action; returns its result."""
        start = time.process_time()
        result = action()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - start
        return result


def episode_arrays(generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random ids of a prompt and of a completion, and the log-probs of the latter."""
    prompt = generator.integers(0, 150_000, PROMPT, dtype=np.int32)
    completion = generator.integers(0, 150_000, COMPLETION, dtype=np.int32)
    return prompt, completion, -generator.random(COMPLETION, dtype=np.float32)


def exchange(samples: list) -> list:
    """One rank pickles all samples of its tensor-parallel group, and each rank reads them back."""
    return pickle.loads(pickle.dumps(samples))


def make_samples(train, generator) -> list:
    """The episodes of a step, as train.rollout makes them."""
    samples = []
    for i in range(SAMPLES):
        prompt, completion, logprobs = episode_arrays(generator)
        row = {"nums": [1, 2, 3], "target": 6}
        sample = train.Sample(
            [{"role": "user", "content": "Make 6 from 1, 2, 3."}], row, key=divmod(i, GROUP)
        )
        sample.append(prompt)
        sample.append(completion, turn=0, mask=1, logprob=logprobs, version=1)
        sample.turns.append(TEXT)
        sample.reward = float(i % 3 == 0)
        sample.metrics = {"solved": sample.reward, "attempts": float(i % 5)}
        samples.append(sample)
    return samples


def bare_trainer(train, folder: Path):
    """A trainer without model and engine, alone in its mesh."""
    from extras import add_flags, balance, monitor

    trainer_class = monitor.extend(balance.extend(train.Trainer))
    trainer = object.__new__(trainer_class)
    trainer.config = add_flags(train.Config)(
        model="none",
        device="cpu",
        group_size=GROUP,
        prompts_per_step=SAMPLES // GROUP,
        tokens_per_micro_batch=BUDGET,
    )
    trainer.mesh = train.init_distributed(trainer.config)
    trainer.monitor = monitor.Monitor(vars(trainer.config))
    shape = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    config = SimpleNamespace(**shape, vocab_size=512, num_hidden_layers=2)
    trainer.actor = SimpleNamespace(model=SimpleNamespace(config=config))
    trainer.folder = folder
    trainer.tokens = 0
    return trainer


def new_side(repeats: int) -> list[dict]:
    """Seconds by part of train.py."""
    import torch.distributed as dist

    import train

    train.tqdm.write = lambda text: None
    trainer = bare_trainer(train, Path(tempfile.mkdtemp()))
    found = []
    for repeat in range(repeats + 1):
        part = Parts()
        samples = part("episodes' arrays", lambda: make_samples(train, np.random.default_rng(0)))
        samples = part("exchange of samples", lambda: exchange(samples))
        part("advantages", lambda: trainer.compare(samples))
        part("weights", lambda: train.set_weights(samples, len(samples)))
        # as Trainer.micro_batches does: once for this rank's count, once for that of all ranks
        useful = [sample for sample in samples if sample.tokens["advantage"].any()]
        part("packing", lambda: train.pack(useful, BUDGET, 1))
        packs = part("packing", lambda: train.pack(useful, BUDGET, 1))
        part("tensors of micro-batches", lambda: [train.Batch(one, "cpu") for one in packs])
        part("records and files", lambda: trainer.write(2 + repeat, {}, samples))
        found.append(part.seconds)
    dist.destroy_process_group()
    return found[1:]


def old_side(repeats: int) -> list[dict]:
    """Seconds by part of train.py at fb47f14, which this runs in."""
    import torch.distributed as dist
    from transformers import AutoTokenizer

    import train
    from tools import packing, runlog

    runlog.say = lambda text: None
    folder = tempfile.mkdtemp()
    tiny = {
        name: value for name, value in train.TINY.items() if name not in ("prompts_per_step", "group_size")
    }
    flags = {"group_size": GROUP, "prompts_per_step": SAMPLES // GROUP, "tokens_per_micro_batch": BUDGET}
    flags |= {"updates_per_step": 1, "output_dir": folder, "wandb": "off"}
    config = train.Config(**tiny | flags)
    mesh = train.init_distributed(config)
    trainer = object.__new__(train.Trainer)
    trainer.config = config
    trainer.mesh = mesh
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    log = runlog.RunLog(vars(config), train.__file__, tokenizer, 1000, True)
    found = []
    for repeat in range(repeats + 1):
        part = Parts()
        samples = part("episodes' arrays", lambda: make_old_samples(train, np.random.default_rng(0)))
        samples = part("exchange of samples", lambda: exchange(exchange(samples)))  # over tp, then over dp
        part("advantages", lambda: trainer.compare(samples))
        useful = [sample for sample in samples if any(sample.advantages)]
        packs = part("packing", lambda: packing.pack(useful, BUDGET, 1))
        batches = part("tensors of micro-batches", lambda: [train.Batch(one, "cpu") for one in packs])
        for batch in batches:
            weigh = (batch, config.aggregation, samples, config.max_new_tokens)
            part("weights", lambda: train.token_weights(*weigh))
            batch.entropy = batch.logprob_diff = batch.weights
        names = ("entropy", "logprob_diff")
        part("numbers per token", lambda: packing.hand_back(samples, batches, names, mesh["dp"]))
        metrics = {"time_step": 1.0, "rollout_tokens_per_s": 1.0, "train_tokens_per_s": 1.0}
        metrics |= {"idle": 0.0, "peak_gb": 0.0, "loss": 0.0, "entropy": 1.0, "clip_fraction": 0.0}
        part("records and files", lambda: log.write(2 + repeat, metrics, samples))
        found.append(part.seconds)
    dist.destroy_process_group()
    return found[1:]


def make_old_samples(train, generator) -> list:
    """The episodes of a step, as train.rollout made them at fb47f14."""
    samples = []
    for i in range(SAMPLES):
        prompt, completion, logprobs = episode_arrays(generator)
        row = {"nums": [1, 2, 3], "target": 6}
        sample = train.Sample(
            [{"role": "user", "content": "Make 6 from 1, 2, 3."}], row, key=divmod(i, GROUP)
        )
        sample.append(prompt.tolist(), mask=0)
        sample.append(
            completion.tolist(), mask=1, logprobs=logprobs.tolist(), versions=[1] * COMPLETION, step=0
        )
        sample.text = TEXT
        sample.rewards = [float(i % 3 == 0)]
        sample.metrics = {"solved": sample.reward, "attempts": float(i % 5)}
        samples.append(sample)
    return samples


def run_side(side: str, folder: Path, repeats: int) -> list[dict]:
    """Measures one side in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), side, str(repeats)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the {side} side failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare_sides(found: dict[str, list[dict]]) -> list[dict]:
    """A row per part with the medians of both sides, and one for their sums."""
    rows = []
    for name in dict.fromkeys(name for records in found.values() for record in records for name in record):
        row = {"part": name}
        for side, records in found.items():
            row[f"{side} (CPU s)"] = statistics.median(record.get(name, 0.0) for record in records)
        rows.append(row)
    total = {"part": "all"}
    for side, records in found.items():
        total[f"{side} (CPU s)"] = statistics.median(sum(record.values()) for record in records)
    return [*rows, total]


def main():
    """Measures both tables and prints them."""
    from bench.measure import ROOT, options, show, write
    from bench.overhead import measure_steps, shares

    repeats = {"repeats": (3, "measurements in each process"), "old": ("", "a checkout of fb47f14")}
    flags = options(__doc__, "around", **repeats, steps=(6, "steps of the embedded job; 0: without it"))
    sides = {"new": ROOT} | ({"fb47f14": Path(flags.old).resolve()} if flags.old else {})
    found = {side: [] for side in sides}
    for _ in range(flags.rounds):
        for side, folder in sides.items():
            found[side] += run_side(side, folder, flags.repeats)
    rows = compare_sides(found)
    print(f"CPU seconds for {SAMPLES} samples of {PROMPT + COMPLETION} tokens, {SAMPLES // GROUP} groups:")
    show(rows)
    embedded = []
    if flags.steps:
        sys.argv = ["train.py"]
        walls, cpus = measure_steps(flags.steps)
        step = statistics.median(record["step"] for record in cpus)
        embedded = [{"part": name, "share of CPU": share} for name, share in shares(cpus).items()]
        print(f"\nThe embedded job, {step:.3f} CPU seconds per step:")
        show(embedded)
    write(flags.output, rows=rows, found=found, embedded=embedded)


if __name__ == "__main__":
    if sys.argv[1:2] in (["new"], ["fb47f14"]):
        sides = {"new": new_side, "fb47f14": old_side}
        sys.path[0] = os.environ["PYTHONPATH"]
        print(json.dumps(sides[sys.argv[1]](int(sys.argv[2]))))
    else:
        main()
