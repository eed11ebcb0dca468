"""--engine_timeout: a colocated SGLang that dies, freezes or does not start ends the run with one line.

Every wait for SGLang has a limit, and ranks wait for each other three times as long. Without this file the
trainer works the same, but a frozen SGLang blocks it forever, a dead one kills it without a message, and a
SIGTERM to the run also reaches SGLang's processes, so that the run cannot finish its step.
"""

import asyncio
import inspect
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

from train import flag

START_SECONDS = 900.0  # least time for SGLang to load a model and compile its kernels
BUSY_SECONDS = 30.0


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
    end_signals = (signal.SIGTERM, signal.SIGINT)
    original_start = BaseProcess.start

    def start_deaf(process):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, end_signals)  # a child inherits the mask
        try:
            original_start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def exit_with_children(number, frame):
        kill_children()
        os._exit(128 + number)

    resource_tracker.ensure_running()  # Python's helper process resets the mask when it starts
    BaseProcess.start = start_deaf
    handlers = {number: signal.signal(number, exit_with_children) for number in end_signals}
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


class LimitedSGLang:
    """An sglang.Engine in which every call has a time limit; what exceeds it ends the run."""

    def __init__(self, engine, seconds: float):
        self.engine = engine
        self.seconds = seconds
        self.patience = Patience("SGLang", seconds)

    async def async_generate(self, **request) -> dict:
        """Samples one completion, however long it takes, while SGLang responds to any request."""
        try:
            return await self.patience.wait(self.engine.async_generate(**request))
        except TimeoutError as error:  # the calls that a clean exit makes would hang, too
            exit_because(str(error))

    def flush_cache(self):
        """Empties the cache, which SGLang refuses while it is busy: for a moment after its last response."""
        start = time.monotonic()
        while True:
            with limit("flush_cache", self.seconds):
                answer = self.engine.flush_cache()
            if answer.success:
                return answer
            if time.monotonic() - start > BUSY_SECONDS:
                exit_because(f"SGLang is still busy {BUSY_SECONDS:g} s after its last response")
            time.sleep(0.05)

    def __getattr__(self, name: str):
        """Everything else is the engine's own, its methods with a time limit."""
        attribute = getattr(self.engine, name)
        if not inspect.ismethod(attribute):
            return attribute

        def limited(*args, **kwargs):
            with limit(name, self.seconds):
                return attribute(*args, **kwargs)

        return limited


def watch(engine_class: type) -> type:
    """A train.SGLangEngine that ends the run when SGLang dies, freezes or fails to start."""

    class WatchedEngine(engine_class):
        def __init__(self, path: str, tokenizer, mesh, config):
            if mesh["tp"].get_local_rank() > 0:  # the first rank of the group talks to SGLang
                super().__init__(path, tokenizer, mesh, config)
                return
            on_sigterm = signal.getsignal(signal.SIGTERM)
            with deaf_children(), limit("its start", max(config.engine_timeout, START_SECONDS)):
                super().__init__(path, tokenizer, mesh, config)
            self.engine = LimitedSGLang(self.engine, config.engine_timeout)
            self.engine.flush_cache()  # SGLang's first call installs its signal handlers: replace them now
            signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
            signal.signal(signal.SIGQUIT, on_sigquit)

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
        sglang_class = watch(trainer_class.sglang_class)

        def __init__(self, config, *arguments):
            super().__init__(config, *arguments)
            set_timeouts(3 * config.engine_timeout)

    return WatchedTrainer
