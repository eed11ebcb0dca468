"""Make the tiny Qwen3 that ships in `assets/`: its tokenizer, its countdown problems and its warmed-up
weights.

    python -m tools.make_tiny  # everything, from scratch: about half an hour on one CPU core
    python -m tools.make_tiny --hybrid --steps 900 --batch 64  # a Qwen3.5 instead, in tiny_hybrid/: as long

The problem is countdown with three different numbers: reach the target with + and -, each number used
once. There are four ways to do so without going below zero, and the model has learned, from random traces,
to try them in random order:

    <think>12+4+1 = 16+1 = 17 no
    12-4+1 = 8+1 = 9 yes</think>
    <answer>12-4+1</answer>

Arithmetic and verdicts are right, but the traces say nothing about when to stop: after every attempt they
stop with the same probability, whatever the verdict, and answer with the attempt they stopped at. So the
model that ships finds the target as often as chance does, one time in four. What is left for reinforcement
learning to discover is to read the verdict: go on after a "no", stop after a "yes".

One problem in four belongs to number sets that are held out: they occur neither in these traces nor in
`train.jsonl`, and `test.jsonl` holds 512 of them.
"""

import argparse
import itertools
import json
import math
import random
import re
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3_5TextConfig, Qwen3Config

import rewards
from train import COUNTDOWN

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VERDICTS = [" no", " yes"]
STOP = 0.4  # probability that a trace stops after an attempt
VERDICT_WEIGHT = 8  # of the loss of a verdict
RESULT_WEIGHT = 4  # of the loss of the result of a sum
HYBRID = {  # of a Qwen3.5, with the proportions of the published ones
    "intermediate_size": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
# Pieces of text that never change: the tokenizer keeps each of them whole, so that each becomes one token.
PHRASES = [
    *re.split(r"{target}|{nums}", COUNTDOWN.replace("{nums}", "[{nums}]")),
    "system\n",
    "user\n",
    "assistant\n",
    "<think>",
    "</think>\n<answer>",
    "</answer>",
    " = ",
    ", ",
    *VERDICTS,
]


# ------------------------------------------------------------------------ the problems --------------------
def attempts(nums):
    """The four ways to combine three numbers: (first step, second step, value of the first, value) each."""
    a, b, c = sorted(nums, reverse=True)
    last = (a, "-", b, "-", c) if a >= b + c else (b, "+", c, "-", a)
    ways = [(a, "+", b, "+", c), (a, "+", b, "-", c), (a, "-", b, "+", c), last]
    sign = {"+": 1, "-": -1}
    return [
        (f"{x}{op1}{y}", f"{op2}{z}", x + sign[op1] * y, x + sign[op1] * y + sign[op2] * z)
        for x, op1, y, op2, z in ways
    ]


def split_problems(seed, held_out=0.25):
    """All problems as {"nums", "target"} rows, (train, test): no set of numbers is in both."""
    rng = random.Random(seed)
    sets = list(itertools.combinations(range(1, 21), 3))
    rng.shuffle(sets)
    cut = int(len(sets) * held_out)
    splits = []
    for part in (sets[cut:], sets[:cut]):
        values = [(nums, value) for nums in part for *_, value in attempts(nums) if value > 0]
        rows = [{"nums": rng.sample(nums, 3), "target": value} for nums, value in values]
        rng.shuffle(rows)
        splits.append(rows)
    return splits


def trace(row, rng):
    """A random trace: distinct attempts in random order, ended blindly with probability STOP each."""
    lines = []
    for first, second, between, value in rng.sample(attempts(row["nums"]), 4):
        lines.append(f"{first}{second} = {between}{second} = {value}{VERDICTS[value == row['target']]}")
        if rng.random() < STOP:
            break
    return "<think>" + "\n".join(lines) + f"</think>\n<answer>{first}{second}</answer>{END}"


# ----------------------------------------------------------------------- the tokenizer --------------------
def make_tokenizer(phrases=PHRASES):
    """Byte-level BPE: any text round-trips; the phrases and numbers of one or two digits are one token."""
    whole = "|".join(re.escape(p) for p in sorted(phrases, key=len, reverse=True))
    bpe = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(whole + r"|[0-9]{1,2}|\p{L}+|."), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=1,
        show_progress=False,  # 4096 is never reached:
        special_tokens=[PAD, START, END],  # it merges until every phrase is one token
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator([*phrases, *map(str, range(100))], trainer)
    options = {"eos_token": END, "pad_token": PAD, "model_max_length": 1024}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **options)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def render(tokenizer, row):
    """The prompt of one problem as the chat text that the model continues."""
    messages = [{"role": "user", "content": COUNTDOWN.format(**row)}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


# ------------------------------------------------------------------------- the warm-up --------------------
def make_model(tokenizer, hidden, layers, config_class=Qwen3Config, **options):
    """A Qwen3 of random weights, four heads on two key-value heads, embeddings tied; or another Qwen."""
    config = config_class(
        vocab_size=math.ceil(len(tokenizer) / 8) * 8,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{"intermediate_size": 3 * hidden} | options,
    )
    return AutoModelForCausalLM.from_config(config)


def weighted_loss(model, ids, start, weights):
    """The mean of weighted token losses over the completions in rows that are padded on the right."""
    hidden = model.model(ids[:, :-1], use_cache=False).last_hidden_state[:, start - 1 :]
    labels = ids[:, start:]
    losses = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten(), reduction="none")
    scale = weights["of"][labels] * weights["after"][ids[:, start - 1 : -1]]
    return (losses * scale.flatten()).sum() / scale.sum()


