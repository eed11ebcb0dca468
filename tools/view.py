"""A run's samples as one HTML page, which opens in a browser without a server.

    python -m tools.view RUN [--output RUN/samples.html] [--steps 100:120] [--limit 2000] [--tokenizer FOLDER]

RUN is the --output_dir of train.py. The page can be filtered by step, reward and text. Trained tokens can be
colored by every list of numbers that a sample has for them; samples.jsonl has those of the first
--token_groups groups of each step, other samples show their text. From a long run only evenly spaced steps
are kept, and not the numbers of all tokens; the page says what is missing.

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
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path

import jinja2
import numpy as np

LIMIT = 2000  # samples in a page
TOKEN_LIMIT = 200_000  # tokens of a page that can be colored
# In samples.jsonl: names of columns of numbers per trained token, and what the page calls them.
LABELS = {
    "advantages": "advantage",
    "logprobs": "engine's log-prob",
    "entropy": "entropy",
    "logprob_diff": "log-prob difference, actor minus engine",
    "versions": "weight version",
    "turn_ids": "turn",
}
NO_COLUMN = {"step", "key", "reward", "rewards", "row", "text", "turns", "messages", "failure", "metrics"}
NO_COLUMN |= {"ids", "trained", "truncated", "response_length"}
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
def step_of(line: bytes) -> int | None:
    """The step of a line of samples.jsonl; None if the line is damaged, or still being written."""
    start = re.match(rb'\{"step": (\d+),', line)
    return int(start[1]) if start and line.endswith(b"}\n") else None


def choose(counts: dict[int, int], steps: str, limit: int, group_size: int) -> dict[int, int]:
    """How many samples of which steps to show: {step: samples}, about `limit` in all (0: no limit).

    `steps` is "120", "100:120" (both inclusive), "100:", ":120", or "" for all. Raises ViewError if there are
    no such steps.
    """
    if not re.fullmatch(r"\d*(:\d*)?", steps):
        raise ViewError(f"--steps {steps}: expected 120, 100:120, 100: or :120")
    if limit < 0:
        raise ViewError(f"--limit {limit}: it must be at least 0 (0: all samples)")
    first, colon, last = steps.partition(":")
    low = int(first or min(counts))
    high = int(last or max(counts)) if colon or not first else low
    chosen = {step: counts[step] for step in sorted(counts) if low <= step <= high}
    if not chosen:
        raise ViewError(f"--steps {steps}: the run has samples of steps {min(counts)} to {max(counts)}")
    if not limit or sum(chosen.values()) <= limit:
        return chosen
    found = list(chosen)
    number = min(len(found), max(2, limit // max(chosen.values())))
    spread = [found[i * (len(found) - 1) // max(1, number - 1)] for i in range(number)]
    whole_groups = max(1, limit // number // group_size) * group_size
    return {step: min(chosen[step], whole_groups) for step in spread}


def read_samples(path: Path, steps: str, limit: int, group_size: int) -> tuple[list[dict], str]:
    """The chosen records of a file that may be larger than memory, and a sentence on what is missing.

    Raises ViewError if there is nothing to show.
    """
    if not path.exists():
        raise ViewError(f"{path} does not exist; name the --output_dir of a run of train.py")
    with path.open("rb") as file:
        counts = Counter(map(step_of, file))
    damaged = counts.pop(None, 0)
    if not counts:
        raise ViewError(f"{path} has no samples yet")
    left = choose(counts, steps, limit, group_size)
    records = []
    with path.open("rb") as file:
        for line in file:
            step = step_of(line)
            if left.get(step, 0) == 0:
                continue
            left[step] -= 1
            try:
                records.append(json.loads(line))
            except ValueError:
                damaged += 1
    if not records:
        raise ViewError(f"{path}: {damaged} damaged lines, and no sample")
    note = f"{len(records):,} of {counts.total():,} samples"
    if len(records) < counts.total():
        note += f", from {len(left)} steps; select others with --steps FIRST:LAST, more with --limit N"
    if damaged:
        note += f"; {damaged} damaged or unfinished lines skipped"
    return records, note


# ---- What the page shows of them -------------------------------------------------------------------------
def count_trained(record: dict) -> int:
    """Tokens that the page shows one by one: 0 for a sample of which only the text is known."""
    return sum(end - start for start, end in record.get("trained", []))


def drop_details(records: list[dict], limit: int) -> int:
    """Leaves only the text of samples whose tokens exceed an equal share of each step in `limit`.

    Returns the number of these samples.
    """
    used = Counter()
    share = limit // len({record["step"] for record in records})
    dropped = 0
    for record in records:
        count = count_trained(record)
        if used[record["step"]] + count <= share:
            used[record["step"]] += count
        else:
            del record["trained"]
            dropped += 1
    return dropped


def load_decoder(name: str):
    """Returns decode(*ids) -> text of a tokenizer, a folder or Hub name. Raises ViewError if it fails."""
    from transformers import AutoTokenizer  # slow to import, and needed only for samples with ids

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ViewError(f"no tokenizer in {name or 'the run'}: {reason}; set --tokenizer") from error

    anchor = tokenizer.encode("a", add_special_tokens=False)[-1]  # the first token of a text may lose a space
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    before = len(tokenizer.decode([anchor], **options))

    @cache
    def decode(*ids: int) -> str:
        return tokenizer.decode([anchor, *ids], **options)[before:]

    return decode


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
    if not count_trained(record):
        turns = record.get("turns") or [record.get("text", "")]  # older runs kept turns
        return [{"is_trained": True, "texts": [text]} for text in turns]
    parts = []
    edges = [edge for span in record["trained"] for edge in span] + [len(record["ids"])]
    for i in range(len(edges) - 1):
        ids = record["ids"][edges[i] : edges[i + 1]]
        is_trained = i % 2 == 0
        texts = spell(ids, decode) if is_trained else [decode(*ids)]
        if ids:
            parts.append({"is_trained": is_trained, "texts": texts})
    return parts


def columns_of(record: dict) -> dict[str, list]:
    """Columns of numbers: [N] for N trained tokens, or one number for all; None where it is not finite."""
    columns = {}
    for name in [name for name in record if name not in NO_COLUMN]:
        values = record[name] if isinstance(record[name], list) else [record[name]]
        if len(values) in (1, count_trained(record)) and all(isinstance(x, (int, float)) for x in values):
            columns[name] = [float(f"{x:.4g}") if math.isfinite(x) else None for x in values]
    return columns


def show_sample(record: dict, decode) -> dict:
    """A sample: its facts, its text in parts, and its numbers per trained token."""
    names = ("reward", "rewards", "response_length", "truncated")  # older runs kept all of them here
    facts = {name: record[name] for name in names if name in record}
    return {
        "reward": record.get("reward", math.nan),
        "facts": facts | record.get("metrics", {}),
        "failure": record.get("failure", ""),
        "parts": parts_of(record, decode),
        "columns": columns_of(record) if count_trained(record) else {},
    }


def show_groups(records: list[dict], group_size: int, decode) -> list[dict]:
    """The groups of all steps, with their samples, the best first."""
    found = defaultdict(list)  # (step, place of the prompt in the run): records
    for place, record in enumerate(records):
        key = record.get("key") or [place // group_size]  # older runs have no keys
        found[record["step"], key[0]].append(record)
    groups = []
    for (step, place), members in found.items():
        prompts = [record["ids"][: record["trained"][0][0]] for record in members if count_trained(record)]
        samples = [show_sample(record, decode) for record in members]
        group = {"step": step, "place": place, "prompt": decode(*prompts[0]) if prompts else ""}
        group["mean"] = float(np.mean([sample["reward"] for sample in samples]))
        group["row"] = json.dumps(members[0].get("row"), ensure_ascii=False, indent=1)
        group["samples"] = sorted(samples, key=lambda sample: sample["reward"], reverse=True)
        groups.append(group)
    return groups


def options_of(samples: list[dict]) -> list[dict]:
    """The columns to color by; full color is at the magnitude that 1 % of the numbers exceed."""
    found = defaultdict(list)
    for sample in samples:
        for name, values in sample["columns"].items():
            found[name] += [abs(value) for value in values if value is not None]
    options = []
    for name in sorted(found, key=[*LABELS, *found].index):
        bound = np.quantile(found[name], 0.99) if found[name] else 0.0
        options.append({"name": name, "label": LABELS.get(name, name), "bound": short(bound)})
    return options


def visible(value):
    """Applied to all that enters the page, before it is escaped: makes hidden characters visible."""
    return value.translate(HIDDEN) if isinstance(value, str) else value


def short(value) -> str:
    """A number with three digits, anything else unchanged."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_view(run: Path, output: Path, steps: str = "", limit: int = LIMIT, tokenizer: str = "") -> str:
    """Writes the page and returns a sentence on what it holds. Raises ViewError if it would be empty.

    `steps` is as `choose` expects it, `limit` the number of samples (0: no limit), `tokenizer` a folder or
    Hub name; by default that of the model that the run exported, or started from.
    """
    config_file = run / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    group_size = config.get("group_size", 1)
    records, note = read_samples(run / "samples.jsonl", steps, limit, group_size)
    dropped = drop_details(records, TOKEN_LIMIT)
    if dropped:
        note += f"; {dropped} samples show only their text: a page has numbers for {TOKEN_LIMIT:,} tokens"
    exported = run / "model"
    tokenizer = tokenizer or str(exported if exported.is_dir() else config.get("model", ""))
    decode = load_decoder(tokenizer) if any(map(count_trained, records)) else None
    groups = show_groups(records, group_size, decode)
    environment = jinja2.Environment(autoescape=True, finalize=visible, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"short": short, "json": json.dumps}
    template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    html = template.render(
        run=run.resolve().name,
        note=note,
        groups=groups,
        options=options_of([sample for group in groups for sample in group["samples"]]),
        nonce=secrets.token_hex(16),  # names the page's own script; no text can know it
    )
    output.write_text(html, encoding="utf-8")
    return f"{output}, {output.stat().st_size / 1e6:.1f} MB: {note}"


def main():
    """Reads the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("run", type=Path, help="output folder of train.py")
    parser.add_argument("--output", type=Path, help="page to write; default: samples.html in RUN")
    parser.add_argument("--steps", default="", help="120, 100:120 (both inclusive), 100: or :120")
    parser.add_argument("--limit", type=int, default=LIMIT, help="number of samples; 0: no limit")
    parser.add_argument("--tokenizer", default="", help="folder or Hub name; default: the run's own")
    flags = parser.parse_args()
    output = flags.output or flags.run / "samples.html"
    try:
        print(write_view(flags.run, output, flags.steps, flags.limit, flags.tokenizer))
    except (ViewError, OSError) as error:
        print(f"tools.view: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
