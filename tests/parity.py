"""What test_train.py runs in several processes: tests/parity.py few|all INPUTS OUTPUTS.

One interpreter imports everything once and forks the ranks of each group of processes, which takes a few
seconds where torchrun would take a minute. `few`: some cases of gradients, whole weights and exports, a short
run. `all`, for the slow tests: all cases of gradients.
"""

import logging
import os
import socket
import sys
from copy import deepcopy
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import extras.local_engine  # noqa: F401 (once, before the fork)
import train
from extras import balance, dither
from recipes import lora
from tests.conftest import (
    FORMS,
    TEMPERATURE,
    VOCAB,
    Config,
    VariantTrainer,
    make_trainer,
    other_logprobs,
    parse_flags,
)

ADAPTED = ("qwen2-tied", "qwen3-untied")  # also with adapters
# Processes -> cases of (tensor-parallel size, copies of the model, tokens per micro-batch, checkpointing).
CASES = {
    1: [(1, 1, 10**6, False), (1, 1, 60, True), (1, 1, 30, False)],
    2: [(1, 1, 60, False), (2, 1, 10**6, False), (2, 1, 30, True), (1, 2, 60, False)],
    4: [(1, 1, 10**6, False), (1, 1, 30, True), (2, 1, 60, False), (1, 2, 60, False), (2, 2, 30, False)],
}
FEW = {1: [(1, 1, 60, True)], 2: [(1, 1, 30, False)], 4: [(2, 1, 60, True), (2, 2, 10**6, False)]}
RUNS = {1: (1, 1), 4: (2, 2)}  # processes -> tensor-parallel size and copies of a short run
# Two losses: plain GRPO in its first update, and every term of a later update.
LOSSES = {
    "plain": {"aggregation": "sequence"},
    "all terms": {"aggregation": "token", "kl_coef": 0.05, "entropy_coef": 0.01, "tis_cap": 1.1},
}
COMMON = {
    "device": "cpu",
    "max_new_tokens": 8,
    "temperature": TEMPERATURE,
    "max_grad_norm": 0.1,
    "warmup_steps": 0,
}


