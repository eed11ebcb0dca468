"""Loss, every gradient and the clipped norm of train.py against those of another commit, in fp32.

    git worktree add /tmp/old fb47f14
    python bench/parity.py --old /tmp/old

Both trees get the same small random models (Qwen2 and Qwen3, tied and untied) and the same samples, with 1, 2
and 4 processes, several tensor-parallel sizes, copies of the model and micro-batch budgets. Two losses: plain
GRPO in its first update, and a later update with clip, KL, entropy bonus and truncated importance sampling.
The table shows the worst relative difference over the models; for a gradient it is the largest difference
within a parameter, divided by the parameter's largest gradient. The exit code is 1 if one is above 1e-5.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent.parent
TARGET = 1e-5


# ---------------------------------------------- the old tree ----------------------------------------------
def old_samples(records: list[dict]) -> list:
    """Samples of the old tree, whose columns are lists."""
    from train import Sample

    samples = []
    for record in records:
        mask = record["mask"]
        advantages = [record["advantage"] * bit for bit in mask]
        sample = Sample([], {}, record["ids"], mask, record["logprobs"], advantages=advantages, rewards=[0.0])
        samples.append(sample)
    return samples


def old_update(trainer, samples: list, loss: str) -> dict:
    """One update with the old tree: loss, whole gradients, their norm, and that after clipping."""
    actor = trainer.actor
    batches = trainer.micro_batches(samples)
    if loss == "all terms":
        for batch in batches:
            batch.old_logprobs = batch.engine_logprobs + 0.2 * torch.sin(3.0 * batch.targets)
            batch.ref_logprobs = batch.engine_logprobs + 0.2 * torch.sin(5.0 * batch.targets)
    record = {"batches": len(batches)}
    kept = torch.nn.utils.clip_grad_norm_

    def clip(parameters, *args, **options):
        whole = {name: one.grad.full_tensor().clone() for name, one in actor.parameters.items()}
        record["gradients"] = whole
        norm = kept(actor.parameters.values(), *args, **options)
        clipped = [one.grad.full_tensor().flatten() for one in actor.parameters.values()]
        record["clipped_norm"] = torch.cat(clipped).norm().item()
        return norm

    torch.nn.utils.clip_grad_norm_ = clip
    metrics = actor.update([batches])
    torch.nn.utils.clip_grad_norm_ = kept
    return record | {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


def old_rank(rank: int, cases: list, plan: dict, inputs: Path, outputs: Path):
    """A rank of the old tree: all cases of its number of processes."""
    from tools.ranks import make_meshes

    from train import Actor, Config, Trainer

    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    for name in plan["models"]:
        samples = json.loads((inputs / f"{name}.json").read_text())
        for case in cases:
            tp, copies, budget, recompute = case
            mesh = make_meshes("cpu", copies, world // tp // copies, tp)
            flags = {"model": str(inputs / name), "tokens_per_micro_batch": budget, "group_size": 2}
            flags |= {"gradient_checkpointing": recompute}
            for loss, terms in plan["losses"].items():
                trainer = object.__new__(Trainer)
                trainer.config = Config(**plan["common"] | flags | terms)
                trainer.mesh = mesh
                trainer.actor = Actor(str(inputs / name), mesh, trainer.config, plan["vocabulary"])
                record = old_update(trainer, old_samples(samples), loss)
                if rank == 0:
                    torch.save(record, outputs / f"{name}-{loss}-{world}-{tuple(case)}.pt")
    dist.barrier()
    os._exit(0)


def old_worker(inputs: Path, outputs: Path):
    """Runs in the old tree: forks the ranks of each number of processes."""
    import train  # noqa: F401 (once, before the fork)

    plan = json.loads((inputs / "plan.json").read_text())
    for processes, cases in plan["cases"].items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": processes}
        arguments = (cases, plan, inputs, outputs)
        options = {"nprocs": int(processes), "start_method": "fork"}
        torch.multiprocessing.start_processes(old_rank, arguments, **options)


# ---------------------------------------------- this tree -------------------------------------------------
def write_inputs(folder: Path) -> dict:
    """Models and samples for both trees, and the plan of what to run."""
    sys.path.insert(0, str(HERE))
    from tests import parity
    from tests.conftest import VOCAB, make_inputs

    make_inputs(folder)
    models = [path.stem for path in sorted(folder.glob("*.pt"))]
    for name in models:
        records = []
        for sample in torch.load(folder / f"{name}.pt", weights_only=False):
            tokens = sample.tokens
            trained = tokens["mask"] == 1
            record = {"ids": tokens["id"].tolist(), "mask": tokens["mask"].tolist()}
            record |= {"logprobs": tokens["logprob"].tolist()}
            records.append(record | {"advantage": float(tokens["advantage"][trained][0])})
        (folder / f"{name}.json").write_text(json.dumps(records))
    plan = {"models": models, "cases": parity.CASES, "losses": parity.LOSSES}
    plan |= {"common": parity.COMMON, "vocabulary": VOCAB}
    (folder / "plan.json").write_text(json.dumps(plan))
    return plan


def run_tree(tree: Path, *command):
    """Runs python with a tree's modules."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=tree, env=environment, stderr=subprocess.PIPE
    )
    if done.returncode:
        sys.exit(done.stderr.decode()[-3000:])


