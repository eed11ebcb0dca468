"""docs/results.md, made of the records in assets/records, and assets/learning.png, the picture in README.md.

    python -m bench.report

A benchmark writes its record with bench.measure.record. The text of a section is in SECTIONS or, for other
records, the docstring of the benchmark. A test compares the page with what this command renders: no figure of
it is written by hand.
"""

import ast
import json
import re
import textwrap
from pathlib import Path
from statistics import mode

from matplotlib.figure import Figure

from bench.measure import ASSETS, RECORDS, ROOT

PAGE = ROOT / "docs/results.md"
PICTURE = ASSETS / "learning.png"
WIDTH = 130  # columns of text
FACTS = {"commit": "commit", "date": "measured on", "machine": "machine:"}
INTRODUCTION = """
No GPU has ever run this: every figure is from a CPU. Seconds are those of shared cores, so trust the ratio
of two figures of one table more than either. Tables come from `assets/records/`, where the command of a
section writes them; `python -m bench.report` makes this page of them. Do not edit it.

The *embedded job* is what `train.py` runs on a machine without a GPU: the tiny Qwen3 of `assets/tiny`
(656,448 parameters) learns countdown in 30 steps of 32 prompts x 8 completions, with two optimizer steps
each. Its 512 held-out problems use sets of numbers that occur neither in the warm-up of the model nor in
training; *held-out* is the share of them that it solves (greedy), *solved* the share of sampled answers in
training that are right.
"""
SECTIONS = {
    "embedded": (
        "The embedded job",
        "The README's command, and the same with a coin instead of the reward, where nothing may rise. The "
        "settings were chosen on other problems than these 512. Any working trainer solves this: it shows "
        "that nothing is broken, not how large models fare.",
    ),
    "formats": (
        "Number formats",
        "The embedded job in each `--dtype`. Its weights are float32, so `--dither` leaves most of them "
        "alone. Seconds say nothing about a GPU: this CPU has no float16 units.",
    ),
    "sglang": (
        "With SGLang on the CPU",
        "The embedded job with the real SGLang, alone and with tensor parallelism, on two cores. SGLang "
        "does not seed its samples there, so runs differ from those above and from each other. Its seconds "
        "say nothing about a GPU.",
    ),
    "algorithms": (
        "Algorithms",
        "The rows of `recipes/algorithms.py`, and the critics of `recipes/ppo.py`, on the embedded job with "
        "one process and the settings found for `grpo`. Each of them learns; with one seed each, it does not "
        "show which is better. `dapo` draws again until groups carry a signal, and so solves fewer.",
    ),
    "games": (
        "A game of several turns",
        "`recipes/guess_number.py`: find one of 32 secrets in at most 8 turns. Bisection takes 4.2 turns on "
        "average, a player that respects the answers but guesses at random 5.4. The start model knows what "
        "the answers mean, and seldom respects them when it samples. Only with a discount do early "
        "solutions pay more.",
    ),
    "tools": (
        "A Python tool",
        "`recipes/math_python.py`: products of two numbers of two digits, from one start model that seldom "
        "uses its tool, and mostly wrongly. Without the tool almost no answer is right, so there is no "
        "signal to learn from.",
    ),
    "process_rewards": (
        "Process rewards",
        "`recipes/prm.py`: a small model judges each line of an answer, and pays for it. Whether the answer "
        "is right is measured, never paid. Runs are short: a critic that is behind here may only be slower.",
    ),
    "real_qwen": (
        "A real Qwen",
        "Qwen2.5-Coder-0.5B-Instruct on two CPU cores: it reverses four numbers, adds two of three digits "
        "(`python -m bench.real_qwen --model FOLDER --task TASK --dtype bfloat16 --gradient_checkpointing "
        "False --tokens_per_micro_batch 4096`), and does GSM8K (`recipes/gsm8k.py --protocol tapeagents`, 4 "
        "prompts per step). The standard error of the 64 held-out rows (128 of GSM8K) is about .05 (.04). "
        "Addition is near the limit of this model, and two hours of GSM8K taught nothing that its test "
        "problems show. No real model was trained to a published score: that requires GPUs.",
    ),
}

