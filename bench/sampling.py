"""How fast does the local engine sample, compared with transformers' `generate`?

    python -m bench.sampling [--rounds 7] [--output assets/sampling.json]

Both have the embedded model on one thread of a CPU, in fp32, and sample 8 completions of each of 4, 16 or 32 countdown
prompts at temperature 1, of at most 64 tokens, in turn. At first rows stop by themselves, as in training; `generate`
then goes on with all of them until the last one stops. The second time nothing stops a row: all have 64 tokens, and
none leaves the batch, which is the harder comparison.

`generate` is called in its plainest form: it keeps no scores, cuts nothing off the distribution, and looks for no end
where there is none. It returns ids alone; the engine returns their log-probs as well, and each completion at its end.

Prints medians over the rounds, tokens as far as the end of each row, and how many times the tokens a second of
`generate` the engine makes, the median of the rounds' own ratios, by wall and by CPU time.
"""
import asyncio
import itertools
from functools import partial
from statistics import median

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import measure
from local_engine import LocalEngine
from train import ASSETS, Config, RLDataset, encode_prompt, init_distributed

LIMIT, GROUP, BATCHES = 64, 8, (32, 128, 256)


def engine_sampler(engine: LocalEngine, prompts: list[list[int]]):
    """A function that samples GROUP completions of each prompt, new ones at every call: lists of ids."""
    seeds = itertools.count()

    async def ask():
        return await asyncio.gather(*(engine.generate(ids, 1.0, next(seeds)) for ids in prompts for _ in range(GROUP)))

    return lambda: [ids for ids, *_ in engine.loop.run_until_complete(ask())]


def generate_sampler(model, prompts: list[list[int]], pad: int):
    """The same with `generate`: a tensor of ids, padded behind the end of each row."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return lambda: model.generate(ids, attention_mask=mask, num_return_sequences=GROUP, max_new_tokens=LIMIT,
                                  do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad)[:, width:]


def count(rows, eos: int | None) -> int:
    """Tokens of completions, each as far as its first end of sequence and with it."""
    rows = [row.tolist() if isinstance(row, torch.Tensor) else row for row in rows]
    return sum(row.index(eos) + 1 if eos in row else len(row) for row in rows)


def compare(samplers: dict, eos: int | None, rounds: int) -> dict[str, dict]:
    """Runs the samplers in turn. Returns by name seconds, tokens and tokens a second of each round, and the ratios."""
    made = {name: [] for name in samplers}

    def run(name):
        made[name].append(samplers[name]())

    results = measure.in_turn({name: partial(run, name) for name in samplers}, rounds)
    for name, result in results.items():
        result["tokens"] = [count(rows, eos) for rows in made[name][1:]]        # without the warm-up
        for clock in ("wall", "cpu"):
            result[f"speed_{clock}"] = [new / time for new, time in zip(result["tokens"], result[clock])]
    for clock in ("wall", "cpu"):
        key = f"speed_{clock}"
        for result in results.values():
            result[f"ratio_{clock}"] = measure.ratio(result[key], results["generate"][key])
    return results


COLUMNS = {"tokens": "tokens", "wall s": "wall", "CPU s": "cpu", "tokens/s": "speed_wall", "tokens/CPU s": "speed_cpu"}


def main():
    """Measures all batches both ways, prints the table, writes the numbers."""
    options = measure.options(__doc__, "sampling")
    config = Config(model=f"{ASSETS}/tiny", device="cpu", dtype="float32", engine="local", max_new_tokens=LIMIT)
    tokenizer, data = AutoTokenizer.from_pretrained(config.model), RLDataset(f"{ASSETS}/countdown/train.jsonl")
    engine = LocalEngine(config.model, tokenizer, init_distributed(config), config)
    model = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).eval()
    table, numbers = [], []
    torch.manual_seed(0)
    for stops, eos in (("by themselves", tokenizer.eos_token_id), ("never", None)):
        engine.stops, model.generation_config.eos_token_id = {eos}, eos
        for batch in BATCHES:
            prompts = [encode_prompt(tokenizer, data[i]) for i in range(batch // GROUP)]
            samplers = {"engine": engine_sampler(engine, prompts),
                        "generate": generate_sampler(model, prompts, tokenizer.pad_token_id)}
            results = compare(samplers, eos, options.rounds)
            numbers.append(dict(batch=batch, stops=stops, **results))
            table += [{"batch": batch, "rows stop": stops, "by": name}
                      | {title: f"{median(result[key]):.5g}" for title, key in COLUMNS.items()}
                      | {"ratio": result["ratio_wall"], "CPU ratio": result["ratio_cpu"]}
                      for name, result in results.items()]
    measure.show(table)
    measure.write(options.output, runs=numbers)


if __name__ == "__main__":
    main()
