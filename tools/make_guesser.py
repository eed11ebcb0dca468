"""Make the tiny model that recipes/guess_number.py starts from: it knows the game, and plays it almost at
random.

    python -m tools.make_guesser [--output runs/guesser] [--steps 1500]

Supervised learning on random games. A guess either follows the answers so far, and is drawn from the numbers
that they leave, or is drawn from 1 to 32: at first all guesses follow the answers, at the end one in five.
The target is not the number guessed but the probability of each number. So the model has learned what the
answers mean, but seldom follows them.
"""

import argparse
import random
import time

import torch

from recipes.guess_number import HIGHEST, Secrets
from recipes.turns import user_turn
from tools.make_tiny import END, make_model, make_tokenizer

TURNS, HEED = 8, 0.2  # most turns per game; final share of guesses that follow the answers
PHRASES = [
    "user\n",
    "assistant\n",
    *(message["content"] for message in Secrets("")[0].messages),
    "higher",
    "lower",
]


def game(rng: random.Random, share: float) -> tuple[list[tuple[str, bool]], list[tuple[int, int]]]:
    """A game whose guesses follow the answers with probability `share`.

    Returns the pieces after the prompt, each with whether the policy writes it, and the range of numbers that
    the answers left before each guess.
    """
    secret, low, high, pieces, left = rng.randint(1, HIGHEST), 1, HIGHEST, [], []
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


def encode(tokenizer, prompt: list[int], pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Ids [T] and, for each, whether it is learned, [T]."""
    ids, learned = list(prompt), [0] * len(prompt)
    for text, own in pieces:
        new = tokenizer.encode(text, add_special_tokens=False)
        ids += new
        learned += [int(own)] * len(new)
    return ids, learned


def batch_of(games: list[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels [B, T], padded at the end; a label of -100 is not learned."""
    width = max(len(ids) for ids, _ in games)
    ids = torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in games])
    learned = torch.tensor([learned + [0] * (width - len(learned)) for _, learned in games])
    return ids, ids.masked_fill(learned == 0, -100)


def read_options(description: str, **defaults) -> argparse.Namespace:
    """The flags of a script that makes a small model; it also seeds torch."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (dict(batch=64, seed=0) | defaults).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    return options


def teach(model, loss, options):
    """Supervised learning: AdamW over options.steps, each on `loss(step)`, a scalar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.lr, total_steps=options.steps, pct_start=0.1
    )
    began = time.time()
    for step in range(options.steps):
        value = loss(step)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == options.steps - 1:
            print(f"step {step:5d}  loss {value.item():.4f}  {time.time() - began:.0f} s", flush=True)


def main():
    """Trains the model, and saves it with its tokenizer."""
    options = read_options(__doc__, output="runs/guesser", steps=1500, lr=3e-3, batch=32)
    rng, tokenizer = random.Random(options.seed), make_tokenizer(PHRASES)
    model = make_model(tokenizer, hidden=64, layers=3)
    prompt = tokenizer.apply_chat_template(
        Secrets("")[0].messages, add_generation_prompt=True, return_dict=False
    )
    numbers = torch.tensor([tokenizer.encode(str(number))[0] for number in range(1, HIGHEST + 1)])

    def loss(step: int) -> torch.Tensor:
        """The loss of a batch of fresh games: of the guesses, and of ending the turn after each."""
        share = max(HEED, min(1.0, 4 * (1 - step / options.steps)))  # 1 for three quarters of the steps
        games, left = zip(*(game(rng, share) for _ in range(options.batch)))
        ids, labels = batch_of(
            [encode(tokenizer, prompt, pieces) for pieces in games], tokenizer.pad_token_id
        )
        logprobs, labels = model(ids[:, :-1], use_cache=False).logits.log_softmax(-1), labels[:, 1:]
        guesses = torch.isin(labels, numbers)
        of_guess = -(guess_odds(sum(left, []), share) * logprobs[guesses][:, numbers]).sum(1)
        of_end = -logprobs[labels == tokenizer.eos_token_id][:, tokenizer.eos_token_id]
        return of_guess.mean() + of_end.mean()

    teach(model, loss, options)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"{options.output} plays almost at random; {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
