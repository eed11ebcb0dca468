"""Make the tiny models that three recipes start from: each knows the task, and does it badly.

    python -m tools.make_start guesser       # runs/guesser, for recipes/guess_number.py
    python -m tools.make_start calculator    # runs/calculator, for recipes/math_python.py, and its problems
    python -m tools.make_start prm           # runs/prm, the process-reward model of recipes/prm.py

All are made by supervised learning, in a few minutes on one CPU core.

The guesser has seen random games. A guess either follows the answers so far, and is drawn from the numbers
that they leave, or is drawn from 1 to 32: at first all guesses follow the answers, at the end one in five. So
it has learned what the answers mean, but seldom follows them.

The calculator multiplies numbers of two digits, other ones than in its train.jsonl and test.jsonl. One prompt
in four does not mention a tool, and is answered directly. The others are all answered by a program at first,
and one in five at the end. A program applies +, - or * at random, and its output becomes the answer. So it
has learned how to use a tool, but seldom does, and mostly wrongly.

The process-reward model is the embedded model, taught to write + or - after the tag that follows each line of
a trace. A line is right if its sums and verdict are right, and it continues after a "no" or ends the thinking
after a "yes"; the last line, the answer, is right if the line before it said "yes". So it judges how a line
follows from the one before, and needs no solution.
"""

import argparse
import json
import random
from itertools import combinations_with_replacement
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.guess_number import HIGHEST, Secrets
from recipes.math_python import HINT
from recipes.prm import CONVENTIONS
from recipes.problems import PROMPT
from recipes.turns import user_turn
from tools.make_tiny import END, VERDICTS, attempts, make_model, make_tokenizer, split_problems
from train import COUNTDOWN

TINY = Path(__file__).parent.parent / "assets/tiny"
HEED = 0.2  # final share of guesses that follow the answers, and of answers that use the tool


# --------------------------------------------------------------------------- learning ---------------------
def teach(model, loss, steps: int, lr: float = 3e-3):
    """Supervised learning: AdamW over so many steps, each on `loss(step)`, a scalar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        value = loss(step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {value.item():.4f}", flush=True)


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    """Rows of different lengths as a tensor [B, T], filled up at the end."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def logits_and_labels(model, tokenizer, episodes: list[tuple[str, list]]):
    """Logits [B, T, V] and labels [B, T], -100 if not learned, of episodes.

    An episode is a prompt and the pieces that follow, each with whether the policy writes it.
    """
    all_ids = []
    all_labels = []
    for prompt, pieces in episodes:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        labels = [-100] * len(ids)
        for text, own in pieces:
            new = tokenizer.encode(text, add_special_tokens=False)
            ids += new
            labels += new if own else [-100] * len(new)
        all_ids.append(ids)
        all_labels.append(labels)
    ids = padded(all_ids, tokenizer.pad_token_id)
    return model(ids[:, :-1], use_cache=False).logits, padded(all_labels, -100)[:, 1:]


def share_at(step: int, steps: int) -> float:
    """The share of episodes that show the skill: all for three quarters of the steps, HEED at the end."""
    return max(HEED, min(1.0, 4 * (1 - step / steps)))


# -------------------------------------------------------------------------- the guesser -------------------
TURNS = 8  # most turns per game


def game(rng: random.Random, share: float) -> tuple[list[tuple[str, bool]], list[tuple[int, int]]]:
    """A game whose guesses follow the answers with probability `share`.

    Returns the pieces after the prompt, each with whether the policy writes it, and the range of numbers that
    the answers left before each guess.
    """
    secret = rng.randint(1, HIGHEST)
    low = 1
    high = HIGHEST
    pieces = []
    left = []
    for _ in range(TURNS):
        left.append((low, high))
        guess = rng.randint(low, high) if rng.random() < share else rng.randint(1, HIGHEST)
        pieces.append((f"{guess}{END}", True))
        if guess == secret:
            break
        pieces.append((user_turn("higher" if guess < secret else "lower"), False))
        if guess < secret:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return pieces, left


def guess_odds(left: list[tuple[int, int]], share: float) -> torch.Tensor:
    """How likely each number is as a guess, [N, HIGHEST], from what the answers left, [N]."""
    low, high = torch.tensor(left)[:, :, None].unbind(1)
    numbers = torch.arange(1, HIGHEST + 1)
    heedful = ((low <= numbers) & (numbers <= high)).float()
    return share * heedful / heedful.sum(1, keepdim=True) + (1 - share) / HIGHEST


def make_guesser(folder: Path, steps: int, seed: int):
    """The model and its tokenizer. Learning from the guesses, not their odds, makes a much worse player."""
    rng = random.Random(seed)
    prompt = Secrets("")[0].messages[0]["content"]
    tokenizer = make_tokenizer(["user\n", "assistant\n", prompt, "higher", "lower"])
    model = make_model(tokenizer, hidden=64, layers=3)
    numbers = torch.tensor([tokenizer.encode(str(number))[0] for number in range(1, HIGHEST + 1)])

    def loss(step: int) -> torch.Tensor:
        """The loss of a batch of fresh games: of the guesses, and of ending the turn after each."""
        share = share_at(step, steps)
        games, left = zip(*(game(rng, share) for _ in range(32)))
        logits, labels = logits_and_labels(model, tokenizer, [(prompt, pieces) for pieces in games])
        logprobs = logits.log_softmax(-1)
        guesses = torch.isin(labels, numbers)
        of_guess = -(guess_odds(sum(left, []), share) * logprobs[guesses][:, numbers]).sum(1)
        of_end = -logprobs[labels == tokenizer.eos_token_id][:, tokenizer.eos_token_id]
        return of_guess.mean() + of_end.mean()

    teach(model, loss, steps)
    return model, tokenizer


