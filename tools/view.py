"""A run's samples as one HTML file: prompts and completions token by token, in a browser, without a server.

    python -m tools.view RUN [--output RUN/samples.html] [--steps 100:120] [--limit 2000] [--tokenizer FOLDER]

A RUN is the --output_dir of train.py. From a long run only evenly spaced steps are kept; the page says which.
Tokens can be colored by every list of numbers that a sample has for its trained tokens. Per-token details are
kept for the first --token_groups groups of each step; other samples show their text.

Whatever a model writes stays text in the page: the JSON data is escaped so that it cannot contain a tag, and
the page may run only its own script.
"""

import argparse
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np

from tools import samples
from tools.samples import SamplesError

PAGE = Path(__file__).with_suffix(".html")
SCRIPT = Path(__file__).with_suffix(".js")
LIMIT = 2000  # samples in a page
KEPT = ("reward", "rewards", "truncated", "failure", "metrics", "response_length")  # copied unchanged
NO_COLUMN = {"step", "key", "messages", "row", "ids", "trained", "text", "turns", *KEPT}


def write_view(run: Path, output: Path, steps: str = "", limit: int = LIMIT, tokenizer: str = "") -> str:
    """Writes the page and returns a sentence on what it holds. Raises SamplesError if it would be empty.

    `steps` is as of_steps expects it, `limit` the maximum number of samples (0: no limit), `tokenizer` a
    folder or Hub name; by default that of the model that the run exported, or started from.
    """
    found = samples.find_samples(run / "samples.jsonl")
    config_file = run / "config.json"
    config = json.loads(config_file.read_text()) if config_file.exists() else {}
    group_size = config.get("group_size", 1)
    chosen = samples.spread(samples.of_steps(found, steps), limit, group_size)
    note = samples.what_is_kept(found, chosen)
    exported = run / "model"
    packer = Packer(tokenizer or str(exported if exported.is_dir() else config.get("model", "")), group_size)
    tables = packer.pack(samples.load_samples(run / "samples.jsonl", chosen))
    about = [Path(config[name]).name for name in ("model", "data", "algo") if config.get(name)]
    page = {"run": run.resolve().name, "about": about, "note": note} | tables
    output.write_text(filled(PAGE.read_text(), SCRIPT.read_text(), page))
    return f"{output}, {output.stat().st_size / 1e6:.1f} MB: {note}"


def load_tokenizer(name: str):
    """A tokenizer, by its folder or Hub name. Raises SamplesError if there is none."""
    from transformers import AutoTokenizer  # slow to import, and needed only for samples with ids

    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        where = name or "the run"
        reason = str(error).partition("\n")[0]
        raise SamplesError(f"no tokenizer in {where}: {reason}; name one with --tokenizer") from error