ELSEWHERE = ("mismatch",)  # records whose figures are in the text of another page


# ------------------------------------------------------------------------------- the page -----------------
def wrap(text: str) -> str:
    """Paragraphs of text at most WIDTH wide."""
    paragraphs = textwrap.dedent(text).strip().split("\n\n")
    return "\n\n".join(textwrap.fill(one, WIDTH, break_on_hyphens=False) for one in paragraphs)


def number(value) -> str:
    """A cell: three significant digits, without an exponent unless the number is tiny."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, int):
        return f"{value:,}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 1000 else f"{rounded:.3g}"


def markdown(title: str, rows: list[dict]) -> str:
    """Rows as a table, numbers at the right; a title stands in the first column's head."""
    names = list(rows[0])
    names[0] = f"**{title}**: {names[0]}" if title else names[0]
    sides = ["---" if isinstance(value, str) else "---:" for value in rows[0].values()]
    lines = [names, sides] + [[number(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def summary_of(command: str) -> str:
    """The first sentence of what a benchmark says of itself, and where the rest is."""
    module = re.search(r"-m bench\.(\w+)", command)[1]
    text = ast.get_docstring(ast.parse((ROOT / f"bench/{module}.py").read_text()))
    first = text.split("\n\n")[0]
    return f"{' '.join(first.split())} Details: [bench/{module}.py](../bench/{module}.py)."


def facts_of(record: dict, names) -> str:
    """These facts of a record in words."""
    return ", ".join(f"{FACTS[name]} {record[name]}" for name in FACTS if name in names)


def section(name: str, record: dict, usual: dict) -> str:
    """Heading, text and tables of a record, with the facts in which it differs from most."""
    heading, text = SECTIONS.get(name) or (
        name.replace("_", " ").capitalize(),
        summary_of(record["command"]),
    )
    own = {name for name in FACTS if record[name] != usual[name]}
    command = f"`{record['command']}`" + (f" ({facts_of(record, own)})" if own else "")
    parts = [f"## {heading}\n{wrap(text)}\n{command}"]
    parts += [markdown(title, rows) for title, rows in record["tables"].items()]
    return "\n\n".join(parts)


def render(folder: Path = RECORDS) -> str:
    """The page."""
    records = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    usual = {name: mode(record[name] for record in records.values()) for name in FACTS}
    facts = f"Unless a section says otherwise: {facts_of(usual, FACTS)}."
    parts = ["# Results", wrap(f"{INTRODUCTION.rstrip()}\n{facts}")]
    for name in dict.fromkeys([*SECTIONS, *records]):
        if name in records and name not in ELSEWHERE:
            parts.append(section(name, records[name], usual))
    return "\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------------- the picture -----------------
PANELS = {
    "eval_score": "held-out problems solved (greedy)",
    "solved": "training problems solved (sampled)",
}


def draw(record: dict, output: Path):
    """The curves of the embedded job: a panel per metric, a line per run; grey: the random reward."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (metric, title) in zip(figure.subplots(1, len(PANELS), sharey=True), PANELS.items()):
        column = record["curve_columns"].index(metric)
        for run, rows in record["curves"].items():
            points = [(row[0], row[column]) for row in rows if row[column] is not None]
            axes.plot(*zip(*points), label=run, color="grey" if run.startswith("random") else None)
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(output, dpi=110)


def main():
    """Writes the page and the picture."""
    PAGE.write_text(render())
    embedded = RECORDS / "embedded.json"
    if embedded.exists():
        draw(json.loads(embedded.read_text()), PICTURE)
    print(f"{PAGE}, {PICTURE}")


if __name__ == "__main__":
    main()
