"""How much memory does an update take: compared with full logits, and with what tools/plan.py predicts?

    python -m bench.memory [--limit_gb 19] [--output assets/memory.json]

Each case is a process of its own, or two under torchrun: a real Actor with random weights learns from a
packed batch whose sequences have 1,024 tokens, a quarter of them the prompt. An earlier batch has left
gradients, and Adam's state exists, as in the middle of a step. Counted are the bytes of live tensors, which
do not vary: on a CPU torch.profiler sees every allocation, on a GPU torch.cuda.max_memory_allocated does.

(a) The head of train.py compared with the naive way: logits of all tokens in fp32, log_softmax, gather,
    entropy and autograd; and with a kinder one, with the logits of the trained tokens only. Alone, without
    states and head themselves; and as a part of the whole update, where everything counts. What would take
    more than --limit_gb is not run: its number is on the line through the two batches before it, and marked.
(b) The largest sum of an update's phases in tools/plan.py, without its reserve, compared with the measured
    peak. One case is measured by the memory that Linux counts for the process, too.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import accumulate, chain, product
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}  # for the imports below, which read them once

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

import train  # noqa: E402
from bench import measure  # noqa: E402
from tools.plan import PlanConfig, plan  # noqa: E402
from train import GPU, Actor, Batch, Sample, grpo_loss, init_distributed, load_policy  # noqa: E402

SIZES = {
    "small": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "vocab_size": 8192,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "wide": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "vocab_size": 1024,
            "hidden_size": 512,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    ),
    "untied": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "vocab_size": 32768,
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
        },
    ),
    "real": (  # Qwen2.5-0.5B with 4 of its 24 layers
        Qwen2Config,
        Qwen2ForCausalLM,
        {
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 4,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}
TOKENS = (1024, 2048, 4096, 8192)
NAIVE = ("all", "trained")  # the tokens whose logits the naive way computes
GRID = {"small": (1024, 4096, 8192), "wide": (4096,), "untied": (640, 4096), "real": (1024, 4096, 8192)}
TRAINED = 0.75  # of a batch's tokens
TOLERANCE = 15  # percent


# ---- In a process of its own -----------------------------------------------------------------------------
def full_batch(tokens: int, device: str, trained: float = TRAINED):
    """A packed batch of sequences of 1,024 tokens, the last one shorter; `trained` is their trained share."""
    samples = []
    for begin in range(0, tokens, 1024):
        length = min(1024, tokens - begin)
        sample = Sample([], {})
        sample.append([5] * length, logprob=-1.0)
        prompt = max(1, round(length * (1 - trained)))
        sample.tokens["mask"][prompt:] = 1
        sample.tokens["advantage"] = 1.0
        sample.tokens["weight"] = 0.01
        samples.append(sample)
    return Batch(samples, device)


def naive_logprobs(states, targets, head, temperature: float, *_):
    """Stands in for train.head_logprobs: log-probs [N] and entropies [N] by way of all logits."""
    logprobs = torch.log_softmax((states @ head.T).float() / temperature, -1)
    with torch.no_grad():
        entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets[:, None])[:, 0], entropies


def peak(action) -> int:
    """Bytes of tensors alive at once in an action, beyond those from before. It must leave none."""
    if GPU:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    sizes = []
    places = {}
    for event in sorted(allocations(tree), key=lambda event: event.start_time_ns):
        size = event.extra_fields.alloc_size
        address = event.extra_fields.ptr
        if size > 0:
            places.setdefault(address, []).append(len(sizes))
        elif not places.get(address):
            continue  # older than the action
        else:
            places[address].pop()
        sizes.append(size)
    for place in chain(*places.values()):
        sizes[place] = 0  # a thread of gloo has released it, which the profiler does not see
    return max(accumulate(sizes))


def allocations(events):
    """Allocations and releases among the profiler's events, nested ones included."""
    for event in events:
        if event.tag.name == "Allocation":
            yield event
        yield from allocations(event.children)


def resident_peak(action) -> int:
    """The same by Linux: the most memory that the process ever had, less what it has before the action."""
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    action()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before


