"""What a run leaves in its folder: config.json, the train.py it ran, metrics.jsonl, samples.jsonl, curve.png, model/.

`train.py` writes through it, on rank 0. It knows nothing of training but the names of metrics.
"""
import json
import os
import shutil
import signal
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from statistics import fmean

from tqdm import tqdm

from tools.curve import draw
from tools.diagnose import Diagnosis
from tools.inputs import UserError, brief, lost_contact, one_line
from tools.speed import hardware

# In a step's line, in this order; the reward's own metrics follow.
SHOWN = {"reward": ".3f", "eval_score": ".3f", "loss": ".1e", "entropy": ".3f", "grad_norm": ".2f",
         "clip_fraction": ".3f", "logprob_diff": ".0e", "gate_diff": ".0e", "staleness": ".2f",
         "response_length": ".0f", "truncated": ".2f"}
ENCODER = json.JSONEncoder(default=str, check_circular=False)      # made once: there are many samples
LOGS = ("metrics.jsonl", "samples.jsonl")
WANDB_SECONDS = 60     # for its last words, at the end of a run
PHASES = ("rollout", "wait", "swap", "logprobs", "update", "push", "gate")      # of a step, as they follow


def say(text: str):
    """Prints a line, past the bars of progress; what the screen's encoding lacks is shown by its number."""
    encoding = sys.stdout.encoding or "utf-8"
    tqdm.write(text.encode(encoding, "backslashreplace").decode(encoding))


def end(message: str, code: int):
    """Ends this process at once, with one line: a clean end would wait for ranks that wait for this one."""
    print(f"train.py: {message}", file=sys.stderr, flush=True)
    tell_torchrun(message)
    os._exit(code)


def tell_torchrun(message: str):
    """torchrun shows at the very end what the rank said that failed first."""
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:
        said = dict(message=message, extraInfo=dict(timestamp=int(time.time())))
        with suppress(OSError):
            Path(report).write_text(json.dumps({"message": said}))


@contextmanager
def one_line_errors():
    """Ends the process with one line for what a user can mend, or a lost connection; others keep their traceback."""
    try:
        yield
    except Exception as error:
        message, code = one_line(error)
        if not message:
            tell_torchrun(f"{type(error).__name__}: {brief(error)}")
            raise
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if int(os.environ.get("LOCAL_RANK", 0)) > 0 or lost_contact(error):
            time.sleep(2)       # torchrun ends us once rank 0, or who broke the connection, has spoken: one line
        end(message, code)


