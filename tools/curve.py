"""Draw the curves of one or several runs into one picture.

    python -m tools.curve RUN [RUN ...] [--output curve.png]

A RUN is the folder that train.py wrote. Panels: reward and evaluation, what the reward function measured besides,
entropy, length, and the difference between the engine's and the actor's log-probs.
"""
import argparse
import itertools
import json
from pathlib import Path

PANELS = {  # title: what it shows; the first also has eval_pass@k
    "reward": ["reward", "eval_score"], "habits": [], "entropy": ["entropy"], "response length": ["response_length"],
    "engine against actor": ["logprob_diff", "logprob_diff_max", "gate_diff"],
    "staleness": ["staleness", "staleness_max"], "divergence": ["kl"], "critic": ["value", "explained_variance"]}
NOT_SHOWN = {"step", "loss", "grad_norm", "clip_fraction", "logprob_diff_exp", "truncated", "tokens", "skipped", "idle",
             "peak_gb", "rollout_tokens_per_s", "train_tokens_per_s", "mfu", "eval_failures", "value_loss"}


def read(run: Path) -> list[dict]:
    """The metrics of a run, an object a step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(runs: list[Path], output: Path):
    """Lays the curves of runs over one another.

    Without matplotlib, or before a first step, it does nothing: a curve is worth no crash.
    """
    try:
        from matplotlib.figure import Figure     # no pyplot: no window, no global state
    except ImportError:
        return
    histories = {str(run): read(run) for run in runs}
    panels = grouped({name for history in histories.values() for record in history for name in record})
    if not panels:
        return
    figure = Figure(figsize=(4 * len(panels), 3.4), layout="constrained")
    for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items()):
        for (run, history), style in zip(histories.items(), itertools.cycle(["-", "--", ":", "-."])):
            for color, name in enumerate(panel):
                points = [(record["step"], record[name]) for record in history if name in record]
                label = f"{run}: {name}" if len(histories) > 1 else name
                steps, values = zip(*points) if points else ((), ())
                axes.plot(steps, values, style, color=f"C{color}", label=label, marker="." if len(points) < 3 else "")
        axes.set(xlabel="step", title=title)
        axes.set_yscale("log" if panel[0] == "logprob_diff" else "linear")
        axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=110)


def grouped(names: set[str]) -> dict[str, list[str]]:
    """Which of these metrics go into which panel; those that nobody here knows are the reward function's."""
    known = NOT_SHOWN | {name for panel in PANELS.values() for name in panel}
    best_of = sorted(name for name in names if name.startswith("eval_pass@"))
    others = sorted(name for name in names - known if not name.startswith(("time_", "eval_pass@")))
    panels = PANELS | {"reward": PANELS["reward"] + best_of, "habits": others}
    panels = {title: [name for name in panel if name in names] for title, panel in panels.items()}
    return {title: panel for title, panel in panels.items() if panel}


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("curve.png"))
    options = parser.parse_args()
    draw(options.runs, options.output)


if __name__ == "__main__":
    main()
