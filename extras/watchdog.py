"""--engine_timeout: a colocated SGLang that dies, freezes or does not start ends the run with one line.

Every wait for SGLang has a limit, and ranks wait for each other three times as long. Without this file the
trainer works the same, but a frozen SGLang blocks it forever, a dead one kills it without a message, and a
SIGTERM to the run also reaches SGLang's processes, so that the run cannot finish its step.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from train import SGLangEngine, flag

START_SECONDS = 900.0  # least time for SGLang to load a model and compile its kernels
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass
class Flags:
    engine_timeout: float = flag(1800, "seconds without a response before SGLang is considered dead")


# ---- Waiting with a limit --------------------------------------------------------------------------------
class Patience:
    """Waits for the responses of one peer: dead once it was silent for `seconds` while a response was due.

    Every response counts as a sign of life. So a long queue does not make a peer look dead, and one request
    may take longer than `seconds` as long as others return.
    """

    def __init__(self, name: str, seconds: float):
        self.name = name
        self.seconds = seconds
        self.last_response = 0.0
        self.pending: set[asyncio.Future] = set()

    async def wait(self, call: Awaitable):
        """Returns the result of `call`. Raises TimeoutError for silence, ConnectionError after `give_up`."""
        start = time.monotonic()
        task = asyncio.ensure_future(call)
        self.pending.add(task)
        task.add_done_callback(self.pending.discard)
        while not task.done():
            remaining = max(start, self.last_response) + self.seconds - time.monotonic()
            # At least once, even if no time is left: the loop itself may have been busy.
            await asyncio.wait({task}, timeout=max(remaining, 0))
            if remaining <= 0 and not task.done():
                task.cancel()
                raise TimeoutError(f"{self.name} was silent for {self.seconds:g} s (--engine_timeout)")
        if task.cancelled():
            raise ConnectionError(f"{self.name} was given up")
        self.last_response = time.monotonic()
        return task.result()

    def give_up(self):
        """Ends all waits with a ConnectionError. Must be called on the event loop."""
        for task in list(self.pending):
            task.cancel()


# ---- SGLang's processes ----------------------------------------------------------------------------------
def kill_children():
    """Kills the processes started by this one: those still starting up would not notice its death."""
    for child in active_children():
        child.kill()


@contextmanager
def deaf_children():
    """Processes started in the block ignore SIGTERM and SIGINT. During the block, either signal to this
    process ends it and them.

    torchrun and terminals send these signals to SGLang's processes too, which a run needs to finish its step.
    """
    original_start = BaseProcess.start

    def start_deaf(process):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)  # a child inherits the mask
        try:
            original_start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def exit_with_children(number, frame):
        kill_children()
        os._exit(128 + number)

    resource_tracker.ensure_running()  # Python's helper process resets the mask when it starts
    BaseProcess.start = start_deaf
    handlers = {number: signal.signal(number, exit_with_children) for number in END_SIGNALS}
    try:
        yield
    finally:
        BaseProcess.start = original_start
        for number, handler in handlers.items():
            signal.signal(number, handler)


# ---- The engine ------------------------------------------------------------------------------------------
def exit_because(reason: str):
    """Ends this process, and thereby the run, with one line. A clean exit would wait for SGLang."""
    print(f"train.py: {reason}", file=sys.stderr, flush=True)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # torchrun repeats this message at the very end, as the root cause
        content = {"message": reason, "extraInfo": {"timestamp": int(time.time())}}
        Path(report).write_text(json.dumps({"message": content}))
    kill_children()  # last: SGLang's helper threads report their death to this process
    os._exit(1)


def on_sigquit(number, frame):
    """SGLang's helper threads send SIGQUIT to their process when one of its children is gone."""
    exit_because("SGLang died: one of its processes crashed or was killed; its own messages are above")


@contextmanager
def limit(task: str, seconds: float):
    """Ends the run if SGLang takes longer for the task in this block, in Python or in a system call."""
    message = f"SGLang: {task} took over {seconds:g} s (--engine_timeout)"
    timer = threading.Timer(seconds, exit_because, [message])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch(engine_class: type) -> type:
    """A train.SGLangEngine that ends the run when SGLang dies, freezes or fails to start."""

    class WatchedEngine(engine_class):
        def __init__(self, path: str, tokenizer, mesh, config):
            self.patience = Patience("SGLang", config.engine_timeout)
            if mesh["tp"].get_local_rank() > 0:  # the first rank of the group talks to SGLang
                super().__init__(path, tokenizer, mesh, config)
                return
            with deaf_children(), limit("its start", max(config.engine_timeout, START_SECONDS)):
                super().__init__(path, tokenizer, mesh, config)
                self.engine.flush_cache()  # SGLang's first call installs handlers: undone as the block ends
            signal.signal(signal.SIGQUIT, on_sigquit)

        def limit(self, task: str):
            """Limits a task of the rank that talks to SGLang; the others wait for it."""
            return limit(task, self.config.engine_timeout) if self.engine else nullcontext()

        async def generate(self, *arguments):
            """Samples one completion, however long it takes, while SGLang responds to any request."""
            try:
                return await self.patience.wait(super().generate(*arguments))
            except TimeoutError as error:  # the calls that a clean exit makes would hang, too
                exit_because(str(error))

        def sleep(self):
            with self.limit("sleep"):  # it repeats flush_cache until SGLang is idle
                super().sleep()

        def call(self, method: str, *args, **kwargs):
            with self.limit(method):
                super().call(method, *args, **kwargs)

    return WatchedEngine


def set_timeouts(seconds: float):
    """Sets how long ranks wait for each other, in every process group."""
    limit = timedelta(seconds=seconds)
    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.14
    for group in list(distributed_c10d._world.pg_map):
        set_timeout(limit, group)


def extend(trainer_class: type) -> type:
    """A trainer in which a colocated SGLang is watched."""

    class WatchedTrainer(trainer_class):
        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            set_timeouts(3 * config.engine_timeout)

        def make_engine(self):
            if self.config.engine != "sglang":
                return super().make_engine()
            return watch(SGLangEngine)(self.path, self.tokenizer, self.mesh, self.config)

    return WatchedTrainer
