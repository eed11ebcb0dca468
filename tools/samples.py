"""Reads samples.jsonl of a run, which may be larger than memory: finds all samples, loads the selected ones.

A line is one sample and begins with {"step": N, and the samples of a group follow one another. Every sample
has its text; those of the first --token_groups groups of a step also have ids and numbers per token.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np


class SamplesError(Exception):
    """Something about a run that the user can fix, in one line."""


def find_samples(path: Path) -> dict[int, list[int]]:
    """The byte offset of each sample, by step. A last line that is still being written does not count.

    Raises SamplesError if the file is missing, empty, or not from a run.
    """
    if not path.exists():
        raise SamplesError(f"{path} does not exist; name the --output_dir of a run of train.py")
    found = {}
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            step = re.match(rb'\{"step": (\d+),', line)
            if not step:
                raise SamplesError(f"{path}: line {number} does not begin with a step, as train.py writes it")
            if line.endswith(b"\n"):
                found.setdefault(int(step[1]), []).append(offset)
            offset += len(line)
    if not found:
        raise SamplesError(f"{path} has no samples yet")
    return found


def of_steps(found: dict[int, list[int]], steps: str) -> dict[int, list[int]]:
    """The samples of steps "120", "100:120" (both inclusive), "100:" or ":120"; all for "".

    Raises SamplesError if there are none.
    """
    if not re.fullmatch(r"\d*(:\d*)?", steps):
        raise SamplesError(f"--steps {steps}: expected 120, 100:120, 100: or :120")
    first, colon, last = steps.partition(":")
    low = int(first or min(found))
    high = int(last or max(found))
    if first and not colon:  # a single step
        high = low
    chosen = {step: offsets for step, offsets in found.items() if low <= step <= high}
    if not chosen:
        raise SamplesError(f"--steps {steps}: the run has samples of steps {min(found)} to {max(found)}")
    return chosen


def spread(found: dict[int, list[int]], limit: int, group_size: int) -> dict[int, list[int]]:
    """At most `limit` samples (0: all), of evenly spaced steps from the first to the last.

    If not even two whole steps fit, it keeps the first groups of both. Raises SamplesError if limit is
    negative.
    """
    if limit < 0:
        raise SamplesError(f"--limit {limit}: it must be at least 0 (0: all samples)")
    total = sum(map(len, found.values()))
    if not limit or total <= limit:
        return found
    steps = sorted(found)
    largest = max(map(len, found.values()))
    count = min(len(steps), max(2, limit // largest))
    per_step = limit // count
    if per_step > group_size:
        per_step -= per_step % group_size
    places = [i * (len(steps) - 1) // max(1, count - 1) for i in range(count)]
    return {steps[place]: found[steps[place]][:per_step] for place in places}


def what_is_kept(found: dict[int, list[int]], chosen: dict[int, list[int]]) -> str:
    """A sentence on which samples were selected, and how to see others."""
    count = sum(map(len, chosen.values()))
    total = sum(map(len, found.values()))
    if count == total:
        return f"all {total:,} samples"
    if len(chosen) == 1:
        steps = f"from step {min(chosen)}"
    elif len(chosen) < 12:
        steps = f"from steps {', '.join(map(str, chosen))}"
    else:
        steps = f"from {len(chosen)} steps between {min(chosen)} and {max(chosen)}"
    return (
        f"{count:,} of {total:,} samples, {steps}; select others with --steps FIRST:LAST, more with --limit N"
    )


def load_samples(path: Path, chosen: dict[int, list[int]]) -> Iterator[tuple[int, dict]]:
    """Yields the place of each sample in its step, from 0, and its record. NaN and infinities become strings.

    Raises SamplesError for a line that is not JSON, or that has neither a text nor trained tokens.
    """
    with path.open("rb") as file:
        for step, offsets in chosen.items():
            for place, offset in enumerate(offsets):
                file.seek(offset)
                name = f"{path}: sample {place + 1} of step {step}"
                try:
                    record = json.loads(file.readline(), parse_constant=str)
                except ValueError as error:
                    raise SamplesError(f"{name} is not JSON: {error}") from error
                if "text" not in record and not has_tokens(record):
                    raise SamplesError(f"{name} has neither a text nor ids with trained")
                yield place, record


def has_tokens(record: dict) -> bool:
    """Whether a sample has its tokens, or only its text."""
    return "ids" in record and "trained" in record


def over_tokens(value, mask: np.ndarray) -> np.ndarray | None:
    """Numbers [N] of the trained tokens, or one for all, over all tokens of a mask [T]; NaN elsewhere.

    None for anything else, as other fields of a sample may be.
    """
    if value is None:
        return None
    values = np.full(len(mask), np.nan, "<f4")
    try:
        values[mask] = np.array(value, "<f4")
    except (TypeError, ValueError):
        return None
    return values
