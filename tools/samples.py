"""Reads the samples.jsonl of a run, which may be larger than memory: finds each sample, chooses some, loads only those.

`tools/runlog.py` writes the file, one sample a line, step after step, a group's samples one behind the other.
"""
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tools.inputs import UserError, brief


def find_samples(path: Path) -> dict[int, list[int]]:
    """Where each sample of a step begins, in bytes. A last line that is still being written does not count.

    Raises UserError for a file that is missing, empty, or no run's.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; name the folder that train.py wrote, its --output_dir")
    found, offset = {}, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            step = re.match(rb'\{"step": (\d+),', line)
            if not step:
                raise UserError(f"{path}: line {number} does not begin with a step, as those of train.py do")
            if line.endswith(b"\n"):
                found.setdefault(int(step[1]), []).append(offset)
            offset += len(line)
    if not found:
        raise UserError(f"{path} has no samples yet")
    return found


def of_steps(found: dict[int, list[int]], steps: str) -> dict[int, list[int]]:
    """Those of "120", "100:120" (both inclusive), "100:" or ":120"; for "" all. Raises UserError if there are none."""
    if not re.fullmatch(r"\d*(:\d*)?", steps):
        raise UserError(f"--steps {steps}: write it as 120, 100:120, 100: or :120")
    first, colon, last = steps.partition(":")
    low, high = int(first or min(found)), int(last or max(found)) if colon or not first else int(first)
    chosen = {step: offsets for step, offsets in found.items() if low <= step <= high}
    if not chosen:
        raise UserError(f"--steps {steps}: the run has samples of steps {min(found)} to {max(found)}")
    return chosen


def spread(found: dict[int, list[int]], limit: int, group_size: int) -> dict[int, list[int]]:
    """At most `limit` samples (0: all), of evenly spread steps from the first to the last.

    Of steps so large that not even two of them fit, it takes the first groups. Raises UserError for a limit below 0.
    """
    if limit < 0:
        raise UserError(f"--limit {limit}: it must be 0, for all samples, or more")
    if not limit or sum(map(len, found.values())) <= limit:
        return found
    steps = sorted(found)
    count = min(len(steps), max(2, limit // max(map(len, found.values()))))
    share = limit // count
    share -= share % group_size if share > group_size else 0
    places = [i * (len(steps) - 1) // max(1, count - 1) for i in range(count)]
    return {steps[place]: found[steps[place]][:share] for place in places}


def what_is_kept(found: dict[int, list[int]], chosen: dict[int, list[int]]) -> str:
    """Which samples were chosen, and how to see others."""
    count, total = sum(map(len, chosen.values())), sum(map(len, found.values()))
    if count == total:
        return f"all {total:,} samples"
    steps = ", ".join(map(str, chosen)) if len(chosen) < 12 else f"{len(chosen)} from {min(chosen)} to {max(chosen)}"
    return f"{count:,} of {total:,} samples, of steps {steps}; for others use --steps FIRST:LAST, for more --limit N"


def load_samples(path: Path, chosen: dict[int, list[int]]) -> Iterator[tuple[int, dict]]:
    """Yields the place of each sample in its step, from 0, and its record. NaN and infinities are strings in it."""
    with path.open("rb") as file:
        for step, offsets in chosen.items():
            for place, offset in enumerate(offsets):
                file.seek(offset)
                try:
                    record = json.loads(file.readline(), parse_constant=str)
                except ValueError as error:
                    raise UserError(f"{path}: sample {place + 1} of step {step} is no JSON: {brief(error)}") from error
                if not {"ids", "trained"} <= record.keys():
                    raise UserError(f"{path}: sample {place + 1} of step {step} lacks ids or trained")
                yield place, record


def over_tokens(value, mask: np.ndarray) -> np.ndarray | None:
    """Trained tokens' numbers [N], or one for all of them, over the tokens of a mask [T]: NaN where it is False.

    None for what is no such thing, as other fields of a sample may be.
    """
    if value is None:
        return None
    values = np.full(len(mask), np.nan, "<f4")
    try:
        values[mask] = np.array(value, "<f4")
    except (TypeError, ValueError):
        return None
    return values
