"""Does every algorithm learn? Each row of recipes/algorithms.py, and the three critics of recipes/ppo.py.

    python -m bench.algorithms [--steps 60] [--jobs 2] [--output assets/algorithms.json]

Each trains the embedded model with the settings of the embedded job, which were found for grpo: a row that
ends lower here may need others. The four most used have three seeds, the others one. Each run is one process,
--jobs of them at once; seconds are from its start to the exported model. Prints a table, writes the numbers.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean

from bench.learning import train
from bench.measure import options, show, write
from recipes.algorithms import ALGORITHMS

CRITICS = ("ppo", "appo", "tppo")
MOST_USED = ("grpo", "dr_grpo", "dapo", "ppo")
KL = ["--kl_coef", "0.001"]  # for the row that is made for it


def command(name: str) -> list[str]:
    """The command of a row or a critic."""
    if name in CRITICS:
        return ["-m", "recipes.ppo", "--critic", name, "--critic_lr", "1e-3"]
    return ["-m", "recipes.algorithms", "--algo", name, *(KL if name == "reinforce_pp" else [])]


def numbers(run: dict) -> dict[str, float]:
    """For one run: held-out problems solved (greedy) at start, end and best; and what it took."""
    scores = [record["eval_score"] for record in run["history"] if "eval_score" in record]
    steps = run["history"][1:]
    return dict(
        start=scores[0],
        end=scores[-1],
        best=max(scores),
        sampled_end=fmean(r["reward"] for r in steps[-5:]),
        entropy_end=steps[-1]["entropy"],
        clip_fraction=fmean(r["clip_fraction"] for r in steps),
        seconds=run["seconds"],
    )


def main():
    """Runs all, prints the table, writes the numbers."""
    flags = options(__doc__, "algorithms", steps=(60, "of each run"), jobs=(2, "runs at once"))
    jobs = [(name, seed) for name in (*ALGORITHMS, *CRITICS) for seed in range(3 if name in MOST_USED else 1)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(flags.jobs) as pool:

        def done(job):
            name, seed = job
            found = train(
                [*command(name), "--steps", str(flags.steps), "--eval_every", "10"],
                seed,
                1,
                Path(scratch) / f"{name}-{seed}",
            )
            print(name, seed, numbers(found), flush=True)
            return found

        runs = dict(zip(jobs, pool.map(done, jobs)))
    rows = [dict(algorithm=name, seed=seed) | numbers(run) for (name, seed), run in runs.items()]
    show(rows)
    curves = {
        f"{name} {seed}": [
            [record.get(what) for what in ("step", "eval_score", "reward", "entropy")]
            for record in run["history"]
        ]
        for (name, seed), run in runs.items()
    }
    write(flags.output, rows=rows, curves=curves)


if __name__ == "__main__":
    main()
