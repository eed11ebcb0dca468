"""What packing is worth: one update on packed sequences against the same update on padded ones.

    python -m bench.packing [--rounds 7] [--output assets/packing.json]

256 samples of the embedded model's size, whose completions have log-normal lengths, ten times as long at the 90th
percentile as at the 10th. The peers do what most small trainers do: micro-batches [B, longest], right-padded, causal
attention over the rectangle, the same head at the trained tokens only, and at most as many tokens, padding included,
as the budget of the packed run. "sorted" groups alike lengths first, which not all do. Same weights, loss and
optimiser; the gradients are compared before anything is timed.
"""
import tempfile
from dataclasses import replace

import torch
from transformers import AttentionInterface

import train
from bench.measure import in_turn, options, ratio, show, write

PROMPT, MEDIAN, SPREAD = 32, 100, 10        # tokens; the spread is that of the 90th over the 10th percentile
SIGMA = torch.tensor(SPREAD).log().item() / (2 * 1.2815515)


def make_samples(count: int) -> list[train.Sample]:
    """Random tokens, and completion lengths at the quantiles of a log-normal, at most 900, in random order."""
    generator = torch.Generator().manual_seed(0)
    quantiles = (torch.randperm(count, generator=generator) + 0.5) / count
    lengths = (torch.special.ndtri(quantiles) * SIGMA).exp().mul(MEDIAN).clamp(1, 900).int().tolist()
    samples = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, 500, (PROMPT + length,), generator=generator).tolist()
        samples.append(train.Sample([], {}, ids, [0] * PROMPT + [1] * length, [-1.0] * len(ids),
                                    advantages=[(-1.0) ** i] * len(ids)))
    return samples


def padded_packs(samples: list[train.Sample], budget: int) -> list[list[train.Sample]]:
    """Micro-batches in the given order whose rectangles have at most `budget` tokens."""
    packs = [[]]
    for sample in samples:
        longest = max(len(other.ids) for other in [*packs[-1], sample])
        if longest * (len(packs[-1]) + 1) > budget:
            packs.append([])
        packs[-1].append(sample)
    return packs


def padded_batch(samples: list[train.Sample]) -> train.Batch:
    """A rectangle [B, longest], laid out as one row of T = B longest tokens; the padding is not trained."""
    longest = max(len(sample.ids) for sample in samples)
    filled = [replace(sample, **{name: getattr(sample, name) + [0] * (longest - len(sample.ids))
                                 for name in ("ids", "mask", "logprobs", "advantages")}) for sample in samples]
    batch = train.make_batch(filled, "cpu")
    return replace(batch, ids=batch.ids.view(-1, longest), positions=batch.positions.view(-1, longest))


def rectangle_attention(module, query, key, value, mask, scaling=None, **_):
    """Causal attention on [B, heads, longest, width]: padding comes last, so nothing real sees it."""
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling,
                                                           enable_gqa=True)
    return out.transpose(1, 2), None


def padded_logprobs(model, tp, batch: train.Batch, temperature: float, vocab_size: int):
    """`model_logprobs` for a rectangle."""
    states = model.model(batch.ids, position_ids=batch.positions, use_cache=False).last_hidden_state
    return train.HeadLogprobs.apply(states.flatten(0, 1)[batch.source], model.lm_head.weight, batch.targets,
                                    temperature, vocab_size, tp)


def make_actor(config: train.Config, mesh, attention: str, logprobs) -> train.Actor:
    """An actor whose model attends and scores in the given way."""
    plain, train.model_logprobs = train.model_logprobs, logprobs
    actor = train.Actor(config.model, mesh, config, 511)
    train.model_logprobs = plain
    actor.model.config._attn_implementation = attention
    return actor


def main():
    """Measures the update three ways in turn."""
    flags = options(__doc__, "packing", samples=(256, "samples of an update"), budget=(8192, "tokens a micro-batch"))
    config = train.Config(**train.TINY | dict(tokens_per_micro_batch=flags.budget, output_dir=tempfile.mkdtemp()))
    mesh = train.init_distributed(config)
    AttentionInterface.register("rectangle", rectangle_attention)
    samples = make_samples(flags.samples)

    by_length = sorted(samples, key=lambda sample: len(sample.ids))
    batches = {
        "packed": [train.make_batch(part, "cpu") for part in train.pack(samples, flags.budget, 1)],
        "padded": [padded_batch(part) for part in padded_packs(samples, flags.budget)],
        "padded, sorted": [padded_batch(part) for part in padded_packs(by_length, flags.budget)]}
    for batch in sum(batches.values(), []):
        batch.weights = train.token_weights(batch, "sequence", samples, config.max_new_tokens)
    actors = {name: make_actor(config, mesh, "packed", train.model_logprobs) if name == "packed" else
              make_actor(config, mesh, "rectangle", padded_logprobs) for name in batches}
    norms = {name: actor.update([batches[name]])["grad_norm"] for name, actor in actors.items()}
    assert max(norms.values()) - min(norms.values()) < 1e-4 * min(norms.values()), norms
    actions = {name: lambda name=name: actors[name].update([batches[name]]) for name in actors}
    times = in_turn(actions, flags.rounds)
    rows = [dict(update=name, micro_batches=len(batches[name]), tokens=sum(b.ids.numel() for b in batches[name]),
                 wall_s=sorted(times[name]["wall"])[flags.rounds // 2],
                 wall_over_packed=ratio(times[name]["wall"], times["packed"]["wall"]),
                 cpu_over_packed=ratio(times[name]["cpu"], times["packed"]["cpu"])) for name in actors]
    lengths = sorted(sum(sample.mask) for sample in samples)
    p10, median, p90 = (lengths[int(len(lengths) * share)] for share in (0.1, 0.5, 0.9))
    print(f"completions: p10 {p10}, median {median}, p90 {p90} tokens; gradient norms "
          + ", ".join(f"{norm:.6f}" for norm in norms.values()))
    show(rows)
    write(flags.output, lengths=lengths, rows=rows, times=times)


if __name__ == "__main__":
    main()
