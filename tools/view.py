"""A run's samples as one HTML file: prompts and completions token by token, to look at in a browser, without a server.

    python -m tools.view RUN [--output samples.html] [--steps 100:120] [--limit 2000] [--tokenizer FOLDER]

A RUN is the folder that train.py wrote. Of a long one only evenly spread steps are kept; the page says which. Colours
come from whatever list of numbers a sample has for its trained tokens. What a model wrote may be anything, and stays
text: the page's data is JSON in which no tag can be spelled, and the page may run no script but its own.
"""
import argparse
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tools.inputs import UserError, brief
from tools.samples import find_samples, load_samples, of_steps, over_tokens, spread, what_is_kept

PAGE, SCRIPT = Path(__file__).with_suffix(".html"), Path(__file__).with_suffix(".js")
LIMIT = 2000        # samples in a page
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}     # in the names of byte-level tokens
NO_COLUMN = {"step", "key", "messages", "row", "ids", "trained", "text", "turns", "reward", "rewards", "metrics",
             "truncated"}


def write_view(run: Path, output: Path, steps: str = "", limit: int = LIMIT, tokenizer: str = "") -> str:
    """Writes the page, and returns a sentence on what it holds. Raises UserError where there is nothing to show.

    `steps` is as of_steps takes it, `limit` the number of samples at most (0: no limit), `tokenizer` a folder or a Hub
    name, by default the one of the model that the run left, or began with.
    """
    found = find_samples(run / "samples.jsonl")
    config = json.loads((run / "config.json").read_text()) if (run / "config.json").exists() else {}
    size = config.get("group_size", 1)
    chosen = spread(of_steps(found, steps), limit, size)
    note = what_is_kept(found, chosen)
    ours = str(run / "model") if (run / "model").is_dir() else config.get("model", "")
    packer = Packer(load_tokenizer(tokenizer or ours), size)
    about = [Path(config[name]).name for name in ("model", "data", "algo") if config.get(name)]
    page = {"run": run.resolve().name, "about": about, "note": note}
    page |= packer.pack(load_samples(run / "samples.jsonl", chosen))
    output.write_text(filled(PAGE.read_text(), SCRIPT.read_text(), page))
    return f"{output}, {output.stat().st_size / 1e6:.1f} MB: {note}"


def load_tokenizer(name: str):
    """A tokenizer, by its folder or Hub name. Raises UserError where there is none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:
        raise UserError(f"no tokenizer in {name or 'the run'}: {brief(error)}; name one by --tokenizer") from error


def spell(tokenizer, tokens: list[int]) -> list[str | list[int]]:
    """What each token adds to a text; where that is no whole characters, its bytes."""
    (anchor, *_) = tokenizer.encode("a", add_special_tokens=False)[::-1]    # the first token of a text may lose a space

    def decode(*ids):
        return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    texts = []
    for token in tokens:
        text, name = decode(anchor, token)[len(decode(anchor)):], tokenizer.convert_ids_to_tokens(token)
        if name is None:
            text = f"[no token {token}]"
        elif "\ufffd" in text and re.fullmatch("<0x[0-9A-F]{2}>", name):     # a SentencePiece tokenizer's
            text = [int(name[3:5], 16)]
        elif "\ufffd" in text and set(name) <= BYTE_OF.keys():
            text = [BYTE_OF[character] for character in name]
        texts.append(text)
    return texts


class Packer:
    """Gathers samples into the page's tables: texts of tokens, groups with their prompts, columns, completions."""

    def __init__(self, tokenizer, group_size: int):
        self.tokenizer, self.group_size = tokenizer, group_size
        self.places, self.groups, self.values = {}, [], {}      # of a token in the table; columns' values [N], in parts

    def pack(self, samples) -> dict:
        """The tables, from (place in its step, record) of each sample."""
        completions = [self.completion(*sample) for sample in samples]
        special = {token for token, known in self.tokenizer.added_tokens_decoder.items() if known.special}
        return {"vocabulary": spell(self.tokenizer, list(self.places)),
                "special": [place for token, place in self.places.items() if token in special],
                "columns": {name: scale(np.concatenate(parts)) for name, parts in self.values.items()},
                "groups": self.groups, "samples": completions}

    def completion(self, place: int, record: dict) -> dict:
        """What the page has of a sample: all tokens behind the prompt, and what is known of them."""
        tokens = [self.places.setdefault(token, len(self.places)) for token in record["ids"]]
        start = record["trained"][0][0] if record["trained"] else len(tokens)
        group = {"step": record["step"], "number": place // self.group_size + 1, "prompt": tokens[:start],
                 "row": record.get("row")}
        if not self.groups or self.groups[-1] != group:
            self.groups.append(group)
        trained = [[first - start, end - start] for first, end in record["trained"]]
        mask = np.zeros(len(tokens) - start, bool)
        for first, end in trained:
            mask[first:end] = True
        columns = {}
        for name in [name for name in record if name not in NO_COLUMN]:
            values = over_tokens(record[name], mask)
            if values is not None:
                constant = isinstance(record[name], (int, float))
                columns[name] = float(record[name]) if constant else base64.b64encode(values.tobytes()).decode()
                self.values.setdefault(name, []).append(values[mask])
        kept = {name: record[name] for name in ("reward", "rewards", "truncated", "metrics") if name in record}
        return kept | dict(group=len(self.groups) - 1, tokens=tokens[start:], trained=trained, columns=columns)


def scale(values: np.ndarray) -> dict[str, float]:
    """Where a column has its full colours: the size that 1 % exceed, above 0 and below, if there are such values."""
    size = np.abs(values[np.isfinite(values)])
    bound = float(f"{np.quantile(size, 0.99) or size.max():.3g}") if len(size) else 0.0
    return {"low": -bound * bool((values < 0).any()), "high": bound * bool((values > 0).any())}


def filled(template: str, script: str, page: dict) -> str:
    """The template with its script, that one's hash, and the data: JSON in ASCII, in which "<" is escaped as well."""
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    data = json.dumps(page, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    parts = {"{hash}": digest, "{script}": script, "{data}": data}
    return re.sub("{(hash|script|data)}", lambda found: parts[found[0]], template)      # once: the data may spell these


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--output", type=Path, default=Path("samples.html"))
    parser.add_argument("--steps", default="", help="only these: 120, 100:120 (both inclusive), 100: or :120")
    parser.add_argument("--limit", type=int, default=LIMIT, help="samples at most, of evenly spread steps; 0: all")
    parser.add_argument("--tokenizer", default="", help="folder or Hub name; by default the run's own")
    flags = parser.parse_args()
    try:
        print(write_view(flags.run, flags.output, flags.steps, flags.limit, flags.tokenizer))
    except (UserError, OSError) as error:
        print(f"tools.view: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
