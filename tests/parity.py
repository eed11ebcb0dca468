"""What test_train.py runs in several processes: tests/parity.py few|all INPUTS OUTPUTS.

One interpreter imports everything once and forks the ranks of each group of processes, which takes a few
seconds where torchrun would take a minute. `few`: some cases of gradients, whole weights and exports, a short
run. `all`, for the slow tests: all cases of gradients.
"""

import logging
import os
import sys
from copy import deepcopy
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

import extras.local_engine  # noqa: F401 (once, before the fork)
import train
from extras import add_flags, balance, dither, head, loss_scale, shared_prompts
from extras.shared_prompts import SharedBatch
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

ADAPTED = ("qwen2-tied", "qwen3-untied", "qwen3_5-tied")  # also with adapters
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
RunTrainer = shared_prompts.extend(head.extend(balance.extend(VariantTrainer)))
COMMON = {"device": "cpu", "max_new_tokens": 8, "temperature": TEMPERATURE, "max_grad_norm": 0.1}


def losses_of(case: tuple, cases: dict) -> list[str]:
    """Both losses; the fast tests, which run FEW cases, take one of them for each."""
    return list(LOSSES) if cases is CASES else ["all terms" if case[2] == 60 else "plain"]


def save(content, file: Path):
    if dist.get_rank() == 0:
        torch.save(content, file)


def own_samples(file: Path, mesh: dict, in_turn: int = 1) -> list:
    """This rank's groups of a file: so many for each rank in turn."""
    samples, dp = torch.load(file, weights_only=False), mesh["dp"]
    return [one for one in samples if one.key[0] // in_turn % dp.size() == dp.get_local_rank()]


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
    record["gradients"] = {name: one.grad.full_tensor().clone() for name, one in actor.parameters.items()}
    record["grad_norm"] = actor.optimizer_step()
    moments = [one["exp_avg"].full_tensor().flatten() for one in actor.optimizer.state.values()]
    record["clipped_norm"] = torch.cat(moments).norm().item() / (1 - 0.9)  # of the first step of Adam
    return record


def compare_gradients(all_cases: dict, inputs: Path, outputs: Path):
    """For each case, model and loss an update of the model's samples, which rank 0 writes to a file."""
    processes = dist.get_world_size()
    for name in FORMS:
        for case in all_cases[processes]:
            tp, copies, budget, recompute = case
            flags = COMMON | {"model": str(inputs / name), "tp_size": tp, "dp_replicate": copies}
            flags |= {"tokens_per_micro_batch": budget, "gradient_checkpointing": recompute}
            mesh = train.init_distributed(Config(**flags))
            mine = own_samples(inputs / f"{name}.pt", mesh, 4 if recompute else 1)  # uneven, to be balanced
            for loss in losses_of(case, all_cases):
                config = Config(**flags | LOSSES[loss], token_groups=0)
                if recompute:  # as a run has it: shared prompts, the other head, moves between ranks
                    layout = {"batch_class": SharedBatch}
                    trainer = make_trainer(config, mesh, RunTrainer, **layout)
                else:
                    trainer = make_trainer(config, mesh)
                record = update(trainer, deepcopy(mine), loss)
                save(record, outputs / f"{name}-{loss}-{processes}-{case}.pt")


def compare_weights(inputs: Path, outputs: Path):
    """Whole weights over all layouts are those of the folder to the bit; the exports are written."""
    for name in FORMS:
        expected = dict(AutoModelForCausalLM.from_pretrained(inputs / name).named_parameters())
        for tp, dtype in ((2, "float32"), (2, "bfloat16"), (1, "bfloat16")):
            config = Config(model=str(inputs / name), device="cpu", tp_size=tp, dtype=dtype)
            mesh = train.init_distributed(config)
            actor = train.Actor(train.load_policy(config.model, mesh, config, VOCAB), mesh, config)
            found = {key: whole.clone() for bucket in actor.whole_weights() for key, whole in bucket}
            assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
            for key, value in found.items():
                assert value.dtype == getattr(torch, dtype)
                for other in (expected[key], actor.parameters[key].full_tensor()):
                    assert torch.equal(value, other.to(value.dtype)), (name, tp, key)
        actor.save(inputs / name, outputs / f"{name}-export")


def compare_adapters(inputs: Path, outputs: Path):
    """Updates of adapters with tp 2 and without, which rank 0 writes to files, with the merged weights."""
    for name in ADAPTED:
        for tp in (1, 2):
            flags = COMMON | {"model": str(inputs / name), "tp_size": tp, "tokens_per_micro_batch": 60}
            config = add_flags(lora.LoRAConfig)(**flags, lora_rank=4, lora_alpha=6)
            mesh = train.init_distributed(config)
            layout = {"batch_class": SharedBatch} if tp == 2 else {}
            trainer = make_trainer(config, mesh, head.extend(lora.LoRATrainer), lora.LoRAActor, **layout)
            for weight in trainer.actor.parameters.values():  # at the start B is 0, and so A's gradient
                generator = torch.Generator().manual_seed(1)
                lora.fill(weight, 0.1 * torch.randn(weight.shape, generator=generator))
            adapters = {key: one.full_tensor().clone() for key, one in trainer.actor.parameters.items()}
            merged = {key: one for bucket in trainer.actor.whole_weights() for key, one in bucket}
            record = update(trainer, own_samples(inputs / f"{name}.pt", mesh), "plain")
            save(record | {"adapters": adapters, "merged": merged}, outputs / f"{name}-lora-{tp}.pt")


def dither_parts(inputs: Path, outputs: Path):
    """Dithers a model whose parts have copies; rank 0 writes the parts of all ranks to a file."""
    flags = {"model": str(inputs / "qwen2-tied"), "tp_size": 2, "dp_replicate": 2, "dtype": "bfloat16"}
    config = Config(**COMMON | flags)
    weights = make_trainer(config, train.init_distributed(config)).actor.parameters
    for weight in weights.values():  # bf16 numbers, as in a checkpoint
        weight.data.copy_(weight.data.bfloat16())
    dither.dither_all(list(weights.values()), seed=0)
    mine = {name: (dither.part_of(weight), weight.to_local()) for name, weight in weights.items()}
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    save(everyones, outputs / "dithered.pt")


def overflow_one_rank(inputs: Path, outputs: Path):
    """Three updates in float16, of which the second overflows on rank 1; what each rank has after each."""
    flags = COMMON | {"model": str(inputs / "qwen3-tied"), "dtype": "float16", "warmup_steps": 0, "lr": 1e-3}
    config = Config(**flags)
    trainer = make_trainer(config, train.init_distributed(config))
    loss_scale.scale_loss(trainer.actor)
    mine = own_samples(inputs / "qwen3-tied.pt", trainer.mesh)
    history = []
    for factor in (1, 1e9 if dist.get_rank() == 1 else 1, 1):
        samples = deepcopy(mine)
        for sample in samples:
            sample.tokens["advantage"] *= factor
        norm = update(trainer, samples, "plain")["grad_norm"]
        actor = trainer.actor
        state = [list(one.values()) for one in actor.optimizer.state.values()]
        local = [one.to_local().clone() for one in actor.parameters.values()]
        moments = [getattr(one, "_local_tensor", one).clone() for one in sum(state, [])]
        updates = actor.scheduler.last_epoch
        history.append((norm, vars(actor.loss_scale).copy(), updates, local, moments))
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, history)
    save(everyones, outputs / "overflow.pt")


