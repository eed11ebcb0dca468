"""Does the embedded job learn? Three seeds of it and a control with a random reward, one after the other.

    python -m bench.learning [--seeds 0 1 2] [--processes 2] [--output FILE.png] [flags of train.py]

Each run is the command of the README in a process of its own; its wall time is from the start of the command
to its end, including imports, evaluations and export. CPU time is that of all its processes. Prints a table,
and writes the numbers beside the picture as JSON.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from matplotlib.figure import Figure

from bench.measure import machine
from tools.curve import read

PANELS = {
    "eval_score": "held-out problems solved (greedy)",
    "reward": "training problems solved (sampled)",
    "stops_after_hit": "stops after a correct attempt",
    "goes_on_after_miss": "continues after a wrong one",
}
CONTROL = "random reward"


def cpu_of_children() -> float:
    """CPU seconds of all processes that this one has started and waited for, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def train(target: list[str], seed: int, processes: int, folder: Path, flags=()) -> dict:
    """Runs one training; returns its wall and CPU seconds and its history of metrics."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = ["--seed", str(seed), "--output_dir", str(folder), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    start = time.perf_counter()
    cpu = cpu_of_children()
    subprocess.run([sys.executable, *launcher, *target, *words], check=True, **quiet, env=environment)
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": cpu_of_children() - cpu}
    return seconds | {"history": read(folder)}


def draw(runs: dict[str, dict], output: Path):
    """A panel for each of PANELS, a line for each run."""
    figure = Figure(figsize=(14, 3.4), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items()):
        for label, run in runs.items():
            key = "solved" if label == CONTROL and name == "reward" else name
            points = [(record["step"], record[key]) for record in run["history"] if key in record]
            if points:
                axes.plot(*zip(*points), label=label, color="grey" if label == CONTROL else None)
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(output, dpi=110)


def describe(run: dict) -> dict[str, float]:
    """The row of a run: scores at its start and end, and its seconds."""
    history = run["history"]
    scores = [record["eval_score"] for record in history if "eval_score" in record]
    sampled = [record.get("solved", record["reward"]) for record in history if "reward" in record]
    return {
        "held-out at start": scores[0],
        "at end": scores[-1],
        "best": max(scores),
        "sampled at start": sampled[0],
        "sampled at end": sampled[-1],
        "seconds": run["seconds"],
        "CPU seconds": run["cpu_seconds"],
    }


def main():
    """Runs all, prints the table, saves picture and numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("assets/learning.png"))
    options, flags = parser.parse_known_args()
    runs = {}
    jobs = [(f"seed {seed}", ["train.py"], seed) for seed in options.seeds]
    jobs.append((CONTROL, ["-m", "bench.random_reward"], options.seeds[0]))
    with tempfile.TemporaryDirectory() as scratch:
        for label, target, seed in jobs:
            folder = Path(scratch) / label.replace(" ", "-")
            runs[label] = train(target, seed, options.processes, folder, flags)
            row = {name: round(value, 3) for name, value in describe(runs[label]).items()}
            print(label, row, flush=True)
    print(machine())
    draw(runs, options.output)
    options.output.with_suffix(".json").write_text(json.dumps({"machine": machine(), "runs": runs}) + "\n")


if __name__ == "__main__":
    main()
