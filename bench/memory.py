"""How much memory does an update take, compared with what tools/plan.py predicts?

    python -m bench.memory [--models "small Qwen3,untied Qwen2"] [--output assets/records/memory.json]

Each case is a run of its own, of one process or two: a real Actor with random weights learns from a packed
batch whose sequences have 1,024 tokens, a quarter of them the prompt. An earlier batch has left gradients,
and Adam's state exists, as in the middle of a step. Counted are the bytes of live tensors, which do not vary:
on a CPU torch.profiler sees every allocation, on a GPU torch.cuda.max_memory_allocated does. On a CPU it
takes 12 GB.

Planned is the largest sum of an update's phases in tools/plan.py, without its reserve.
"""

import json
import sys
import tempfile
from itertools import accumulate, chain

import torch
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen3Config

import train
from bench.cost import print_result, run_case
from bench.measure import ASSETS, options, record, show
from extras import head
from tools.plan import PlanConfig, plan
from train import GPU, Actor, Batch, Sample, grpo_loss, init_distributed, load_policy

# Vocabulary, hidden size, MLP size, layers, query heads, key-value heads, tied embeddings.
SHAPES = {
    "small Qwen3": (8192, 256, 768, 6, 8, 4, True),
    "untied Qwen2": (32768, 512, 2048, 4, 8, 2, False),
    "Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, True),
    "4 layers of Qwen2.5-0.5B": (151936, 896, 4864, 4, 14, 2, True),
}
REAL = "4 layers of Qwen2.5-0.5B"
TRAINED = 0.75  # of a batch's tokens
TOLERANCE = 15  # percent
BASE = {"shape": REAL, "tokens": 1024, "dtype": "float32", "recompute": True, "tp": 1, "ranks": 1}
PLAN_CASES = (
    {"shape": "small Qwen3", "tokens": 4096, "recompute": False},
    {"shape": "small Qwen3", "tokens": 4096, "dtype": "bfloat16"},
    {"shape": "small Qwen3", "tokens": 4096, "ranks": 2, "tp": 2},
    {"shape": "untied Qwen2", "tokens": 1024, "dtype": "bfloat16", "recompute": False},
    {"shape": "untied Qwen2", "tokens": 640, "ranks": 2},
    {"shape": "untied Qwen2", "tokens": 640, "ranks": 2, "tp": 2, "dtype": "bfloat16", "recompute": False},
    {"tokens": 2048},
    {"tokens": 1024, "dtype": "bfloat16", "recompute": False},
    {"tokens": 1024, "ranks": 2, "tp": 2},
)


# ---- Models, batches, updates ----------------------------------------------------------------------------
def shape_config(name: str):
    """The Hugging Face config of a shape."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "tie_word_embeddings")
    sizes = dict(zip(names, SHAPES[name]), max_position_embeddings=32768)
    if "Qwen3" in name:
        return Qwen3Config(**sizes, head_dim=sizes["hidden_size"] // sizes["num_attention_heads"])
    return Qwen2Config(**sizes)


def make_model(folder: str, config, dtype: torch.dtype = torch.float32) -> str:
    """A folder with random weights of this shape, and with the tokenizer of the embedded model."""
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "tiny").save_pretrained(folder)
    return folder


def full_batch(tokens: int, device: str) -> Batch:
    """A packed batch of sequences of 1,024 tokens, the last one shorter; TRAINED is their trained share."""
    samples = []
    for begin in range(0, tokens, 1024):
        length = min(1024, tokens - begin)
        sample = Sample([], {})
        sample.append([5] * length, logprob=-1.0, advantage=1.0, weight=0.01)
        prompt = max(1, round(length * (1 - TRAINED)))
        sample.tokens["mask"][prompt:] = 1
        samples.append(sample)
    return Batch(samples, device)


def make_actor(config: train.Config, mesh, vocab_size: int) -> Actor:
    """The actor, as a Trainer makes it."""
    model = load_policy(config.model, mesh, config, vocab_size)
    model.head_logprobs = head.head_logprobs
    return Actor(model, mesh, config)


def backward(actor: Actor, batches: list[Batch]):
    """Adds up the gradients of an actor."""

    def loss(batch):
        logprobs, entropy = actor.model.logprobs(batch)
        batch.old_logprobs = logprobs.detach()
        result = grpo_loss(logprobs, entropy, batch, actor.config)
        batch.old_logprobs = None
        return result

    actor.backward(batches, loss)


def update(actor: Actor, batches: list[Batch]) -> float:
    """One optimizer step of an actor. Returns the gradient's norm."""
    backward(actor, batches)
    return actor.optimizer_step()


