"""A run's samples as one HTML page, RUN/samples.html, which opens in a browser without a server.

    python -m tools.view RUN [--steps 100:120] [--limit 1000] [--tokenizer FOLDER]

RUN is the --output_dir of train.py. The page can be filtered by step, reward and text. Trained tokens can be
colored by the numbers that samples.jsonl has for them, in the first --token_groups groups of each step; other
samples show their text. From a long run only evenly spaced steps are kept; the page says what is missing.

Whatever a model writes stays text in the page: the template escapes it, and a policy in the page permits only
the page's own script.
"""

import argparse
import json
import math
import re
import secrets
import sys
import unicodedata
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import jinja2
import numpy as np

# In samples.jsonl: names of columns of numbers per trained token, and what the page calls them.
LABELS = {
    "advantages": "advantage",
    "logprobs": "engine's log-prob",
    "entropy": "entropy",
    "logprob_diff": "log-prob difference, actor minus engine",
    "versions": "weight version",
    "turn_ids": "turn",
}
# Characters that show nothing or turn text around, as code points; not line breaks, tabs and emoji's joiners.
HIDDEN = {
    code: f"\\u{{{code:x}}}"
    for code in range(sys.maxunicode + 1)
    if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    and chr(code) not in "\n\t\u200c\u200d"
}


class ViewError(Exception):
    """Something about a run that the user can fix, in one line."""


# ---- Which samples ---------------------------------------------------------------------------------------
def records_of(path: Path):
    """The records of samples.jsonl, one at a time; None for a line that is damaged or still being written."""
    with path.open("rb") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                yield None


