"""Checkpoints: all that a run needs to go on as if nothing had happened. No file of theirs can hold code.

A checkpoint is a folder, RUN/checkpoint-STEP:

    state/*.safetensors   weights in fp32 and Adam's moments, each rank's own slices (torch.distributed.checkpoint)
    state.json            the step, the place in the data, random states, how long the log was, the flags of the run
    model/                the same weights as a Hugging Face folder

It is written beside, as RUN/partial, and gets its name once it is whole and on the disk. A learner, below, is what has
`parameters` {name: DTensor}, an AdamW `optimizer` over them and its `scheduler`: an actor, or a critic.
"""
import json
import os
import random
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from tools.inputs import UserError, brief

DAMAGE = (OSError, ValueError, KeyError, SafetensorError, CheckpointException)


# ------------------------------------------------ where a run is ------------------------------------------------------
def checkpoints(run: Path) -> list[Path]:
    """Those of a run, the newest last."""
    found = [path for path in run.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))


def checkpoint_of(resume: str, output_dir: str) -> Path | None:
    """What --resume means: a checkpoint, or the newest of a run; with "auto" None where --output_dir has none yet."""
    folder = Path(output_dir if resume == "auto" else resume)
    if resume == "auto" and not output_dir:
        raise UserError("--resume auto looks into --output_dir, which must be given, too")
    if (folder / "state.json").exists():
        return folder
    found = checkpoints(folder)
    if not found and resume != "auto":
        raise UserError(f"--resume {resume} is neither a checkpoint nor a run that has one (a folder checkpoint-STEP)")
    return found[-1] if found else None


def flags_of(resume: str, output_dir: str) -> dict:
    """The flags of the run that is to go on: defaults for what is not given anew."""
    checkpoint = checkpoint_of(resume, output_dir)
    flags = read_state(checkpoint)["flags"] if checkpoint else {}
    return {name: value for name, value in flags.items() if name not in ("resume", "output_dir")}


def locate(output_dir: str, resume: str) -> tuple[str, str]:
    """The folder of this run, by default named by the time, and the checkpoint to go on from, or "".

    Raises UserError where that would write over a run, or over later steps of this one.
    """
    checkpoint = checkpoint_of(resume, output_dir) if resume else None
    run = Path(output_dir or (checkpoint.parent if checkpoint else time.strftime("runs/%Y-%m-%d_%H-%M-%S")))
    if checkpoint and run.resolve() == checkpoint.resolve().parent:
        newest = checkpoints(run)[-1]
        if newest.name != checkpoint.name:
            raise UserError(f"--resume {checkpoint}: {newest} is later, and would be lost; resume that one, or name "
                            "another --output_dir for a branch")
    elif (run / "metrics.jsonl").exists() and (resume != "auto" or (run / "model").exists()):
        raise UserError(f"--output_dir {run} holds a run already; name another folder, or remove that one")
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir {run} cannot be made: {error.strerror}") from error
    if not os.access(run, os.W_OK):
        raise UserError(f"--output_dir {run} cannot be written")
    return str(run), str(checkpoint or "")


def find_run(config) -> tuple[Path | None, dict]:
    """Settles config.output_dir, and finds the checkpoint of --resume with its state, as rank 0 sees its disk.

    A new run has none, and a state before step 0. With --save_every all machines must share that folder.
    """
    answer = [None, None]
    if dist.get_rank() == 0:
        try:
            answer = [locate(config.output_dir, config.resume), None]
        except UserError as error:
            answer = [None, str(error)]
    dist.broadcast_object_list(answer)
    if answer[1]:
        raise UserError(answer[1])
    config.output_dir, checkpoint = answer[0]
    if config.save_every or checkpoint:
        check_shared(Path(config.output_dir))
    return (Path(checkpoint), read_state(Path(checkpoint))) if checkpoint else (None, {"step": -1, "draws": 0})


def check_shared(folder: Path):
    """Raises UserError on all ranks if one of them does not see a folder that rank 0 has made."""
    seen = torch.tensor(float(folder.exists()))
    dist.all_reduce(seen, dist.ReduceOp.MIN)
    if not seen:
        raise UserError(f"{folder} is not on a disk that all machines share: a checkpoint needs one, as each rank "
                        "saves its part there; name another --output_dir")


# ------------------------------------------------ what is in it -------------------------------------------------------
def tensors_of(learners: dict) -> dict[str, torch.Tensor]:
    """Weights and Adam's moments of all learners by name, sharded as they are; before a first update they are 0."""
    found = {}
    for owner, learner in learners.items():
        for name, weight in learner.parameters.items():
            moments = learner.optimizer.state[weight]
            if not moments:
                moments["step"] = torch.zeros((), device=weight.device)
                moments |= {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
            found[f"{owner}.weight.{name}"] = weight.detach()
            found |= {f"{owner}.{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq")}
    return found


