"""Does a run that is killed and resumed end like one that was not? Random kills, compared bit for bit.

    python -m bench.kills --rounds 20 [--steps 8] [--output assets/kills.json]

A run of the embedded job, with one process and with two, saves a checkpoint every other step. The same run in
another folder is killed with SIGKILL, all its processes at once: in every other round at a random instant of
its life, in the others while a checkpoint is being written. It is then started again by the same command with
--resume auto. In the end every weight, Adam moment, sample and metric must be equal, except for measured
times. Prints a table and writes the numbers.
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
from extras.checkpoint import checkpoints

MEASURED = (
    "time_",
    "idle_rollout",
    "peak_gb",
    "rollout_tokens_per_s",
    "train_tokens_per_s",
    "mfu",
    "gate_diff",
)  # the last: if there is time


def start(folder: Path, processes: int, steps: int, *more: str) -> subprocess.Popen:
    """Starts the run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    flags = {"steps": steps, "prompts_per_step": 8, "eval_every": 4, "save_every": 2, "output_dir": folder}
    words = [f"--{name}={value}" for name, value in flags.items()]
    command = [sys.executable, *launcher, "train.py", *words, *more]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, **quiet, start_new_session=True, env=environment)


def kill(process: subprocess.Popen):
    """Ends torchrun and every rank at once; ranks have sessions of their own."""
    ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    for pid in [*map(int, ranks), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the last checkpoint, if there is one, and of the exported model."""
    tensors = {}
    for place in [folder / "model", *checkpoints(folder)[-1:]]:
        for path in place.rglob("*.safetensors"):
            for name, tensor in load_file(path).items():
                tensors[f"{path.relative_to(folder)} {name}"] = tensor
    return tensors


def read_run(folder: Path) -> dict:
    """What must be equal: metrics, samples, tensors."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = []
    for record in records:
        metrics.append({name: value for name, value in record.items() if not name.startswith(MEASURED)})
    samples = (folder / "samples.jsonl").read_text().splitlines()
    return {"metrics": metrics, "samples": samples, "tensors": read_tensors(folder)}


def count_differences(one: dict, other: dict) -> dict[str, int]:
    """How many records, lines and tensors of two runs are not equal to the bit."""
    counts = {}
    for name in ("metrics", "samples"):
        unequal = sum(a != b for a, b in zip(one[name], other[name]))
        counts[name] = unequal + abs(len(one[name]) - len(other[name]))
    counts["tensors"] = 0
    for name in one["tensors"].keys() | other["tensors"].keys():
        pair = [found["tensors"].get(name) for found in (one, other)]
        counts["tensors"] += pair[0] is None or pair[1] is None or not torch.equal(*pair)
    return counts


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


def describe(folder: Path) -> str:
    """Where a killed run stands: its lines of metrics, its checkpoints, and whether one is half written."""
    log = folder / "metrics.jsonl"
    lines = log.read_text().count("\n") if log.exists() else 0
    names = ", ".join(path.name for path in checkpoints(folder)) or "none"
    return f"{lines} records; {names}{'; one half written' if (folder / 'partial').exists() else ''}"


def run_rounds(scratch: Path, processes: int, flags, rng: random.Random) -> list[dict]:
    """Runs once without a kill, then --rounds times with one. A row per round counts the differences."""
    whole = scratch / "whole"
    began = time.perf_counter()
    code = start(whole, processes, flags.steps).wait()
    assert code == 0, f"the run without a kill ended with exit code {code}"
    seconds = time.perf_counter() - began
    expected = read_run(whole)
    sizes = ", ".join(f"{len(content)} {name}" for name, content in expected.items())
    print(f"{processes} ranks, a whole run: {seconds:.1f} s, {sizes}", flush=True)
    rows = []
    for number in range(flags.rounds):
        folder = scratch / f"killed-{number}"
        process = start(folder, processes, flags.steps)
        if number % 2:
            wait_for_save(folder, process, rng, flags.steps // 2)
        else:
            time.sleep(rng.uniform(0.2, 1.0) * seconds)
        kill(process)
        row = {"ranks": processes, "killed_at": describe(folder)}
        row["code"] = start(folder, processes, flags.steps, "--resume", "auto").wait()
        rows.append(row | count_differences(expected, read_run(folder)))
        print(rows[-1], flush=True)
        shutil.rmtree(folder)
    return rows


def main():
    """Measures one process, and two."""
    flags = options(__doc__, "kills", steps=(8, "of the run"), seed=(0, "of the instants"))
    rng = random.Random(flags.seed)
    rows = []
    for processes in (1, 2):
        with tempfile.TemporaryDirectory() as scratch:
            rows += run_rounds(Path(scratch), processes, flags, rng)
    show(rows)
    write(flags.output, rows=rows)


if __name__ == "__main__":
    main()
