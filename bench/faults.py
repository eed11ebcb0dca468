"""What becomes of a run into which a fault is injected? Each fault at three instants; then, is anything lost?

    python -m bench.faults [--only reward rank gradient disk clock wandb engine] [--fault NAME ...]
                           [--at "update 3"] [--output assets/faults.json]

A run is six steps of the embedded job with two processes, two optimizer steps per step, an evaluation every
other step and a checkpoint after each. bench.injected has the faults that strike within the processes, at an
instant such as "update 3": between the two optimizer steps of step 3. Rewards run in reward workers. `engine`
(bench.faults_engine) needs sglang; `disk` needs root, for a small disk of its own.

For each: what happened; after how many seconds (to the run's end, or to the next step's line); how many
processes were left 5 s after the end; and what the run said. A run that ended is started again by the same
command, without the fault and with --resume auto. `unequal` counts the records, samples and tensors that are
then not equal to the bit to those of a run without a fault. A run that continues must equal one that was
never hit (clock, wandb), or one in which the same group was left out (reward), or the same optimizer step
(gradient; except for the metrics that show it). SGLang's samples are not exact: there `unequal` says whether
a step, a sample or an optimizer step is missing or duplicated. `twice` lists the steps that metrics.jsonl
does not have exactly once when the faulty run ends. Prints a table, and writes it.
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

from bench.fake_wandb import closed, lost, silent
from bench.kills import count_differences, read_run
from bench.measure import ASSETS, ROOT, command_line, show, write
from extras.checkpoint import checkpoints

END = 6
FLAGS = {
    "steps": END,
    "prompts_per_step": 8,
    "group_size": 8,
    "max_new_tokens": 48,
    "eval_every": 2,
    "save_every": 1,
    "eval_data": "assets/countdown/test.jsonl:train[:16]",
    "reward_workers": 2,
    "reward_timeout": 2,
    "token_groups": 8,
    "wandb": "disabled",
}
PATIENCE = 60.0  # seconds without progress after a fault before a run counts as hanging
DAY = 86400
# what a run says, the most telling first: its last line, an error, torchrun's report, a sentence about a step
SAYS_SO = (
    r"train\.py: .*",
    r"^(?!.*ChildFailed).*Error: .*",
    r"Signal (?!15)\d+ \(\w+\)",
    r".* samples? failed, .*",
    r".*wandb.*",
)


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
    env: dict = field(default_factory=dict)  # what injects it
    flags: dict = field(default_factory=dict)
    reference: dict = field(default_factory=dict)  # environment of the run that one that continues must equal
    uncompared: tuple[str, ...] = ()  # metrics that may differ from it
    around: object = nothing  # around(the folder it runs in), a context: more env, more flags
    patience: float = PATIENCE
    processes: int = 2


def injected(
    group: str, fault: str, instants, rank=0, reference="", uncompared=(), around=nothing, **more
) -> list[Case]:
    """The cases of a fault of bench.injected; a run that continues must equal one with `reference`."""
    name = fault + "".join(f" {value}" for value in more.values())
    if group == "rank":
        name += f", rank {rank}"
    found = []
    for at in instants:
        equal = {"FAULT": reference, "FAULT_AT": at} if reference else {}
        env = {"FAULT": fault, "FAULT_AT": at, "FAULT_RANK": str(rank)} | more
        case = Case(group, name, at, env, reference=equal, uncompared=uncompared, around=around)
        found.append(case)
    return found


def cases() -> list[Case]:
    """All but those of the engine."""
    scored = ("rollout 1", "rollout 3", "evaluation 4")
    later = ("rollout 1", "update 3", "checkpoint 4")
    found = []
    for fault in ("raises", "hangs", "hangs_in_c", "is_killed"):
        found += injected("reward", fault, scored, reference="left_out")
    for rank in (0, 1):
        found += injected("rank", "kill", later, rank)
    updates = ("update 1", "update 3", "update 4")
    found += injected("gradient", "nan", updates, 1, "not_updated", ("grad_norm",))
    found += injected("disk", "disk", ("rollout 1", "checkpoint 4", f"export {END}"), around=small_disk)
    for seconds in (DAY, -DAY):
        found += injected("clock", "clock", later, FAULT_SECONDS=str(seconds))
    key = {"WANDB_API_KEY": "0" * 40}
    online = {"wandb": "online"}
    found.append(Case("wandb", "nobody at the port", "start", key, online, around=closed))
    found.append(Case("wandb", "a silent server", "start", key, online, around=silent))
    for case in injected("wandb", "answers", later, around=lost, **key):
        found.append(replace(case, fault="the server goes", flags=online))
    for case in found:
        case.patience = 200.0 if case.group == "wandb" else PATIENCE
    return found


# ---- What a fault needs around it ------------------------------------------------------------------------
@contextmanager
def small_disk(folder: Path):
    """A disk of 64 MB: room for three checkpoints of the embedded model and a little more."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], check=True)
    try:
        yield {}, {}
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