def tensor_bytes(actor: Actor) -> int:
    """Bytes that an actor holds between updates."""
    moments = [value for state in actor.optimizer.state.values() for value in state.values()]
    tensors = [*actor.model.parameters(), *actor.model.buffers(), *moments]
    storages = {}
    for value in tensors:
        storage = (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def config_of(case: dict) -> PlanConfig:
    """The flags of a case."""
    return PlanConfig(
        model=case["model"],
        engine="http://elsewhere",
        dtype=case["dtype"],
        max_new_tokens=64,
        tokens_per_micro_batch=case["tokens"],
        gradient_checkpointing=case["recompute"],
        tp_size=case["tp"],
        processes=case["ranks"],
        device="cuda" if GPU else "cpu",
        kl_coef=0.0,
    )


def make_actor(config, mesh, vocab_size: int) -> Actor:
    """An actor as train.Trainer makes it."""
    return Actor(load_policy(config.model, mesh, config, vocab_size), mesh, config)


def update(actor: Actor, batches: list):
    """One optimizer step of an actor."""

    def loss(batch):
        logprobs, entropy = actor.model.logprobs(batch)
        batch.old_logprobs = logprobs.detach()
        result = grpo_loss(logprobs, entropy, batch, actor.config)
        batch.old_logprobs = None
        return result

    actor.backward(batches, loss)
    actor.optimizer_step()


def update_peak(case: dict) -> int:
    """Bytes of a rank at the peak of an update."""
    config = config_of(case)
    mesh = init_distributed(config)
    trained = 1.0 if case["plain"] == "all" else TRAINED
    if case["plain"]:
        train.head_logprobs = naive_logprobs
    actor = make_actor(config, mesh, SIZES[case["size"]][2]["vocab_size"])
    short = full_batch(64, config.device)
    full = full_batch(case["tokens"], config.device, trained)
    update(actor, [short])  # creates Adam's state
    measured_by = resident_peak if case["resident"] else peak
    return tensor_bytes(actor) + measured_by(lambda: update(actor, [short, full]))


def head_peak(case: dict) -> int:
    """Bytes of log-probs at their peak, forward and backward, besides states and head."""
    config = config_of(case)
    mesh = init_distributed(config)
    dtype = getattr(torch, config.dtype)
    sizes = SIZES[case["size"]][2]
    batch = full_batch(case["tokens"], config.device, 1.0 if case["plain"] == "all" else TRAINED)

    def leaf(rows):
        values = torch.randn(rows, sizes["hidden_size"]).mul_(0.1)
        return values.to(config.device, dtype).requires_grad_()

    head = leaf(sizes["vocab_size"])
    states = leaf(len(batch.targets))
    logprobs_of = naive_logprobs if case["plain"] else train.head_logprobs

    def work():
        logprobs, _ = logprobs_of(states, batch.targets, head, 1.0, len(head), mesh["tp"])
        logprobs.sum().backward()
        states.grad = head.grad = None

    return peak(work)


def worker(case: dict):
    """Runs a case and prints its bytes."""
    found = (head_peak if case["part"] == "log-probs" else update_peak)(case)
    if dist.get_rank() == 0:
        print(found)
    dist.destroy_process_group()


# ---- The cases -------------------------------------------------------------------------------------------
def planned(case: dict) -> tuple[float, str]:
    """The plan of a case's update: bytes, and the phase."""
    config_class, _, sizes = SIZES[case["size"]]
    phases = plan(config_of(case), config_class(**sizes), case["ranks"], TRAINED)
    updates = {name: parts for name, parts in phases.items() if "gradients" in parts}
    return max((sum(parts.values()) - parts["reserve"], name) for name, parts in updates.items())


def measured(case: dict) -> int:
    """Bytes of a case, measured in processes of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={case['ranks']}"]
    command = [sys.executable, *(launcher if case["ranks"] > 1 else []), "-m", "bench.memory"]
    done = subprocess.run([*command, "--case", json.dumps(case)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    return int(done.stdout.splitlines()[-1])


def against_plain(base: dict, limit: float) -> list[dict]:
    """Table (a)."""
    rows = []
    for part in ("log-probs", "update"):
        ours = {tokens: measured(base | {"part": part, "tokens": tokens}) for tokens in TOKENS}
        for kind in NAIVE:
            known = {}
            for tokens in TOKENS:
                found = extrapolate(known, tokens)
                how = "on a line"
                if found <= limit:
                    found = measured(base | {"part": part, "tokens": tokens, "plain": kind})
                    how = "measured"
                    known[tokens] = found
                row = {"part": part, "logits_of": kind, "tokens": tokens, "ours_gb": ours[tokens] / 1e9}
                row |= {"naive_gb": found / 1e9, "ratio": found / ours[tokens], "naive_is": how}
                rows.append(row)
                print(*row.values(), flush=True)
    return rows


def extrapolate(known: dict[int, int], tokens: int) -> float:
    """Bytes on the line through the two largest known batches; 0 where there are not two."""
    if len(known) < 2:
        return 0
    (x, low), (y, high) = list(known.items())[-2:]
    return high + (high - low) / (y - x) * (tokens - y)


def plan_cases() -> list[dict]:
    """The cases of table (b)."""
    cases = []
    for size, counts in GRID.items():
        for tokens, recompute, dtype in product(counts, (True, False), ("float32", "bfloat16")):
            cases.append({"size": size, "tokens": tokens, "recompute": recompute, "dtype": dtype})
    for size, tokens in (("small", 4096), ("untied", 640), ("real", 1024)):
        for tp, (recompute, dtype) in product((1, 2), ((True, "float32"), (False, "bfloat16"))):
            case = {"size": size, "tokens": tokens, "recompute": recompute, "dtype": dtype}
            cases.append(case | {"ranks": 2, "tp": tp})
    if not GPU:
        cases.append({"size": "real", "tokens": 4096, "resident": True})
    return cases


def against_plan(base: dict, models: dict, limit: float) -> list[dict]:
    """Table (b)."""
    rows = []
    for case in plan_cases():
        case = base | case | {"model": models[case["size"]]}
        expected, phase = planned(case)
        if expected * case["ranks"] > limit or GPU and case["ranks"] > torch.cuda.device_count():
            continue
        found = measured(case)
        row = {name: case[name] for name in ("size", "tokens", "dtype", "recompute", "ranks", "tp")}
        row |= {"by": "Linux" if case["resident"] else "tensors", "plan_gb": expected / 1e9}
        row |= {"measured_gb": found / 1e9, "error_percent": 100 * (expected / found - 1), "fullest": phase}
        rows.append(row)
        print(*row.values(), flush=True)
    return rows


def make_models(folder: str, names=tuple(SIZES)) -> dict[str, str]:
    """Hugging Face folders with random weights, by size."""
    models = {}
    for name in names:
        config_class, model_class, sizes = SIZES[name]
        models[name] = f"{folder}/{name}"
        model_class(config_class(**sizes, max_position_embeddings=32768)).save_pretrained(models[name])
    return models


BASE = {"part": "update", "size": "real", "dtype": "float32", "recompute": True, "ranks": 1, "tp": 1}
BASE |= {"plain": "", "resident": False}


def main():
    """Measures everything, prints both tables, writes the numbers."""
    limit_gb = (19.0, "largest case, over all its ranks")
    options = measure.options(__doc__, "memory", limit_gb=limit_gb, case=("", "internal: one case as JSON"))
    if options.case:
        return worker(json.loads(options.case))
    limit = options.limit_gb * 1e9
    with tempfile.TemporaryDirectory() as scratch:
        models = make_models(scratch)
        base = BASE | {"model": models["real"]}
        rows = {"plan": against_plan(base, models, limit), "plain": against_plain(base, limit)}
    for table in rows.values():
        measure.show(table)
    sizes = {size: numbers for size, (*_, numbers) in SIZES.items()}
    measure.write(options.output, sizes=sizes, **rows)
    wrong = [row for row in rows["plan"] if abs(row["error_percent"]) > TOLERANCE]
    if wrong:
        sys.exit(f"tools/plan.py is off by more than {TOLERANCE} %: {wrong}")


if __name__ == "__main__":
    main()
