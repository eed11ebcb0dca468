"""The cost of everything around the model: its share of a step of the embedded job.

    torchrun --standalone --nproc_per_node=2 -m bench.overhead [--rounds 10] [--output assets/overhead.json]

Runs the trainer's own steps, with all extras, and measures everything that is neither sampling nor a forward
or backward pass: prompts and episodes (encode, copy, append, decode), rewards, advantages, micro-batches
(weights, packing, tensors), the exchange of samples within a tensor-parallel group, the push, and the log.
Prints medians of CPU and wall time over the rounds, on rank 0. A rank that waits for another one in `log`
or `push` waits in wall time only.
"""

import statistics
import sys
import tempfile
import time
from collections import Counter

import torch.distributed as dist

import extras
import train
from bench.measure import embedded_flags, options, show, write


class Clock:
    """Wall and CPU seconds by name; a clocked function inside another one counts for the inner one only."""

    def __init__(self):
        self.wall = Counter()
        self.cpu = Counter()
        self.stack = []

    def read(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def book(self):
        """Books the time since the last change to the innermost clocked function."""
        wall, cpu = self.read()
        if self.stack:
            self.wall[self.stack[-1]] += wall - self.last[0]
            self.cpu[self.stack[-1]] += cpu - self.last[1]
        self.last = (wall, cpu)

    def clocked(self, name: str, function):
        """The function, with its seconds booked to `name`."""

        def run(*arguments, **named):
            self.book()
            self.stack.append(name)
            try:
                return function(*arguments, **named)
            finally:
                self.book()
                self.stack.pop()

        return run

    def clear(self):
        self.wall.clear()
        self.cpu.clear()


def make_trainer(**flags) -> train.Trainer:
    """The trainer of the embedded job, with all extras that are there."""
    config_class, trainer_class = extras.extend(train.Config, train.Trainer)
    flags = {"eval_every": 0, "output_dir": f"{tempfile.mkdtemp()}/run"} | flags
    config = train.parse_flags(config_class, embedded_flags(**flags))
    return trainer_class(config, train.RLDataset, train.reward_fn, None)


def attach(clock: Clock, trainer: train.Trainer):
    """Puts clocks around the parts of a step."""
    train.encode_prompt = clock.clocked("prompts and episodes", train.encode_prompt)
    train.deepcopy = clock.clocked("prompts and episodes", train.deepcopy)
    train.Sample.append = clock.clocked("prompts and episodes", train.Sample.append)
    trainer.tokenizer.decode = clock.clocked("prompts and episodes", trainer.tokenizer.decode)
    trainer.reward_fn = clock.clocked("rewards", trainer.reward_fn)
    dist.all_gather_object = clock.clocked("exchange of samples", dist.all_gather_object)
    trainer.compare = clock.clocked("advantages", trainer.compare)
    trainer.micro_batches = clock.clocked("micro-batches", trainer.micro_batches)
    trainer.engine.push = clock.clocked("push", trainer.engine.push)
    trainer.write = clock.clocked("log", trainer.write)


def measure_steps(rounds: int, **flags) -> tuple[list[dict], list[dict]]:
    """Runs steps after a warm-up step. Returns {part: seconds} of each and of the "step", wall and CPU."""
    trainer = make_trainer(steps=rounds + 1, **flags)
    clock = Clock()
    attach(clock, trainer)
    trainer.engine.sleep()
    trainer.publish()
    walls, cpus = [], []
    for step in range(1, rounds + 2):
        clock.clear()
        wall, cpu = clock.read()
        metrics, samples = trainer.step()
        trainer.write(step, metrics, samples)
        end_wall, end_cpu = clock.read()
        if step > 1:
            walls.append(dict(clock.wall) | {"step": end_wall - wall})
            cpus.append(dict(clock.cpu) | {"step": end_cpu - cpu})
    trainer.engine.close()
    return walls, cpus


def shares(records: list[dict]) -> dict[str, float]:
    """Median share of a step, by part, and of all parts."""
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    found = {}
    for name in names:
        found[name] = statistics.median(record.get(name, 0.0) / record["step"] for record in records)
    found["all of these"] = statistics.median(
        sum(value for name, value in record.items() if name != "step") / record["step"] for record in records
    )
    return found


def main():
    """Runs the steps and prints the shares."""
    flags = options(__doc__, "overhead")
    sys.argv = ["train.py"]
    walls, cpus = measure_steps(flags.rounds)
    if dist.get_rank() == 0:
        wall, cpu = shares(walls), shares(cpus)
        rows = []
        for name in wall:
            seconds = statistics.median(record.get(name, 0.0) for record in cpus)
            row = {"part": name, "CPU (s)": seconds, "share of CPU": cpu[name], "share of wall": wall[name]}
            rows.append(row)
        rows[-1]["CPU (s)"] = sum(row["CPU (s)"] for row in rows[:-1])
        step = {
            clock: statistics.median(record["step"] for record in records)
            for clock, records in (("wall", walls), ("CPU", cpus))
        }
        ranks = dist.get_world_size()
        print(f"a step takes {step['wall']:.3f} s, {step['CPU']:.3f} CPU s per rank; {ranks} ranks")
        show(rows)
        write(flags.output, step=step, rows=rows, ranks=ranks, wall=walls, cpu=cpus)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
