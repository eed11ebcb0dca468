"""Does a run that is killed and resumed end like one that was not? Kills at random instants, compared bit for bit.

    python -m bench.kills --rounds 20 [--steps 8]

A run of the embedded job, of one process and of two, saves a checkpoint every other step. The same run, elsewhere, is
killed with SIGKILL, all its processes at once: every other round at a random instant of its life, and every other one
while a checkpoint is being written. It is then started again by the same command, with --resume auto. In the end every
weight, Adam moment, sample and metric must be equal, but for seconds and memory. Prints a table, writes the numbers.
"""
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from bench.measure import options, show, write
from tools.checkpoint import checkpoints

MEASURED = ("time_", "idle", "peak_gb", "rollout_tokens_per_s", "train_tokens_per_s", "mfu")


def start(folder: Path, flags, *more: str) -> subprocess.Popen:
    """The run, in a group of processes of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={flags.processes}",
               "train.py", "--steps", str(flags.steps), "--prompts_per_step", "8", "--eval_every", "4",
               "--save_every", "2", "--wandb", "off", "--output_dir", str(folder), *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                            env=os.environ | {"OMP_NUM_THREADS": "1"})


def kill(process: subprocess.Popen):
    """Ends torchrun and every rank at once; ranks have sessions of their own."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in [*map(int, children), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Those of the last checkpoint, if there is one, and of the exported model."""
    found = {}
    for place in [folder / "model", *checkpoints(folder)[-1:]]:
        for path in place.rglob("*.safetensors"):
            found |= {f"{path.relative_to(folder)} {name}": tensor for name, tensor in load_file(path).items()}
    return found


def kept(folder: Path) -> dict:
    """What must be equal: metrics, samples, tensors."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in record.items() if not name.startswith(MEASURED)} for record in records]
    return dict(metrics=metrics, samples=(folder / "samples.jsonl").read_text(), tensors=tensors_in(folder))


def differences(one: dict, other: dict) -> dict[str, int]:
    """How many records, lines and tensors are not equal to the bit."""
    lines = [found["samples"].splitlines() for found in (one, other)]
    names = one["tensors"].keys() | other["tensors"].keys()
    unequal = sum(name not in one["tensors"] or name not in other["tensors"]
                  or not torch.equal(one["tensors"][name], other["tensors"][name]) for name in names)
    return dict(metrics=sum(a != b for a, b in zip(one["metrics"], other["metrics"]))
                + abs(len(one["metrics"]) - len(other["metrics"])),
                samples=sum(a != b for a, b in zip(*lines)) + abs(len(lines[0]) - len(lines[1])), tensors=unequal)


def wait_for_save(folder: Path, process: subprocess.Popen, rng: random.Random, saves: int):
    """Returns at a random instant within the writing of one of the checkpoints."""
    number = rng.randint(1, saves)
    while process.poll() is None and number:
        if (folder / "partial").exists():
            number -= 1
            if number == 0:
                time.sleep(rng.uniform(0, 0.1))
                return
            while (folder / "partial").exists():
                time.sleep(0.001)
        time.sleep(0.001)


def state_of(folder: Path) -> str:
    """Where a killed run stands: its lines of metrics, its checkpoints, and whether one is half written."""
    lines = (folder / "metrics.jsonl").read_text().count("\n") if (folder / "metrics.jsonl").exists() else 0
    names = ", ".join(path.name for path in checkpoints(folder)) or "none"
    return f"{lines} steps; {names}{'; one half written' if (folder / 'partial').exists() else ''}"


def rounds(scratch: Path, flags, rng: random.Random) -> list[dict]:
    """Runs once without a kill, then --rounds times with one; says for each what was different in the end."""
    whole, rows = scratch / "whole", []
    began = time.perf_counter()
    start(whole, flags).wait()
    lasts, expected = time.perf_counter() - began, kept(whole)
    print(f"{flags.processes} ranks, a whole run: {lasts:.1f} s, {len(expected['metrics'])} records, "
          f"{len(expected['samples'].splitlines())} samples, {len(expected['tensors'])} tensors", flush=True)
    for number in range(flags.rounds):
        folder = scratch / f"killed-{number}"
        process = start(folder, flags)
        if number % 2:
            wait_for_save(folder, process, rng, flags.steps // 2)
        else:
            time.sleep(rng.uniform(0.2, 1.0) * lasts)
        kill(process)
        found = state_of(folder)
        code = start(folder, flags, "--resume", "auto").wait()
        rows.append(dict(ranks=flags.processes, killed_at=found, code=code) | differences(expected, kept(folder)))
        shutil.rmtree(folder)
    return rows


def main():
    """Measures one process, and two."""
    flags, rows = options(__doc__, "kills", steps=(8, "of the run"), seed=(0, "of the instants")), []
    rng = random.Random(flags.seed)
    for flags.processes in (1, 2):
        with tempfile.TemporaryDirectory() as scratch:
            rows += rounds(Path(scratch), flags, rng)
    show(rows)
    write(flags.output, rows=rows)


if __name__ == "__main__":
    main()
