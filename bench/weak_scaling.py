"""Weak scaling of everything around the model: CPU seconds and bytes per rank.

    python -m bench.weak_scaling [--rounds 3] [--processes "1 2 4 8"] [--old CHECKOUT] [--output FILE]

Each rank has its own 64 episodes of 1,224 tokens, as a rollout leaves them. Measured is what train.py does
with them without the model: exchange between ranks, advantages, weights, packing, tensors of the
micro-batches, and the records that rank 0 gathers and writes. Bytes are those of the loopback device, sent
and received, divided by the ranks. Flat columns mean that a rank's cost does not depend on the number of
ranks; what rank 0 alone does, the log, grows with them, and stands in a column of its own. With --old, the
same work of a checkout of fb47f14.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SAMPLES = 64  # per rank
REPEATS = 5


def loopback_bytes() -> int:
    """Bytes that the loopback device has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[0])


def measured(work, log) -> list[dict]:
    """CPU seconds of a rank and bytes of all ranks, in `work` and in `log`, for each repeat but the first."""
    import torch.distributed as dist

    found = []
    for repeat in range(REPEATS + 1):
        row = {}
        for name, action in (("work", work), ("log", log)):
            dist.barrier()
            before = loopback_bytes()
            dist.barrier()
            start = time.process_time()
            action(repeat)
            row[f"{name} seconds"] = time.process_time() - start
            dist.barrier()
            row[f"{name} bytes"] = (loopback_bytes() - before) / dist.get_world_size()
        found.append(row)
    return found[1:]


def new_rank(rank: int, processes: int) -> list[dict]:
    """What a rank of train.py does."""
    import train
    from bench import around

    around.SAMPLES = SAMPLES
    train.tqdm.write = lambda text: None
    trainer = around.bare_trainer(train, Path(tempfile.mkdtemp()))
    trainer.config.prompts_per_step = SAMPLES // around.GROUP * processes
    samples = around.make_samples(train, np.random.default_rng(rank))
    for sample in samples:
        sample.key = (sample.key[0] * processes + rank, sample.key[1])

    def work(repeat):
        trainer.compare(samples)
        trainer.micro_batches(samples)

    return measured(work, lambda repeat: trainer.write(2 + repeat, {}, samples))


def old_rank(rank: int, processes: int) -> list[dict]:
    """What a rank of fb47f14 did: it got the samples of all ranks."""
    from transformers import AutoTokenizer

    import train
    from bench import around
    from tools import packing, ranks, runlog

    around.SAMPLES = SAMPLES
    runlog.say = lambda text: None
    names = ("prompts_per_step", "group_size")
    tiny = {name: value for name, value in train.TINY.items() if name not in names}
    flags = {"group_size": around.GROUP, "prompts_per_step": SAMPLES // around.GROUP * processes}
    flags |= {"tokens_per_micro_batch": around.BUDGET, "updates_per_step": 1, "wandb": "off"}
    config = train.Config(**tiny | flags | {"output_dir": tempfile.mkdtemp()})
    trainer = object.__new__(train.Trainer)
    trainer.config = config
    trainer.mesh = mesh = train.init_distributed(config)
    log = runlog.RunLog(
        vars(config), train.__file__, AutoTokenizer.from_pretrained(config.model), 1000, rank == 0
    )
    samples = around.make_old_samples(train, np.random.default_rng(rank))
    for sample in samples:
        sample.key = (sample.key[0] * processes + rank, sample.key[1])
    everything = []

    def work(repeat):
        everything[:] = sorted(ranks.gather(samples, mesh["dp"]), key=lambda sample: sample.key)
        trainer.compare(everything)
        useful = [sample for sample in everything if any(sample.advantages)]
        packs = packing.pack(useful, around.BUDGET, processes)[rank::processes]
        batches = [train.Batch(one, "cpu") for one in packs]
        for batch in batches:
            train.token_weights(batch, config.aggregation, everything, config.max_new_tokens)
            batch.entropy = batch.logprob_diff = batch.weights
        packing.hand_back(everything, batches, ("entropy", "logprob_diff"), mesh["dp"])

    metrics = {"time_step": 1.0, "rollout_tokens_per_s": 1.0, "train_tokens_per_s": 1.0, "clip_fraction": 0.0}
    metrics |= {"idle": 0.0, "peak_gb": 0.0, "loss": 0.0, "entropy": 1.0}

    def write(repeat):
        if rank == 0:
            log.write(2 + repeat, dict(metrics), everything)

    return measured(work, write)


def run(side: str, folder: Path, processes: int) -> list[list[dict]]:
    """The rows of all ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    shared |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    ranks = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(Path(__file__).resolve()), side]
        options = {"cwd": folder, "env": os.environ | shared | own, "stdout": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, **options, stderr=subprocess.PIPE))
    rows = []
    for process in ranks:
        output, errors = process.communicate()
        if process.returncode:
            sys.exit(f"the {side} side failed:\\n{errors}")
        rows.append(json.loads(output.splitlines()[-1]))
    return rows


def row_of(side: str, processes: int, rounds: list[list[list[dict]]]) -> dict:
    """Medians over rounds and repeats: of a rank other than 0 (or of the only one), and of rank 0."""
    others = [row for ranks in rounds for rank in ranks[min(1, processes - 1) :] for row in rank]
    first = [row for ranks in rounds for row in ranks[0]]

    def median(rows, name):
        return statistics.median(row[name] for row in rows)

    return {
        "side": side,
        "processes": processes,
        "work (CPU s)": median(others, "work seconds"),
        "log (CPU s)": median(others, "log seconds"),
        "MB per rank": (median(first, "work bytes") + median(first, "log bytes")) / 1e6,
        "of these work": median(first, "work bytes") / 1e6,
        "rank 0: log (CPU s)": median(first, "log seconds"),
    }


def main():
    """Measures all numbers of processes in turn, and prints the table."""
    from bench.measure import ROOT, options, show, write

    more = {"processes": ("1 2 4 8", "numbers of ranks"), "old": ("", "a checkout of fb47f14")}
    flags = options(__doc__, "weak_scaling", **more)
    sides = {"new": ROOT} | ({"fb47f14": Path(flags.old).resolve()} if flags.old else {})
    rows = []
    for processes in map(int, flags.processes.split()):
        rounds = {side: [] for side in sides}
        for _ in range(flags.rounds):
            for side, folder in sides.items():
                rounds[side].append(run(side, folder, processes))
        rows += [row_of(side, processes, found) for side, found in rounds.items()]
    show(rows)
    write(flags.output, rows=rows)


if __name__ == "__main__":
    if sys.argv[1:2] in (["new"], ["fb47f14"]):
        sys.path[0] = os.environ["PYTHONPATH"]
        if sys.argv[1] == "fb47f14":  # it has a bench/ of its own
            import importlib.util

            place = Path(__file__).parent / "around.py"
            spec = importlib.util.spec_from_file_location("bench.around", place)
            sys.modules["bench.around"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules["bench.around"])
            import bench

            bench.around = sys.modules["bench.around"]
        import torch.distributed as dist

        side = {"new": new_rank, "fb47f14": old_rank}[sys.argv[1]]
        found = side(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        print(json.dumps(found), flush=True)
        dist.barrier()
        os._exit(0)
    else:
        main()
