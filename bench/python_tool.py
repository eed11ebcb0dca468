"""Does a Python tool help where the head does not suffice? Products of two numbers of two digits, with it and
without.

    python -m bench.python_tool [--seeds 2] [--output assets/python_tool.json]

Makes the start model and the problems (`python -m tools.make_calculator`), and trains the one by
recipes/math_python.py with --tool True and with --tool False, with nothing else between them; the 128
held-out problems are in no training. Prints a table, writes the numbers and a picture.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from bench.learning import train
from bench.measure import options, report

FLAGS = (
    "--steps 20 --prompts_per_step 8 --group_size 8 --updates_per_step 2 --max_turns 2 "
    "--max_new_tokens 16 --lr 5e-4 --warmup_steps 3 --eval_every 5 --gradient_checkpointing False"
).split()
PANELS = {
    "eval_score": "held-out problems solved (greedy)",
    "reward": "training problems solved (sampled)",
    "tool_uses": "programs an episode (sampled)",
}
NAMES = {"True": "with the tool", "False": "without"}


def numbers(run: dict) -> dict[str, float]:
    """For one run: held-out problems solved (greedy), training problems and programs (sampled), seconds."""
    scores = [record["eval_score"] for record in run["history"] if "eval_score" in record]
    steps, found = run["history"][1:], {}
    for metric in ("reward", "tool_uses"):
        found |= {
            f"{metric}_start": steps[0][metric],
            f"{metric}_end": fmean(step[metric] for step in steps[-5:]),
        }
    return dict(start=scores[0], end=scores[-1], best=max(scores)) | found | dict(seconds=run["seconds"])


def main():
    """Runs all, prints the table, writes numbers and picture."""
    flags = options(__doc__, "python_tool", seeds=(2, "of each"))
    runs = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = f"{scratch}/calculator"
        subprocess.run([sys.executable, "-m", "tools.make_calculator", "--output", folder], check=True)
        target = [
            "-m",
            "recipes.math_python",
            "--model",
            folder,
            "--data",
            f"{folder}/train.jsonl",
            "--eval_data",
            f"{folder}/test.jsonl",
            *FLAGS,
        ]
        for seed in range(flags.seeds):
            for tool, name in NAMES.items():
                run = train([*target, "--tool", tool], seed, 1, Path(scratch) / f"{tool}-{seed}")
                runs[name, seed] = run
                print(name, seed, numbers(run), flush=True)
    report(flags.output, PANELS, runs, numbers)


if __name__ == "__main__":
    main()