def random_states() -> dict:
    """Of the generators that a reward function may use; training itself draws from none of them."""
    kind, keys, *rest = numpy.random.get_state()
    return dict(python=random.getstate(), numpy=[kind, keys.tolist(), *rest], torch=torch.get_rng_state().tolist())


def set_random_states(states: dict):
    """The reverse of `random_states`, from what JSON made of it."""
    version, inner, gauss = states["python"]
    random.setstate((version, tuple(inner), gauss))
    numpy.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))


def read_state(checkpoint: Path) -> dict:
    """What state.json says. Raises UserError if a file of the checkpoint is not as it was written."""
    try:
        state = json.loads((checkpoint / "state.json").read_text())
        for name, size in state["files"].items():
            found = (checkpoint / name).stat().st_size
            if found != size:
                raise ValueError(f"{name} has {found} bytes, {size} were written")
    except DAMAGE as error:
        others = [path for path in checkpoints(checkpoint.parent) if path.name != checkpoint.name]
        hint = f"; there is {others[-1]}, too" if others else ""
        raise UserError(f"--resume {checkpoint} is damaged: {brief(error)}{hint}") from error
    return state


# ------------------------------------------------ writing and loading -------------------------------------------------
@contextmanager
def on_disk(folder: Path):
    """Says in one line why a block could not write into a folder, and leaves no half of it there."""
    try:
        yield
    except DAMAGE as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UserError(f"{folder} could not be written: {reason(error)}. Checkpoints made before are whole") from error


def save_checkpoint(config, state: dict, learners: dict, export):
    """Writes RUN/checkpoint-STEP, and removes all but the newest; `export(folder)` writes the Hugging Face folder.

    All ranks call it together.
    """
    run = Path(config.output_dir)
    target, partial, first = run / f"checkpoint-{state['step']}", run / "partial", dist.get_rank() == 0
    if target.exists():
        return
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state["random"])
    updates = {owner: learner.scheduler.last_epoch for owner, learner in learners.items()}
    with on_disk(partial):
        if first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        dist.barrier()
        check_shared(partial)
        export(partial / "model")
        dcp.save(tensors_of(learners), storage_writer=dcp.HuggingFaceStorageWriter(
            str(partial / "state"), save_distributed=True))
        if first:
            files = [path for path in partial.rglob("*") if path.is_file()]
            sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
            (partial / "state.json").write_text(json.dumps(
                state | dict(random=states, updates=updates, files=sizes, flags=vars(config))))
            for path in [*files, partial / "state.json"]:
                flush(path)
            partial.rename(target)
            flush(run)
    if first:
        for older in checkpoints(run)[:-config.keep_checkpoints]:
            shutil.rmtree(older)
    dist.barrier()


def reason(error: BaseException) -> str:
    """What went wrong, in a line: of torch's collection of errors, one a rank, the first."""
    return brief(next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error)


def save_model(config, export):
    """Writes RUN/model by `export(folder)`, in place of an older one once it is whole. All ranks call it together."""
    target, partial = (Path(config.output_dir) / name for name in ("model", "partial"))
    with on_disk(partial):
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier()
        export(partial)
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            partial.rename(target)


def flush(path: Path):
    """Waits until a file, or the names in a folder, are on the disk: a crash of the machine may follow."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def load_checkpoint(checkpoint: Path, state: dict, learners: dict):
    """Fills the learners, and sets their schedules and the random states; ranks and tp may be others than then.

    Raises UserError if it is of another model. All ranks call it together.
    """
    tensors, reader = tensors_of(learners), dcp.HuggingFaceStorageReader(str(checkpoint / "state"))
    try:
        there = reader.read_metadata().state_dict_metadata
        for name, tensor in tensors.items():
            if name not in there:
                raise UserError(f"--resume {checkpoint} is of another model or recipe: it has no {name}")
            if there[name].size != tensor.shape:
                raise UserError(f"--resume {checkpoint} is of another model: its {name} is {list(there[name].size)}, "
                                f"that of --model {list(tensor.shape)}")
        dcp.load(tensors, storage_reader=reader)
    except DAMAGE as error:
        raise UserError(f"--resume {checkpoint} is damaged: {reason(error)}") from error
    for owner, learner in learners.items():
        updates, scheduler = state["updates"][owner], learner.scheduler
        for weight in learner.parameters.values():
            learner.optimizer.state[weight]["step"].fill_(updates)
        scheduler.last_epoch = updates
        for group, peak, factor in zip(learner.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas):
            group["lr"] = peak * factor(updates)        # of flags given now: they may differ
    if len(state["random"]) == dist.get_world_size():
        set_random_states(state["random"][dist.get_rank()])