def score_head(dtype: torch.dtype, tp, fp32_logits: bool) -> dict:
    """Log-probs, entropies and gradients of a 16-bit head whose rows are split, and the inputs."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(300, 64, generator=generator).mul(2).to(dtype).requires_grad_()
    whole = torch.randn(128, 64, generator=generator).to(dtype)
    targets = torch.randint(0, 120, (300,), generator=generator)
    outside = torch.randn(2, 300, generator=generator)  # gradients of some loss
    weight = whole.chunk(tp.size())[tp.get_local_rank()].clone().requires_grad_()
    options = {"temperature": 0.8, "vocab_size": 120, "tp": tp, "fp32_logits": fp32_logits}
    scores = head.head_logprobs(states, targets, weight, **options)
    (outside * torch.stack(scores)).sum().backward()
    found = {"scores": torch.stack(scores).detach(), "by_states": states.grad, "by_head": weight.grad}
    return found | {"inputs": (states.detach(), whole, targets, outside)}


def score_heads(outputs: Path):
    """What `score_head` finds with tp 2, with the gradient of all rows."""
    tp = train.init_distributed(Config(device="cpu", tp_size=2))["tp"]
    for dtype in (torch.bfloat16, torch.float16):
        found = score_head(dtype, tp, True)
        parts = [None] * 2
        dist.all_gather_object(parts, found["by_head"])
        save(found | {"by_head": torch.cat(parts)}, outputs / f"head-{dtype}.pt")


def learn(case: tuple, outputs: Path):
    """A short run of the embedded model, in a folder of its own."""
    tp, copies = case
    config = parse_flags(Config, ["--steps", "2", "--prompts_per_step", "8", "--group_size", "4"])
    options = {"tp_size": tp, "dp_replicate": copies, "max_new_tokens": 20, "eval_every": 0, "lr": 1e-3}
    options["output_dir"] = str(outputs / f"{dist.get_world_size()}-{tp}-{copies}")
    vars(config).update(options | {"updates_per_step": 2, "warmup_steps": 0})
    VariantTrainer(config, train.RLDataset, lambda sample: len(sample.text) % 7, None).fit()


def uneven_machines(outputs: Path):
    """A machine with two processes and two with one; making groups is collective: all must agree."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if dist.get_rank() < 2 else "1"
    trainer = object.__new__(balance.extend(VariantTrainer))
    trainer.mesh = train.init_distributed(Config(device="cpu"))
    (outputs / f"uneven-{dist.get_rank()}").write_text(str(trainer.neighbors))


def compare(rank: int, processes: int, cases: dict, inputs: Path, outputs: Path):
    """Everything that runs in so many processes, in one of them; it may make many meshes."""
    train.RANK = rank
    os.environ |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    store = dist.FileStore(str(outputs / f"store-{processes}"), processes)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    train.dist.init_process_group = lambda *args, **options: None
    compare_gradients(cases, inputs, outputs)
    if cases is FEW and processes in RUNS:
        learn(RUNS[processes], outputs)
    if cases is FEW and processes == 2:
        compare_weights(inputs, outputs)
        compare_adapters(inputs, outputs)
        overflow_one_rank(inputs, outputs)
        score_heads(outputs)
    if cases is FEW and processes == 4:
        dither_parts(inputs, outputs)
        uneven_machines(outputs)
    dist.barrier()
    os._exit(0)  # at once: destructors of many meshes take seconds


if __name__ == "__main__":
    cases = FEW if sys.argv[1] == "few" else CASES
    for processes in cases:
        arguments = (processes, cases, *map(Path, sys.argv[2:]))
        torch.multiprocessing.start_processes(compare, arguments, processes, start_method="fork")
