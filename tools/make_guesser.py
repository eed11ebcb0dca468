"""Make the tiny model that recipes/guess_number.py starts from: it knows the game, and plays it almost at random.

    python -m tools.make_guesser [--output runs/guesser] [--steps 500]

Supervised learning on random games. At first every guess is any number that the answers leave; then in more and more
games, nine of ten at the end, it is any number from 1 to 32, whatever was answered. So the model has learnt what an
answer means, and heeds it seldom.
"""
import argparse
import random
import time

import torch
import torch.nn.functional as F

from recipes.guess_number import HIGHEST, Secrets
from recipes.turns import user_turn
from tools.make_tiny import END, make_model, make_tokenizer

TURNS, HEED = 8, 0.1        # of a game, at most; the share of games that heed the answers, at the end


def game(rng: random.Random, share: float) -> list[tuple[str, bool]]:
    """The pieces of a game after its prompt, and which of them are the policy's; that share of games is heedful."""
    secret, heed = rng.randint(1, HIGHEST), rng.random() < share
    low, high, pieces = 1, HIGHEST, []
    for _ in range(TURNS):
        guess = rng.randint(low, high) if heed else rng.randint(1, HIGHEST)
        pieces.append((f"{guess}{END}", True))
        if guess == secret:
            break
        pieces.append((user_turn("higher" if guess < secret else "lower"), False))
        if guess < secret:
            low = max(low, guess + 1)
        else:
            high = min(high, guess - 1)
    return pieces


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
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(batch=64, seed=0, **defaults).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    return options


def teach(model, loss, options):
    """Supervised learning: AdamW over options.steps, each on `loss(step)`, a scalar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps, pct_start=0.1)
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
    """Learns, and saves the model with its tokenizer."""
    options = read_options(__doc__, output="runs/guesser", steps=500, lr=2e-3)
    rng, tokenizer = random.Random(options.seed), make_tokenizer()
    model = make_model(tokenizer, hidden=64, layers=3)
    prompt = tokenizer.apply_chat_template(Secrets("")[0].messages, add_generation_prompt=True, return_dict=False)

    def loss(step: int) -> torch.Tensor:
        """Of a batch of fresh games."""
        share = max(HEED, min(1.0, 2 * (1 - step / options.steps)))      # 1 in the first half
        games = [encode(tokenizer, prompt, game(rng, share)) for _ in range(options.batch)]
        ids, labels = batch_of(games, tokenizer.pad_token_id)
        logits = model(ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())

    teach(model, loss, options)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(f"{options.output} plays almost at random; {model.num_parameters()} parameters")


if __name__ == "__main__":
    main()
