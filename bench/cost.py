"""The cost of what surrounds the model: its share of a step, and ranks that wait for others.

    python -m bench.cost [--rounds 7] [--parts "steps waits"] [--output assets/records/cost.json]

steps: the trainer with all extras runs steps of the embedded job on two ranks. Its learning rate is so small
    that completions stay as long as they are. Clocks measure what is neither sampling nor a forward or
    backward pass. A rank that waits for another one in the log or the push waits in wall time only.
waits: samples of log-normal lengths are packed as the trainer packs them; nothing is timed. In each pass all
    ranks wait for the one with the most tokens, because FSDP's collectives join them there. The table has the
    tokens of these fullest ranks, as a share of what they are if every sample has a prompt of its own and
    stays where it was sampled, and the share of its time that the average rank waits: with prompts computed
    once per group, and if extras/balance.py moves groups within machines of 8 ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from functools import wraps
from statistics import median

import numpy as np
import torch.distributed as dist

import extras
import train
from bench.measure import embedded_flags, options, record, show
from extras.balance import moves
from extras.shared_prompts import SharedBatch, by_prompt, size

GROUP = 8
PROMPT_LENGTH, MEDIAN, LONGEST = 300, 600, 4096  # tokens of a prompt; of completions
BUDGET = 8192  # tokens per micro-batch
MACHINE = 8  # ranks


# ---- Runs in processes of their own ----------------------------------------------------------------------
def run_case(module: str, case: dict):
    """What `python -m MODULE --case CASE` prints last, as JSON, with case["ranks"] processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case['ranks']}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [*launcher, "-m", module, "--case", json.dumps(case | {"folder": folder})]
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def print_result(result):
    """The end of such a process: rank 0 prints what it found."""
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def make_trainer(folder: str, config_class=train.Config, trainer_class=train.Trainer, **flags):
    """A trainer of the embedded job, with all extras that are there; its engine has the weights."""
    sys.argv = ["train.py"]  # some extras read it
    config_class, trainer_class = extras.extend(config_class, trainer_class)
    flags = {"eval_every": 0, "output_dir": f"{folder}/run", "lr": 1e-9} | flags
    config = train.parse_flags(config_class, embedded_flags(**flags))
    trainer = trainer_class(config, train.RLDataset, train.reward_fn, None)
    trainer.engine.sleep()
    trainer.publish()
    return trainer


