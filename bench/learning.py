"""What is learned: small trainings by the commands that README.md and docs/ name, in one table each.

    python -m bench.learning [TABLE ...] [--jobs 2] [--seeds 0 1] [--steps N] [--output FOLDER]
    torchrun --standalone --nproc_per_node=2 -m bench.learning --coin [flags of train.py]

embedded           the README's command on a CPU, and its control: the same with a random reward
algorithms         every row of recipes/algorithms.py, and the critics of recipes/ppo.py
games              recipes/guess_number.py with and without a discount
tools              recipes/math_python.py with and without its tool
process_rewards    recipes/prm.py with each critic: the only reward is what a model says of each line
formats            the embedded job in float32, bfloat16 and float16; only if named: a CPU is slow in float16
sglang             the embedded job with SGLang on the CPU; only if named, as it requires sglang

--jobs processes run at once. A table is recorded, with the curves of its runs, in assets/records/TABLE.json.
Seconds are those of the whole command, from its start to the exported model. In every table `solved` is the
share of sampled answers that are right, whatever was rewarded.

--coin is that control, for any flags of train.py: it trains on a coin that knows nothing of the answer, while
evaluations ask the real reward.
"""

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import train
from bench.measure import RECORDS, record, show
from extras.curve import read
from recipes.algorithms import ALGORITHMS

CHANCE = 0.25  # of the coin: about what the embedded model solves at first, so that as many groups differ


class CoinTrainer(train.Trainer):
    """Throws a coin for each sample just before it is compared to its group."""

    def compare(self, samples: list[train.Sample]):
        for sample in samples:
            sample.metrics["solved"] = sample.reward
            coin = random.Random(f"{self.config.seed} {sample.key}")  # the same on any number of ranks
            sample.reward = float(coin.random() < CHANCE)
        super().compare(samples)


# ---------------------------------------------------------------------------- the tables ------------------
def first(values: list[float]) -> float:
    """The value of the first step that has one."""
    return values[0]


def last(values: list[float]) -> float:
    """The value of the last step that has one."""
    return values[-1]


def late(values: list[float]) -> float:
    """The mean over the last five steps, which is less noisy than the last."""
    return fmean(values[-5:])


HELD_OUT = {
    "held-out, start": (first, "eval_score"),
    "end": (last, "eval_score"),
    "best": (max, "eval_score"),
}
SOLVED = {"solved, first step": (first, "solved"), "last five": (late, "solved")}


@dataclass
class Table:
    """Trainings that differ in a few flags.

    A row is what torchrun starts, and its own flags; `flags` are those of all rows, where START is the folder
    of a model, which `tools.make_start` makes with the words of `start`. A cell is a function of a metric's
    values, one per step.
    """

    rows: dict[str, str]
    columns: dict[str, tuple[Callable, str]]
    flags: str = ""
    start: str = ""
    seeds: tuple = (0,)
    processes: int = 1


CRITICS = ("ppo", "appo", "tppo")
TABLES = {
    "embedded": Table(
        rows={"the README's command": "train.py", "random reward": "-m bench.learning --coin"},
        columns=HELD_OUT | SOLVED,
        seeds=(0, 1, 2),
        processes=2,
    ),
    "algorithms": Table(
        rows={name: f"-m recipes.algorithms --algo {name}" for name in ALGORITHMS}
        | {"reinforce_pp": "-m recipes.algorithms --algo reinforce_pp --kl_coef 0.001"}
        | {name: f"-m recipes.ppo --critic {name} --critic_lr 1e-3" for name in CRITICS},
        columns=HELD_OUT | SOLVED | {"entropy, last step": (last, "entropy")},
        flags="--steps 40 --eval_every 10",
    ),
    "games": Table(
        rows={f"--gamma {gamma}": f"-m recipes.guess_number --gamma {gamma}" for gamma in (0.9, 1.0)},
        columns={
            "turns per game, first step": (first, "turns"),
            "turns, last five": (late, "turns"),
            **SOLVED,
            "of 32 secrets, greedy, start": (first, "eval_score"),
            "end": (last, "eval_score"),
        },
        flags="--model START --steps 40 --eval_every 10 --prompts_per_step 32 --group_size 8 "
        "--updates_per_step 4 --max_turns 8 --max_new_tokens 8 --lr 1e-3 --warmup_steps 3 "
        "--gradient_checkpointing False",
        start="guesser",
        seeds=(0, 1),
    ),
    "tools": Table(
        rows={f"--tool {tool}": f"-m recipes.math_python --tool {tool}" for tool in (True, False)},
        columns={
            **HELD_OUT,
            **SOLVED,
            "programs per episode, first step": (first, "tool_uses"),
            "programs, last five": (late, "tool_uses"),
        },
        flags="--model START --data START/train.jsonl --eval_data START/test.jsonl --steps 20 "
        "--eval_every 5 --prompts_per_step 8 --group_size 8 --updates_per_step 2 --max_turns 2 "
        "--max_new_tokens 16 --lr 5e-4 --warmup_steps 3 --gradient_checkpointing False",
        start="calculator",
    ),
    "process_rewards": Table(
        rows={f"--critic {name}": f"-m recipes.prm --critic {name}" for name in ("appo", "tppo", "none")},
        columns={
            **HELD_OUT,
            **SOLVED,
            "paid, first step": (first, "reward"),
            "paid, last five": (late, "reward"),
        },
        flags="--prm START --steps 25 --lr 1e-4 --critic_lr 1e-3 --gae_lambda 0.95 --eval_every 5",
        start="prm --steps 150",
    ),
    "formats": Table(
        rows={
            f"--dtype {dtype}": f"train.py --dtype {dtype}" for dtype in ("float32", "bfloat16", "float16")
        },
        columns={**HELD_OUT, **SOLVED, "difference of a log-prob": (fmean, "logprob_diff")},
        seeds=(0, 1, 2),
        processes=2,
    ),
    "sglang": Table(
        rows={f"--tp_size {size}": f"train.py --engine sglang --tp_size {size}" for size in (1, 2)},
        columns={
            **HELD_OUT,
            **SOLVED,
            "largest difference of a log-prob": (max, "logprob_diff_max"),
            "seconds per step": (fmean, "time_step"),
        },
        processes=2,
    ),
}
DEFAULT = [name for name in TABLES if name not in ("sglang", "formats")]