def spell(tokenizer, tokens: list[int]) -> list[str | list[int]]:
    """What each token adds to a text; its bytes where they are not whole characters."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}  # byte-level tokens' names
    anchor = tokenizer.encode("a", add_special_tokens=False)[-1]  # the first token of a text may lose a space

    def decode(*ids):
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts = []
    for token in tokens:
        text = decode(anchor, token)[len(decode(anchor)) :]
        name = tokenizer.convert_ids_to_tokens(token)
        if name is None:
            text = f"[no token {token}]"
        elif "\ufffd" in text and re.fullmatch("<0x[0-9A-F]{2}>", name):  # a SentencePiece tokenizer's
            text = [int(name[3:5], 16)]
        elif "\ufffd" in text and set(name) <= byte_of.keys():
            text = [byte_of[character] for character in name]
        texts.append(text)
    return texts


class Packer:
    """Collects samples into the tables of the page: texts of tokens, groups, columns, completions."""

    def __init__(self, tokenizer: str, group_size: int):
        self.tokenizer = tokenizer  # folder or Hub name; loaded only if a sample has ids
        self.group_size = group_size
        self.places = {}  # token id: its place in the vocabulary of the page
        self.groups = []
        self.group = None  # the step and place of the last group
        self.keys = set()  # keys of its samples so far
        self.values = {}  # name of a column: its values [N], in parts

    def pack(self, records) -> dict:
        """The tables, from (place in its step, record) of each sample."""
        completions = [self.completion(place, record) for place, record in records]
        tables = {"groups": self.groups, "samples": completions, "vocabulary": [], "special": []}
        tables["columns"] = {name: scale(np.concatenate(parts)) for name, parts in self.values.items()}
        if self.places:
            tokenizer = load_tokenizer(self.tokenizer)
            special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
            tables["vocabulary"] = spell(tokenizer, list(self.places))
            tables["special"] = [place for token, place in self.places.items() if token in special]
        return tables

    def completion(self, place: int, record: dict) -> dict:
        """What the page shows of a sample: its text, or the tokens after the prompt with their numbers."""
        kept = {name: record[name] for name in KEPT if name in record}
        if not samples.has_tokens(record):
            turns = record.get("turns") or [record["text"]]
            return kept | {"group": self.group_of(place, record, []), "turns": turns}
        tokens = [self.places.setdefault(token, len(self.places)) for token in record["ids"]]
        start = record["trained"][0][0] if record["trained"] else len(tokens)
        trained = [[first - start, end - start] for first, end in record["trained"]]
        group = self.group_of(place, record, tokens[:start])
        columns = self.columns(record, trained, len(tokens) - start)
        return kept | {"group": group, "tokens": tokens[start:], "trained": trained, "columns": columns}

    def group_of(self, place: int, record: dict, prompt: list[int]) -> int:
        """The index of a sample's group, which is added if the sample is its first."""
        key = tuple(record.get("key", ()))  # (place of the prompt in the step, index in the group)
        own = (record["step"], key[0] if key else place // self.group_size)
        if own != self.group or (key and key in self.keys):
            number = 1  # position of the prompt in its step
            if self.groups and self.groups[-1]["step"] == record["step"]:
                number = self.groups[-1]["number"] + 1
            group = {"step": record["step"], "number": number, "prompt": prompt, "row": record.get("row")}
            self.groups.append(group)
            self.group = own
            self.keys = set()
        self.keys.add(key)
        return len(self.groups) - 1

    def columns(self, record: dict, trained: list[list[int]], length: int) -> dict[str, float | str]:
        """A sample's numbers per token: one number if all are the same, else base64 of float32 [length]."""
        mask = np.zeros(length, bool)
        for first, end in trained:
            mask[first:end] = True
        columns = {}
        for name in [name for name in record if name not in NO_COLUMN]:
            values = samples.over_tokens(record[name], mask)
            if values is None:
                continue
            if isinstance(record[name], (int, float)):
                columns[name] = float(record[name])
            else:
                columns[name] = base64.b64encode(values.tobytes()).decode()
            self.values.setdefault(name, []).append(values[mask])
        return columns


def scale(values: np.ndarray) -> dict[str, float]:
    """Where a column reaches full color: the magnitude that 1 % exceed, for each sign that occurs."""
    magnitude = np.abs(values[np.isfinite(values)])
    bound = 0.0
    if len(magnitude):
        bound = float(f"{np.quantile(magnitude, 0.99) or magnitude.max():.3g}")
    return {"low": -bound * bool((values < 0).any()), "high": bound * bool((values > 0).any())}


def filled(template: str, script: str, page: dict) -> str:
    """The template with its script, that script's hash, and the data: ASCII JSON with "<" escaped as well."""
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    data = json.dumps(page, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"{hash}": digest, "{script}": script, "{data}": data}
    # in one pass, because the data may contain these names
    return re.sub("{(hash|script|data)}", lambda found: parts[found[0]], template)


def main():
    """Reads the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("run", type=Path, help="output folder of train.py")
    parser.add_argument("--output", type=Path, help="page to write; default: samples.html in RUN")
    parser.add_argument("--steps", default="", help="120, 100:120 (both inclusive), 100: or :120")
    parser.add_argument("--limit", type=int, default=LIMIT, help="maximum number of samples; 0: no limit")
    parser.add_argument("--tokenizer", default="", help="folder or Hub name; default: the run's own")
    flags = parser.parse_args()
    try:
        print(
            write_view(
                flags.run,
                flags.output or flags.run / "samples.html",
                flags.steps,
                flags.limit,
                flags.tokenizer,
            )
        )
    except (SamplesError, OSError) as error:
        print(f"tools.view: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
