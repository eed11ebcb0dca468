"""How near the hardware's limits the update and the push are: Qwen2.5-1.5B's shape with random weights.

    python -m bench.gpu [--rounds 5] [--output assets/gpu.json] [--shape 1.5B|small] [--tokens 16384]

One process. Measures, in turn where two things are compared:
- the ceiling: bf16 FLOP/s of a square matmul of 8192, the best of this card;
- the update (forward, backward, clipping, AdamW) on packed sequences of 1,024 tokens, 768 of them trained,
  with and without gradient checkpointing and torch.compile. FLOPs are those of the model (extras/monitor.py:
  three forward passes, nothing for what checkpointing computes twice), as a share of the ceiling and of the
  card's peak;
- its peak memory compared with tools/plan.py;
- a push into the local engine's copy, compared with copying the same bytes from one tensor to another.
On a CPU it runs with --shape small, in fp32, to try the script.
"""

import statistics
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import train
from bench.measure import ASSETS, in_turn, options, seconds, show, write
from bench.memory import make_actor, update
from extras import add_flags
from extras.compile import compile_layers
from extras.local_engine import LocalEngine
from extras.monitor import forward_flops, peak_flops
from tools.plan import plan

SHAPES = {
    "1.5B": dict(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
    ),
    "small": dict(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=8192,
    ),
}
SEQUENCE, TRAINED = 1024, 768


def make_model(folder: Path, shape: str) -> str:
    """A Hugging Face folder with random weights of this shape and the embedded model's tokenizer."""
    config = Qwen2Config(max_position_embeddings=4096, tie_word_embeddings=True, **SHAPES[shape])
    with torch.device(train.Config().device):
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "tiny").save_pretrained(folder)
    return str(folder)


def ceiling(dtype: torch.dtype, device: str) -> float:
    """FLOP/s of a square matmul, the best of 20."""
    size = 8192 if device == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / min(seconds(lambda: left @ right)[0] for _ in range(20))


def make_batches(tokens: int, micro_batches: int, vocab_size: int, device: str) -> list[train.Batch]:
    """Packed sequences of SEQUENCE random tokens each, the last TRAINED of which are trained."""
    mask = [0] * (SEQUENCE - TRAINED) + [1] * TRAINED
    count = tokens // SEQUENCE
    batches = []
    for _ in range(micro_batches):
        ids = torch.randint(0, vocab_size, (count, SEQUENCE)).tolist()
        samples = []
        for i, row in enumerate(ids):
            sample = train.Sample([], {})
            sample.append(row, mask=mask, logprob=-1.0, advantage=(-1.0) ** i, weight=1e-5)
            samples.append(sample)
        batches.append(train.Batch(samples, device))
    return batches


def measure_update(config: train.Config, mesh, micro_batches: int, rounds: int, top: float) -> dict:
    """Seconds, MFU and peak memory of one optimiser step over so many micro-batches of the budget."""
    shape = AutoConfig.from_pretrained(config.model)
    actor = make_actor(config, mesh, shape.vocab_size)
    if config.compile:
        compile_layers(actor.model)
    batches = make_batches(config.tokens_per_micro_batch, micro_batches, shape.vocab_size, config.device)
    if config.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = in_turn({"update": lambda: update(actor, batches)}, rounds)["update"]["wall"]
    sequences = micro_batches * config.tokens_per_micro_batch // SEQUENCE
    flops = 3 * forward_flops(shape, [SEQUENCE] * sequences, TRAINED * sequences)
    taken = statistics.median(times)
    row = dict(
        checkpointing=config.gradient_checkpointing,
        compile=config.compile,
        seconds=taken,
        tokens_per_s=sequences * SEQUENCE / taken,
        TFLOPs=flops / taken / 1e12,
        share_of_ceiling=flops / taken / top,
    )
    peak = peak_flops(torch.cuda.get_device_name()) if config.device == "cuda" else None
    row["MFU"] = flops / taken / peak if peak else "-"
    if config.device == "cuda":
        row["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    return row | {"planned_GB": planned(config, shape)}


def planned(config: train.Config, shape) -> float:
    """GB that tools.plan expects of the update's tensors: what is neither the engine's nor a reserve."""
    phases = plan(config, shape, 1, TRAINED / SEQUENCE)
    return (
        max(
            sum(size for what, size in phases[phase].items() if what not in ("engine", "reserve"))
            for phase in ("log-probs", "layers", "reduce")
        )
        / 1e9
    )


def measure_push(config: train.Config, mesh, rounds: int) -> dict:
    """GB/s of a push, and of a plain copy of the same tensors, in turn."""
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    engine = LocalEngine(config.model, tokenizer, mesh, config)
    actor = make_actor(config, mesh, engine.vocab_size)
    source = [engine.model.get_parameter(name).detach() for name in actor.parameters]
    copies = [torch.empty_like(value) for value in source]
    times = in_turn(
        {
            "push": lambda: engine.push(actor.whole_weights()),
            "copy": lambda: [copy.copy_(value) for copy, value in zip(copies, source)],
        },
        rounds,
    )
    size = sum(value.nbytes for value in source) / 1e9
    push, copy = (statistics.median(times[name]["wall"]) for name in ("push", "copy"))
    return dict(
        GB=size,
        push_s=push,
        copy_s=copy,
        push_GB_per_s=size / push,
        copy_GB_per_s=size / copy,
        share=copy / push,
    )


def main():
    """Measures all, prints the tables, writes the numbers."""
    flags = options(
        __doc__,
        "gpu",
        shape=("1.5B", "of SHAPES"),
        tokens=(16384, "tokens a micro-batch"),
        micro_batches=(4, "micro-batches an optimiser step"),
    )
    model = make_model(Path(tempfile.mkdtemp()), flags.shape)
    base = dict(model=model, tokens_per_micro_batch=flags.tokens, warmup_steps=0, engine="local")
    config = add_flags(train.Config)(**base)
    mesh = train.init_distributed(config)
    top = ceiling(getattr(torch, config.dtype), config.device)
    print(f"ceiling: {top / 1e12:.1f} TFLOP/s in {config.dtype}", flush=True)
    rows = []
    for checkpointing, compiled in [(True, False), (False, False)] + [
        (True, True),
        (False, True),
    ] * train.GPU:
        config = add_flags(train.Config)(**base, gradient_checkpointing=checkpointing, compile=compiled)
        rows.append(measure_update(config, mesh, flags.micro_batches, flags.rounds, top))
        show(rows[-1:])
    push = measure_push(config, mesh, flags.rounds)
    show(rows)
    show([push])
    write(flags.output, ceiling=top, shape=flags.shape, tokens=flags.tokens, updates=rows, push=push)


if __name__ == "__main__":
    main()