# ----------------------------------------------------------------------------- the runs -------------------
def command(table: Table, name: str, seed: int, folder: Path, start: Path, steps: int | None) -> list[str]:
    """The words of a run's command after `python`."""
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={table.processes}"
    flags = table.flags.replace("START", str(start))
    words = f"{launcher} {table.rows[name]} {flags} --seed {seed} --output_dir {folder}"
    return shlex.split(words + (f" --steps {steps}" if steps else ""))


def run_python(words: list[str]) -> float:
    """Runs python with these words; returns its seconds. Raises RuntimeError with what it wrote last."""
    begin = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return time.perf_counter() - begin


def history_of(folder: Path) -> list[dict]:
    """The metrics of a run, one object per step; where nothing else was rewarded, `solved` is the reward."""
    history = read(folder)
    for metrics in history:
        if "reward" in metrics:
            metrics.setdefault("solved", metrics["reward"])
    return history


def summary(history: list[dict], columns: dict[str, tuple[Callable, str]]) -> dict:
    """The cells of a run's row, by title."""
    cells = {}
    for title, (function, metric) in columns.items():
        cells[title] = function([metrics[metric] for metrics in history if metric in metrics])
    return cells


def curve(history: list[dict], names: list[str]) -> list[list[float | None]]:
    """A row per step: the values of these metrics, to five digits."""
    return [[float(f"{one[name]:.5g}") if name in one else None for name in names] for one in history]


def make_start(name: str, scratch: Path) -> Path:
    """Makes the start model of a table, if it has one of its own; returns its folder."""
    folder = scratch / f"{name}-start"
    words = TABLES[name].start.split()
    if words:
        run_python(["-m", "tools.make_start", *words, "--output", str(folder)])
    return folder


def measure(name: str, start: Path, flags: argparse.Namespace, scratch: Path):
    """Runs a table's trainings from a start model, and records it."""
    table = TABLES[name]
    seeds = table.seeds if flags.seeds is None else flags.seeds
    runs = [(row, seed) for row in table.rows for seed in seeds]

    def measure_run(row: str, seed: int) -> tuple[dict, list[dict]]:
        """The row of a run, and its history."""
        folder = scratch / f"{name}-{list(table.rows).index(row)}-{seed}"
        seconds = run_python(command(table, row, seed, folder, start, flags.steps))
        history = history_of(folder)
        cells = {"run": row, "seed": seed} | summary(history, table.columns) | {"seconds": seconds}
        print(cells, flush=True)
        return cells, history

    with ThreadPoolExecutor(max(1, flags.jobs // table.processes)) as pool:
        measured = list(pool.map(measure_run, *zip(*runs)))
    rows = [cells for cells, _ in measured]
    show(rows)
    names = ["step", *dict.fromkeys(metric for _, metric in table.columns.values())]
    curves = {
        f"{row}, seed {seed}": curve(history, names) for (row, seed), (_, history) in zip(runs, measured)
    }
    record(flags.output / f"{name}.json", {"": rows}, curve_columns=names, curves=curves)


def main():
    """Reads the command line, and measures the tables that it names."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="default: all but sglang and formats")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--seeds", type=int, nargs="+", help="of each run; default: those of the table")
    parser.add_argument("--steps", type=int, help="of each run, to try a table out")
    parser.add_argument("--output", type=Path, default=RECORDS, help="folder for the records")
    flags = parser.parse_args()
    unknown = set(flags.tables) - set(TABLES)
    if unknown:
        parser.error(f"no table {' '.join(unknown)}: choose from {' '.join(TABLES)}")
    flags.output.mkdir(parents=True, exist_ok=True)
    names = flags.tables or DEFAULT
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(flags.jobs) as pool:
        scratch = Path(folder)
        starts = list(pool.map(lambda name: make_start(name, scratch), names))
        for name, start in zip(names, starts):
            measure(name, start, flags, scratch)


if __name__ == "__main__":
    if "--coin" in sys.argv:
        sys.argv.remove("--coin")
        train.main(trainer=CoinTrainer)
    else:
        main()
