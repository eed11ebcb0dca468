"""train.py with one fault in it: what bench.faults runs.

    FAULT=kill FAULT_AT="update 3" FAULT_RANK=1 FAULT_NOTE=FILE python -m bench.injected [flags of train.py]

FAULT_AT is a phase and the step that it belongs to: the rollout, in the middle of its episodes; the update, between its
first optimiser step and its second; the push, after its first bucket; the evaluation, in the middle; the checkpoint,
half written; the export of the model at the end, of step END. FAULT_NOTE is a file that gets the instant, in seconds of
time.monotonic. The fault happens once, on FAULT_RANK. All comes from the environment, so that a process that the run
starts to judge samples has it, too.

Two are no faults but what a run should come to that survives one: `left_out` judges a sample as a reward that fails,
and `not_updated` leaves optimiser steps out.
"""
import itertools
import os
import signal
import sys
import time
from pathlib import Path

CLOCK, MOVED = time.time, [0.0]
time.time = lambda: CLOCK() + MOVED[0]      # before anything else can take hold of it

import psutil
import torch.distributed as dist

import train

FAULT, RANK, NOTE = os.environ["FAULT"], int(os.environ.get("FAULT_RANK", 0)), Path(os.environ["FAULT_NOTE"])
PHASE, STEP = os.environ["FAULT_AT"].split()
STEP = int(STEP)
PROMPTS, END = 8, 6         # of a step; the last step
FAILURES = ("raises", "hangs", "hangs_in_c", "is_killed")    # of a reward
STRIKES = ("kill", "disk", "clock", "signal", "answers")     # at an instant; the others at a sample, or a loss
SPOILED = {1: (0,), 3: (1,), 4: (0, 1)}     # step: which of its two optimiser steps get NaN, or are left out
DAY = 86400.0


def note():
    """Writes the instant down, the first time."""
    if not NOTE.exists():
        NOTE.write_text(str(time.monotonic()))


# ------------------------------------------------ a reward function --------------------------------------------------
def hit(sample) -> bool:
    """Whether it is the sample that a reward fails on: by its place, its number in the group and its weights' version.

    A rollout of step n is sampled after n pushes, the evaluation that follows it after n + 1.
    """
    if not sample.versions:
        return False
    key, version = ((2, 0), STEP + 1) if PHASE == "evaluation" else (((STEP - 1) * PROMPTS + 2, 3), STEP)
    return (sample.key, max(sample.versions)) == (key, version)


def fail():
    """What a reward does when it fails."""
    if FAULT == "raises":
        raise RuntimeError("injected")
    if FAULT == "hangs":
        time.sleep(1e6)
    if FAULT == "hangs_in_c":
        sum(itertools.repeat(0))        # no signal is looked at, and no other thread runs
    os.kill(os.getpid(), signal.SIGKILL)


def reward_fn(sample) -> float:
    """The trainer's own, but for one sample."""
    if FAULT in FAILURES and hit(sample):
        note()
        fail()
    return train.reward_fn(sample)


# ------------------------------------------------ a trainer ----------------------------------------------------------
def strike(folder: Path):
    """What happens at an instant to a rank, its disk or its clock."""
    note()
    if FAULT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif FAULT == "disk":
        fill(folder.parent / "filler")
    elif FAULT == "clock":
        MOVED[0] = float(os.environ["FAULT_SECONDS"])
    elif FAULT == "signal":
        signal_engine(getattr(signal, f"SIG{os.environ['FAULT_SIGNAL']}"))


def signal_engine(number: int):
    """To the server whose group of processes FAULT_GROUP is; without one, to the scheduler that this rank started."""
    if "FAULT_GROUP" in os.environ:
        return os.killpg(int(os.environ["FAULT_GROUP"]), number)
    for child in psutil.Process().children(recursive=True):
        if "sglang::scheduler" in " ".join(child.cmdline()):
            child.send_signal(number)


def fill(path: Path):
    """Writes a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


class Faulty(train.Trainer):
    """Knows at each instant which phase of which step it is in."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.phase, self.now, self.played, self.updates = "start", 0, 0, 0
        self.folder = Path(self.config.output_dir)
        self.inner = dict(whole=self.actor.whole_weights, loss=self.actor.loss)
        self.actor.whole_weights, self.actor.loss = self.whole_weights, self.loss
        self.actor.optimizer.register_step_post_hook(lambda *_: self.strike("update"))
        zero_grad = self.actor.optimizer.zero_grad

        def counted():
            self.updates += 1
            zero_grad()
        self.actor.optimizer.zero_grad = counted
        if FAULT == "not_updated":
            self.leave_out(self.actor, "optimizer")
            self.leave_out(self.actor, "scheduler")

    def strike(self, phase: str):
        """The fault, if this is the instant, on the rank that it is for; a clock is everyone's."""
        if FAULT in STRIKES and (phase, self.now) == (PHASE, STEP) and (FAULT == "clock" or dist.get_rank() == RANK):
            strike(self.folder)

    def spoiled(self) -> bool:
        """Whether the optimiser step that is under way is one that NaN spoils."""
        return self.now == STEP and self.updates in SPOILED.get(STEP, ())

    def leave_out(self, actor, name: str):
        """Makes the `step` of an optimiser or a schedule do nothing where NaN would come."""
        inner = getattr(actor, name).step
        getattr(actor, name).step = lambda: None if self.spoiled() else inner()

    # -------------------------------------------- what the trainer does, with instants --------------------------------
    def step(self):
        """And so on: each of these does what the trainer does, and looks whether this is the instant."""
        self.now, self.updates = self.state["step"] + 1, 0
        return super().step()

    def rollout(self):
        self.phase, self.played = "rollout", 0
        return super().rollout()

    def evaluate(self):
        self.phase, self.played = "evaluation", 0
        return super().evaluate()

    async def episode(self, sample, temperature):
        sample = await super().episode(sample, temperature)
        self.played += 1
        if self.played == 4:
            self.strike(self.phase)
        return sample

    def act(self, *parts):
        samples = super().act(*parts)
        for sample in samples if FAULT == "left_out" else ():
            if hit(sample):
                sample.rewards, sample.failure, sample.metrics = [0.0], "left out", {}
        return samples

    def loss(self, batch):
        loss, *rest = self.inner["loss"](batch)
        if FAULT == "nan" and self.spoiled() and dist.get_rank() == RANK:
            note()
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss, *rest

    def whole_weights(self):
        for bucket in self.inner["whole"]():
            yield bucket
            self.strike("push")

    def save(self, folder):
        if not self.exporting():
            super().save(folder)
            return self.strike("checkpoint")
        self.strike("export")
        super().save(folder)

    def exporting(self) -> bool:
        """Whether the last checkpoint is written already, so that what is saved is the model of the end."""
        return self.now == END and (self.folder / f"checkpoint-{END}").exists()


if __name__ == "__main__":
    sys.argv[0] = "train.py"
    train.main(reward_fn=reward_fn, trainer_class=Faulty)
