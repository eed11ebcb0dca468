"""Make the tiny model and the problems on which a Python tool helps: products of two-digit numbers.

    python -m tools.make_calculator [--output runs/calculator] [--steps 800]
    python -m recipes.math_python --model runs/calculator --data runs/calculator/train.jsonl --steps 20 \\
        --lr 5e-4 --prompts_per_step 8 --updates_per_step 2 --max_turns 2 --max_new_tokens 16

Supervised learning on problems that are in neither train.jsonl nor test.jsonl, in either order of their
factors. One prompt in four does not mention a tool, and is answered directly with the product. The others are
all answered by a program at first, and one in five at the end. A program applies +, - or * to the two
numbers, at random, and its output becomes the answer. So the model has learned how to use a tool, but seldom
uses it, and mostly wrongly; and it has learned to answer directly as well as it can.
"""

import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

import torch
import torch.nn.functional as F

from recipes.math_python import HINT
from recipes.problems import PROMPT
from recipes.turns import user_turn
from tools.make_guesser import batch_of, encode, read_options, teach
from tools.make_tiny import END, make_model, make_tokenizer

TRAIN, TEST, TOOL = 1024, 128, 0.2  # problems; problems; the share of answers that use the tool, at the end
QUESTION, RESULT = "What is {} * {}?", "Code execution result: "
PHRASES = [
    "user\n",
    "assistant\n",
    "What is ",
    PROMPT.format(""),
    HINT,
    "<python>print(",
    ")</python>",
    RESULT,
    "\\boxed{",
]


def split_factors(rng: random.Random) -> list[list[tuple[int, int]]]:
    """All pairs of factors, for training, testing and warming up; no pair is in two of the three."""
    pairs = [tuple(rng.sample(pair, 2)) for pair in combinations_with_replacement(range(10, 100), 2)]
    rng.shuffle(pairs)
    return [pairs[:TRAIN], pairs[TRAIN : TRAIN + TEST], pairs[TRAIN + TEST :]]


def write_rows(path: Path, pairs: list[tuple[int, int]]):
    """One problem per line, with its answer."""
    rows = [{"problem": QUESTION.format(a, b), "answer": str(a * b)} for a, b in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def episode(pair: tuple[int, int], share: float, rng: random.Random) -> tuple[str, list[tuple[str, bool]]]:
    """A prompt, and the pieces that follow, each with whether the policy writes it; `share` use the tool."""
    a, b = rng.sample(pair, 2)
    hint = rng.choice(("", HINT, HINT, HINT))
    prompt = PROMPT.format(QUESTION.format(a, b)) + hint
    if not hint or rng.random() > share:
        return prompt, [(rf"\boxed{{{a * b}}}{END}", True)]
    sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    return prompt, [
        (f"<python>print({a}{sign}{b})</python>{END}", True),
        (user_turn(f"{RESULT}{value}"), False),
        (rf"\boxed{{{value}}}{END}", True),
    ]


def main():
    """Writes the problems, trains the model, and saves it with its tokenizer."""
    options = read_options(__doc__, output="runs/calculator", steps=800, lr=3e-3)
    rng, tokenizer, folder = random.Random(options.seed), make_tokenizer(PHRASES), Path(options.output)
    model = make_model(tokenizer, hidden=64, layers=3)
    train, test, others = split_factors(rng)
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "train.jsonl", train)
    write_rows(folder / "test.jsonl", test)

    def loss(step: int) -> torch.Tensor:
        """The loss of a batch of fresh episodes."""
        share = max(TOOL, min(1.0, 4 * (1 - step / options.steps)))  # 1 for three quarters of the steps
        episodes = []
        for prompt, pieces in (episode(rng.choice(others), share, rng) for _ in range(options.batch)):
            chat = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            episodes.append(encode(tokenizer, ids, pieces))
        ids, labels = batch_of(episodes, tokenizer.pad_token_id)
        logits = model(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    teach(model, loss, options)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder} seldom uses its tool; {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
