"""How near the hardware's limits the update is: Qwen2.5-1.5B's shape with random weights.

    python -m bench.gpu [--rounds 5] [--shape 1.5B|small] [--tokens 16384] [--output assets/records/gpu.json]

One process. Measures:
- the ceiling: FLOP/s of a square matmul of 8192 in the compute dtype, the best of this card;
- the update (forward, backward, clipping, AdamW) on packed sequences of 1,024 tokens, 768 of them trained,
  with and without gradient checkpointing and torch.compile. FLOPs are those of the model (extras/monitor.py:
  three forward passes, nothing for what checkpointing computes twice), as a share of the ceiling and of the
  card's peak;
- its peak memory compared with tools/plan.py.

Without a GPU it runs with --shape small --tokens 2048, in fp32, to try the script.
"""

import tempfile
from statistics import median

import torch
from transformers import AutoConfig

import train
from bench.measure import in_turn, options, record, seconds, show
from bench.memory import TRAINED, full_batch, make_actor, make_model, planned_update, shape_config, update
from extras.compile import compile_layers
from extras.monitor import forward_flops, peak_flops
from tools.plan import PlanConfig
from tools.shapes import known_config

SEQUENCE = 1024  # tokens of a sample in full_batch
CASES = [{"gradient_checkpointing": True}, {"gradient_checkpointing": False}]
CASES += [case | {"compile": True} for case in CASES] * train.GPU


def ceiling(dtype: torch.dtype, device: str) -> float:
    """FLOP/s of a square matmul, the best of 20."""
    size = 8192 if device == "cuda" else 1024
    left = torch.randn(size, size, device=device, dtype=dtype)
    right = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / min(seconds(lambda: left @ right)[0] for _ in range(20))


def measure_update(config: PlanConfig, mesh, micro_batches: int, rounds: int, top: float) -> dict:
    """Seconds, MFU and peak memory of one optimizer step over so many micro-batches of the budget."""
    shape = AutoConfig.from_pretrained(config.model)
    actor = make_actor(config, mesh, shape.vocab_size)
    if config.compile:
        compile_layers(actor.model)
    batches = [full_batch(config.tokens_per_micro_batch, config.device) for _ in range(micro_batches)]
    if train.GPU:
        torch.cuda.reset_peak_memory_stats()
    times = in_turn({"update": lambda: update(actor, batches)}, rounds)["update"]["wall"]
    sequences = micro_batches * config.tokens_per_micro_batch // SEQUENCE
    flops = 3 * forward_flops(shape, [SEQUENCE] * sequences, round(TRAINED * SEQUENCE * sequences))
    speed = flops / median(times)
    row = {"checkpointing": config.gradient_checkpointing, "compile": config.compile}
    row |= {"seconds": median(times), "tokens per s": sequences * SEQUENCE / median(times)}
    row |= {"TFLOP/s": speed / 1e12, "% of the ceiling": 100 * speed / top}
    peak = peak_flops(torch.cuda.get_device_name()) if train.GPU else None
    row["MFU (%)"] = 100 * speed / peak if peak else "-"
    row["peak (GB)"] = torch.cuda.max_memory_allocated() / 1e9 if train.GPU else "-"
    return row | {"planned (GB)": planned_update(config, shape) / 1e9}


def main():
    """Measures all, prints the tables, writes the numbers."""
    extra = {"shape": ("1.5B", "1.5B or small"), "tokens": (16384, "tokens per micro-batch")}
    flags = options(__doc__, "gpu", **extra, micro_batches=(4, "micro-batches per optimizer step"))
    shape = known_config("Qwen2.5-1.5B-Instruct") if flags.shape == "1.5B" else shape_config("small Qwen3")
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, shape, torch.bfloat16)
        base = {"model": folder, "tokens_per_micro_batch": flags.tokens, "engine": "local"}
        config = PlanConfig(**base, processes=1)
        mesh = train.init_distributed(config)
        top = ceiling(getattr(torch, config.dtype), config.device)
        print(f"ceiling: {top / 1e12:.1f} TFLOP/s in {config.dtype}", flush=True)
        rows = []
        for case in CASES:
            config = PlanConfig(**base, **case, processes=1)
            rows.append(measure_update(config, mesh, flags.micro_batches, flags.rounds, top))
            show(rows[-1:])
    show(rows)
    record(flags.output, {f"An update of Qwen {flags.shape}": rows}, ceiling=top)


if __name__ == "__main__":
    main()
