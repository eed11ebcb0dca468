"""How fast does the local engine sample, compared with `generate` of transformers?

    python -m bench.sampling [--rounds 7] [--output assets/sampling.json] [--batches 32,128,256] [--old
    FOLDER]

Both run the embedded model in fp32 on one CPU thread, and sample 8 completions of each of 4, 16 or 32
countdown prompts at temperature 1, with at most 64 tokens, in turn. In the first part rows stop by
themselves, as in training; `generate` then continues with all of them until the last one stops. In the second
part nothing stops a row: all have 64 tokens and none leaves the batch, which is the harder comparison.

`generate` is called in its plainest form: it keeps no scores, does not truncate the distribution, and looks
for no stop id where there is none. It returns ids only; the engine also returns their log-probs, and each
completion as soon as it ends.

With --old, a folder with a local_engine.py of an earlier commit, that engine samples in turn as well, with
the same seeds; the run fails unless both return the same ids and log-probs.

Prints medians over the rounds, counts tokens up to the end of each row, and reports the engine's tokens per
second relative to `generate`: the median of the rounds' own ratios, by wall and by CPU time.
"""

import asyncio
import importlib.util
import itertools
import sys
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench import measure
from extras.local_engine import LocalEngine
from train import Config, RLDataset, encode_prompt, init_distributed

LIMIT = 64  # tokens per completion
GROUP = 8  # completions per prompt
COLUMNS = {
    "tokens": "tokens",
    "wall s": "wall",
    "CPU s": "cpu",
    "tokens/s": "speed_wall",
    "tokens/CPU s": "speed_cpu",
}


def engine_sampler(engine, prompts: list):
    """A function that samples GROUP new completions of each prompt: a list of (ids, logprobs)."""
    seeds = itertools.count()

    async def sample():
        requests = [engine.generate(ids, 1.0, next(seeds)) for ids in prompts for _ in range(GROUP)]
        return await asyncio.gather(*requests)

    return lambda: [answer[:2] for answer in engine.loop.run_until_complete(sample())]


def generate_sampler(model, prompts: list[list[int]], pad: int):
    """The same with `generate`, without log-probs: ids, padded after the end of each row."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    options = {"num_return_sequences": GROUP, "max_new_tokens": LIMIT, "pad_token_id": pad}
    options |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return lambda: [(row, None) for row in model.generate(ids, attention_mask=mask, **options)[:, width:]]


def count_tokens(answers: list[tuple], eos: int | None) -> int:
    """Tokens of completions, each up to and including its first end of sequence."""
    rows = [np.asarray(ids).tolist() for ids, _ in answers]
    return sum(row.index(eos) + 1 if eos in row else len(row) for row in rows)


def check_equal(new: list[list], old: list[list]):
    """Raises ValueError unless two engines returned the same ids and log-probs in every round."""
    for round_new, round_old in zip(new, old, strict=True):
        for (ids, logprobs), (old_ids, old_logprobs) in zip(round_new, round_old, strict=True):
            if list(ids) != list(old_ids) or list(logprobs) != list(old_logprobs):
                raise ValueError("the engines returned different samples for the same seed")


def compare(samplers: dict, eos: int | None, rounds: int) -> dict[str, dict]:
    """Runs the samplers in turn. Returns seconds, tokens and tokens per second by name, and the ratios."""
    answers = {name: [] for name in samplers}

    def run(name):
        answers[name].append(samplers[name]())

    results = measure.in_turn({name: partial(run, name) for name in samplers}, rounds)
    if "old" in samplers:
        check_equal(answers["engine"], answers["old"])
    for name, result in results.items():
        result["tokens"] = [count_tokens(found, eos) for found in answers[name][1:]]  # without the warm-up
        for clock in ("wall", "cpu"):
            result[f"speed_{clock}"] = [n / time for n, time in zip(result["tokens"], result[clock])]
    for clock in ("wall", "cpu"):
        key = f"speed_{clock}"
        for result in results.values():
            result[f"ratio_{clock}"] = measure.ratio(result[key], results["generate"][key])
    return results


def old_engine_class(folder: str):
    """The LocalEngine of folder/local_engine.py, where it was in commits before extras/."""
    spec = importlib.util.spec_from_file_location("old_local_engine", Path(folder) / "local_engine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.LocalEngine


def row_of(batch: int, part: str, name: str, result: dict) -> dict:
    """A row of the table that is printed."""
    medians = {title: f"{median(result[key]):.5g}" for title, key in COLUMNS.items()}
    ratios = {"ratio": result["ratio_wall"], "CPU ratio": result["ratio_cpu"]}
    return {"batch": batch, "rows stop": part, "by": name} | medians | ratios


def main():
    """Measures all batches in both parts, prints the table and writes the numbers."""
    batches = ("32,128,256", "completions per batch, separated by commas")
    old = ("", "folder with the local_engine.py of an earlier commit")
    flags = measure.options(__doc__, "sampling", batches=batches, old=old)
    model_folder = f"{measure.ASSETS}/tiny"
    config = Config(
        model=model_folder, device="cpu", dtype="float32", engine="local", max_new_tokens=LIMIT, tp_size=1
    )
    mesh = init_distributed(config)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    data = RLDataset(f"{measure.ASSETS}/countdown/train.jsonl")
    engines = {"engine": LocalEngine(model_folder, tokenizer, mesh, config)}
    if flags.old:
        engines["old"] = old_engine_class(flags.old)(model_folder, tokenizer, mesh, config)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    table = []
    numbers = []
    torch.manual_seed(0)
    for part, eos in (("by themselves", tokenizer.eos_token_id), ("never", None)):
        model.generation_config.eos_token_id = eos
        for batch in map(int, flags.batches.split(",")):
            prompts = [list(encode_prompt(tokenizer, data[i].messages)) for i in range(batch // GROUP)]
            samplers = {"generate": generate_sampler(model, prompts, tokenizer.pad_token_id)}
            for name, engine in engines.items():
                engine.stops = {eos}
                arrays = [np.array(ids, np.int32) for ids in prompts]
                samplers[name] = engine_sampler(engine, prompts if name == "old" else arrays)
            results = compare(samplers, eos, flags.rounds)
            numbers.append({"batch": batch, "stops": part} | results)
            table += [row_of(batch, part, name, result) for name, result in results.items()]
    measure.show(table)
    measure.write(flags.output, runs=numbers)


if __name__ == "__main__":
    main()
