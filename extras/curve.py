"""Draws curve.png at the end of a run. As a command, draws several runs in one picture:

    python -m extras.curve RUN [RUN ...] [--output curve.png]

A RUN is the --output_dir of train.py. Panels: reward and evaluation, the metrics of the reward function,
entropy, response length, the log-prob difference between engine and actor, and others that the run has.
Without matplotlib a run draws nothing.
"""

import argparse
import itertools
import json
from pathlib import Path

# Panels: title, label of the y axis, metrics. "Reward" also shows eval_pass@k.
PANELS = [
    ("Reward", "reward", ["reward", "eval_score"]),
    ("Metrics of the reward function", "mean over samples", []),  # all that no other panel shows
    ("Entropy", "nats per token", ["entropy"]),
    ("Response length", "tokens", ["response_length"]),
    ("Engine vs. actor", "|log-prob difference|", ["logprob_diff", "logprob_diff_max", "gate_diff"]),
    ("Staleness", "weight versions", ["staleness", "staleness_max"]),
    ("KL to the reference model", "nats per token", ["kl"]),
    ("Critic", "value; explained variance", ["value", "explained_variance"]),
]
# Of other metrics these are never shown, nor those that begin with time_ or idle_.
NOT_SHOWN = set(
    "step clip_fraction eval_failures failures grad_norm loss mfu peak_gb rollout_tokens_per_s "
    "skipped_prompts train_tokens_per_s truncated value_loss".split()
)
STYLES = ["-", "--", ":", "-."]


def read(run: Path) -> list[dict]:
    """The metrics of a run, one object per step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(runs: list[Path], output: Path):
    """Draws the runs' curves over one another; before the first step there is nothing to draw.

    Raises ImportError without matplotlib, and OSError for a folder without metrics.jsonl.
    """
    from matplotlib.figure import Figure  # not pyplot: no window, no global state

    histories = {str(run): read(run) for run in runs}
    panels = panels_of({name for history in histories.values() for record in history for name in record})
    if not panels:
        return
    figure = Figure(figsize=(4.2 * len(panels), 3.4), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, label, metrics) in zip(all_axes, panels):
        for (run, history), style in zip(histories.items(), itertools.cycle(STYLES)):
            for i, name in enumerate(metrics):
                points = {record["step"]: record[name] for record in history if name in record}
                marker = "." if len(points) < 3 else ""
                legend = f"{run}: {name}" if len(histories) > 1 else name
                axes.plot([*points], [*points.values()], style, color=f"C{i}", label=legend, marker=marker)
        axes.set(title=title, xlabel="training step", ylabel=label)
        axes.set_yscale("log" if "logprob_diff" in metrics and axes.dataLim.ymax > 0 else "linear")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
    figure.savefig(output, dpi=110)


def panels_of(names: set[str]) -> list[tuple[str, str, list[str]]]:
    """The panels that these metrics fill: title, label of the y axis and metrics of each."""
    known = NOT_SHOWN.union(*(metrics for _, _, metrics in PANELS))
    pass_at_k = sorted(name for name in names if name.startswith("eval_pass@"))
    others = sorted(name for name in names - known if not name.startswith(("time_", "idle_", "eval_pass@")))
    extra = {"Reward": pass_at_k, "Metrics of the reward function": others}
    panels = []
    for title, label, metrics in PANELS:
        shown = [name for name in metrics + extra.get(title, []) if name in names]
        if shown:
            panels.append((title, label, shown))
    return panels


def extend(trainer_class: type) -> type:
    """A trainer that draws its curve."""
    from train import RANK  # not above: the command needs no torch

    class DrawingTrainer(trainer_class):
        def fit(self):
            super().fit()
            try:
                if RANK == 0:
                    draw([self.folder], self.folder / "curve.png")
            except ImportError:  # without matplotlib
                pass
            except Exception as error:  # the run has not failed
                print(f"curve.png was not drawn: {type(error).__name__}: {error}", flush=True)

    return DrawingTrainer


def main():
    """Reads the command line."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("runs", nargs="+", type=Path, help="output folders of train.py")
    parser.add_argument("--output", type=Path, default=Path("curve.png"), help="picture to write")
    flags = parser.parse_args()
    draw(flags.runs, flags.output)


if __name__ == "__main__":
    main()