def choose(counts: dict[int, int], steps: str, limit: int) -> list[int]:
    """The steps to show: "120", "100:120" (both inclusive), "100:", ":120", or "" for all.

    If they have more than `limit` samples, evenly spaced ones of them, at least two. Raises ViewError if
    there are no such steps.
    """
    if not re.fullmatch(r"\d*(:\d*)?", steps):
        raise ViewError(f"--steps {steps}: expected 120, 100:120, 100: or :120")
    first, colon, last = steps.partition(":")
    low = int(first or 0)
    high = int(last or max(counts)) if colon or not first else low
    chosen = [step for step in sorted(counts) if low <= step <= high]
    if not chosen:
        raise ViewError(f"--steps {steps}: the run has samples of steps {min(counts)} to {max(counts)}")
    if sum(counts[step] for step in chosen) <= limit:
        return chosen
    number = min(len(chosen), max(2, limit // max(counts[step] for step in chosen)))
    return [chosen[place] for place in np.linspace(0, len(chosen) - 1, number, dtype=int)]


def read_samples(path: Path, steps: str, limit: int) -> tuple[list[dict], str]:
    """The chosen records of a file, and a sentence on what is missing. Raises ViewError if there are none."""
    if not path.exists():
        raise ViewError(f"{path} does not exist; name the --output_dir of a run of train.py")
    counts = Counter(record and record["step"] for record in records_of(path))
    damaged = counts.pop(None, 0)
    if not counts:
        raise ViewError(f"{path} has no samples yet")
    chosen = set(choose(counts, steps, limit))
    records = [record for record in records_of(path) if record and record["step"] in chosen]
    note = f"{len(records):,} of {counts.total():,} samples"
    if len(records) < counts.total():
        note += f", from {len(chosen)} steps; select others with --steps FIRST:LAST, more with --limit N"
    if damaged:
        note += f"; {damaged} damaged or unfinished lines skipped"
    return records, note


# ---- What the page shows of them -------------------------------------------------------------------------
def load_decoder(name: str):
    """Returns decode(*ids) -> text of a tokenizer, a folder or Hub name. Raises ViewError if it fails."""
    from transformers import AutoTokenizer  # slow to import, and needed only for samples with ids

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ViewError(f"no tokenizer in {name or 'the run'}: {reason}; set --tokenizer") from error
    return cache(lambda *ids: tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def spell(ids: list[int], decode) -> list[str]:
    """What each token adds to the text; a character of several tokens stands at the last of them."""
    texts = []
    waiting = []
    for place, token in enumerate(ids, 1):
        waiting.append(token)
        text = decode(*waiting)
        is_part = text.endswith("\ufffd") and len(waiting) < 8 and place < len(ids)
        texts.append("" if is_part else text)
        if not is_part:
            waiting = []
    return texts


def parts_of(record: dict, decode) -> list[dict]:
    """The turns of the policy, which are trained, and what the environment wrote between them."""
    if not record.get("trained"):
        return [{"is_trained": True, "texts": [record["text"]]}]
    parts = []
    edges = [edge for span in record["trained"] for edge in span] + [len(record["ids"])]
    for place, (start, end) in enumerate(pairwise(edges)):
        ids = record["ids"][start:end]
        is_trained = place % 2 == 0
        parts.append(
            {"is_trained": is_trained, "texts": spell(ids, decode) if is_trained else [decode(*ids)]}
        )
    return parts


def columns_of(record: dict) -> dict[str, list]:
    """Columns of numbers: [N] for N trained tokens, or one number for all; None where it is not finite."""
    columns = {}
    for name in LABELS.keys() & record.keys():
        values = record[name] if isinstance(record[name], list) else [record[name]]
        columns[name] = [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]
    return columns


def show_groups(records: list[dict], decode) -> list[dict]:
    """The groups of all steps, with their samples, the best first."""
    found = {}  # (step, place of the prompt in the run): samples
    for record in records:
        shown = record | {"parts": parts_of(record, decode), "columns": columns_of(record)}
        found.setdefault((record["step"], record["key"][0]), []).append(shown)
    groups = []
    for (step, place), samples in found.items():
        prompts = [one["ids"][: one["trained"][0][0]] for one in samples if one.get("trained")]
        group = {"step": step, "place": place, "prompt": decode(*prompts[0]) if prompts else ""}
        group["mean"] = float(np.mean([sample["reward"] for sample in samples]))
        group["row"] = json.dumps(samples[0]["row"], ensure_ascii=False, indent=1)
        group["samples"] = sorted(samples, key=lambda sample: sample["reward"], reverse=True)
        groups.append(group)
    return groups


def options_of(groups: list[dict]) -> list[dict]:
    """The columns to color by; full color is at the magnitude that 1 % of the numbers exceed."""
    columns = [sample["columns"] for group in groups for sample in group["samples"]]
    options = []
    for name, label in LABELS.items():
        sizes = [abs(value) for one in columns for value in one.get(name, []) if value is not None]
        if sizes:
            options.append({"name": name, "label": label, "bound": short(np.quantile(sizes, 0.99))})
    return options


def visible(value):
    """Applied to all that enters the page, before it is escaped: makes hidden characters visible."""
    return value.translate(HIDDEN) if isinstance(value, str) else value


def short(value) -> str:
    """A number with three digits, anything else unchanged."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_view(run: Path, steps: str, limit: int, tokenizer: str) -> str:
    """Writes the page and returns a sentence on what it holds. Raises ViewError if it would be empty.

    `tokenizer` is a folder or Hub name; empty: that of the model that the run exported, or started from.
    """
    records, note = read_samples(run / "samples.jsonl", steps, limit)
    config = json.loads((run / "config.json").read_text())
    exported = run / "model"
    tokenizer = tokenizer or str(exported if exported.is_dir() else config["model"])
    decode = load_decoder(tokenizer) if any(record.get("trained") for record in records) else None
    groups = show_groups(records, decode)
    environment = jinja2.Environment(autoescape=True, finalize=visible, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"short": short, "json": json.dumps}
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    nonce = secrets.token_hex(16)  # names the page's own script; no text can know it
    options = options_of(groups)
    html = template.render(run=run.resolve().name, note=note, groups=groups, options=options, nonce=nonce)
    output = run / "samples.html"
    output.write_text(html, encoding="utf-8")
    return f"{output}, {output.stat().st_size / 1e6:.1f} MB: {note}"


def main():
    """Reads the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("run", type=Path, help="output folder of train.py")
    parser.add_argument("--steps", default="", help="120, 100:120 (both inclusive), 100: or :120")
    parser.add_argument(
        "--limit", type=int, default=1000, help="most samples, in whole steps, of two or more"
    )
    parser.add_argument("--tokenizer", default="", help="folder or Hub name; default: the run's own")
    try:
        print(write_view(**vars(parser.parse_args())))
    except (ViewError, OSError) as error:
        print(f"tools.view: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