# ---- Bytes -----------------------------------------------------------------------------------------------
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


def tensor_bytes(actor: Actor) -> int:
    """Bytes that an actor holds between updates."""
    moments = [value for state in actor.optimizer.state.values() for value in state.values()]
    tensors = [*actor.model.parameters(), *actor.model.buffers(), *moments]
    storages = {}
    for value in tensors:
        storage = (value.to_local() if isinstance(value, DTensor) else value).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# ---- A case, in processes of its own ---------------------------------------------------------------------
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
        share_prompts=False,  # as in full_batch
        processes=case["ranks"],
        device="cuda" if GPU else "cpu",
    )


def measure_case(case: dict) -> int:
    """Bytes of a rank at the peak of an update."""
    config = config_of(case)
    mesh = init_distributed(config)
    actor = make_actor(config, mesh, AutoConfig.from_pretrained(case["model"]).vocab_size)
    batches = [full_batch(64, config.device), full_batch(case["tokens"], config.device)]
    update(actor, batches[:1])  # creates Adam's state
    return peak(lambda: update(actor, batches)) + tensor_bytes(actor)


# ---- The tables ------------------------------------------------------------------------------------------
def planned_update(config: PlanConfig, shape) -> float:
    """Bytes of an update's tensors according to tools/plan.py, without the engine's and the reserve."""
    phases = plan(config, shape, config.processes, TRAINED)
    updates = [parts for parts in phases.values() if "gradients" in parts]
    return max(sum(parts.values()) - parts["reserve"] - parts["engine"] for parts in updates)


def plan_rows(folder: str, models: list[str]) -> list[dict]:
    """The peaks of an update of these models, and what tools/plan.py says."""
    rows = []
    for change in PLAN_CASES:
        case = BASE | change
        case["model"] = f"{folder}/{case['shape']}"
        if case["shape"] not in models or GPU and case["ranks"] > torch.cuda.device_count():
            continue
        planned = planned_update(config_of(case), shape_config(case["shape"]))
        found = run_case("bench.memory", case)
        row = {"model": case["shape"], "tokens": case["tokens"], "dtype": case["dtype"]}
        row |= {"recomputed": case["recompute"], "ranks": case["ranks"], "tp": case["tp"]}
        row |= {"planned (GB)": planned / 1e9, "measured (GB)": found / 1e9}
        rows.append(row | {"error (%)": 100 * (planned / found - 1)})
        show(rows[-1:])
    return rows


def main():
    """Measures everything, writes the numbers."""
    known = (",".join(SHAPES), "models to measure")
    flags = options(__doc__, "memory", models=known, case=("", "internal: one case, as JSON"))
    if flags.case:
        return print_result(measure_case(json.loads(flags.case)))
    models = flags.models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        for name in models:
            make_model(f"{folder}/{name}", shape_config(name))
        rows = plan_rows(folder, models)
    show(rows)
    record(flags.output, {"Peak memory of an update, planned and measured": rows})
    errors = [row["error (%)"] for row in rows]
    if max(map(abs, errors)) > TOLERANCE:
        sys.exit(f"tools/plan.py is off by more than {TOLERANCE} %")


if __name__ == "__main__":
    main()
