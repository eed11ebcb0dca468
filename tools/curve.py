"""Draw the curves of one or several runs into one picture.

    python -m tools.curve RUN [RUN ...] [--output curve.png]

A RUN is the folder that train.py wrote. Panels: reward and evaluation, what the reward function measured besides,
entropy, length, and the difference between the engine's and the actor's log-probs.
"""
import argparse
import itertools
import json
from pathlib import Path

STANDARD = {"step", "reward", "eval_score", "loss", "entropy", "grad_norm", "clip_fraction", "logprob_diff",
            "logprob_diff_max", "logprob_diff_exp", "gate_diff", "staleness", "staleness_max", "response_length",
            "truncated", "tokens"}


def read(run: Path) -> list[dict]:
    """The metrics of a run, an object a step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(runs: list[Path], output: Path):
    """Lays the curves of runs over one another; without matplotlib it does nothing, as a curve is worth no crash."""
    try:
        from matplotlib.figure import Figure     # no pyplot: no window, no global state
    except ImportError:
        return
    histories = {str(run): read(run) for run in runs}
    names = {name for history in histories.values() for record in history for name in record}
    habits = sorted(name for name in names - STANDARD if not name.startswith("time_"))
    panels = [["reward", "eval_score"], habits, ["entropy"], ["response_length"],
              ["logprob_diff", "logprob_diff_max", "gate_diff"], ["staleness", "staleness_max"]]
    panels = [panel for panel in panels if names & set(panel)]
    figure = Figure(figsize=(4 * len(panels), 3.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for (run, history), style in zip(histories.items(), itertools.cycle(["-", "--", ":", "-."])):
            for color, name in enumerate(panel):
                points = [(record["step"], record[name]) for record in history if name in record]
                label = f"{run}: {name}" if len(histories) > 1 else name
                steps, values = zip(*points) if points else ((), ())
                axes.plot(steps, values, style, color=f"C{color}", label=label)
        axes.set(xlabel="step", title=", ".join(panel) if len(panel) < 3 else "habits")
        axes.set_yscale("log" if panel[0] == "logprob_diff" else "linear")
        axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=110)


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path("curve.png"))
    options = parser.parse_args()
    draw(options.runs, options.output)


if __name__ == "__main__":
    main()