def warm_up(model, tokenizer, rows, steps, seed, batch=256, lr=2e-3):
    """Supervised learning on fresh random traces; verdicts and results of sums weigh more."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    ramp = max(1, min(200, steps // 10))

    def scale(step):
        return min((step + 1) / ramp, 0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, scale)
    weights = {"of": torch.ones(model.config.vocab_size), "after": torch.ones(model.config.vocab_size)}
    weights["of"][tokenizer("".join(VERDICTS))["input_ids"]] = VERDICT_WEIGHT
    weights["of"][tokenizer.pad_token_id] = 0
    weights["after"][tokenizer(" = ")["input_ids"]] = RESULT_WEIGHT
    start = len(tokenizer(render(tokenizer, rows[0]))["input_ids"])
    began = time.time()
    for step in range(steps):
        texts = []
        for row in rng.choices(rows, k=batch):
            prompt = render(tokenizer, {**row, "nums": rng.sample(row["nums"], 3)})
            texts.append(prompt + trace(row, rng))
        rows_of_ids = [torch.tensor(ids) for ids in tokenizer(texts)["input_ids"]]
        ids = pad_sequence(rows_of_ids, batch_first=True, padding_value=tokenizer.pad_token_id)
        loss = weighted_loss(model, ids, start, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.time() - began:.0f} s", flush=True)


# ----------------------------------------------------------------- measuring the model --------------------
@torch.no_grad()
def solved(model, tokenizer, rows, sample):
    """The share of rows that a completion of each solves, sampled or greedy."""
    prompts = [render(tokenizer, row) for row in rows]
    inputs = tokenizer(prompts, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**inputs, max_new_tokens=80, do_sample=sample, top_k=0 if sample else None)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(rewards.countdown(text, **row) for row, text in zip(rows, texts)) / len(rows)


def main():
    """Makes the data, the tokenizer and the model, and prints what the model solves."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--output", type=Path, default=Path("assets"), help="for tiny/ and countdown/")
    parser.add_argument("--steps", type=int, default=1800, help="supervised steps")
    parser.add_argument("--batch", type=int, default=256, help="traces per step")
    parser.add_argument("--hybrid", action="store_true", help="three Gated DeltaNet layers and one attention")
    parser.add_argument("--seed", type=int, default=0, help="of problems, weights and traces")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    train, test = split_problems(args.seed)
    test = test[512:1024]  # the first 512 served to choose the settings
    folder = args.output / "countdown"
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer()
    if args.hybrid:
        model = make_model(tokenizer, 128, 4, Qwen3_5TextConfig, **HYBRID)
        model.config.full_attention_interval = 4  # published files have it, and SGLang reads nothing else
    else:
        model = make_model(tokenizer, 128, 3)
    print(
        f"{len(train)} + {len(test)} problems, {len(tokenizer)} tokens, {model.num_parameters()} parameters"
    )
    warm_up(model, tokenizer, train, args.steps, args.seed, args.batch)
    place = args.output / ("tiny_hybrid" if args.hybrid else "tiny")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    for sample in (True, False):
        print("sampled" if sample else "greedy", f"{solved(model, tokenizer, test, sample):.3f}")


if __name__ == "__main__":
    main()
