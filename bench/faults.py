"""What becomes of a run into which a fault is injected? Each fault at three instants, and then: is anything lost?

    python -m bench.faults [--only reward rank gradient disk clock wandb engine] [--fault NAME ...] [--at "update 3"]

A run is six steps of the embedded model by two processes, with two optimiser steps each, an evaluation every other
step and a checkpoint after each. bench.injected has the faults that strike within the processes, at an instant such as
"update 3": between the two optimiser steps of step 3. `engine` (bench.faults_engine) needs the real sglang, `disk`
needs root, for a small disk of its own.

For each: what happened; after how many seconds (to the run's end, or to the next step's line); how many processes were
left 5 s after the end; and what the run said. A run that ended is started again by the same command, without the fault
and with --resume auto. `unequal` counts the records, samples and tensors that are then not equal to the bit to those of
a run without a fault. A run that goes on must equal one that was never hit (clock, wandb), in which the same group was
left out (reward), or the same optimiser step (gradient; but for the metrics that count it). SGLang's samples are not
exact: there `unequal` says whether a step, a sample or an optimiser step is missing, or there twice. `twice` are steps
that metrics.jsonl has twice, or has not, when the faulty run ends. Prints a table, and writes it.
"""
import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from bench.kills import differences, kept
from bench.fake_wandb import closed, lost, silent
from bench.measure import ASSETS, show, write
from tools.checkpoint import checkpoints
from train import TINY

END = 6
FLAGS = dict(steps=END, prompts_per_step=8, group_size=8, max_new_tokens=48, eval_every=2, save_every=1, bucket_mb=0.5,
             eval_data=TINY["eval_data"] + ":train[:16]", reward_timeout=2, wandb="off")
PATIENCE = 60.0         # seconds that a run may be still after a fault, before it counts as hanging
DAY = 86400
# where a run says what became of it, the best first: its last line, an error, torchrun's report, a step's sentence
SAYS_SO = (r"train\.py: .*", r"^(?!.*ChildFailed).*Error: .*", r"Signal (?!15)\d+ \(\w+\)", r".* samples failed, .*",
           r".*goes on without .*")


@contextmanager
def nothing(folder: Path):
    """What most runs need around them."""
    yield {}, {}


@dataclass
class Case:
    """One fault at one instant."""
    group: str
    fault: str
    at: str
    env: dict = field(default_factory=dict)         # what injects it
    flags: dict = field(default_factory=dict)
    reference: dict = field(default_factory=dict)   # the environment of the run that one that goes on must equal
    uncompared: tuple[str, ...] = ()                # metrics that may differ from it
    around: object = nothing                        # around(the folder it runs in), a context: more env, more flags
    patience: float = PATIENCE
    processes: int = 2


def injected(group: str, fault: str, instants, rank: int = 0, reference: str = "", uncompared=(), around=nothing,
             **more) -> list[Case]:
    """The cases of a fault of bench.injected. A run that goes on must equal one with the fault `reference`."""
    name = fault + "".join(f" {value}" for value in more.values()) + (f", rank {rank}" if group == "rank" else "")
    found = []
    for at in instants:
        equal = dict(FAULT=reference, FAULT_AT=at) if reference else {}
        env = dict(FAULT=fault, FAULT_AT=at, FAULT_RANK=str(rank)) | more
        found.append(Case(group, name, at, env, reference=equal, uncompared=uncompared, around=around))
    return found


def cases() -> list[Case]:
    """All but those of the engine."""
    judged, later = ("rollout 1", "rollout 3", "evaluation 4"), ("rollout 1", "update 3", "checkpoint 4")
    found = []
    for fault in ("raises", "hangs", "hangs_in_c", "is_killed"):
        found += injected("reward", fault, judged, reference="left_out")
    for rank in (0, 1):
        found += injected("rank", "kill", later, rank)
    found += injected("gradient", "nan", ("update 1", "update 3", "update 4"), 1, "not_updated",
                      ("grad_norm", "skipped"))
    found += injected("disk", "disk", ("rollout 1", "checkpoint 4", f"export {END}"), around=small_disk)
    for seconds in (DAY, -DAY):
        found += injected("clock", "clock", later, FAULT_SECONDS=str(seconds))
    key = dict(WANDB_API_KEY="0" * 40)
    for mode in ("online", "auto"):
        found += [Case("wandb", f"nobody at the port, --wandb {mode}", "start", key, dict(wandb=mode), around=closed),
                  Case("wandb", f"a silent server, --wandb {mode}", "start", key, dict(wandb=mode), around=silent)]
    for case in injected("wandb", "answers", later, around=lost, **key):
        found.append(replace(case, fault="the server goes, --wandb online", flags=dict(wandb="online")))
    for case in found:
        case.patience = 200.0 if case.group == "wandb" else PATIENCE
    return found