# ---- Running ---------------------------------------------------------------------------------------------
def start(target, folder: Path, flags: dict, env: dict, log: Path, processes: int) -> subprocess.Popen:
    """A run, in a process group of its own; all its processes have FAULT_NOTE in their environment."""
    words = command_line(FLAGS | flags | {"output_dir": folder})
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc_per_node={processes}", *target, *words]
    note = {"FAULT_NOTE": str(log.parent / "note")}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | note | env
    streams = {"stdout": log.open("a"), "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, **streams, start_new_session=True, cwd=ROOT, env=environment)


def left(note: Path) -> list[psutil.Process]:
    """The living processes of a run, found by their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FAULT_NOTE") == str(note) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


def finished(process: subprocess.Popen, note: Path) -> int:
    """The exit code of a run. If this process ends meanwhile, so does the run."""
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
    """The number of steps that the run has logged, including step 0."""
    metrics = folder / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def watch(process: subprocess.Popen, folder: Path, note: Path, patience: float) -> dict:
    """Waits for the end of a run, or until it has made no progress for `patience` seconds since its fault."""
    began = time.monotonic()
    lines = 0
    before = 0  # lines when the fault struck
    moved = began
    went_on = None
    while process.poll() is None:
        struck = float(note.read_text() or "inf") if note.exists() else None
        if lines_in(folder) != lines:
            lines = lines_in(folder)
            moved = time.monotonic()
            if struck is None:
                before = lines
            went_on = went_on or (moved if struck and lines > before else None)
        if time.monotonic() - max(moved, struck or began) > patience:
            return {"what": "hangs", "seconds": time.monotonic() - (struck or began)}
        time.sleep(0.02)
    if not note.exists():
        return {"what": "never struck", "seconds": time.monotonic() - began}
    struck = float(note.read_text())
    if process.returncode == 0:
        return {"what": "continues", "seconds": (went_on or time.monotonic()) - struck}
    return {"what": f"ends, code {process.returncode}", "seconds": time.monotonic() - struck}


def said(folder: Path, log: str = "log") -> str:
    """What a run said about its fault."""
    text = (folder / log).read_text()
    matches = filter(None, (re.search(pattern, text, re.MULTILINE) for pattern in SAYS_SO))
    said = next((match.group().strip(" |") for match in matches), "")
    return said.replace(str(folder / "disk/run"), "RUN")


def disorder(folder: Path) -> list[int]:
    """Steps that metrics.jsonl does not have exactly once, up to its last; a half line at the end is none."""
    metrics = folder / "metrics.jsonl"
    steps = []
    for line in metrics.read_text().splitlines() if metrics.exists() else ():
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:
            pass
    return [step for step in range(max(steps, default=-1) + 1) if steps.count(step) != 1]


def kept_but(folder: Path, uncompared: tuple[str, ...]) -> dict:
    """What must be equal in two runs; of a sample's failure, only that there is one."""
    found = read_run(folder)
    for record in found["metrics"]:
        for name in uncompared:
            record.pop(name, None)
    samples = [json.loads(line) for line in found["samples"]]
    for sample in samples:
        sample["failure"] = bool(sample["failure"])
    found["samples"] = [json.dumps(sample) for sample in samples]
    return found


def incomplete(run: Path) -> str:
    """What is missing or duplicated in a run with SGLang, whose samples are not reproducible.

    Each step needs its line, and every sample of every prompt once, sampled with the weights of the step
    before; the last checkpoint must be the result of as many optimizer steps as the run has.
    """
    samples = [json.loads(line) for line in (run / "samples.jsonl").open()]
    keys = sorted(tuple(sample["key"]) for sample in samples)
    wanted = [
        (place, i) for place in range(END * FLAGS["prompts_per_step"]) for i in range(FLAGS["group_size"])
    ]
    stale = sum(sample.get("versions") != sample["step"] for sample in samples)
    updates = json.loads((checkpoints(run)[-1] / "state.json").read_text())["updates"]["actor"]
    faults = {
        "steps": disorder(run),
        "samples": keys != wanted,
        "stale samples": stale,
        "optimizer steps": updates - 2 * END,
        "steps' lines": lines_in(run) - END - 1,
    }
    return ", ".join(f"{name}: {value}" for name, value in faults.items() if value)


class Laboratory:
    """Runs cases in a folder, and the runs that they are compared with, each of those once."""

    def __init__(self, scratch: Path):
        self.scratch = scratch
        self.references = {}

    def reference(self, env: dict) -> Path:
        """The folder of a run without a fault, or with that of `env`."""
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
        """Runs a case, and again if it ended. Returns its row of the table."""
        place = self.scratch / "case"
        place.mkdir()
        disk = place / "disk"
        note = place / "note"
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
            row["left"] = 0 if row["what"] == "hangs" else behind
            row |= {"twice": disorder(run), "said": said(place)}
            for path in (disk / "filler", note):
                path.unlink(missing_ok=True)
            code = 0
            log = place / "log again"
            if row["what"] != "continues":
                again = case.flags | flags | {"resume": "auto", "wandb": "disabled"}
                code = finished(start(["train.py"], run, again, env, log, case.processes), note)
            row["unequal"] = (
                self.compare(case, row, run) if code == 0 else f"cannot be resumed: {said(place, log.name)}"
            )
        shutil.rmtree(place)
        return {"group": case.group, "fault": case.fault, "at": case.at} | row

    def compare(self, case: Case, row: dict, run: Path) -> str:
        """What is unequal to the run that this one must equal in the end."""
        if case.group == "engine":
            return incomplete(run) or "nothing lost"
        ended = row["what"] != "continues"
        uncompared = () if ended else case.uncompared
        expected = kept_but(self.reference({} if ended else case.reference), uncompared)
        found = count_differences(expected, kept_but(run, uncompared))
        return ", ".join(f"{count} {name}" for name, count in found.items() if count) or "nothing"


def main():
    """Runs all cases, or some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    groups = ("reward", "rank", "gradient", "disk", "clock", "wandb", "engine")
    parser.add_argument("--only", nargs="+", choices=groups, default=groups)
    parser.add_argument(
        "--fault", nargs="+", default=[], help='these only, for example "one of two servers, KILL"'
    )
    parser.add_argument("--at", default="", help="this instant only")
    parser.add_argument("--output", type=Path, default=ASSETS / "faults.json", help="file for the table")
    options = parser.parse_args()
    rows = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up, as Ctrl-C does
    chosen = cases()
    if "engine" in options.only:
        from bench.faults_engine import engine_cases  # needs sglang

        chosen += engine_cases()
    with tempfile.TemporaryDirectory() as scratch:
        laboratory = Laboratory(Path(scratch))
        for case in chosen:
            named = case.fault in (options.fault or [case.fault])
            if case.group in options.only and options.at in ("", case.at) and named:
                rows.append(laboratory.run(case))
                print(rows[-1], flush=True)
                write(options.output, flags=FLAGS, patience=PATIENCE, rows=rows)
    if not rows:
        parser.error("no such fault")
    show([row | {"seconds": round(row["seconds"], 1), "said": row["said"][:60]} for row in rows])


if __name__ == "__main__":
    main()
