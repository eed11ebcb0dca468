"""How much memory does an update take: against full logits, and against what tools/plan.py says?

    python -m bench.memory [--limit_gb 19] [--output assets/memory.json]

Each case is a process of its own, or two under torchrun: a real Actor with random weights learns from a packed batch
whose sequences have 1024 tokens, a quarter of them the prompt. An earlier batch has left gradients, and Adam is there,
as in the middle of a step. Counted are the bytes of live tensors, exactly: torch.profiler sees every allocation, on a
GPU torch.cuda.max_memory_allocated. They do not wander, so --rounds has no use here.

(a) HeadLogprobs against the naive way: logits of all tokens in fp32, log_softmax, gather, entropy, and autograd; and
    against a kinder one, with the logits of the trained tokens only. Alone, without states and head themselves; and as
    a part of the whole update, where everything counts. What would take more than --limit_gb is not run: its number is
    on the line through the two batches before it, and marked so.
(b) The largest sum of an update's phases in tools/plan.py, without its reserve, against the measured peak. One case is
    measured by the memory that Linux says the process has, too.
"""
import json
import os
import resource
import subprocess
import sys
import tempfile
from functools import partial
from itertools import accumulate, chain, product
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}   # for the imports below, which read them once

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import (
    LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

import train
from bench import measure
from tools.kernels import HeadLogprobs
from tools.plan import PlanConfig, plan
from train import GPU, Actor, Sample, init_distributed, make_batch

SIZES = {
    "small": (Qwen3Config, Qwen3ForCausalLM, dict(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=True)),
    "wide": (LlamaConfig, LlamaForCausalLM, dict(
        vocab_size=1024, hidden_size=512, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False)),
    "untied": (Qwen2Config, Qwen2ForCausalLM, dict(
        vocab_size=32768, hidden_size=512, intermediate_size=2048, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=False)),
    "real": (Qwen2Config, Qwen2ForCausalLM, dict(       # Qwen2.5-0.5B with 4 of its 24 layers
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=4, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True))}
TOKENS = (1024, 2048, 4096, 8192)
NAIVE = ("all", "trained")          # which tokens the naive way makes logits of
GRID = {"small": (1024, 4096, 8192), "wide": (4096,), "untied": (640, 4096), "real": (1024, 4096, 8192)}
TRAINED, TOLERANCE = 0.75, 15       # of a batch's tokens; in percent


# ------------------------------------------------ in a process of its own --------------------------------------------
def full_batch(tokens: int, device: str):
    """A packed batch of sequences of 1024 tokens, the last one shorter."""
    lengths = [min(1024, tokens - begin) for begin in range(0, tokens, 1024)]
    samples = [Sample([], {}, [5] * length, [0] * (length // 4) + [1] * (length - length // 4), [-1.0] * length,
                      advantages=[1.0] * length) for length in lengths]
    batch = make_batch(samples, device)
    batch.weights *= 0.01
    return batch


def plain(logits, targets, temperature: float):
    """Logits [N, V] and targets [N] -> log-probs [N] and entropies [N], of which the loss has no need."""
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


def plain_logprobs(model, tp, batch, temperature: float, vocab_size: int, kind: str):
    """Stands in for `model_logprobs`."""
    states = model.model(batch.ids, position_ids=batch.positions, use_cache=False, bounds=batch.bounds,
                         longest=batch.longest).last_hidden_state[0]
    if kind == "trained":
        return plain(model.lm_head(states[batch.source]), batch.targets, temperature)
    logprobs, entropies = plain(model.lm_head(states), batch.ids[0].roll(-1), temperature)
    return logprobs[batch.source], entropies[batch.source]


def peak(action) -> int:
    """Bytes of tensors alive at once in an action, over those that were there before. It must leave none."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    sizes, places = [], {}
    for event in sorted(allocations(profiler.profiler.kineto_results.experimental_event_tree()),
                        key=lambda event: event.start_time_ns):
        size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
        if size > 0:
            places.setdefault(address, []).append(len(sizes))
        elif not places.get(address):
            continue            # older than the action
        else:
            places[address].pop()
        sizes.append(size)
    for place in chain(*places.values()):
        sizes[place] = 0        # a thread of gloo's has let go of it, which the profiler does not see
    return max(accumulate(sizes))


def allocations(events):
    """Allocations and releases among the profiler's events and what is inside them."""
    for event in events:
        if event.tag.name == "Allocation":
            yield event
        yield from allocations(event.children)


def resident_peak(action) -> int:
    """The same, as Linux sees it: the most memory that the process ever had, less what it has before the action."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def tensor_bytes(actor: Actor) -> int:
    """What an actor holds between updates."""
    tensors = [*actor.model.parameters(), *actor.model.buffers(),
               *(value for state in actor.optimizer.state.values() for value in state.values())]
    storages = [(value.to_local() if isinstance(value, DTensor) else value).untyped_storage() for value in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def config_of(case: dict) -> PlanConfig:
    """The flags of a case."""
    return PlanConfig(model=case["model"], engine="http://elsewhere", dtype=case["dtype"], max_new_tokens=64,
                      tokens_per_micro_batch=case["tokens"], gradient_checkpointing=case["recompute"],
                      tp_size=case["tp"], processes=case["ranks"], device="cuda" if GPU else "cpu")


def update_peak(case: dict) -> int:
    """Bytes of a rank at the peak of an update."""
    config = config_of(case)
    mesh = init_distributed(config)
    if case["plain"]:
        train.model_logprobs = partial(plain_logprobs, kind=case["plain"])
    actor = Actor(case["model"], mesh, config, SIZES[case["size"]][2]["vocab_size"])
    short, full = full_batch(64, config.device), full_batch(case["tokens"], config.device)
    actor.update([[short]])         # makes Adam's state
    return tensor_bytes(actor) + (resident_peak if case["resident"] else peak)(lambda: actor.update([[short, full]]))


def head_peak(case: dict) -> int:
    """Bytes that log-probs take at their peak, forward and backward, besides states and head."""
    config = config_of(case)
    mesh, dtype, sizes = init_distributed(config), getattr(torch, config.dtype), SIZES[case["size"]][2]
    batch = full_batch(case["tokens"], config.device)
    targets = batch.ids[0] if case["plain"] == "all" else batch.targets
    head, states = (torch.randn(rows, sizes["hidden_size"]).mul_(0.1).to(config.device, dtype).requires_grad_()
                    for rows in (sizes["vocab_size"], len(targets)))

    def work():
        logprobs, _ = (plain(states @ head.T, targets, 1.0) if case["plain"] else
                       HeadLogprobs.apply(states, head, targets, 1.0, len(head), mesh["tp"]))
        logprobs.sum().backward()
        states.grad = head.grad = None

    return peak(work)


def worker(case: dict):
    """Runs a case and prints its bytes."""
    found = (head_peak if case["part"] == "log-probs" else update_peak)(case)
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()


# ------------------------------------------------ the cases ----------------------------------------------------------
def planned(case: dict) -> tuple[float, str]:
    """What tools/plan.py says of a case's update: bytes, and in which phase."""
    config_class, _, sizes = SIZES[case["size"]]
    phases = plan(config_of(case), config_class(**sizes), case["ranks"], TRAINED)
    return max((sum(parts.values()) - parts["reserve"], name) for name, parts in phases.items() if "gradients" in parts)


def measured(case: dict) -> int:
    """Bytes of a case, measured in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case['ranks']}"]
    done = subprocess.run([sys.executable, *(launcher if case["ranks"] > 1 else []), "-m", "bench.memory", "--case",
                           json.dumps(case)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def against_plain(base: dict, limit: float) -> list[dict]:
    """Table (a)."""
    rows = []
    for part in ("log-probs", "update"):
        ours = {tokens: measured(base | dict(part=part, tokens=tokens)) for tokens in TOKENS}
        for kind in NAIVE:
            known = {}
            for tokens in TOKENS:
                found, how = guess(known, tokens), "on a line"
                if found <= limit:
                    found, how = measured(base | dict(part=part, tokens=tokens, plain=kind)), "measured"
                    known[tokens] = found
                rows.append(dict(part=part, logits_of=kind, tokens=tokens, ours_gb=ours[tokens] / 1e9,
                                 naive_gb=found / 1e9, ratio=found / ours[tokens], naive_is=how))
                print(*rows[-1].values(), flush=True)
    return rows


def guess(known: dict[int, int], tokens: int) -> float:
    """Bytes on the line through the two largest batches that are known; nothing where there are not two."""
    if len(known) < 2:
        return 0
    (x, low), (y, high) = list(known.items())[-2:]
    return high + (high - low) / (y - x) * (tokens - y)


def against_plan(base: dict, models: dict, limit: float) -> list[dict]:
    """Table (b)."""
    cases = [dict(size=size, tokens=tokens, recompute=recompute, dtype=dtype) for size, counts in GRID.items()
             for tokens, recompute, dtype in product(counts, (True, False), ("float32", "bfloat16"))]
    cases += [dict(size=size, tokens=tokens, recompute=recompute, dtype=dtype, ranks=2, tp=tp)
              for size, tokens in (("small", 4096), ("untied", 640), ("real", 1024))
              for tp, (recompute, dtype) in product((1, 2), ((True, "float32"), (False, "bfloat16")))]
    cases += [dict(size="real", tokens=4096, resident=True)] if not GPU else []
    rows = []
    for case in cases:
        case = base | case | dict(model=models[case["size"]])
        expected, phase = planned(case)
        if expected * case["ranks"] > limit or GPU and case["ranks"] > torch.cuda.device_count():
            continue
        found = measured(case)
        rows.append({name: case[name] for name in ("size", "tokens", "dtype", "recompute", "ranks", "tp")} | dict(
            by="Linux" if case["resident"] else "tensors", plan_gb=expected / 1e9, measured_gb=found / 1e9,
            error_percent=100 * (expected / found - 1), fullest=phase))
        print(*rows[-1].values(), flush=True)
    return rows


def main():
    """Measures all, prints both tables, writes the numbers."""
    options = measure.options(__doc__, "memory", limit_gb=(19.0, "what a case may take, of all its ranks together"),
                              case=("", "for the benchmark itself: a process measures one case"))
    if options.case:
        return worker(json.loads(options.case))
    limit = options.limit_gb * 1e9
    with tempfile.TemporaryDirectory() as scratch:
        models = {size: f"{scratch}/{size}" for size in SIZES}
        for size, (config_class, model_class, sizes) in SIZES.items():
            model_class(config_class(**sizes, max_position_embeddings=32768)).save_pretrained(models[size])
        base = dict(part="update", size="real", model=models["real"], dtype="float32", recompute=True, ranks=1, tp=1,
                    plain="", resident=False)
        rows = dict(plan=against_plan(base, models, limit), plain=against_plain(base, limit))
    for table in rows.values():
        measure.show(table)
    measure.write(options.output, sizes={size: sizes for size, (*_, sizes) in SIZES.items()}, **rows)
    wrong = [row for row in rows["plan"] if abs(row["error_percent"]) > TOLERANCE]
    if wrong:
        sys.exit(f"tools/plan.py is off by more than {TOLERANCE} %: {wrong}")


if __name__ == "__main__":
    main()
