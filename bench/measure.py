"""What the benchmarks share: measuring in turn, medians, tables on the screen, numbers in files.

    from bench.measure import in_turn, options, ratio, record, show        # no command of its own

The machine is shared and its speed varies. Alternatives therefore run in turn, round after round, in one
process, and a ratio is the median of the rounds' own ratios.
"""

import argparse
import gc
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "assets"
RECORDS = ASSETS / "records"  # what docs/results.md is made of
EMBEDDED = ASSETS / "embedded.json"  # flags of the job for machines without a GPU


def embedded_flags(**more) -> list[str]:
    """The command-line flags of the embedded job, whatever the machine, and others that take precedence."""
    flags = json.loads(EMBEDDED.read_text().replace("ASSETS", str(ASSETS)))
    flags |= {"device": "cpu", "dtype": "float32", "engine": "local"} | more
    return command_line(flags)


def command_line(flags: dict) -> list[str]:
    """{name: value} -> ["--name", "value", ...]."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def options(description: str, name: str, **extra) -> argparse.Namespace:
    """The flags of a benchmark: --rounds, --output, and `extra`, name=(default, help)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each thing, after a warm-up")
    parser.add_argument("--output", type=Path, default=RECORDS / f"{name}.json", help="file for the numbers")
    for flag, (default, text) in extra.items():
        parser.add_argument(f"--{flag}", type=type(default), default=default, help=text)
    torch.set_num_threads(1)
    return parser.parse_args()


def machine() -> str:
    """The machine that the numbers were measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, {device}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def seconds(action) -> tuple[float, float]:
    """Wall and CPU seconds of an action in this process, including the GPU's work."""
    gc.collect()
    wall = time.perf_counter()
    cpu = time.process_time()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def in_turn(actions: dict, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Each action once per round, after a warm-up round: {name: {"wall": [rounds], "cpu": [rounds]}}."""
    times = {name: {"wall": [], "cpu": []} for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            wall, cpu = seconds(action)
            if number > 0:
                times[name]["wall"].append(wall)
                times[name]["cpu"].append(cpu)
    return times


def ratio(slow: list[float], fast: list[float]) -> float:
    """How many times as long `slow` takes: the median over rounds."""
    return statistics.median(a / b for a, b in zip(slow, fast))


def show(rows: list[dict]):
    """Prints rows as a table; their keys are the columns."""
    cells = [list(rows[0])]
    for row in rows:
        cells.append([f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()])
    widths = [max(map(len, column)) for column in zip(*cells)]
    for cell in cells:
        print("  ".join(text.rjust(width) for text, width in zip(cell, widths)), flush=True)


def commit() -> str:
    """The commit of this checkout, marked if a source file differs from it."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "*.py"], cwd=ROOT)
    return found.stdout.strip() + (" with changes" if changed.returncode else "")


def record(output: Path, tables: dict[str, list[dict]], **more):
    """Writes what a published table needs: its command, commit, date, machine and tables, a fact per line.

    Tables are by title; each is a list of rows whose keys are its columns. `more` is kept, but not published.
    """
    facts = {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "commit": commit(),
        "date": f"{date.today()}",
        "machine": machine(),
        "tables": tables,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in (facts | more).items()]
    output.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{machine()}; the numbers are in {output}")