# ------------------------------------------------ what a fault needs around it ---------------------------------------
@contextmanager
def small_disk(folder: Path):
    """A disk of 64 MB: room for three checkpoints of the embedded model and some more."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield {}, {}
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


# ------------------------------------------------ running -------------------------------------------------------------
def start(target: list[str], folder: Path, flags: dict, env: dict, log: Path, processes: int) -> subprocess.Popen:
    """A run, in a group of processes of its own, all of which have FAULT_NOTE in their environment."""
    words = [str(word) for name, value in (FLAGS | flags | dict(output_dir=folder)).items()
             for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", *target,
               *words]
    environment = os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", FAULT_NOTE=str(log.parent / "note"))
    return subprocess.Popen(command, stdout=log.open("a"), stderr=subprocess.STDOUT, start_new_session=True,
                            cwd=Path(__file__).parent.parent, env=environment | env)


def left(note: Path) -> list[psutil.Process]:
    """The processes of a run that live, by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FAULT_NOTE") == str(note) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def finished(process: subprocess.Popen, note: Path) -> int:
    """The exit code of a run at its end, which is now at the latest if this process is to end."""
    try:
        return process.wait()
    finally:
        clear(note, process)


def clear(note: Path, process: subprocess.Popen) -> int:
    """Ends what is left of a run. Returns how many processes that were."""
    behind = left(note)
    for one in behind:
        one.kill()
    process.wait()
    return len(behind)


def lines_in(folder: Path) -> int:
    """How many steps, step 0 among them, the run has written."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def watch(process: subprocess.Popen, folder: Path, note: Path, patience: float) -> dict:
    """Waits for the end of a run, or until nothing has come of it for that long since its fault."""
    began = time.monotonic()
    lines, before, moved, went_on = 0, 0, began, None
    while process.poll() is None:
        struck = float(note.read_text() or "inf") if note.exists() else None
        if lines_in(folder) != lines:
            lines, moved = lines_in(folder), time.monotonic()
            if struck is None:
                before = lines
            went_on = went_on or (moved if struck and lines > before else None)
        if time.monotonic() - max(moved, struck or began) > patience:
            return dict(what="hangs", seconds=time.monotonic() - (struck or began))
        time.sleep(0.02)
    if not note.exists():
        return dict(what="never struck", seconds=time.monotonic() - began)
    struck = float(note.read_text())
    if process.returncode == 0:
        return dict(what="goes on", seconds=(went_on or time.monotonic()) - struck)
    return dict(what=f"ends, code {process.returncode}", seconds=time.monotonic() - struck)


def said(folder: Path, log: str = "log") -> str:
    """What a run said of its fault."""
    text = (folder / log).read_text()
    matches = filter(None, (re.search(pattern, text, re.MULTILINE) for pattern in SAYS_SO))
    said = next((match.group().strip(" |") for match in matches), "")
    return said.replace(str(folder / "disk/run"), "RUN")


def disorder(folder: Path) -> list[int]:
    """The steps that metrics.jsonl has not exactly once, up to its last one; a half line at its end is none."""
    steps = []
    for line in (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else ():
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            pass
    return [step for step in range(max(steps, default=-1) + 1) if steps.count(step) != 1]


def kept_but(folder: Path, uncompared: tuple[str, ...]) -> dict:
    """What must be equal of a run; of a sample's failure, that it has one."""
    found = kept(folder)
    found["metrics"] = [{name: value for name, value in record.items() if name not in uncompared}
                        for record in found["metrics"]]
    samples = [json.loads(line) for line in found["samples"].splitlines()]
    found["samples"] = "\n".join(json.dumps(sample | dict(failure=bool(sample.get("failure")))) for sample in samples)
    return found


