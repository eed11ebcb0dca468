"""The benefit of packing: one update on packed sequences compared with the same update on padded ones.

    python -m bench.packing [--rounds 7] [--samples 256] [--output assets/records/packing.json]

Samples of the embedded model, whose completions have log-normal lengths, ten times as long at the 90th
percentile as at the 10th. The alternatives do what most small trainers do: micro-batches [B, longest], padded
on the right, causal attention over the rectangle, the same head at the trained tokens only, and at most as
many tokens, including padding, as the budget of the packed run. "sorted" groups similar lengths first, which
not all trainers do. Same weights, loss and optimizer; the gradients are compared before anything is timed.
"""

import sys
from functools import partial
from statistics import median

import torch
from transformers import AttentionInterface

import train
from bench.measure import embedded_flags, in_turn, options, ratio, record, show
from bench.memory import make_actor, update
from extras import add_flags
from extras.head import head_logprobs

PROMPT, MEDIAN, SPREAD = 32, 100, 10  # tokens; the spread is that of the 90th over the 10th percentile
SIGMA = torch.tensor(SPREAD).log().item() / (2 * 1.2815515)
VOCAB = 511


def make_samples(count: int) -> list[train.Sample]:
    """Random tokens, and completions with the quantiles of a log-normal as lengths, in random order."""
    generator = torch.Generator().manual_seed(0)
    quantiles = (torch.randperm(count, generator=generator) + 0.5) / count
    lengths = (torch.special.ndtri(quantiles) * SIGMA).exp().mul(MEDIAN).clamp(1, 900).int().tolist()
    samples = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, 500, (PROMPT + length,), generator=generator).numpy()
        sample = train.Sample([], {})
        sample.append(ids[:PROMPT])
        sample.append(ids[PROMPT:], mask=1, logprob=-1.0, advantage=(-1.0) ** i)
        samples.append(sample)
    train.set_weights(samples, count)
    return samples


# ---- Layouts ---------------------------------------------------------------------------------------------
def packed(samples: list[train.Sample], budget: int) -> list[train.Batch]:
    """Micro-batches as the trainer makes them."""
    return [train.Batch(part, "cpu") for part in train.pack(samples, budget, 1)]


def padded(samples: list[train.Sample], budget: int) -> list[train.Batch]:
    """Micro-batches in the given order whose rectangles have at most `budget` tokens."""
    parts = [[]]
    for sample in samples:
        longest = max(len(other.tokens) for other in [*parts[-1], sample])
        if longest * (len(parts[-1]) + 1) > budget:
            parts.append([])
        parts[-1].append(sample)
    return [rectangle(part) for part in parts]


def rectangle(samples: list[train.Sample]) -> train.Batch:
    """A rectangle [B, longest]; its tokens are counted row by row, and no padding is trained."""
    longest = max(len(sample.tokens) for sample in samples)
    rows = []
    for sample in samples:
        row = train.Sample([], {}, sample.tokens)
        row.append([0] * (longest - len(sample.tokens)))
        rows.append(row)
    batch = train.Batch(rows, "cpu")
    batch.ids = batch.ids.view(-1, longest)
    batch.layout = {"position_ids": batch.layout["position_ids"].view(-1, longest)}
    return batch


def rectangle_attention(module, query, key, value, mask, scaling=None, **_):
    """Causal attention on [B, heads, longest, width]: padding comes last, so nothing real sees it."""
    causal = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **causal)
    return out.transpose(1, 2), None


def rectangle_logprobs(model, batch: train.Batch, temperature: float, vocab_size: int, tp):
    """What train.policy_logprobs does, for a rectangle."""
    states = model.model(batch.ids, use_cache=False, **batch.layout).last_hidden_state
    states = states.flatten(0, 1)[batch.source]
    return head_logprobs(states, batch.targets, model.lm_head.weight, temperature, vocab_size, tp)


by_length = partial(sorted, key=lambda sample: len(sample.tokens))
PADDED = ("rectangle", rectangle_logprobs)
LAYOUTS = {  # name: (samples, budget -> micro-batches; attention; model, batch, ... -> log-probs, entropies)
    "packed": (packed, "packed", train.policy_logprobs),
    "padded": (padded, *PADDED),
    "padded, sorted": (lambda samples, budget: padded(by_length(samples), budget), *PADDED),
}


def main():
    """Measures an update in each layout, in turn."""
    extra = {"samples": (256, "samples of an update"), "budget": (8192, "tokens per micro-batch")}
    flags = options(__doc__, "packing", **extra)
    sys.argv = ["train.py"]  # some extras read it
    config = train.parse_flags(add_flags(train.Config), embedded_flags(lr=1e-9))
    mesh = train.init_distributed(config)
    AttentionInterface.register("rectangle", rectangle_attention)
    samples = make_samples(flags.samples)
    fixed = {"temperature": config.temperature, "vocab_size": VOCAB, "tp": mesh["tp"]}
    batches = {}
    actions = {}
    for name, (make_batches, attention, logprobs) in LAYOUTS.items():
        batches[name] = make_batches(samples, flags.budget)
        actor = make_actor(config, mesh, VOCAB)
        actor.model.config._attn_implementation = attention
        actor.model.logprobs = partial(logprobs, actor.model, **fixed)
        train.register_fsdp_forward_method(actor.model, "logprobs")
        actions[name] = partial(update, actor, batches[name])
    norms = {name: action() for name, action in actions.items()}
    assert max(norms.values()) - min(norms.values()) < 1e-4 * min(norms.values()), norms
    times = in_turn(actions, flags.rounds)
    rows = []
    for name in LAYOUTS:
        row = {"layout": name, "micro-batches": len(batches[name])}
        row["tokens with padding"] = sum(batch.ids.numel() for batch in batches[name])
        row["update (s)"] = median(times[name]["wall"])
        for clock, label in (("wall", "time / packed"), ("cpu", "CPU time / packed")):
            row[label] = ratio(times[name][clock], times["packed"][clock])
        rows.append(row)
    show(rows)
    record(flags.output, {f"An update on {flags.samples} samples": rows})


if __name__ == "__main__":
    main()
