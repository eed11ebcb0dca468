"""--save_every, --resume, and a clean end on SIGTERM or Ctrl-C.

A resumed run continues bit for bit as if it had never been interrupted. A checkpoint is a folder,
RUN/checkpoint-STEP, and none of its files can execute code when loaded:

    state/*.safetensors   weights in fp32 and Adam's moments, each rank's own shards
    state.json            step, place in the data, random states, loss scales, lengths of the log files, flags
    model/                the same weights as a Hugging Face folder

It is written as RUN/partial and renamed once it is complete and synced to disk. It holds every train.Actor
among the trainer's attributes: the policy, and what a recipe trains beside it, for example a critic. A recipe
that carries more from step to step has two methods: carried() returns it as JSON, as a copy that later steps
do not change, and restore_carried(parts) gets what all ranks have returned, or None.
"""

import argparse
import asyncio
import fcntl
import functools
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import wandb
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from tqdm import tqdm

import train
from train import Actor, UserError, flag


@dataclass
class Flags:
    save_every: int = flag(0, "steps between checkpoints; 0: only on SIGTERM or Ctrl-C")
    resume: str = flag("", "checkpoint or run folder to resume; auto: newest in --output_dir, if any")


KEPT = 2  # newest checkpoints kept per run
LOGS = ("metrics.jsonl", "samples.jsonl")
DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError, CheckpointException)


def reason(error: BaseException) -> str:
    """An error in one line; if torch collected errors from several ranks, the first one."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---- Folders and flags -----------------------------------------------------------------------------------
def checkpoints(run: Path) -> list[Path]:
    """The checkpoints of a run, the newest last."""
    steps = {}
    for path in run.glob("checkpoint-*"):
        step = path.name.removeprefix("checkpoint-")
        if step.isdecimal():
            steps[int(step)] = path
    return [steps[step] for step in sorted(steps)]


def find_checkpoint(resume: str, output_dir: str) -> Path | None:
    """The checkpoint that --resume names, or the newest one of the run that it names; None without --resume.

    "auto" stands for --output_dir, and then None means that there is no checkpoint yet. Raises UserError if
    there is no such checkpoint.
    """
    if not resume:
        return None
    if resume == "auto" and not output_dir:
        raise UserError("--resume auto looks for checkpoints in --output_dir: set it, too")
    folder = Path(output_dir if resume == "auto" else resume)
    if os.path.exists(folder / "state.json"):  # also False if the name is too long
        return folder
    found = checkpoints(folder) if os.path.isdir(folder) else []
    if not found and resume != "auto":
        raise UserError(f"--resume {resume} is neither a checkpoint nor a run with a checkpoint-STEP folder")
    return found[-1] if found else None


def add_saved_flags(arguments: list[str]) -> list[str]:
    """The command line, preceded by the flags of the run that it resumes, so that flags given now win."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--resume", "--output_dir"):
        parser.add_argument(name, nargs="?", default="", const="")  # train.py refuses one without a value
    given, _ = parser.parse_known_args(arguments)
    checkpoint = find_checkpoint(given.resume, given.output_dir)
    saved = []
    for name, value in read_state(checkpoint)["flags"].items() if checkpoint else ():
        if isinstance(value, list):
            saved += [f"--{name}", *map(str, value)]
        elif value is not None and name not in ("resume", "output_dir"):
            saved.append(f"--{name}={value}")
    return saved + arguments


