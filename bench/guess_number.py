"""Does the small model learn to ask well? Guess the number with and without a discount, three seeds each.

    python -m bench.guess_number [--seeds 3] [--model FOLDER] [--output assets/guess_number.json]

Makes the start model (`python -m tools.make_guesser`), and trains it by recipes/guess_number.py with
--gamma 0.9 and with 1.0, with nothing else between them. Halving takes 4.2 turns on average over the 32
secrets, and at most 6. Prints a table, writes the numbers and a picture.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from bench.learning import train
from bench.measure import options, report

FLAGS = (
    "--steps 40 --prompts_per_step 32 --group_size 8 --updates_per_step 4 --max_turns 8 "
    "--max_new_tokens 8 --lr 1e-3 --warmup_steps 3 --eval_every 10 --gradient_checkpointing False"
).split()
PANELS = {
    "turns": "turns of a game (sampled)",
    "solved": "games solved (sampled)",
    "eval_score": "of 32 secrets solved (greedy)",
}


def numbers(run: dict) -> dict[str, float]:
    """Of one run: turns of a game and games solved at the first step and over the last five; what it took."""
    history, steps = run["history"], run["history"][1:]
    found = {}
    for metric in ("turns", "solved"):
        found |= {
            f"{metric}_start": steps[0][metric],
            f"{metric}_end": fmean(step[metric] for step in steps[-5:]),
        }
    fast = [step["step"] for step in steps if step["turns"] <= 5]
    return found | dict(
        first_step_of_5_turns=fast[0] if fast else "never",
        greedy_start=history[0]["eval_score"],
        greedy_end=history[-1]["eval_score"],
        seconds=run["seconds"],
    )


def main():
    """Runs all, prints the table, writes numbers and picture."""
    flags = options(
        __doc__, "guess_number", seeds=(3, "of each gamma"), model=("", "start model; '': makes one")
    )
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        if not flags.model:
            flags.model = f"{scratch}/guesser"
            subprocess.run([sys.executable, "-m", "tools.make_guesser", "--output", flags.model], check=True)
        target = ["-m", "recipes.guess_number", "--model", flags.model, *FLAGS]
        for seed in range(flags.seeds):
            for gamma in ("0.9", "1.0"):
                run = train([*target, "--gamma", gamma], seed, 1, Path(scratch) / f"{gamma}-{seed}")
                runs[f"gamma {gamma}", seed] = run
                print(gamma, seed, numbers(run), flush=True)
    report(flags.output, PANELS, runs, numbers)


if __name__ == "__main__":
    main()
