"""What the benchmarks share: measuring in turn, medians, a table on the screen and the numbers in a file.

The machine is shared and its speed wanders. So what is compared runs in turn, round after round, in one process, and
the ratio is the median of the rounds' own ratios.
"""
import argparse
import gc
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
from matplotlib.figure import Figure

ASSETS = Path(__file__).parent.parent / "assets"


def options(description: str, name: str, **extra) -> argparse.Namespace:
    """The flags of a benchmark: --rounds, --output, and `extra`, name=(default, help)."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="how often each thing is measured; one more warms up")
    parser.add_argument("--output", type=Path, default=ASSETS / f"{name}.json", help="where the numbers go")
    for flag, (default, text) in extra.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default, help=text)
    torch.set_num_threads(1)
    return parser.parse_args()


def machine() -> str:
    """What the numbers were measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (f"{platform.machine()}, {os.cpu_count()} cores, {device}, Python {platform.python_version()}, "
            f"torch {torch.__version__}, transformers {transformers.__version__}")


def seconds(action) -> tuple[float, float]:
    """Wall and CPU seconds of an action in this process, the GPU's work included."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turn(actions: dict, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Each action once a round, after a round that does not count: {name: {"wall": [rounds], "cpu": [rounds]}}."""
    times = {name: {"wall": [], "cpu": []} for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            for clock, value in zip(("wall", "cpu"), seconds(action)):
                times[name][clock] += [value] if number else []
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    """How many times as long `slow` takes: the median over rounds."""
    return statistics.median(a / b for a, b in zip(slow, fast))


def line(xs: list[float], ys: list[float]) -> dict[str, float]:
    """The straight line through points, by least squares: its slope, its intercept, and R^2."""
    slope, intercept = statistics.linear_regression(xs, ys)
    return dict(slope=slope, intercept=intercept, r2=statistics.correlation(xs, ys) ** 2)


def show(rows: list[dict]):
    """Prints rows as a table; their keys are the columns."""
    cells = [list(rows[0])] + [[f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()]
                               for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for cell in cells:
        print("  ".join(text.rjust(width) for text, width in zip(cell, widths)), flush=True)


def write(output: Path, **numbers):
    """Writes the numbers, and the machine they are from."""
    output.write_text(json.dumps(dict(machine=machine(), **numbers)) + "\n")
    print(f"{machine()}; the numbers are in {output}")


def picture(output: Path, panels: dict[str, str], runs: dict[tuple[str, int], dict]):
    """Draws a panel for each metric, with its title; a line for each run, by (name, seed), a colour for each name."""
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(name for name, _ in runs))}
    figure = Figure(figsize=(4.5 * len(panels), 3.4), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for (name, seed), run in runs.items():
            points = [(record["step"], record[metric]) for record in run["history"] if metric in record]
            first = seed == min(one for other, one in runs if other == name)
            axes.plot(*zip(*points), color=colors[name], alpha=0.8, label=name if first else None)
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(output.with_suffix(".png"), dpi=110)


def report(output: Path, panels: dict[str, str], runs: dict[tuple[str, int], dict], numbers):
    """Ends a benchmark of trainings, by (name, seed): a table of what `numbers` says of each, a picture, all in a file.

    `runs` are what bench.learning.train returned; curves have a row a step, of the step and the metrics of `panels`.
    """
    rows = [dict(run=name, seed=seed) | numbers(run) for (name, seed), run in runs.items()]
    show(rows)
    picture(output, panels, runs)
    columns = ["step", *panels]
    curves = {f"{name}, seed {seed}": [[record.get(column) for column in columns] for record in run["history"]]
              for (name, seed), run in runs.items()}
    write(output, rows=rows, columns=columns, curves=curves)