class Lock:
    """Keeps other processes out of a run folder, until `release` or the end of this process."""

    def __init__(self, folder: Path):
        """Creates the folder if necessary. Raises UserError if it is in use or not writable."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = open(folder / "lock", "a+")
        except OSError as error:
            raise UserError(f"--output_dir {folder} is not writable: {error.strerror}") from error
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            used = f"is in use by process {(folder / 'lock').read_text()}; wait for its end"
            raise UserError(f"--output_dir {folder} {used}") from error
        except OSError as error:
            tqdm.write(f"{folder} has no lock against a second process: {error.strerror}")
        self.file.truncate(0)
        self.file.write(f"{os.getpid()} on {socket.gethostname()}")
        self.file.flush()
        os.register_at_fork(after_in_child=self.file.close)  # or a child would keep the lock after we exit

    def release(self):
        """Releases the lock, and removes the folder if the run has left nothing in it."""
        if os.listdir(self.folder) == ["lock"]:
            shutil.rmtree(self.folder)
        self.file.close()


def claim_run(config) -> tuple[Lock, Path | None]:
    """Chooses and locks config.output_dir, by default named after the time. Returns the checkpoint to resume.

    Raises UserError where that would write over a run, or over later steps of this one.
    """
    checkpoint = find_checkpoint(config.resume, config.output_dir)
    parent = checkpoint.resolve().parent if checkpoint else None
    run = Path(config.output_dir or parent or time.strftime(train.FOLDER))
    lock = Lock(run)
    try:
        check_free(run, checkpoint, config.resume == "auto")
    except UserError:
        lock.release()
        raise
    config.output_dir = str(run)
    return lock, checkpoint


def check_free(run: Path, checkpoint: Path | None, is_auto: bool):
    """Raises UserError where a run, or later steps of it, would be lost; the caller has locked the folder."""
    newest = checkpoints(run)[-1:]
    if checkpoint and run.resolve() == checkpoint.resolve().parent:
        if newest and newest[0].name != checkpoint.name:
            raise UserError(
                f"--resume {checkpoint}: {newest[0]} is later and would be lost; resume that one, or set "
                "another --output_dir to branch off"
            )
    elif (run / LOGS[0]).exists():
        if newest or not is_auto or (run / "model").exists():  # without either it may be restarted
            raise UserError(f"--output_dir {run} already holds a run; set another folder, or remove that one")
    elif (run / "model").exists():
        raise UserError(f"--output_dir {run} has a folder model, which the export would replace; set another")


def check_shared(folder: Path):
    """Raises UserError on all ranks if one of them does not see a folder that rank 0 has created."""
    seen = torch.tensor(float(folder.exists()))
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    if not seen:
        raise UserError(
            f"{folder} is not on a disk that all machines share, which checkpoints require as each rank "
            "saves its own shards; set another --output_dir"
        )


# ---- What a checkpoint holds -----------------------------------------------------------------------------
def named_tensors(actors: dict[str, Actor]) -> dict[str, torch.Tensor]:
    """Weights and Adam's moments of all actors by name, as sharded; zeros before a first update."""
    tensors = {}
    for owner, actor in actors.items():
        for name, weight in actor.parameters.items():
            state = actor.optimizer.state[weight]
            if not state:
                moments = {kind: torch.zeros_like(weight) for kind in ("exp_avg", "exp_avg_sq")}
                state.update(moments, step=torch.zeros((), device=weight.device))
            tensors[f"{owner}.weight.{name}"] = weight.detach()
            tensors[f"{owner}.exp_avg.{name}"] = state["exp_avg"]
            tensors[f"{owner}.exp_avg_sq.{name}"] = state["exp_avg_sq"]
    return tensors


def loss_scales(actors: dict[str, Actor]) -> dict:
    """The loss scales of the actors that have one (extras/loss_scale.py)."""
    return {owner: actor.loss_scale for owner, actor in actors.items() if hasattr(actor, "loss_scale")}


def random_states() -> dict:
    """The global generators, which a reward function may use; training itself draws from none of them."""
    kind, keys, *rest = np.random.get_state()
    numbers = [kind, keys.tolist(), *rest]
    return {"python": random.getstate(), "numpy": numbers, "torch": torch.get_rng_state().tolist()}


def set_random_states(states: dict):
    """Restores what `random_states` returned, as read back from JSON."""
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))


def read_state(checkpoint: Path) -> dict:
    """The content of state.json. Raises UserError if a file of the checkpoint is missing or cut off."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        for name, size in state["files"].items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes instead of {size}")
    except DAMAGE as error:
        raise UserError(f"--resume {checkpoint} is damaged: {reason(error)}; try an older one") from error
    return state


# ---- Writing and loading ---------------------------------------------------------------------------------
def sync(path: Path):
    """Waits until a file, or the list of files in a folder, has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def write_state(partial: Path, state: dict, run: Path):
    """Writes state.json, with the sizes of the other files, and syncs all of them and the logs."""
    files = [path for path in partial.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    (partial / "state.json").write_text(json.dumps(state | {"files": sizes}))
    folders = [path for path in partial.rglob("*") if path.is_dir()]
    logs = [run / name for name in LOGS if (run / name).exists()]
    for path in [*files, partial / "state.json", *folders, partial, *logs]:
        sync(path)


def save_checkpoint(run: Path, state: dict, actors: dict[str, Actor], export):
    """Writes RUN/checkpoint-STEP and removes all but the newest; export(folder) writes model/.

    All ranks call it together. Raises UserError if the disk is full, for example.
    """
    target = run / f"checkpoint-{state['step']}"
    partial = run / "partial"
    is_first = dist.get_rank() == 0
    if target.exists():
        return
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state["random"])
    carried = [None] * dist.get_world_size()
    dist.all_gather_object(carried, state.get("carried"))
    updates = {owner: actor.scheduler.last_epoch for owner, actor in actors.items()}
    scales = {owner: vars(scale) for owner, scale in loss_scales(actors).items()}
    try:
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        dist.barrier()
        check_shared(partial)
        export(partial / "model")
        writer = dcp.HuggingFaceStorageWriter(str(partial / "state"), save_distributed=True)
        dcp.save(named_tensors(actors), storage_writer=writer)
        if is_first:
            numbers = {"random": states, "updates": updates, "loss_scales": scales, "carried": carried}
            write_state(partial, state | numbers, run)
            partial.rename(target)
            sync(run)
    except DAMAGE as error:
        shutil.rmtree(partial, ignore_errors=True)
        message = f"{partial} could not be written: {reason(error)}. Earlier checkpoints are intact"
        raise UserError(message) from error
    if is_first:
        for older in checkpoints(run)[:-KEPT]:
            shutil.rmtree(older)
    dist.barrier()


