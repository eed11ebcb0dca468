"""train.py with one fault in it: the program that bench.faults runs.

    FAULT=kill FAULT_AT="update 3" FAULT_RANK=1 FAULT_NOTE=FILE python -m bench.injected [flags of train.py]

FAULT_AT is a phase and its step: the rollout, in the middle of its episodes; the update, between its first
optimizer step and its second; the push, after its first bucket; the evaluation, in the middle; the
checkpoint, half written; the export of the model at the end, of the last step. FAULT_NOTE is a file that
receives the instant, in seconds of time.monotonic. The fault happens once, on FAULT_RANK. Everything comes
from the environment, so that reward workers have it, too.

Two are not faults but what a run that survives one must be equal to: `left_out` marks a sample as failed, and
`not_updated` leaves optimizer steps out.
"""

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

real_time = time.time
CLOCK = SimpleNamespace(offset=0.0)
time.time = lambda: real_time() + CLOCK.offset  # before any import can keep the real one

import psutil  # noqa: E402
import torch.distributed as dist  # noqa: E402

import train  # noqa: E402

FAULT = os.environ["FAULT"]
RANK = int(os.environ.get("FAULT_RANK", 0))
NOTE = Path(os.environ["FAULT_NOTE"])
PHASE, _, NUMBER = os.environ["FAULT_AT"].partition(" ")
STEP = int(NUMBER)
PROMPTS = 8  # per step
FAILURES = ("raises", "hangs", "hangs_in_c", "is_killed")  # of a reward
STRIKES = ("kill", "disk", "clock", "signal", "answers")  # at an instant
SPOILED = {1: (0,), 3: (1,), 4: (0, 1)}  # step: which of its two updates get NaN, or are left out
NOW = SimpleNamespace(step=0, update=0, phase="start", played=0, folder=None)


def note():
    """Writes the instant down, the first time."""
    if not NOTE.exists():
        NOTE.write_text(str(time.monotonic()))


# ---- A reward function -----------------------------------------------------------------------------------
def hit(sample) -> bool:
    """Whether it is the sample whose reward fails: by its key and the version of its weights.

    The rollout of step n is sampled after n pushes, the evaluation that follows it after n + 1.
    """
    if len(sample.tokens) == 0:
        return False
    key, version = ((STEP - 1) * PROMPTS + 2, 3), STEP
    if PHASE == "evaluation":
        key, version = (2, 0), STEP + 1
    return tuple(sample.key) == key and sample.tokens["version"].max() == version


def fail():
    """What a reward does when it fails."""
    if FAULT == "raises":
        raise RuntimeError("injected")
    if FAULT == "hangs":
        time.sleep(1e6)
    if FAULT == "hangs_in_c":
        sum(itertools.repeat(0))  # reacts to no signal, and lets no other thread run
    os.kill(os.getpid(), signal.SIGKILL)


def reward_fn(sample) -> float:
    """The trainer's own, except for one sample."""
    if FAULT in FAILURES and hit(sample):
        note()
        fail()
    return train.reward_fn(sample)


# ---- Faults at an instant --------------------------------------------------------------------------------
def strike(phase: str):
    """The fault, if this is its instant and its rank; a clock is everyone's."""
    is_mine = FAULT == "clock" or dist.get_rank() == RANK
    if FAULT not in STRIKES or (phase, NOW.step) != (PHASE, STEP) or not is_mine:
        return
    note()
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "disk":
        fill_disk(NOW.folder.parent / "filler")
    elif FAULT == "clock":
        CLOCK.offset = float(os.environ["FAULT_SECONDS"])
    elif FAULT == "signal":
        signal_engine(getattr(signal, f"SIG{os.environ['FAULT_SIGNAL']}"))


def signal_engine(number: int):
    """Signals the server whose process group is FAULT_GROUP, or else the scheduler that this rank started."""
    if "FAULT_GROUP" in os.environ:
        return os.killpg(int(os.environ["FAULT_GROUP"]), number)
    for child in psutil.Process().children(recursive=True):
        if "sglang::scheduler" in " ".join(child.cmdline()):
            child.send_signal(number)


def fill_disk(path: Path):
    """Writes a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def is_spoiled() -> bool:
    """Whether the update under way is one that NaN spoils."""
    return NOW.step == STEP and NOW.update in SPOILED.get(STEP, ())


class FaultyActor(train.Actor):
    """An actor with instants in its optimizer steps, pushes and exports."""

    def optimizer_step(self) -> float:
        if FAULT == "not_updated" and is_spoiled():
            self.optimizer.zero_grad()
            norm = 0.0
        else:
            norm = super().optimizer_step()
        NOW.update += 1
        strike("update")
        return norm

    def whole_weights(self):
        for bucket in super().whole_weights():
            yield bucket
            strike("push")

    def save(self, path, folder: Path):
        if Path(folder).parent == NOW.folder:
            strike("export")
            super().save(path, folder)
        else:
            super().save(path, folder)
            strike("checkpoint")


class FaultyTrainer(train.Trainer):
    """A trainer that knows which phase of which step it is in."""

    def __init__(self, config, *arguments):
        super().__init__(config, *arguments)
        NOW.folder = Path(config.output_dir)

    def step(self):
        NOW.step += 1
        NOW.update = 0
        return super().step()

    def rollout(self):
        NOW.phase = "rollout"
        NOW.played = 0
        return super().rollout()

    def evaluate(self):
        NOW.phase = "evaluation"
        NOW.played = 0
        return super().evaluate()

    async def episode(self, sample, temperature: float):
        sample = await super().episode(sample, temperature)
        NOW.played += 1
        if NOW.played == 4:
            strike(NOW.phase)
        if FAULT == "left_out" and hit(sample):
            sample.reward = 0.0
            sample.failure = "left out"
            sample.metrics = {}
        return sample

    def forward(self, batch):
        loss, stats = super().forward(batch)
        if FAULT == "nan" and is_spoiled() and dist.get_rank() == RANK:
            note()
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss, stats


if __name__ == "__main__":
    sys.argv[0] = "train.py"
    train.Actor = FaultyActor
    train.main(reward_fn=reward_fn, trainer=FaultyTrainer)
