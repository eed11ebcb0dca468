"""How long does a push of new weights into SGLang take, compared with a plain copy of the same bytes?

    python -m bench.push [--pairs 7] [--sizes small middle 0.5B] [--output assets/push.json]

Needs sglang (without a GPU: .ci/sglang_cpu/install and the variables in its first lines). For each size of
a Qwen3 with random weights it starts a colocated engine and the actor, one process each, and times in turn,
pair by pair, `SGLangEngine.push` (gather, flatten, send, load) and copying every tensor into another one that
exists; beside them `sleep`, which comes before a push (flush the cache, release the memory). Prints medians
of wall time, and the line through the sizes: the overhead per push, and per GB.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bench.measure import ASSETS
from extras.sglang_cpu import keep_pages
from train import GPU, Actor, Config, SGLangEngine, init_distributed, load_policy

SIZES = {
    "small": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=6, vocab_size=8192),
    "middle": dict(hidden_size=640, intermediate_size=1920, num_hidden_layers=10, vocab_size=32768),
    "0.5B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=22, vocab_size=151936),
}


def make_model(folder: Path, dtype: str, **sizes):
    """A Hugging Face folder with random weights of a Qwen3, and the tokenizer of the embedded model."""
    config = Qwen3Config(
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=sizes["hidden_size"] // 8,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **sizes,
    )
    Qwen3ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ASSETS / "tiny").save_pretrained(folder)


def seconds(action) -> float:
    """Wall time of an action, the GPU's work included."""
    start = time.perf_counter()
    action()
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(config: Config, mesh, pairs: int) -> dict:
    """Medians over pairs of a push and a copy, taken in turn after one of each that does not count."""
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    engine = SGLangEngine(config.model, tokenizer, mesh, config)
    actor = Actor(load_policy(config.model, mesh, config, engine.vocab_size), mesh, config)
    whole = [value.clone() for bucket in actor.whole_weights() for _, value in bucket]
    copies = [torch.empty_like(value) for value in whole]
    sleeps, pushes, plain = [], [], []
    for _ in range(pairs + 1):
        sleeps.append(seconds(engine.sleep))
        pushes.append(seconds(lambda: engine.push(actor.whole_weights())))
        plain.append(seconds(lambda: [copy.copy_(value) for copy, value in zip(copies, whole)]))
    engine.close()
    sleep, push, copy = (statistics.median(times[1:]) for times in (sleeps, pushes, plain))
    return dict(
        gb=sum(value.nbytes for value in whole) / 1e9,
        sleep=sleep,
        push=push,
        copy=copy,
        sleeps=sleeps[1:],
        pushes=pushes[1:],
        copies=plain[1:],
        ratio=statistics.median(a / b for a, b in zip(pushes[1:], plain[1:])),
    )


def measure_size(name: str, pairs: int) -> dict:
    """Measures a model of a size, in a process of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(model=folder, engine="sglang")
        make_model(Path(folder), config.dtype, **SIZES[name])
        if not GPU:
            keep_pages()
        return measure(config, init_distributed(config), pairs)


def main():
    """Measures all sizes, prints the table, writes the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path, default=ASSETS / "push.json")
    options = parser.parse_args()
    rows = {}
    print("model       GB  sleep (s)   push (s)   copy (s)   push / copy, median of pairs")
    for name in options.sizes:
        # A process each: SGLang's shutdown also ends the process that shares this one's tensors.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows[name] = row = pool.submit(measure_size, name, options.pairs).result()
        print(
            f"{name:8}{row['gb']:6.3f}{row['sleep']:11.3f}{row['push']:11.3f}{row['copy']:11.3f}{row['ratio']:11.1f}",
            flush=True,
        )
    sizes = [row["gb"] for row in rows.values()]
    excess = [row["push"] - row["copy"] for row in rows.values()]
    slope, start = statistics.linear_regression(sizes, excess) if len(sizes) > 1 else (0.0, excess[0])
    device = torch.cuda.get_device_name() if GPU else f"{platform.machine()}, no GPU"
    print(f"over a plain copy: {start:.3f} s per push and {slope:.2f} s per GB ({device})")
    options.output.write_text(
        json.dumps(
            dict(
                device=device, torch=torch.__version__, seconds_a_push=start, seconds_a_gb=slope, models=rows
            )
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