def load_checkpoint(checkpoint: Path, state: dict, actors: dict[str, Actor]):
    """Fills the actors, their schedules and the random states; the number of ranks may have changed.

    Raises UserError if the checkpoint is damaged or of another model. All ranks call it together.
    """
    tensors = named_tensors(actors)
    reader = dcp.HuggingFaceStorageReader(str(checkpoint / "state"))
    try:
        saved = reader.read_metadata().state_dict_metadata
        for name, tensor in tensors.items():
            if name not in saved:
                raise UserError(f"--resume {checkpoint} is of another model or recipe: it has no {name}")
            if saved[name].size != tensor.shape:
                sizes = f"{list(saved[name].size)}, that of --model {list(tensor.shape)}"
                raise UserError(f"--resume {checkpoint} is of another model: its {name} is {sizes}")
        dcp.load(tensors, storage_reader=reader)
    except DAMAGE as error:
        raise UserError(f"--resume {checkpoint} is damaged: {reason(error)}") from error
    for owner, actor in actors.items():
        updates = state["updates"][owner]
        for weight in actor.parameters.values():
            actor.optimizer.state[weight]["step"].fill_(updates)
        scheduler = actor.scheduler
        scheduler.last_epoch = updates
        groups = zip(actor.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas)
        for group, peak, factor in groups:  # by the flags given now
            group["lr"] = peak * factor(updates)
    saved_scales = state.get("loss_scales", {})
    for owner, scale in loss_scales(actors).items():
        vars(scale).update(saved_scales.get(owner, {}))
    if len(state["random"]) == dist.get_world_size():
        set_random_states(state["random"][dist.get_rank()])


def restore_logs(older: Path, run: Path, lengths: dict[str, int]):
    """Copies the first bytes of an older run's logs, or truncates this run's; removes logs without a length.

    Raises UserError if a log is shorter than it was.
    """
    for name in LOGS:
        source, path = older / name, run / name
        if name not in lengths:
            path.unlink(missing_ok=True)
            continue
        size = source.stat().st_size if source.exists() else 0
        if size < lengths[name]:
            raise UserError(f"{source} has {size} bytes, less than the {lengths[name]} of its checkpoint")
        if source.resolve() != path.resolve():
            shutil.copy(source, path)
        os.truncate(path, lengths[name])


# ---- SIGTERM and Ctrl-C ----------------------------------------------------------------------------------
class Stopped(BaseException):
    """A signal asks the run to end, and all ranks know. Like KeyboardInterrupt, it is not an error."""


