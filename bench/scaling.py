"""How the cost of a step grows: 1 to 16 times the tokens, on 1 and on 2 ranks.

    python -m bench.scaling [--rounds 5] [--output assets/scaling.json]

Each size is a run of train.py as the README starts it, with 8 to 128 prompts a step and a learning rate so small that
the completions stay what they are; a round is a run of every size, with two measured steps after one that is not.
Prints the medians and, for each number of ranks, the straight line through them: seconds a step (the intercept: what
a step costs however little it does) and seconds a thousand tokens (the slope).
"""
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import line, options, show, write
from tools.curve import read

SIZES, STEPS = (1, 2, 4, 8, 16), 3


def steps(prompts: int, ranks: int) -> list[dict]:
    """The metrics of the steps of a run, the first left out."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
                   "train.py", "--prompts_per_step", prompts, "--steps", STEPS, "--lr", 1e-9, "--eval_every", 0,
                   "--wandb", "off", "--output_dir", Path(scratch) / "run"]
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       env=os.environ | {"OMP_NUM_THREADS": "1"})
        return read(Path(scratch) / "run")[1:]


def main():
    """Runs all sizes in turn, prints the table and the lines."""
    flags = options(__doc__, "scaling")
    cases = [(ranks, size) for size in SIZES for ranks in (1, 2)]
    records = {case: [] for case in cases}
    for _ in range(flags.rounds):
        for ranks, size in cases:
            records[ranks, size] += steps(8 * size, ranks)
    rows, lines = [], {}
    for ranks, size in sorted(cases):
        def median(name, of=records[ranks, size]):
            return statistics.median(record[name] for record in of)

        rows.append(dict(ranks=ranks, size=f"{size}x", tokens=int(median("tokens")), step_s=median("time_step"),
                         rollout_s=median("time_rollout"), logprobs_s=median("time_logprobs"),
                         update_s=median("time_update"), idle=median("idle")))
    show(rows)
    for ranks in (1, 2):
        points = [(row["tokens"] / 1000, row["step_s"]) for row in rows if row["ranks"] == ranks]
        lines[ranks] = fit = line(*zip(*points))
        worst = max(abs(y - fit["intercept"] - fit["slope"] * x) / y for x, y in points)
        print(f"{ranks} rank{'s' * (ranks - 1)}: {fit['intercept']:.3f} s a step and {fit['slope']:.4f} s a thousand "
              f"tokens, R^2 {fit['r2']:.5f}, farthest point {worst:.1%} off")
    write(flags.output, rows=rows, lines=lines)


if __name__ == "__main__":
    main()
