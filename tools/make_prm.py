"""Make a small process-reward model for the embedded countdown model: recipes/prm.py lets it judge each line.

    python -m tools.make_prm [--output runs/prm] [--steps 300]

It is the embedded model, taught to write + or - after the tag that follows each line of a trace. A line is
right if its sums and verdict are right, and it continues after a "no" or ends the thinking after a "yes"; the
last line, the answer, is right if the line before it said "yes". So it judges how a line follows from the one
before, and needs no solution.
"""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.prm import CONVENTIONS
from tools.make_guesser import read_options, teach
from tools.make_tiny import VERDICTS, attempts, split_problems
from train import COUNTDOWN

TINY = Path(__file__).parent.parent / "assets/tiny"
TAG, GOOD, BAD = CONVENTIONS["math_shepherd"]


def lines_of(row: dict, rng: random.Random) -> list[tuple[str, bool]]:
    """The lines of a random trace, some of them with a wrong sum or verdict, and whether each is right."""
    lines, tried = [], rng.sample(attempts(row["nums"]), 4)
    for number, (first, second, between, value) in enumerate(tried):
        found, said = value, value == row["target"]
        if rng.random() < 0.1:
            found += rng.choice((-2, -1, 1, 2))
        if rng.random() < 0.1:
            said = not said
        stops = rng.random() < 0.5 or number == 3
        right = found == value and said == (value == row["target"]) and stops == said
        text = f"{first}{second} = {between}{second} = {found}{VERDICTS[said]}"
        lines.append(
            ((("<think>" if number == 0 else "") + text + ("</think>\n<answer>" if stops else "\n")), right)
        )
        if stops:
            break
    return [*lines, (f"{first}{second}</answer><|im_end|>", said)]


def main():
    """Trains the model, measures it on held-out problems, and saves it."""
    options = read_options(__doc__, output="runs/prm", steps=300, lr=1e-3)
    rng = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    rows, held_out = split_problems(options.seed)
    tag = tokenizer.encode(TAG, add_special_tokens=False)
    verdict_ids = [tokenizer.encode(verdict, add_special_tokens=False)[-1] for verdict in (GOOD, BAD)]

    def scored(rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [lines, 2] of good and bad, and which of them is right, [lines], for a trace of each row."""
        sequences, places, labels = [], [], []
        for i, row in enumerate(rows):
            ids = tokenizer.encode(COUNTDOWN.format(**row) + "\n", add_special_tokens=False)
            for text, right in lines_of(row, rng):
                ids += tokenizer.encode(text, add_special_tokens=False) + tag
                places.append((i, len(ids) - 1))
                labels.append(int(not right))
            sequences.append(ids)
        width = max(map(len, sequences))
        padded = torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in sequences])
        logits = model(padded, use_cache=False).logits
        return torch.stack([logits[i, place, verdict_ids] for i, place in places]), torch.tensor(labels)

    teach(model, lambda step: F.cross_entropy(*scored(rng.choices(rows, k=options.batch))), options)
    with torch.no_grad():
        logits, labels = scored(held_out[:512])
    print(f"right about {(logits.argmax(1) == labels).float().mean():.3f} of {len(labels)} held-out lines")
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