class Stop:
    """SIGTERM or Ctrl-C to any rank ends the run at the next safe point; a second one ends it at once.

    torchrun forwards what a terminal has already sent to all processes, so a second signal counts only after
    `grace` seconds.
    """

    grace = 2.0

    def __init__(self):
        self.signal = 0  # number of the received signal
        self.time = 0.0
        self.dropping = False  # a rollout is under way: its episodes may be dropped
        self.episodes = set()  # tasks

    def listen(self):
        """Installs the handlers. SGLang installs its own when it starts, so this must come later."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.handle)

    def handle(self, number: int, frame):
        if not self.signal:
            self.signal = number
            self.time = time.monotonic()
        elif time.monotonic() - self.time > self.grace:
            os._exit(128 + number)
        if self.dropping:
            for task in list(self.episodes):
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def play(self, sample, episode):
        """Runs the coroutine of an episode; a dropped episode returns the sample as it is."""
        if self.signal and self.dropping:
            episode.close()
            return sample
        task = asyncio.current_task()
        self.episodes.add(task)
        try:
            return await episode
        except asyncio.CancelledError:
            if not self.signal:
                raise
            return sample
        finally:
            self.episodes.discard(task)

    def check(self):
        """Raises Stopped on all ranks if any of them received a signal."""
        received = torch.tensor(self.signal)
        dist.all_reduce(received, dist.ReduceOp.MAX)
        if received:
            raise Stopped(signal.Signals(int(received)).name)


# ---- The trainer -----------------------------------------------------------------------------------------
def extend(trainer_class: type) -> type:
    """A trainer that saves checkpoints, resumes from them, and ends cleanly on SIGTERM and Ctrl-C.

    Adds the flags of a run that is resumed to sys.argv. Raises UserError if there is nothing to resume.
    """
    sys.argv[1:] = add_saved_flags(sys.argv[1:])

    class CheckpointedTrainer(Resumable, trainer_class):
        pass

    return CheckpointedTrainer


class Resumable:
    """What `extend` puts in front of a trainer class."""

    is_resumed = True  # claim_run has checked what the folder holds
    saved_state = None  # after the last whole step
    wandb_id = ""

    def __init__(self, config, *arguments):
        self.stop = Stop()
        self.lock = None
        self.claimed = None  # on rank 0, the checkpoint to resume
        if train.RANK == 0:
            self.lock, self.claimed = claim_run(config)
        try:
            super().__init__(config, *arguments)
        except BaseException:
            if self.lock:
                self.lock.release()
            raise
        settled = [config.output_dir, self.claimed]
        dist.broadcast_object_list(settled)
        config.output_dir, checkpoint = settled
        self.folder = Path(config.output_dir)
        if config.save_every or checkpoint:
            check_shared(self.folder)
        if checkpoint:
            self.load(checkpoint)

    def open_log(self):
        """Called on rank 0: cuts the logs to what they were when the checkpoint was saved."""
        run = Path(self.config.output_dir)
        if self.claimed:
            state = read_state(self.claimed)
            restore_logs(self.claimed.resolve().parent, run, state["log"])
            if state["wandb"] and self.claimed.resolve().parent == run.resolve():
                os.environ.setdefault("WANDB_RUN_ID", state["wandb"])
                os.environ.setdefault("WANDB_RESUME", "allow")
        else:
            restore_logs(run, run, {})
        super().open_log()
        self.wandb_id = wandb.run.id if wandb.run else ""

    def learners(self) -> dict[str, Actor]:
        """What is trained, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Actor)}

    def load(self, checkpoint: Path):
        """Continues from a checkpoint."""
        state = read_state(checkpoint)
        load_checkpoint(checkpoint, state, self.learners())
        self.first_step = state["step"] + 1
        if train.RANK == 0:
            rest = "nothing is left to do" if self.first_step > self.config.steps else "the run continues"
            tqdm.write(f"{checkpoint}: {rest} after step {state['step']} of {self.config.steps}")
        self.prompts_drawn = state["prompts_drawn"]
        self.prompts = islice(self.prompts, self.prompts_drawn, None)
        if hasattr(self, "restore_carried"):
            self.restore_carried(state.get("carried"))
        self.remember(state["step"])
        self.saved_state["version"] = state["version"]
        self.engine.version = state["version"] - 1  # the first push sends these weights again

    def remember(self, step: int):
        """Records what a checkpoint needs after a whole step, so a rollout dropped later leaves no trace."""
        logs = [self.folder / name for name in LOGS if (self.folder / name).exists()]
        self.saved_state = {
            "step": step,
            "prompts_drawn": self.prompts_drawn,
            "version": self.engine.version,
            "random": random_states(),
            "carried": self.carried() if hasattr(self, "carried") else None,
            "log": {path.name: path.stat().st_size for path in logs},
            "wandb": self.wandb_id,
            "flags": asdict(self.config),
        }

    def save_checkpoint(self):
        """Saves the state after the last whole step."""
        export = functools.partial(self.actor.save, self.path)
        save_checkpoint(self.folder, self.saved_state, self.learners(), export)

    def fit(self):
        """Runs all steps, or those before a signal."""
        self.stop.listen()
        try:
            super().fit()
        except Stopped as stopped:
            message = f"{stopped}: ended before the first step; nothing was saved"
            if self.saved_state:
                self.save_checkpoint()
                step = self.saved_state["step"]
                message = f"{stopped}: ended after step {step}; --resume {self.folder} continues from there"
            self.engine.close()
            if train.RANK == 0:
                tqdm.write(message)
        if self.lock:
            self.lock.release()

    def write(self, step: int, *arguments):
        """Logs a step, saves a checkpoint if one is due, and ends the run if a signal asks for it."""
        super().write(step, *arguments)
        self.remember(step)
        every = self.config.save_every
        if every and step and step % every == 0:
            self.save_checkpoint()
        if step < self.config.steps:
            self.stop.check()

    def rollout(self):
        """The samples of a step. A signal drops the episodes that are under way."""
        self.stop.dropping = True
        samples = super().rollout()
        self.stop.dropping = False
        self.stop.check()
        return samples

    def sample(self, *arguments):
        """Samples, and ends the rollout here if its episodes were dropped, so nothing uses them."""
        samples = super().sample(*arguments)
        if self.stop.dropping:
            self.stop.check()
        return samples

    async def episode(self, sample, *arguments):
        """An episode that a signal may drop."""
        return await self.stop.play(sample, super().episode(sample, *arguments))