# ----------------------------------------------------------------------- the calculator -------------------
TRAIN = 1024  # problems
TEST = 128
PRODUCT = "What is {} * {}?"
RESULT = "Code execution result: "
CALCULATOR_PHRASES = ["What is ", PROMPT.format(""), HINT, "<python>print(", ")</python>", RESULT, "\\boxed{"]


def split_factors(rng: random.Random) -> list[list[tuple[int, int]]]:
    """All pairs of factors, for training, testing and warming up; no pair is in two of the three."""
    pairs = [tuple(rng.sample(pair, 2)) for pair in combinations_with_replacement(range(10, 100), 2)]
    rng.shuffle(pairs)
    return [pairs[:TRAIN], pairs[TRAIN : TRAIN + TEST], pairs[TRAIN + TEST :]]


def episode(pair: tuple[int, int], share: float, rng: random.Random) -> tuple[str, list[tuple[str, bool]]]:
    """A prompt, and the pieces that follow, each with whether the policy writes it; `share` use the tool."""
    a, b = rng.sample(pair, 2)
    hint = rng.choice(("", HINT, HINT, HINT))
    prompt = PROMPT.format(PRODUCT.format(a, b)) + hint
    if not hint or rng.random() > share:
        return prompt, [(rf"\boxed{{{a * b}}}{END}", True)]
    sign, value = rng.choice((("+", a + b), ("-", a - b), ("*", a * b)))
    return prompt, [
        (f"<python>print({a}{sign}{b})</python>{END}", True),
        (user_turn(f"{RESULT}{value}"), False),
        (rf"\boxed{{{value}}}{END}", True),
    ]


def make_calculator(folder: Path, steps: int, seed: int):
    """The model and its tokenizer; writes the problems beside them."""
    rng = random.Random(seed)
    tokenizer = make_tokenizer(["user\n", "assistant\n", *CALCULATOR_PHRASES])
    model = make_model(tokenizer, hidden=64, layers=3)
    train, test, others = split_factors(rng)
    for name, pairs in (("train", train), ("test", test)):
        rows = [{"problem": PRODUCT.format(a, b), "answer": str(a * b)} for a, b in pairs]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def loss(step: int) -> torch.Tensor:
        """The loss of a batch of fresh episodes."""
        share = share_at(step, steps)
        episodes = [episode(rng.choice(others), share, rng) for _ in range(64)]
        logits, labels = logits_and_labels(model, tokenizer, episodes)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    teach(model, loss, steps)
    return model, tokenizer


# ------------------------------------------------------------- the process-reward model -------------------
TAG, GOOD, BAD = CONVENTIONS["math_shepherd"]


def lines_of(row: dict, rng: random.Random) -> list[tuple[str, bool]]:
    """The lines of a random trace, some of them with a wrong sum or verdict, and whether each is right."""
    lines = []
    for number, (first, second, between, value) in enumerate(rng.sample(attempts(row["nums"]), 4)):
        found = value
        said = value == row["target"]
        if rng.random() < 0.1:
            found += rng.choice((-2, -1, 1, 2))
        if rng.random() < 0.1:
            said = not said
        stops = rng.random() < 0.5 or number == 3
        right = found == value and said == (value == row["target"]) and stops == said
        begin = "<think>" if number == 0 else ""
        end = "</think>\n<answer>" if stops else "\n"
        sums = f"{first}{second} = {between}{second} = {found}{VERDICTS[said]}"
        lines.append((begin + sums + end, right))
        if stops:
            break
    return [*lines, (f"{first}{second}</answer><|im_end|>", said)]


def make_prm(folder: Path, steps: int, seed: int):
    """The model and its tokenizer; prints how often it judges lines of held-out problems rightly."""
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    rows, held_out = split_problems(seed)
    tag = tokenizer.encode(TAG, add_special_tokens=False)
    verdict_ids = [tokenizer.encode(verdict, add_special_tokens=False)[-1] for verdict in (GOOD, BAD)]

    def scored(rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [lines, 2] of good and bad, and which of them is right, [lines], for a trace of each row."""
        sequences = []
        places = []
        labels = []
        for i, row in enumerate(rows):
            ids = tokenizer.encode(COUNTDOWN.format(**row) + "\n", add_special_tokens=False)
            for text, right in lines_of(row, rng):
                ids += tokenizer.encode(text, add_special_tokens=False) + tag
                places.append((i, len(ids) - 1))
                labels.append(int(not right))
            sequences.append(ids)
        logits = model(padded(sequences, tokenizer.pad_token_id), use_cache=False).logits
        return torch.stack([logits[i, place, verdict_ids] for i, place in places]), torch.tensor(labels)

    teach(model, lambda step: F.cross_entropy(*scored(rng.choices(rows, k=64))), steps, lr=1e-3)
    with torch.no_grad():
        logits, labels = scored(held_out[:512])
    print(f"right about {(logits.argmax(1) == labels).float().mean():.3f} of {len(labels)} held-out lines")
    return model, tokenizer


KINDS = {"guesser": (make_guesser, 1500), "calculator": (make_calculator, 800), "prm": (make_prm, 300)}


def main():
    """Makes a model, and saves it with its tokenizer."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--output", type=Path, help="folder for the model; default: runs/KIND")
    parser.add_argument("--steps", type=int, help="of the training; default: what the kind needs")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and episodes")
    flags = parser.parse_args()
    make, steps = KINDS[flags.kind]
    folder = flags.output or Path("runs") / flags.kind
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(flags.seed)
    model, tokenizer = make(folder, flags.steps or steps, flags.seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