class RunLog:
    """Writes one run to `config["output_dir"]` and to the screen; with enabled=False, on the other ranks, nothing."""

    def __init__(self, config: dict, source: str, tokenizer, rows: int, enabled: bool, older: Path | None = None,
                 state: dict | None = None):
        state = state or {}
        self.enabled, self.tokenizer, self.folder = enabled, tokenizer, Path(config["output_dir"])
        if not enabled:
            return
        self.config, self.began = config, time.monotonic()
        self.totals = state.get("totals", {"seconds": 0.0, "tokens": 0})
        self.metrics, self.samples = (
            reopened(older and older / name, self.folder / name, state.get(name, 0)) for name in LOGS)
        (self.folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        shutil.copy(source, self.folder / "train.py")
        self.diagnosis = Diagnosis(config, **state.get("diagnosis", {}))
        self.wandb = start_wandb(config, state.get("wandb"))
        say(f"{config['model']} learns {config['data']}; all of this run is in {self.folder}")
        say(f"{rows} rows, an epoch every {rows / config['prompts_per_step']:g} steps: a step may begin the next one, "
            "so no row is left out")

    def state(self) -> dict:
        """What it takes to go on from here: how long the files are, and what is counted over the whole run."""
        if not self.enabled:
            return {}
        lengths = {name: os.fstat(file.fileno()).st_size for name, file in zip(LOGS, (self.metrics, self.samples))}
        totals = self.totals | {"seconds": self.totals["seconds"] + time.monotonic() - self.began}
        return lengths | dict(totals=totals, diagnosis=self.diagnosis.memory(), wandb=self.wandb and self.wandb.id)

    def write(self, step: int, metrics: dict[str, float], samples: list):
        """Adds a step: its line on the screen, its object in metrics.jsonl, its samples; of the first, one in full."""
        if not self.enabled or not (metrics or samples):
            return
        habits = dict(sorted(averages(sample.metrics for sample in samples).items()))
        record = habits | {"step": step} | (summary(samples) if samples else {}) | metrics  # no habit hides a metric
        if step == 1:
            say(f"\n{marked(samples[0], self.tokenizer)}\n\n(the first sample, with a reward of {samples[0].reward:g}; "
                "the tokens in « » are trained)\n")
        shown = {name: format(record[name], form) for name, form in SHOWN.items() if name in record}
        shown |= {name: format(value, ".2f") for name, value in habits.items() if name not in shown}
        say(f"step {step} | " + " | ".join(f"{name} {text}" for name, text in shown.items()))
        margin = " " * len(f"step {step}")
        if record.get("eval_failures"):
            say(f"{margin} | {record['eval_failures']} samples of the evaluation failed, and count as 0")
        if samples:
            say(f"{margin} | {speed_text(record)}")
            diagnosis = self.diagnosis(record, samples)
            if diagnosis:
                say(f"{margin} | {diagnosis}")
        self.totals["tokens"] += record.get("tokens", 0)
        try:
            self.append(record, samples)
        except OSError as error:
            raise UserError(f"{self.folder} cannot be written: {error.strerror}; its checkpoints are whole") from error
        if self.wandb:
            self.wandb.log(record, step=step)

    def append(self, record: dict, samples: list):
        """Writes a step into the files."""
        self.metrics.write(json.dumps(record) + "\n")
        self.metrics.flush()
        for sample in samples:
            self.samples.write(ENCODER.encode({"step": record["step"]} | sample_record(sample)) + "\n")
        self.samples.flush()

    def add_tokenizer(self, model: Path):
        """Makes a folder with weights one that loads by itself."""
        if not self.enabled:
            return
        self.tokenizer.save_pretrained(model)
        stops = Path(self.tokenizer.name_or_path) / "generation_config.json"     # its stop tokens
        if stops.exists():
            shutil.copy(stops, model)

    def reached(self, step: int, score: float):
        """Writes what it took to get to --target: seconds and tokens from step 1 on, and on which machine."""
        if not self.enabled:
            return
        found = dict(target=self.config["target"], eval_score=score, step=step, **self.state()["totals"], **hardware())
        (self.folder / "target.json").write_text(json.dumps(found, indent=1) + "\n")
        say(f"the target is reached: eval_score {score:.3f} at step {step}, after {found['seconds']:.0f} s and "
            f"{found['tokens']} tokens on {found['processes']} x {found['device']}")

    def stopped(self, signal: str, step: int):
        """The last line of a run that was asked to end."""
        if self.enabled:
            say(f"{signal}: ended after step {step}; the same command with --resume {self.folder} goes on from there")

    def close(self):
        """Closes the files, and draws the curve."""
        if not self.enabled:
            return
        self.metrics.close()
        self.samples.close()
        draw([self.folder], self.folder / "curve.png")
        if self.wandb:
            self.wandb.finish()
        if (self.folder / "model").exists():
            say(f"done: {self.folder / 'model'} is a Hugging Face model, {self.folder / 'curve.png'} how it learned")


def reopened(older: Path | None, path: Path, length: int):
    """A text file to write on: new, or with the first `length` bytes of an older one, which may be the same."""
    if older is None:
        return path.open("w")
    if older.resolve() != path.resolve():
        shutil.copy(older, path)
    if path.stat().st_size < length:
        raise UserError(f"{older} is shorter than when its checkpoint was made: it has {path.stat().st_size} of "
                        f"{length} bytes")
    os.truncate(path, length)
    return path.open("a")


def sample_record(sample) -> dict:
    """What samples.jsonl keeps of a sample: all but what is empty; of lists [T], but ids, the trained tokens'.

    A list of what is all the same, such as the advantages of most algorithms, is that number. `trained` are the runs of
    trained tokens, [start, end] each.
    """
    hidden = ("state", "mask")
    record = {name: value for name, value in vars(sample).items() if name not in hidden and value not in ([], {})}
    edges = [t for t, (before, now) in enumerate(zip([0, *sample.mask], [*sample.mask, 0])) if before != now]
    record["trained"] = list(zip(edges[::2], edges[1::2]))
    for name in record.keys() - {"ids", "messages", "rewards", "turns", "trained"}:
        if isinstance(record[name], list) and len(record[name]) == len(sample.ids):
            values = list(compress(record[name], sample.mask))
            record[name] = values[0] if len(set(values)) == 1 else values
    return record | {"reward": sample.reward}


def summary(samples: list) -> dict[str, float]:
    """What the samples of a step have in common: means, and the number of tokens that were processed."""
    return {"reward": fmean(sample.reward for sample in samples),
            "response_length": fmean(sum(sample.mask) for sample in samples),
            "truncated": fmean(sample.truncated for sample in samples),
            "tokens": sum(len(sample.ids) for sample in samples)}


def speed_text(record: dict[str, float]) -> str:
    """What a step took: seconds by phase, tokens a second, idle share, memory, MFU where it is known."""
    phases = ", ".join(f"{name} {record[f'time_{name}']:.2f}" for name in PHASES if f"time_{name}" in record)
    parts = [f"{record['time_step']:.2f} s: {phases}", f"{record['rollout_tokens_per_s']:.0f} tokens/s sampled, "
             f"{record['train_tokens_per_s']:.0f} trained", f"idle {record['idle']:.0%}", f"{record['peak_gb']:.1f} GB"]
    return " | ".join(parts + ([f"MFU {record['mfu']:.0%}"] if "mfu" in record else []))


def averages(records) -> dict[str, float]:
    """The mean of each number over the records that have it."""
    values = {}
    for record in records:
        for name, value in record.items():
            values.setdefault(name, []).append(value)
    return {name: fmean(of_name) for name, of_name in values.items()}


def marked(sample, tokenizer) -> str:
    """The whole text of a sample, special tokens too, with the runs of trained tokens in « »."""
    text, start = "", 0
    for end in range(1, len(sample.ids) + 1):
        if end == len(sample.ids) or sample.mask[end] != sample.mask[start]:
            run = tokenizer.decode(sample.ids[start:end])
            text += f"«{run}»" if sample.mask[start] else run
            start = end
    return text


def start_wandb(config: dict, older: str | None):
    """A wandb run, which may go on with an older one; or None. It never asks, and without a connection it is offline.

    "auto" is online for who is logged in, and off for everyone else.
    """
    mode = config["wandb"]
    if mode == "off":
        return None
    if mode == "auto" and not find_spec("wandb"):
        return None
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb        # slow to import: only where it is used
    begin = partial(wandb.init, project="grpo", config=config, dir=config["output_dir"], id=older, resume="allow",
                    settings=wandb.Settings(finish_timeout=WANDB_SECONDS))      # it would wait for ever at the end
    try:
        if mode == "auto" and not wandb.login(prompt=False):
            return None
        return begin(mode="online" if mode == "auto" else mode)
    except wandb.Error as error:
        refused = isinstance(error, (wandb.errors.AuthenticationError, wandb.errors.UsageError))
        if refused and mode != "auto":
            raise UserError(f"--wandb {mode}: {brief(error)}") from error
        say(f"wandb: {brief(error)}; it is written to {config['output_dir']}/wandb, and `wandb sync` sends it later")
        return begin(mode="offline")
