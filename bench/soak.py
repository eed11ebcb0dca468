"""Does a long run stay as it was? Memory, open files and step time over 2,000 steps of the embedded model.

    python -m bench.soak [--steps 2000] [--skip 100] [--output assets/soak.json] [more flags of train.py]

One process, with an evaluation and a checkpoint every 100 steps. After each step the process and its children are
looked at: memory that is resident (rss_mb), and what of it is no file (anon_mb); open files, threads, children; and the
seconds and CPU seconds that the step took. Of the process itself, what is in use of the memory that it holds: what the
C library has handed out (malloc_mb), and Python's blocks. A leak raises those two; if only the first two rise, the heap
has got holes. The learning rate is 1e-9, so that the policy, and with it the work of a step, stays the same from the
first to the last. Needs Linux with glibc.

Prints a straight line through each, over the steps after the first --skip. Neighbouring steps are alike (a generation
of the garbage collector, another process on the machine), so the line is laid through the means of 20 blocks of steps,
and the error of its slope comes from how far these lie from it. Draws all of it, and writes the means.
"""
import argparse
import ctypes
import sys
import tempfile
from pathlib import Path

import numpy
import psutil
from matplotlib.figure import Figure

import train
from bench.measure import ASSETS, show, write

COLUMNS = ("rss_mb", "anon_mb", "malloc_mb", "python_blocks", "handles", "threads", "children", "cpu_seconds",
           "time_step")
FLAGS = dict(prompts_per_step=4, eval_every=100, save_every=100, lr=1e-9, wandb="off")
BLOCKS = 20


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2() returns, in bytes: of blocks in mmap, and of others in use, among the rest."""
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def malloc_mb() -> float:
    """What the C library has handed out to this process, in MB."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    found = mallinfo()
    return (found.hblkhd + found.uordblks) / 1e6


def resident_mb(process: psutil.Process) -> tuple[float, float]:
    """The resident memory of a process, and what of it is no file, in MB."""
    found = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return tuple(int(found[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "RssAnon"))


def tree() -> list[psutil.Process]:
    """This process and its children."""
    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def cpu_seconds() -> float:
    """Of all of them, since they began."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in tree()))


def look() -> list[float]:
    """The first seven of COLUMNS."""
    return [*map(sum, zip(*map(resident_mb, tree()))), malloc_mb(), sys.getallocatedblocks(),
            sum(process.num_fds() for process in tree()), sum(process.num_threads() for process in tree()),
            len(tree()) - 1]


class Watched(train.Trainer):
    """Looks at itself after each step. The room for what it sees is there from the start."""
    seen = numpy.zeros((0, len(COLUMNS)))

    def step(self):
        """One step of training, and one look."""
        if len(self.seen) == 0:
            Watched.seen = numpy.full((self.config.steps, len(COLUMNS)), numpy.nan)
        start = cpu_seconds()
        metrics, samples = super().step()
        self.seen[self.state["step"]] = *look(), cpu_seconds() - start, metrics["time_step"]
        return metrics, samples


def line(values: numpy.ndarray) -> dict[str, float]:
    """Values [steps] -> their mean, and a line through the means of BLOCKS blocks: its slope for 1,000 steps.

    The error is the slope's standard error, from the residuals of the means; t is their ratio: beyond 2.1 chance is
    an unlikely reason (18 degrees of freedom, 5 per cent).
    """
    blocks = numpy.array_split(values - values[0], BLOCKS)      # so that what never changes is exactly 0
    means = numpy.array([block.mean() for block in blocks])
    middles = numpy.array([block.mean() for block in numpy.array_split(numpy.arange(len(values)), BLOCKS)]) / 1000
    apart = middles - middles.mean()
    slope = (apart * means).sum() / (apart ** 2).sum()
    residuals = means - means.mean() - slope * apart
    error = float(numpy.sqrt((residuals ** 2).sum() / (BLOCKS - 2) / (apart ** 2).sum()))
    return dict(mean=float(values.mean()), lowest=float(values.min()), highest=float(values.max()),
                slope=float(slope), error=error, t=float(slope / error) if error else 0.0)


def draw(values: dict[str, numpy.ndarray], skip: int, output: Path):
    """A panel for each column, with the step from which on it counts."""
    figure = Figure(figsize=(12, 8), layout="constrained")
    for axes, (name, of_steps) in zip(figure.subplots(3, 3).flat, values.items()):
        axes.plot(range(1, len(of_steps) + 1), of_steps, linewidth=0.5)
        axes.axvline(skip, color="grey", linestyle=":")
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=110)


def main():
    """Runs the training in this process, then looks back."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--skip", type=int, default=100, help="steps before the first that counts")
    parser.add_argument("--output", type=Path, default=ASSETS / "soak.json", help="where the numbers go")
    options, others = parser.parse_known_args()
    flags = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))] + others
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["train.py", *flags, "--steps", str(options.steps), "--output_dir", folder]
        train.main(trainer_class=Watched)
    values = dict(zip(COLUMNS, Watched.seen.T))
    rows = [dict(what=name) | line(of_steps[options.skip:]) for name, of_steps in values.items()]
    print(f"steps {options.skip + 1} to {options.steps}; slope and error are for 1,000 steps")
    show(rows)
    draw(values, options.skip, options.output.with_suffix(".png"))
    means = {name: [round(float(block.mean()), 4) for block in numpy.array_split(of_steps, options.steps // 10)]
             for name, of_steps in values.items()}
    write(options.output, flags=flags, steps=options.steps, skip=options.skip, rows=rows, means_of_10_steps=means)


if __name__ == "__main__":
    main()
