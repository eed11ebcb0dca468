"""Prompts computed once per group: the cost of gradients beside train.py alone.

    python -m bench.prompts [--rounds 5] [--cases "tiny,head,60 + 16"] [--output assets/records/prompts.json]

A few prompts' groups of 8 completions, all trained, on a model with random weights in the shape of
Qwen2.5-0.5B in bfloat16, and on the embedded model. Compared are train.py alone (the layout of a sample after
the other, and train.head_logprobs) and "shared", what runs use: extras/shared_prompts.py and extras/head.py.
Seconds are of all gradients, in one thread, without Adam, which no layout changes; "head" is log-probs and
their gradients for 1,024 tokens without the layers. Bytes are the tensors made, at their peak.
"""

import tempfile
from functools import partial
from statistics import median

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoTokenizer

import train
from bench.measure import ASSETS, embedded_flags, in_turn, options, ratio, record, show
from bench.memory import backward, make_actor, make_model, peak, shape_config
from extras import add_flags, head
from extras.shared_prompts import SharedBatch

GROUP = 8
CASES = {  # name: (shape, groups, tokens of the prompt, of each completion)
    "tiny, 15 + 36": ("tiny", 8, 15, 36),
    "0.5B, 60 + 16": ("0.5B", 3, 60, 16),
    "0.5B, 150 + 250": ("0.5B", 1, 150, 250),
    "0.5B, 1000 + 100": ("0.5B", 1, 1000, 100),
}
LAYOUTS = {  # name: (micro-batch, head)
    "train.py": (train.Batch, train.head_logprobs),
    "shared": (SharedBatch, head.head_logprobs),
}


def make_samples(groups: int, prompt: int, completion: int) -> list[train.Sample]:
    """Groups of random tokens; every second completion was worse."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number in range(groups):
        ids = torch.randint(3, 500, (prompt,), generator=generator).numpy()
        for i in range(GROUP):
            sample = train.Sample([], {}, key=(number, i))
            sample.append(ids)
            new = torch.randint(3, 500, (completion,), generator=generator).numpy()
            sample.append(new, mask=1, logprob=-1.0, advantage=(-1.0) ** i)
            samples.append(sample)
    train.set_weights(samples, len(samples))
    return samples


def measure_case(name: str, actor, rounds: int) -> dict:
    """The row of a case."""
    _, *sizes = CASES[name]
    samples = make_samples(*sizes)
    tokens = {}
    actions = {}
    memory = {}
    norms = {}
    for layout, (batch_class, score) in LAYOUTS.items():
        batches = [batch_class(part, "cpu") for part in batch_class.pack(samples, 2**20, 1)]

        def action(layout=layout, batches=batches, score=score):
            actor.model.head_logprobs = score
            backward(actor, batches)
            norms[layout] = clip_grad_norm_(actor.parameters.values(), 1.0).full_tensor().item()
            actor.optimizer.zero_grad()

        tokens[layout] = sum(batch.ids.numel() for batch in batches)
        actions[layout] = action
        memory[layout] = peak(action) / 1e9
    assert all(abs(norm - norms["train.py"]) < 0.05 * norm for norm in norms.values()), norms
    times = in_turn(actions, rounds)
    row = {"prompt + completion": name, "tokens": f"{tokens['train.py']:,} -> {tokens['shared']:,}"}
    row |= {f"CPU s, {layout}": median(times[layout]["cpu"]) for layout in LAYOUTS}
    row["faster"] = ratio(times["train.py"]["cpu"], times["shared"]["cpu"])
    return row | {f"GB, {layout}": memory[layout] for layout in LAYOUTS}


def measure_head(dtype: torch.dtype, mesh, rounds: int) -> dict:
    """A row: 1,024 tokens, V = 151,936, H = 896, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1024, 896, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(151936, 896, generator=generator).mul(0.03).to(dtype).requires_grad_()
    targets = torch.randint(0, 151936, (1024,), generator=generator)

    def action(score):
        states.grad = weight.grad = None
        logprobs, _ = score(states, targets, weight, 1.0, 151936, mesh["tp"])
        logprobs.sum().backward()

    scores = {"train.py": train.head_logprobs, "extras/head.py": head.head_logprobs}
    actions = {name: partial(action, score) for name, score in scores.items()}
    times = in_turn(actions, rounds)
    row = {"dtype": str(dtype).removeprefix("torch.")}
    row |= {f"CPU s, {name}": median(times[name]["cpu"]) for name in scores}
    for name in scores:
        states.grad = weight.grad = None
        row[f"GB, {name}"] = peak(actions[name]) / 1e9
    return row | {"faster": ratio(times["train.py"]["cpu"], times["extras/head.py"]["cpu"])}


def main():
    """Measures all cases."""
    flags = options(__doc__, "prompts", cases=("tiny,0.5B,head", "parts of the names of cases"))
    wanted = flags.cases.split(",")
    tables = {}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(ASSETS / "tiny")
        config = train.parse_flags(add_flags(train.Config), embedded_flags(lr=1e-9))
        mesh = train.init_distributed(config)
        if "head" in wanted:
            heads = [measure_head(dtype, mesh, flags.rounds) for dtype in (torch.bfloat16, torch.float32)]
            show(heads)
            tables["Log-probs of 1,024 tokens and their gradients, V = 151,936, H = 896"] = heads
        actors = {}
        for name, (shape, *_) in CASES.items():
            if not any(part in name for part in wanted):
                continue
            if shape == "0.5B" and shape not in actors:
                config.model = make_model(folder, shape_config("Qwen2.5-0.5B"), torch.bfloat16)
                config.dtype = "bfloat16"
                config.gradient_checkpointing = True
            if shape not in actors:
                vocab = 151936 if shape == "0.5B" else len(tokenizer)
                actors = {shape: make_actor(config, mesh, vocab)}  # one at a time: memory
            rows.append(measure_case(name, actors[shape], flags.rounds))
            show(rows[-1:])
    if rows:
        tables["The gradients of groups of 8"] = rows
    record(flags.output, tables)


if __name__ == "__main__":
    main()