def incomplete(run: Path) -> str:
    """What a run lacks, or has twice, whose samples cannot be foreseen: SGLang's seeds are not exact.

    Each step needs its line, every sample of every prompt once, sampled by the weights of the step before; the last
    checkpoint must have come of as many optimiser steps as the run has.
    """
    samples = [json.loads(line) for line in (run / "samples.jsonl").open()]
    keys = sorted(tuple(sample["key"]) for sample in samples)
    wanted = [(place, i) for place in range(END * FLAGS["prompts_per_step"]) for i in range(FLAGS["group_size"])]
    stale = sum(sample["versions"] != sample["step"] for sample in samples)
    updates = json.loads((checkpoints(run)[-1] / "state.json").read_text())["updates"]["actor"]
    faults = {"steps": disorder(run), "samples": keys != wanted, "stale samples": stale,
              "optimiser steps": updates - 2 * END, "steps' lines": lines_in(run) - END - 1}
    return ", ".join(f"{name}: {value}" for name, value in faults.items() if value)


class Laboratory:
    """Runs cases in a folder, and what they are compared with, each such run once."""

    def __init__(self, scratch: Path):
        self.scratch, self.references = scratch, {}

    def reference(self, env: dict) -> Path:
        """The folder of a run without a fault, or with what `env` says instead."""
        key = json.dumps(env)
        if key not in self.references:
            place = self.scratch / f"reference-{len(self.references)}"
            place.mkdir()
            target = ["-m", "bench.injected"] if env else ["train.py"]
            if finished(start(target, place / "run", {}, env, place / "log", 2), place / "note"):
                sys.exit(f"a reference failed: {(place / 'log').read_text()[-2000:]}")
            self.references[key] = place / "run"
        return self.references[key]

    def run(self, case: Case) -> dict:
        """Runs a case, and again if it ended; returns its row of the table."""
        place = self.scratch / "case"
        place.mkdir()
        disk, note = place / "disk", place / "note"
        run = disk / "run"
        disk.mkdir()
        target = ["-m", "bench.injected"] if "FAULT" in case.env else ["train.py"]
        with case.around(disk) as (env, flags):
            if case.at == "start":
                note.write_text(str(time.monotonic()))
            process = start(target, run, case.flags | flags, case.env | env, place / "log", case.processes)
            try:
                row = watch(process, run, note, case.patience)
                time.sleep(5 if row["what"] != "hangs" else 0)
            finally:
                behind = clear(note, process)
            row |= dict(left=0 if row["what"] == "hangs" else behind, twice=disorder(run), said=said(place))
            for path in (disk / "filler", note):
                path.unlink(missing_ok=True)
            code, log = 0, place / "log again"
            if row["what"] != "goes on" and not (run / "model").exists():
                again = case.flags | flags | dict(resume="auto", wandb="off")
                code = finished(start(["train.py"], run, again, env, log, case.processes), note)
            row["unequal"] = self.compare(case, row, run) if code == 0 else f"cannot go on: {said(place, log.name)}"
        shutil.rmtree(place)
        return dict(group=case.group, fault=case.fault, at=case.at) | row

    def compare(self, case: Case, row: dict, run: Path) -> str:
        """What is unequal to the run that this one must equal, in the end."""
        if case.group == "engine":
            return incomplete(run) or "nothing lost"
        ended = row["what"] != "goes on"
        uncompared = () if ended else case.uncompared
        expected = kept_but(self.reference({} if ended else case.reference), uncompared)
        found = differences(expected, kept_but(run, uncompared))
        return ", ".join(f"{count} {name}" for name, count in found.items() if count) or "nothing"


def main():
    """Runs all cases, or some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = ("reward", "rank", "gradient", "disk", "clock", "wandb", "engine")
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument("--fault", nargs="+", default=[], help="these only, such as \"one of two servers, KILL\"")
    parser.add_argument("--at", default="", help="this instant only")
    parser.add_argument("--output", type=Path, default=ASSETS / "faults.json", help="where the table goes")
    options, rows = parser.parse_args(), []
    flags = {name: str(value).replace(f"{ASSETS}/", "assets/") for name, value in FLAGS.items()}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))       # cleans up, as Ctrl-C does
    chosen = cases()
    if "engine" in options.only:
        from bench.faults_engine import engine_cases    # needs sglang
        chosen += engine_cases()
    with tempfile.TemporaryDirectory() as scratch:
        laboratory = Laboratory(Path(scratch))
        for case in chosen:
            named = case.fault in (options.fault or [case.fault])
            if case.group in options.only and options.at in ("", case.at) and named:
                rows.append(laboratory.run(case))
                print(rows[-1], flush=True)
                write(options.output, flags=flags, patience=PATIENCE, rows=rows)
    if not rows:
        parser.error("no such fault")
    show([row | dict(seconds=round(row["seconds"], 1), said=row["said"][:60]) for row in rows])


if __name__ == "__main__":
    main()
