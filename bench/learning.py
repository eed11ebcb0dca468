"""Does the embedded default really learn? Three seeds of it and a control with a random reward, one after the other.

    python -m bench.learning [--seeds 0 1 2] [--processes 2] [--output assets/learning.png]

Each is the command of the README in a process of its own; its wall time is from the start of the command to its end,
imports, evaluations and export included. Prints a table, writes the numbers beside the picture as JSON.
"""
import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure

from tools.curve import read

PANELS = {"eval_score": "held-out problems solved (greedy)", "reward": "training problems solved (sampled)",
          "stops_after_hit": "stops after a right attempt", "goes_on_after_miss": "goes on after a wrong one"}


def train(target: list[str], seed: int, processes: int, folder: Path) -> dict:
    """Runs one training; returns its seconds and its history of metrics."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *target,
               "--seed", str(seed), "--output_dir", str(folder)]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                   env=os.environ | {"OMP_NUM_THREADS": "1"})
    return {"seconds": time.perf_counter() - start, "history": read(folder)}


def draw(runs: dict[str, dict], output: Path):
    """A panel for each of PANELS, a line for each run."""
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items()):
        for label, run in runs.items():
            key = "solved" if label == "random reward" and name == "reward" else name
            points = [(record["step"], record[key]) for record in run["history"] if key in record]
            if points:
                axes.plot(*zip(*points), label=label, color="grey" if label == "random reward" else None)
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(output, dpi=110)


def main():
    """Runs all, prints the table, saves picture and numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("assets/learning.png"))
    options = parser.parse_args()
    runs = {}
    print("run            held-out at start   at end   best   sampled at start   at end   seconds")
    with tempfile.TemporaryDirectory() as scratch:
        jobs = [(f"seed {seed}", ["train.py"], seed) for seed in options.seeds]
        for label, target, seed in [*jobs, ("random reward", ["-m", "bench.random_reward"], options.seeds[0])]:
            runs[label] = run = train(target, seed, options.processes, Path(scratch) / label.replace(" ", "-"))
            scores = [record["eval_score"] for record in run["history"] if "eval_score" in record]
            sampled = [record.get("solved", record["reward"]) for record in run["history"][1:]]
            print(f"{label:14} {scores[0]:17.3f} {scores[-1]:8.3f} {max(scores):6.3f} {sampled[0]:18.3f} "
                  f"{sampled[-1]:8.3f} {run['seconds']:9.0f}", flush=True)
    machine = (f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
               f"torch {torch.__version__}")
    print(machine)
    draw(runs, options.output)
    options.output.with_suffix(".json").write_text(json.dumps({"machine": machine, "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