def differences(found: dict, expected: dict) -> dict[str, float]:
    """Relative differences of the loss, the worst gradient, the norm before and after clipping."""
    result = {}
    for name in ("loss", "grad_norm", "clipped_norm"):
        result[name] = abs(found[name] - expected[name]) / abs(expected[name])
    assert found["gradients"].keys() == expected["gradients"].keys()
    worst = 0.0
    for name, gradient in expected["gradients"].items():
        difference = (found["gradients"][name] - gradient).abs().max() / gradient.abs().max()
        worst = max(worst, difference.item())
    return result | {"gradient": worst}


def print_table(plan: dict, old: Path, new: Path) -> float:
    """A line per configuration with the worst over the models. Returns the worst of all."""
    names = ("loss", "gradient", "grad_norm", "clipped_norm")
    print("ranks tp copies  budget recompute loss       " + "".join(f"{name:>14}" for name in names))
    largest = 0.0
    for processes, cases in plan["cases"].items():
        for case in cases:
            for loss in plan["losses"]:
                worst = dict.fromkeys(names, 0.0)
                for model in plan["models"]:
                    file = f"{model}-{loss}-{processes}-{tuple(case)}.pt"
                    found = differences(torch.load(new / file), torch.load(old / file))
                    worst = {name: max(worst[name], found[name]) for name in names}
                tp, copies, budget, recompute = case
                line = f"{processes:>5} {tp:>2} {copies:>6} {budget:>7} {recompute!s:>9} {loss:<11}"
                print(line + "".join(f"{worst[name]:14.1e}" for name in names))
                largest = max(largest, *worst.values())
    return largest


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="folder with the other commit's files")
    parser.add_argument("--worker", type=Path, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        old_worker(*options.worker)
        return
    with tempfile.TemporaryDirectory() as folder:
        inputs, old, new = (Path(folder) / name for name in ("inputs", "old", "new"))
        for path in (inputs, old, new):
            path.mkdir()
        plan = write_inputs(inputs)
        tree = options.old.resolve()
        run_tree(tree, Path(__file__).resolve(), "--old", tree, "--worker", inputs, old)
        run_tree(HERE, HERE / "tests/parity.py", "all", inputs, new)
        largest = print_table(plan, old, new)
    print(f"worst: {largest:.1e}, target {TARGET:.0e}, {len(plan['models'])} models")
    sys.exit(largest > TARGET)


if __name__ == "__main__":
    main()