def fork(function, processes: int, *args):
    """Runs function(*args) in as many forked ranks; raises if one of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["LOCAL_WORLD_SIZE"] = str(processes)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    torch.multiprocessing.start_processes(join, (function, args), processes, start_method="fork")


def join(rank: int, function, args: tuple):
    """Runs a function in a rank that has joined the others; it may then make many meshes."""
    os.environ["RANK"] = str(rank)
    train.RANK = rank
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train.dist.init_process_group = lambda *args, **options: None
    function(*args)
    dist.barrier()
    os._exit(0)  # at once: destructors of many meshes take seconds


def update(trainer, samples: list, loss: str) -> dict:
    """One backward pass and optimizer step: loss, whole gradients, their norm, and that after clipping."""
    actor = trainer.actor
    batches = trainer.micro_batches(samples)
    if loss == "all terms":  # what --kl_coef and a later update need
        for batch in batches:
            batch.old_logprobs = other_logprobs(batch, 3.0)
            batch.ref_logprobs = other_logprobs(batch, 5.0)
    record = {"loss": actor.backward(batches, trainer.forward)["loss"], "batches": len(batches)}
    record["keys"] = [sample.key for batch in batches for sample in batch.samples]
    gradients = {name: parameter.grad.full_tensor() for name, parameter in actor.parameters.items()}
    record["gradients"] = {name: gradient.clone() for name, gradient in gradients.items()}
    kept = train.clip_grad_norm_

    def clip(parameters, *args, **options):
        norm = kept(parameters, *args, **options)
        clipped = [parameter.grad.full_tensor().flatten() for parameter in actor.parameters.values()]
        record["clipped_norm"] = torch.cat(clipped).norm().item()
        return norm

    train.clip_grad_norm_ = clip
    record["grad_norm"] = actor.optimizer_step()
    train.clip_grad_norm_ = kept
    return record


def losses_of(case: tuple, cases: dict) -> list[str]:
    """Both losses; the fast tests, which run FEW cases, take one of them for each."""
    return list(LOSSES) if cases is CASES else ["all terms" if case[2] == 60 else "plain"]


def compare_gradients(processes: int, all_cases: dict, inputs: Path, outputs: Path):
    """For each case, model and loss an update of the model's samples, which rank 0 writes to a file."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for name in FORMS:
        samples = torch.load(inputs / f"{name}.pt", weights_only=False)
        for case in all_cases[processes]:
            tp, copies, budget, recompute = case
            flags = {"model": str(inputs / name), "tp_size": tp, "dp_replicate": copies}
            flags |= {"tokens_per_micro_batch": budget, "gradient_checkpointing": recompute}
            mesh = train.init_distributed(Config(**COMMON | flags))
            dp = mesh["dp"]
            in_turn = 4 if recompute else 1  # uneven where ranks share their samples
            mine = [one for one in samples if one.key[0] // in_turn % dp.size() == dp.get_local_rank()]
            for loss in losses_of(case, all_cases):
                balanced = {"trainer_class": balance.extend(VariantTrainer)} if recompute else {}
                config = Config(**COMMON | flags | LOSSES[loss], token_groups=0)
                record = update(make_trainer(config, mesh, **balanced), deepcopy(mine), loss)
                if dist.get_rank() == 0:
                    torch.save(record, outputs / f"{name}-{loss}-{dist.get_world_size()}-{case}.pt")


def compare_weights(inputs: Path, outputs: Path):
    """Whole weights over all layouts are those of the folder to the bit; the exports are written."""
    for name in FORMS:
        original = AutoModelForCausalLM.from_pretrained(inputs / name)
        for tp, dtype in ((2, "float32"), (2, "bfloat16"), (1, "bfloat16")):
            config = Config(model=str(inputs / name), device="cpu", tp_size=tp, dtype=dtype)
            mesh = train.init_distributed(config)
            actor = train.Actor(train.load_policy(config.model, mesh, config, VOCAB), mesh, config)
            found = {name: whole.clone() for bucket in actor.whole_weights() for name, whole in bucket}
            expected = dict(original.named_parameters())
            assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
            for key, value in found.items():
                assert torch.equal(value, expected[key].to(value.dtype)), (name, tp, key)
                held = actor.parameters[key].full_tensor().to(value.dtype)
                assert torch.equal(value, held), (name, tp, key)
                assert value.dtype == getattr(torch, dtype)
        actor.save(inputs / name, outputs / f"{name}-export")


def compare_adapters(inputs: Path, outputs: Path):
    """Updates of adapters with tp 2 and without, which rank 0 writes to files, with the merged weights."""
    for name in ADAPTED:
        samples = torch.load(inputs / f"{name}.pt", weights_only=False)
        for tp in (1, 2):
            flags = {"model": str(inputs / name), "tp_size": tp, "tokens_per_micro_batch": 60}
            config = lora.LoRAConfig(**COMMON | flags, lora_rank=4, lora_alpha=6)
            mesh = train.init_distributed(config)
            dp = mesh["dp"]
            mine = [one for one in samples if one.key[0] % dp.size() == dp.get_local_rank()]
            trainer = make_trainer(config, mesh, lora.LoRATrainer, lora.LoRAActor)
            for weight in trainer.actor.parameters.values():  # at the start B is 0, and so A's gradient
                generator = torch.Generator().manual_seed(1)
                lora.fill(weight, 0.1 * torch.randn(weight.shape, generator=generator))
            adapters = {key: one.full_tensor().clone() for key, one in trainer.actor.parameters.items()}
            merged = {key: one for bucket in trainer.actor.whole_weights() for key, one in bucket}
            record = update(trainer, mine, "plain") | {"adapters": adapters, "merged": merged}
            if dist.get_rank() == 0:
                torch.save(record, outputs / f"{name}-lora-{tp}.pt")


def dither_parts(inputs: Path, outputs: Path):
    """Dithers a model whose parts have copies; rank 0 writes the parts of all ranks to a file."""
    flags = {"model": str(inputs / "qwen2-tied"), "tp_size": 2, "dp_replicate": 2, "dtype": "bfloat16"}
    config = Config(**COMMON | flags)
    weights = make_trainer(config, train.init_distributed(config)).actor.parameters
    with torch.no_grad():
        for weight in weights.values():  # bf16 numbers, as in a checkpoint
            weight.to_local().copy_(weight.to_local().bfloat16())
    dither.dither_all(list(weights.values()), seed=0)
    mine = {name: (dither.part_of(weight), weight.to_local()) for name, weight in weights.items()}
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    if dist.get_rank() == 0:
        torch.save(everyones, outputs / "dithered.pt")


def learn(case: tuple, outputs: Path):
    """A short run of the embedded model, in a folder of its own."""
    tp, copies = case
    name = f"{dist.get_world_size()}-{tp}-{copies}"
    config = parse_flags(Config, ["--steps", "2", "--prompts_per_step", "8", "--group_size", "4"])
    options = {"tp_size": tp, "dp_replicate": copies, "max_new_tokens": 20, "eval_every": 0, "lr": 1e-3}
    options |= {"updates_per_step": 2, "warmup_steps": 0, "output_dir": str(outputs / name)}
    vars(config).update(options)
    VariantTrainer(config, train.RLDataset, lambda sample: len(sample.text) % 7, None).fit()


def uneven_machines(outputs: Path):
    """A machine with two processes and two with one; making groups is collective: all must agree."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() < 2 else "1"
    trainer = object.__new__(balance.extend(VariantTrainer))
    trainer.mesh = train.init_distributed(Config(device="cpu"))
    (outputs / f"uneven-{dist.get_rank()}").write_text(str(trainer.neighbors))


def compare(processes: int, cases: dict, inputs: Path, outputs: Path):
    """Everything that runs in so many processes."""
    compare_gradients(processes, cases, inputs, outputs)
    if cases is CASES:
        return
    if processes in RUNS:
        learn(RUNS[processes], outputs)
    if processes == 2:
        compare_weights(inputs, outputs)
        compare_adapters(inputs, outputs)
    if processes == 4:
        dither_parts(inputs, outputs)
        uneven_machines(outputs)


def main(job: str, inputs: Path, outputs: Path):
    cases = FEW if job == "few" else CASES
    for processes in cases:
        fork(compare, processes, processes, cases, inputs, outputs)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
