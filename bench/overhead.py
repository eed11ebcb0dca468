"""What everything around the model costs: the share of a step of the embedded default run.

    torchrun --standalone --nproc_per_node=2 -m bench.overhead [--rounds 10] [--output assets/overhead.json]

Runs the trainer's own step, with a clock around each thing that is neither sampling nor a forward or backward pass:
rewards, advantages, packing (with making tensors of it), exchanging samples between ranks, the push, and writing the
log. A clock stops only for what it names, so the rewards, which other processes compute while others are still sampled,
count in full, and so does handing the samples over. The gate is listed apart: it is a forward pass. Prints medians over
the rounds, on rank 0.
"""
import statistics
import tempfile
import time
from collections import Counter

import torch.distributed as dist

import train
from bench.measure import options, show, write
from tools.judges import Worker


def clocked(spent: Counter, name: str, function):
    """The function, its seconds added to spent[name]."""
    def run(*arguments, **named):
        start = time.perf_counter()
        try:
            return function(*arguments, **named)
        finally:
            spent[name] += time.perf_counter() - start
    return run


def main():
    """Runs the steps and prints the shares."""
    flags = options(__doc__, "overhead")
    config = train.Config(**train.TINY | dict(output_dir=tempfile.mkdtemp(), eval_every=0, wandb="off"))
    trainer = train.Trainer(config, train.RLDataset, train.reward_fn, train.env_step)
    trainer.engine.sleep()
    trainer.publish(start=True)
    spent, shares, steps = Counter(), [], []
    exchange = clocked(spent, "exchange of samples", train.gather)

    def gather(items, mesh):
        """Once all have come: the wait for a slower rank is no cost of the exchange."""
        dist.barrier(mesh.get_group())
        return exchange(items, mesh)

    train.gather = gather
    Worker.send = clocked(spent, "rewards", Worker.send)
    Worker.data_received = clocked(spent, "rewards", Worker.data_received)
    trainer.batches = clocked(spent, "packing", trainer.batches)
    trainer.compare = clocked(spent, "advantages", trainer.compare)
    trainer.engine.push = clocked(spent, "push", trainer.engine.push)
    trainer.log.write = clocked(spent, "log", trainer.log.write)
    for step in range(1, flags.rounds + 2):
        spent.clear()
        start = time.perf_counter()
        metrics, samples = trainer.step()
        trainer.log.write(step, metrics, samples)
        total = time.perf_counter() - start
        seconds = dict(spent) | {"rewards": spent["rewards"] + metrics["time_reward"]}
        if step > 1:
            steps.append(total)
            shares.append({name: value / total for name, value in seconds.items()} | {
                "all of these": sum(seconds.values()) / total, "(the gate)": metrics["time_gate"] / total})
    if dist.get_rank() == 0:
        rows = [dict(what=name, share_of_step=statistics.median(share[name] for share in shares),
                     highest=max(share[name] for share in shares)) for name in shares[0]]
        print(f"a step of {statistics.median(steps):.3f} s (median of {len(steps)}), {dist.get_world_size()} ranks")
        show(rows)
        write(flags.output, step_seconds=steps, shares=shares, rows=rows, ranks=dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