# ---- steps -----------------------------------------------------------------------------------------------
class Clock:
    """Wall and CPU seconds by part; a part inside another one counts for itself alone."""

    def __init__(self):
        self.wall = Counter()
        self.cpu = Counter()
        self.stack = []

    def read(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def book(self):
        """Books the time since the last change to the innermost part."""
        wall, cpu = self.read()
        if self.stack:
            self.wall[self.stack[-1]] += wall - self.last[0]
            self.cpu[self.stack[-1]] += cpu - self.last[1]
        self.last = (wall, cpu)

    @contextmanager
    def part(self, name: str):
        """What runs inside is this part."""
        self.book()
        self.stack.append(name)
        try:
            yield
        finally:
            self.book()
            self.stack.pop()

    def attach(self, owner, method: str, name: str):
        """Books every call of owner.method as a part."""
        inner = getattr(owner, method)

        @wraps(inner)
        def clocked(*arguments, **named):
            with self.part(name):
                return inner(*arguments, **named)

        setattr(owner, method, clocked)

    def clear(self):
        self.wall.clear()
        self.cpu.clear()


def attach_clock(trainer: train.Trainer) -> Clock:
    """A clock on the parts of a step that surround the model."""
    clock = Clock()
    episodes = ((train, "encode_prompt"), (train, "deepcopy"), (train.Sample, "append"))
    for owner, method in (*episodes, (trainer.tokenizer, "decode")):
        clock.attach(owner, method, "prompts and episodes")
    clock.attach(trainer, "reward_fn", "rewards")
    clock.attach(trainer, "compare", "advantages")
    clock.attach(trainer, "micro_batches", "micro-batches")
    clock.attach(dist, "all_gather_object", "exchange of samples")
    clock.attach(trainer.engine, "push", "push")
    clock.attach(trainer, "write", "log")
    return clock


def totals(parts: Counter) -> dict[str, float]:
    """Seconds of a step: by part, of all parts, and with the model."""
    around = {name: taken for name, taken in parts.items() if name != "model"}
    return around | {"all of these": sum(around.values()), "step": parts.total()}


def measure_steps(case: dict) -> list[dict]:
    """Seconds of each step after the warm-up, by clock and part."""
    trainer = make_trainer(case["folder"], updates_per_step=1)
    clock = attach_clock(trainer)
    rows = []
    for number in range(case["rounds"] + 1):
        clock.clear()
        with clock.part("model"):
            metrics, samples = trainer.step()
            trainer.write(number + 1, metrics, samples)
        rows.append({"wall": totals(clock.wall), "cpu": totals(clock.cpu)})
    return rows[1:]


def steps_table(rounds: int) -> dict[str, list[dict]]:
    """Medians over steps: the CPU time of each part, and its share of a step."""
    steps = run_case("bench.cost", {"ranks": 2, "rounds": rounds})
    rows = []
    for part in [part for part in steps[0]["cpu"] if part != "step"]:
        row = {"part": part, "CPU ms": 1000 * median(step["cpu"][part] for step in steps)}
        for clock, label in (("cpu", "CPU"), ("wall", "wall")):
            shares = [step[clock][part] / step[clock]["step"] for step in steps]
            row[f"% of {label} time"] = 100 * median(shares)
        rows.append(row)
    return {"What surrounds the model in a step of the embedded job, on 2 ranks": rows}


# ---- waits -----------------------------------------------------------------------------------------------
def draw_samples(generator, groups: int, sigma: float) -> list[train.Sample]:
    """Groups of samples; half of the variance of the logarithm of their lengths lies between prompts."""
    difficulty = generator.normal(0, sigma / 2**0.5, (groups, 1))
    lengths = MEDIAN * np.exp(difficulty + generator.normal(0, sigma / 2**0.5, (groups, GROUP)))
    samples = []
    for (number, i), length in np.ndenumerate(np.minimum(lengths, LONGEST).astype(int)):
        sample = train.Sample([], {}, key=(number, i))
        sample.append([number] * PROMPT_LENGTH)
        sample.append(np.zeros(length, int), mask=1)
        samples.append(sample)
    return samples


def balanced(ranks: list[list], shared: int) -> list[list]:
    """The ranks' samples, of which groups share some tokens, after extras/balance.py has moved some."""
    after = []
    for first in range(0, len(ranks), MACHINE):
        machine = [by_prompt(samples) for samples in ranks[first : first + MACHINE]]
        sizes = [[(shared, [len(one.tokens) - shared for one in group]) for group in own] for own in machine]
        loads = [sum(prompt + sum(rests) for prompt, rests in own) for own in sizes]
        arrived = [[] for _ in machine]
        for source, index, n, target in moves(loads, sizes):
            arrived[target] += machine[source][index][:n]
            del machine[source][index][:n]
        after += [sum(own, new) for own, new in zip(machine, arrived)]
    return after


def time_and_wait(ranks: list[list], shares_prompts: bool) -> tuple[float, float]:
    """Time of an update in tokens of the fullest ranks; the share of it that the average rank waits."""
    layout, count = (SharedBatch, tokens_of) if shares_prompts else (train.Batch, plain_tokens_of)
    passes = max(len(layout.pack(samples, BUDGET, 1)) for samples in ranks)
    packs = [layout.pack(samples, BUDGET, passes) for samples in ranks]
    passes = max(map(len, packs))
    tokens = np.zeros((len(ranks), passes))
    for rank, parts in enumerate(packs):
        tokens[rank, : len(parts)] = sorted(map(count, parts), reverse=True)
    return tokens.max(axis=0).sum(), 1 - tokens.mean() / tokens.max(axis=0).mean()


def plain_tokens_of(samples: list) -> int:
    """Tokens of a micro-batch in which every sample has a prompt of its own."""
    return sum(len(sample.tokens) for sample in samples)


def tokens_of(samples: list) -> int:
    """Tokens of a micro-batch with shared prompts."""
    return sum(map(size, by_prompt(samples)))


def waits_table(rounds: int) -> dict[str, list[dict]]:
    """The table of `waits`."""
    rows = []
    for ranks, groups, sigma in ((4, 16, 0.5), (8, 8, 0.5), (8, 8, 1.0), (8, 32, 1.0), (64, 8, 1.0)):
        generator = np.random.default_rng(0)
        found = []
        for _ in range(rounds):
            drawn = draw_samples(generator, ranks * groups, sigma)
            own = [drawn[i : i + groups * GROUP] for i in range(0, len(drawn), groups * GROUP)]
            plain, _ = time_and_wait(own, False)
            moved, _ = time_and_wait(balanced(own, 0), False)
            shared, wait = time_and_wait(own, True)
            both, less = time_and_wait(balanced(own, PROMPT_LENGTH), True)
            found.append([moved / plain, shared / plain, both / plain, wait, less])
        names = ("% of time, moved", "% of time, shared", "% of time, shared and moved")
        names += ("% waited, shared", "% waited, shared and moved")
        row = {"ranks": ranks, "groups per rank": groups, "sigma of log length": sigma}
        rows.append(row | dict(zip(names, (100 * np.mean(found, axis=0)).tolist())))
    return {f"Time of an update with prompts of {PROMPT_LENGTH} tokens and completions of {MEDIAN}": rows}


def main():
    """Measures the parts, prints their tables, writes the numbers."""
    parts = ("steps waits", "parts to measure")
    flags = options(__doc__, "cost", parts=parts, case=("", "internal: one run, as JSON"))
    if flags.case:
        return print_result(measure_steps(json.loads(flags.case)))
    tables = {}
    for part in flags.parts.split():
        tables |= {"steps": steps_table, "waits": waits_table}[part](flags.rounds)
    for rows in tables.values():
        show(rows)
    record(flags.output, tables)


if __name__ == "__main__":
    main()
