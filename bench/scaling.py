"""How the cost of a step grows: 1 to 16 times the tokens, on 1 and on 2 ranks.

    python -m bench.scaling [--rounds 5] [--largest 16] [--output assets/scaling.json]

Each size is a run of the embedded job with 8 to 128 prompts per step and a learning rate so small that the
completions stay the same; a round is a run of every size, with two measured steps after a warm-up step.
Prints the medians and, for each number of ranks, the straight line through them: seconds per step (the
intercept: the cost of a step however little it does) and seconds per thousand tokens (the slope).
"""

import json
import os
import statistics
import subprocess
import sys
import time

import torch.distributed as dist

from bench.measure import line, options, show, write
from bench.overhead import make_trainer

SIZES = (1, 2, 4, 8, 16)
STEPS = 3


def measure_steps(prompts: int) -> list[dict]:
    """Steps of one run in this process: tokens over all ranks, wall seconds, CPU seconds of this rank."""
    trainer = make_trainer(prompts_per_step=prompts, steps=STEPS, lr=1e-9)
    trainer.engine.sleep()
    trainer.publish()
    found = []
    for _ in range(STEPS):
        dist.barrier()
        wall = time.perf_counter()
        cpu = time.process_time()
        samples = trainer.rollout()
        rollout = time.perf_counter() - wall
        trainer.learn(samples)
        update = time.perf_counter() - wall - rollout
        trainer.publish()
        tokens = sum_over_ranks(sum(len(sample.tokens) for sample in samples))
        record = {"tokens": tokens, "rollout": rollout, "update": update}
        found.append(record | {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    return found[1:]


def sum_over_ranks(number: int) -> int:
    """The sum of a number over all ranks."""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, number)
    return sum(parts)


def run_steps(prompts: int, ranks: int) -> list[dict]:
    """The records of rank 0 in a run of its own."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, "-m", "bench.scaling", "--prompts", str(prompts)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    return json.loads(done.stdout.decode().splitlines()[-1])


def main():
    """Runs all sizes in turn, prints the table and the lines."""
    extra = {
        "largest": (16, "largest of the sizes"),
        "prompts": (0, "internal: one run with so many prompts"),
    }
    flags = options(__doc__, "scaling", **extra)
    if flags.prompts:
        found = measure_steps(flags.prompts)
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
        dist.barrier()
        return dist.destroy_process_group()
    cases = [(ranks, size) for size in SIZES if size <= flags.largest for ranks in (1, 2)]
    records = {case: [] for case in cases}
    for _ in range(flags.rounds):
        for ranks, size in cases:
            records[ranks, size] += run_steps(8 * size, ranks)
    rows = []
    for ranks, size in sorted(cases):
        row = {"ranks": ranks, "size": f"{size}x"}
        for name in ("tokens", "wall", "rollout", "update", "cpu"):
            row[name] = statistics.median(record[name] for record in records[ranks, size])
        rows.append(row)
    show(rows)
    lines = {}
    for ranks in (1, 2):
        points = [(row["tokens"] / 1000, row["wall"]) for row in rows if row["ranks"] == ranks]
        if len(points) < 2:
            continue
        lines[ranks] = fit = line(*zip(*points))
        worst = max(abs(y - fit["intercept"] - fit["slope"] * x) / y for x, y in points)
        print(
            f"{ranks} ranks: {fit['intercept']:.3f} s per step and {fit['slope']:.4f} s per thousand tokens, "
            f"R^2 {fit['r2']:.5f}, farthest point {worst:.1%} off"
        )
    write(flags.output, rows=rows, lines=lines)


if __name__ == "__main__":
    main()
