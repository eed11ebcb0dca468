"""The benefit of packing: one update on packed sequences compared with the same update on padded ones.

    python -m bench.packing [--rounds 7] [--samples 256] [--output assets/packing.json]

Samples of the embedded model, whose completions have log-normal lengths, ten times as long at the 90th
percentile as at the 10th. The alternatives do what most small trainers do: micro-batches [B, longest], padded
on the right, causal attention over the rectangle, the same head at the trained tokens only, and at most as
many tokens, including padding, as the budget of the packed run. "sorted" groups similar lengths first, which
not all trainers do. Same weights, loss and optimizer; the gradients are compared before anything is timed.
"""

import sys
import tempfile

import torch
from transformers import AttentionInterface

import extras
import train
from bench.measure import embedded_flags, in_turn, options, ratio, show, write
from extras import variants

PROMPT, MEDIAN, SPREAD = 32, 100, 10  # tokens; the spread is that of the 90th over the 10th percentile
SIGMA = torch.tensor(SPREAD).log().item() / (2 * 1.2815515)
VOCAB = 511


def make_samples(count: int, config: train.Config) -> list[train.Sample]:
    """Random tokens, and completions with the quantiles of a log-normal as lengths, in random order."""
    generator = torch.Generator().manual_seed(0)
    quantiles = (torch.randperm(count, generator=generator) + 0.5) / count
    lengths = (torch.special.ndtri(quantiles) * SIGMA).exp().mul(MEDIAN).clamp(1, 900).int().tolist()
    samples = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, 500, (PROMPT + length,), generator=generator).numpy()
        sample = train.Sample([], {})
        sample.append(ids[:PROMPT])
        sample.append(ids[PROMPT:], mask=1, logprob=-1.0)
        sample.tokens["advantage"] = (-1.0) ** i
        samples.append(sample)
    variants.set_weights(samples, config, count, sum(lengths))
    return samples


def padded_packs(samples: list[train.Sample], budget: int) -> list[list[train.Sample]]:
    """Micro-batches in the given order whose rectangles have at most `budget` tokens."""
    packs = [[]]
    for sample in samples:
        longest = max(len(other.tokens) for other in [*packs[-1], sample])
        if longest * (len(packs[-1]) + 1) > budget:
            packs.append([])
        packs[-1].append(sample)
    return packs


def padded_batch(samples: list[train.Sample]) -> train.Batch:
    """A rectangle [B, longest]; its tokens are counted row by row, and no padding is trained."""
    longest = max(len(sample.tokens) for sample in samples)
    padded = []
    for sample in samples:
        copy = train.Sample([], {})
        copy.tokens = sample.tokens.copy()
        copy.append([0] * (longest - len(sample.tokens)))
        padded.append(copy)
    batch = train.Batch(padded, "cpu")
    batch.ids = batch.ids.view(-1, longest)
    batch.positions = batch.positions.view(-1, longest)
    return batch


def rectangle_attention(module, query, key, value, mask, scaling=None, **_):
    """Causal attention on [B, heads, longest, width]: padding comes last, so nothing real sees it."""
    causal = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, **causal)
    return out.transpose(1, 2), None


def make_actor(config: train.Config, mesh, padded: bool) -> train.Actor:
    """An actor for packed or for padded batches."""
    model = train.load_policy(config.model, mesh, config, VOCAB)
    if padded:
        model.config._attn_implementation = "rectangle"

        def logprobs(batch):
            states = model.model(batch.ids, position_ids=batch.positions, use_cache=False).last_hidden_state
            states = states.flatten(0, 1)[batch.source]
            head = model.lm_head.weight
            head_and_temperature = (head, config.temperature, VOCAB, mesh["tp"])
            return train.head_logprobs(states, batch.targets, *head_and_temperature)

        model.logprobs = logprobs
        train.register_fsdp_forward_method(model, "logprobs")
    return train.Actor(model, mesh, config)


def update(actor: train.Actor, batches: list) -> float:
    """One optimizer step. Returns the gradient norm."""

    def loss(batch):
        logprobs, entropy = actor.model.logprobs(batch)
        batch.old_logprobs = logprobs.detach()
        return train.grpo_loss(logprobs, entropy, batch, actor.config)

    actor.backward(batches, loss)
    return actor.optimizer_step()


def main():
    """Measures the update in three ways, in turn."""
    extra = {"samples": (256, "samples of an update"), "budget": (8192, "tokens per micro-batch")}
    flags = options(__doc__, "packing", **extra)
    more = {"tokens_per_micro_batch": flags.budget, "output_dir": tempfile.mkdtemp(), "lr": 1e-9}
    sys.argv = ["train.py"]
    config = train.parse_flags(extras.add_flags(train.Config), embedded_flags(**more))
    mesh = train.init_distributed(config)
    AttentionInterface.register("rectangle", rectangle_attention)
    samples = make_samples(flags.samples, config)
    by_length = sorted(samples, key=lambda sample: len(sample.tokens))
    batches = {
        "packed": [train.Batch(part, "cpu") for part in train.pack(samples, flags.budget, 1)],
        "padded": [padded_batch(part) for part in padded_packs(samples, flags.budget)],
        "padded, sorted": [padded_batch(part) for part in padded_packs(by_length, flags.budget)],
    }
    actors = {name: make_actor(config, mesh, name != "packed") for name in batches}
    norms = {name: update(actor, batches[name]) for name, actor in actors.items()}
    assert max(norms.values()) - min(norms.values()) < 1e-4 * min(norms.values()), norms
    actions = {name: lambda name=name: update(actors[name], batches[name]) for name in actors}
    times = in_turn(actions, flags.rounds)
    rows = []
    for name in actors:
        tokens = sum(batch.ids.numel() for batch in batches[name])
        row = {"update": name, "micro_batches": len(batches[name]), "tokens": tokens}
        row["wall_s"] = sorted(times[name]["wall"])[flags.rounds // 2]
        row["wall_over_packed"] = ratio(times[name]["wall"], times["packed"]["wall"])
        row["cpu_over_packed"] = ratio(times[name]["cpu"], times["packed"]["cpu"])
        rows.append(row)
    lengths = sorted(int(sample.tokens["mask"].sum()) for sample in samples)
    p10, median, p90 = (lengths[int(len(lengths) * share)] for share in (0.1, 0.5, 0.9))
    shown = ", ".join(f"{norm:.6f}" for norm in norms.values())
    print(f"completions: p10 {p10}, median {median}, p90 {p90} tokens; gradient norms {shown}")
    show(rows)
    write(flags.output, lengths=lengths, rows=rows, times=times)


if __name__ == "__main__":
    main()
