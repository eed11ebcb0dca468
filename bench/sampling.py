"""How fast does the local engine sample, beside `generate` of transformers?

    python -m bench.sampling [--rounds 7] [--batches "32 128 256"] [--output assets/records/sampling.json]

Both run the embedded model in fp32 on one CPU thread, and sample 8 completions of each of 4, 16 or 32
countdown prompts at temperature 1, with at most 64 tokens, in turn. In the first part rows stop by
themselves, as in training; `generate` then continues with all of them until the last one stops. In the second
part nothing stops a row: all have 64 tokens and none leaves the batch, which is the harder comparison.

`generate` is called in its plainest form: it keeps no scores, does not truncate the distribution, and looks
for no stop id where there is none. It returns ids only; the engine also returns their log-probs, and each
completion as soon as it ends. Tokens are counted up to the end of each row. Ratios are medians of the rounds'
own ratios of tokens per second.
"""

import asyncio
import itertools
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.measure import ASSETS, in_turn, options, ratio, record, show
from extras.local_engine import LocalEngine
from train import Config, RLDataset, encode_prompt, init_distributed

MODEL = f"{ASSETS}/tiny"
LIMIT = 64  # tokens per completion
GROUP = 8  # completions per prompt


def engine_sampler(engine: LocalEngine, prompts: list):
    """A function that samples GROUP new completions of each prompt: a list of ids [t]."""
    seeds = itertools.count()

    async def sample():
        requests = [engine.generate(ids, 1.0, next(seeds)) for ids in prompts for _ in range(GROUP)]
        return await asyncio.gather(*requests)

    return lambda: [answer[0].tolist() for answer in engine.loop.run_until_complete(sample())]


def generate_sampler(model, prompts: list, pad: int):
    """The same with `generate`; rows are padded after their end."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"num_return_sequences": GROUP, "max_new_tokens": LIMIT, "pad_token_id": pad}
    settings |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return lambda: model.generate(ids, attention_mask=mask, **settings)[:, width:].tolist()


def count_tokens(rows: list[list[int]], stop: int | None) -> int:
    """Tokens of completions, each up to and including its first stop id."""
    return sum(row.index(stop) + 1 if stop in row else len(row) for row in rows)


def compare(samplers: dict, stop: int | None, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Runs the samplers in turn: {name: {"wall" and "cpu": tokens per second of each round}}."""
    tokens = {name: [] for name in samplers}
    actions = {}
    for name, sample in samplers.items():
        actions[name] = lambda name=name, sample=sample: tokens[name].append(count_tokens(sample(), stop))
    times = in_turn(actions, rounds)
    speeds = {}
    for name in samplers:
        counted = tokens[name][1:]  # without the warm-up
        speeds[name] = {
            clock: [count / taken for count, taken in zip(counted, taken_of)]
            for clock, taken_of in times[name].items()
        }
    return speeds


def main():
    """Measures all batches in both parts, prints the table and writes the numbers."""
    flags = options(__doc__, "sampling", batches=("32 128 256", "completions per batch"))
    config = Config(model=MODEL, device="cpu", dtype="float32", engine="local", max_new_tokens=LIMIT)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    data = RLDataset(f"{ASSETS}/countdown/train.jsonl")
    engine = LocalEngine(MODEL, tokenizer, init_distributed(config), config)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.manual_seed(0)
    rows = []
    numbers = []
    for part, stop in (("by themselves", tokenizer.eos_token_id), ("never", None)):
        model.generation_config.eos_token_id = stop
        engine.stops = {stop}
        for batch in map(int, flags.batches.split()):
            prompts = [encode_prompt(tokenizer, data[i].messages) for i in range(batch // GROUP)]
            samplers = {
                "engine": engine_sampler(engine, [np.array(ids, np.int32) for ids in prompts]),
                "generate": generate_sampler(model, prompts, tokenizer.pad_token_id),
            }
            speeds = compare(samplers, stop, flags.rounds)
            numbers.append({"batch": batch, "rows stop": part} | speeds)
            row = {"batch": batch, "rows stop": part}
            for name, found in speeds.items():
                row[f"{name}: tokens per CPU s"] = median(found["cpu"])
            for clock, label in (("cpu", "CPU"), ("wall", "wall")):
                row[f"{label} ratio"] = ratio(speeds["engine"][clock], speeds["generate"][clock])
            rows.append(row)
    show(rows)
    record(flags.output, {"The local engine compared with generate of transformers": rows}, runs=numbers)


if __name__ == "__main__":
    main()
