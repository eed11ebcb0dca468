"""Does a process-reward model teach what it never sees? OpenR's step task on the embedded countdown problems.

    python -m bench.prm [--seeds 2] [--output assets/prm.json]

Makes a small process-reward model (`python -m tools.make_prm`), and trains the embedded model by
recipes/prm.py with each --critic. The only reward is what that model says of each step; whether the answer
is right is measured, on the training problems as `solved` and on the held-out ones by the evaluation.
Prints a table, writes numbers and a picture.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from bench.learning import train
from bench.measure import options, report

CREDITS = ("appo", "tppo", "none")
FLAGS = "--steps 25 --lr 1e-4 --critic_lr 1e-3 --gae_lambda 0.95 --eval_every 5".split()
PANELS = {
    "eval_score": "held-out problems solved (greedy)",
    "solved": "training problems solved (sampled)",
    "reward": "what the process-reward model paid",
}


def numbers(run: dict) -> dict[str, float]:
    """For one run: held-out problems solved (greedy), training problems solved (sampled), seconds."""
    scores = [record["eval_score"] for record in run["history"] if "eval_score" in record]
    solved = [record["solved"] for record in run["history"][1:]]
    return dict(
        start=scores[0],
        end=scores[-1],
        best=max(scores),
        solved_start=solved[0],
        solved_end=fmean(solved[-5:]),
        solved_last=solved[-1],
        seconds=run["seconds"],
    )


def main():
    """Runs all, prints the table, writes numbers and picture."""
    flags = options(__doc__, "prm", seeds=(2, "runs per critic"))
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-m", "tools.make_prm", "--steps", "150", "--output", f"{scratch}/prm"],
            check=True,
        )
        for seed in range(flags.seeds):
            for credit in CREDITS:
                target = ["-m", "recipes.prm", "--prm", f"{scratch}/prm", "--critic", credit, *FLAGS]
                run = train(target, seed, 1, Path(scratch) / f"{credit}-{seed}")
                runs[credit, seed] = run
                print(credit, seed, numbers(run), flush=True)
    report(flags.output, PANELS, runs, numbers)


if __name__ == "__main__":
    main()
