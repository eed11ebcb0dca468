"""How far the log-probs of engine and actor differ by number format, and gradients from those in float32.

    python -m bench.mismatch [--model FOLDER] [--engines local,sglang] [--prompts 8] [--tokens 48]

For each dtype, without and with --fp32_logits, the engine samples 8 completions per prompt at temperature 1,
and the actor scores the same tokens. "outside" is the share of tokens whose ratio of probabilities is not
within 0.8 to 1.28, the default clip. Gradients are those of samples that the local engine made in float32,
with made-up advantages. Their error is relative to the norm of float32's; "unscaled" is float16 without
a loss scale. CPU seconds are those of the trainer's process. Each case is a process of its own.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import torch

from bench.measure import ROOT, embedded_flags, options, record, show
from extras.loss_scale import LossScale
from train import Sample, Trainer, main

GROUP = 8
LOW, HIGH = 0.8, 1.28


class MismatchTrainer(Trainer):
    """Measures instead of learning, and leaves a row in its folder."""

    def fit(self):
        self.publish()
        start = time.process_time()
        samples = self.rollout()
        played = time.process_time()
        self.engine.close()
        self.engine = None  # the actor needs its memory
        for sample in samples:
            sample.tokens["advantage"] = (-1.0) ** sample.key[1]
        gaps = torch.cat([self.differences(batch) for batch in self.micro_batches(samples)])
        ratios = gaps.exp()
        row = {"dtype": self.config.dtype, "fp32 logits": self.config.fp32_logits, "tokens": len(gaps)}
        row |= {"mean": gaps.abs().mean().item(), "max": gaps.abs().max().item()}
        row["outside, %"] = 100 * ((ratios < LOW) | (ratios > HIGH)).float().mean().item()
        row |= {"sampling, s": played - start, "log-probs, s": time.process_time() - played}
        row |= {"gradient error": "", "unscaled": ""}
        if self.config.engine == "local":
            row |= self.gradient_errors(samples[: 2 * GROUP])
        (self.folder / "row.json").write_text(json.dumps({"engine": self.config.engine} | row))

    @torch.no_grad()
    def differences(self, batch) -> torch.Tensor:
        """Log-probs of the actor minus those of the engine [N]."""
        logprobs, _ = self.actor.model.logprobs(batch)
        return (logprobs - batch.engine_logprobs).cpu()

    def gradients(self, samples: list[Sample], scale: float) -> dict[str, torch.Tensor]:
        """The gradients, of a loss that float16 multiplies by `scale`; they are divided by it."""
        if self.config.dtype == "float16":
            self.actor.loss_scale.value = scale
        self.actor.backward(self.micro_batches(samples), self.forward)
        weights = self.actor.parameters.items()
        found = {name: (weight.grad / scale).full_tensor() for name, weight in weights}
        self.actor.optimizer.zero_grad()
        return found

    def gradient_errors(self, samples: list[Sample]) -> dict[str, float]:
        """The errors relative to the gradients in float32, the first case, which saves its own."""
        scales = {"gradient error": 1.0}
        if self.config.dtype == "float16":
            scales = {"gradient error": LossScale().value, "unscaled": 1.0}
        reference = self.folder.parent / "gradients.pt"
        if self.config.dtype == "float32":
            torch.save((samples, self.gradients(samples, 1.0)), reference)
        if not reference.exists():
            return {}
        samples, expected = torch.load(reference, weights_only=False, mmap=True)
        total = sum(one.double().square().sum() for one in expected.values())
        errors = {}
        for name, scale in scales.items():
            found = self.gradients(samples, scale)
            difference = sum((found[key] - one).double().square().sum() for key, one in expected.items())
            errors[name] = (difference / total).sqrt().item()
        return errors


def measure(flags, folder: Path) -> list[dict]:
    """A row for each engine, dtype and kind of logits, measured in processes of their own."""
    common = {"prompts_per_step": flags.prompts, "max_new_tokens": flags.tokens, "group_size": GROUP}
    common |= {"eval_data": "", "gate": "off", "steps": 1, "updates_per_step": 1}
    if flags.model:
        common |= {"model": flags.model, "gradient_checkpointing": False}
    rows = []
    for engine, dtype, fp32_logits in product(
        flags.engines.split(","), flags.dtypes.split(","), (False, True)
    ):
        if dtype == "float32" and fp32_logits:
            continue  # they are in fp32 anyway
        case = folder / f"{engine}-{dtype}-{fp32_logits}"
        own = {"engine": engine, "dtype": dtype, "fp32_logits": fp32_logits, "output_dir": case}
        words = embedded_flags(**common, **own)
        subprocess.run([sys.executable, "-m", "bench.mismatch", *words], cwd=ROOT, check=True)
        rows.append(json.loads((case / "row.json").read_text()))
        show(rows[-1:])
    return rows


def benchmark():
    """Measures all cases and records them."""
    more = {"model": ("", "folder of a model; empty: the embedded one"), "engines": ("local", "local,sglang")}
    more["dtypes"] = ("float32,bfloat16,float16", "gradients require float32 in front")
    more |= {"prompts": (8, "prompts with 8 completions each"), "tokens": (48, "longest completion")}
    flags = options(__doc__, "mismatch", **more)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(flags, Path(folder))
    record(flags.output, {"": rows})


if __name__ == "__main__":
    if "--output_dir" in sys.argv:
        main(trainer=MismatchTrainer)
    else:
        benchmark()
