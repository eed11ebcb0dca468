"""Does a long run stay as it was? Memory, open files and step time over 2,000 steps of the embedded model.

    python -m bench.soak [--steps 2000] [--skip 100] [--output assets/soak.json] [more flags of train.py]

One process, with an evaluation and a checkpoint every 100 steps. After each step the process and its children
are measured: resident memory (rss_mb), and the part of it that is no file (anon_mb); open files, threads,
children; the seconds and CPU seconds of the step. Of the process itself, the memory in use: what the C
library has allocated (malloc_mb), and Python's blocks. A leak raises those two; if only the first two rise,
the heap is fragmented. The learning rate is 1e-9, so that the policy, and with it the work of a step, stays
the same from the first step to the last. Needs Linux with glibc.

Prints a straight line through each column, over the steps after the first --skip. Neighboring steps are
alike (a generation of the garbage collector, another process on the machine), so the line is fitted to the
means of 20 blocks of steps, and the error of its slope comes from their distances to it. Draws all of it, and
writes the means.
"""

import argparse
import ctypes
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from matplotlib.figure import Figure

import train
from bench.measure import ASSETS, show, write

COLUMNS = (
    "rss_mb",
    "anon_mb",
    "malloc_mb",
    "python_blocks",
    "handles",
    "threads",
    "children",
    "cpu_seconds",
    "time_step",
)
FLAGS = {"prompts_per_step": 4, "eval_every": 100, "save_every": 100, "lr": 1e-9}
BLOCKS = 20


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2() returns, in bytes: here, blocks in mmap and other blocks in use count."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def malloc_mb() -> float:
    """What the C library has allocated for this process, in MB."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return (found.hblkhd + found.uordblks) / 1e6


def resident_mb(process: psutil.Process) -> tuple[float, float]:
    """The resident memory of a process, and the part of it that is no file, in MB."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return tuple(int(status[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))


def process_tree() -> list[psutil.Process]:
    """This process and its children."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def cpu_seconds() -> float:
    """The CPU time of all of them so far."""
    times = [process.cpu_times() for process in process_tree()]
    return sum(one.user + one.system for one in times)


def measure() -> list[float]:
    """The first seven of COLUMNS."""
    processes = process_tree()
    memory = [resident_mb(process) for process in processes]
    handles = sum(process.num_fds() for process in processes)
    threads = sum(process.num_threads() for process in processes)
    own = [malloc_mb(), sys.getallocatedblocks()]
    return [*map(sum, zip(*memory)), *own, handles, threads, len(processes) - 1]


class MeasuredTrainer(train.Trainer):
    """Measures itself after each step. The memory for the measurements is allocated at the start."""

    measured = np.zeros((0, len(COLUMNS)))

    def step(self):
        if len(self.measured) == 0:
            MeasuredTrainer.measured = np.full((self.config.steps, len(COLUMNS)), np.nan)
        cpu = cpu_seconds()
        start = time.perf_counter()
        metrics, samples = super().step()
        seconds = time.perf_counter() - start
        row = self.prompts_drawn // self.config.prompts_per_step - 1
        self.measured[row] = [*measure(), cpu_seconds() - cpu, seconds]
        return metrics, samples


def fit_line(values: np.ndarray) -> dict[str, float]:
    """Values [steps] -> their mean, and a line through the means of BLOCKS blocks: its slope per 1,000 steps.

    The error is the slope's standard error, from the residuals of the means; t is their ratio: beyond 2.1
    chance is an unlikely reason (18 degrees of freedom, 5 percent).
    """
    blocks = np.array_split(values - values[0], BLOCKS)  # so that what never changes is exactly 0
    means = np.array([block.mean() for block in blocks])
    steps = np.array_split(np.arange(len(values)), BLOCKS)
    middles = np.array([block.mean() for block in steps]) / 1000
    distances = middles - middles.mean()
    slope = (distances * means).sum() / (distances**2).sum()
    residuals = means - means.mean() - slope * distances
    variance = (residuals**2).sum() / (BLOCKS - 2)
    error = float(np.sqrt(variance / (distances**2).sum()))
    return {
        "mean": float(values.mean()),
        "lowest": float(values.min()),
        "highest": float(values.max()),
        "slope": float(slope),
        "error": error,
        "t": float(slope / error) if error else 0.0,
    }


def draw(columns: dict[str, np.ndarray], skip: int, output: Path):
    """A panel for each column, with the step from which on it counts."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(3, 3).flat, columns.items()):
        axes.plot(range(1, len(values) + 1), values, linewidth=0.5)
        axes.axvline(skip, color="grey", linestyle=":")
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=110)


def main():
    """Runs the training in this process, then reports."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--skip", type=int, default=100, help="steps before the first that counts")
    parser.add_argument("--output", type=Path, default=ASSETS / "soak.json", help="where the numbers go")
    options, others = parser.parse_known_args()
    flags = [f"--{name}={value}" for name, value in FLAGS.items()] + others
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train.py", *flags, f"--steps={options.steps}", f"--output_dir={folder}/run"]
        train.main(trainer=MeasuredTrainer)
    columns = dict(zip(COLUMNS, MeasuredTrainer.measured.T))
    rows = [{"what": name} | fit_line(values[options.skip :]) for name, values in columns.items()]
    print(f"steps {options.skip + 1} to {options.steps}; slope and error are per 1,000 steps")
    show(rows)
    draw(columns, options.skip, options.output.with_suffix(".png"))
    means = {}
    for name, values in columns.items():
        tens = np.array_split(values, options.steps // 10)
        means[name] = [round(float(block.mean()), 4) for block in tens]
    settings = {"flags": flags, "steps": options.steps, "skip": options.skip}
    write(options.output, **settings, rows=rows, means_of_10_steps=means)


if __name__ == "__main__":
    main()
