"""Calls reward_fn in processes of their own: one that hangs, crashes or takes all memory leaves the trainer alone.

Nothing within a process can end a C function that does not return, nor survive a crash. So each rank forks a nursery
before it has a model, connections or a GPU. The nursery forks the workers, and new ones for those that die. So
reward_fn can be whatever Python can call; only samples are sent. A worker gets many samples at once, and judges them
one by one, or side by side where reward_fn is async. When it dies, or says nothing for --reward_timeout and a little,
each sample that was open there is judged again, in a process of its own, to find out whose fault it was.
Verdicts come back as JSON, so that a worker which a hostile text has taken over has no way into the trainer.
"""
import asyncio
import inspect
import json
import os
import pickle
import random
import signal
import socket
import struct
import sys
import traceback
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count

import numpy as np
import torch

from tools.inputs import UserError
from tools.sandbox import DEATH_SIGNAL, libc
from tools.scoring import fail, judge
from tools.waits import Patience

HEADER = struct.Struct("QQ")                                # before a sample: its length, its number
RETURNED = {"rewards", "metrics", "steps", "failure"}       # what a worker may set in a sample
SLACK = 5.0             # seconds for a worker to say that reward_fn took too long, before it is killed
IN_A_ROW = 5            # so many samples one after another that hang or kill, and what else is open is not tried


class Worker(asyncio.Protocol):
    """The trainer's end of a process that judges."""

    def __init__(self, pid: int, seconds: float):
        self.pid, self.patience = pid, Patience(seconds, f"--reward_timeout and {SLACK:g} s more")
        self.numbers, self.open = count(), {}       # the futures of samples that are open, by their numbers
        self.unread = b""

    def connection_made(self, transport):
        """asyncio calls this first."""
        self.transport = transport

    def data_received(self, data: bytes):
        """Verdicts come as lines, maybe in pieces."""
        *lines, self.unread = (self.unread + data).split(b"\n")
        try:
            for number, seconds, verdict in map(json.loads, lines):
                future = self.open.pop(number)
                if not future.done():
                    future.set_result((seconds, {name: verdict[name] for name in RETURNED if name in verdict}))
        except (ValueError, TypeError, LookupError):        # reward_fn got hold of the connection
            self.kill()

    def connection_lost(self, error):
        """The process is dead."""
        for future in self.open.values():
            if not future.done():
                future.set_exception(ConnectionError("the process that called reward_fn died"))
        self.open.clear()

    def send(self, sample) -> asyncio.Future:
        """Its result: seconds, and what is to be set in the sample; ConnectionError where the process dies."""
        try:
            request = pickle.dumps(sample)
        except Exception as error:
            raise UserError(f"a sample cannot be sent to reward_fn's process ({error}); keep it out of sample.state, "
                            "or take --reward_workers 0") from error
        number = next(self.numbers)
        self.open[number] = asyncio.get_running_loop().create_future()
        self.transport.write(HEADER.pack(len(request), number) + request)
        return self.open[number]

    def kill(self):
        """Ends the process, and with it what is open there."""
        if not self.transport.is_closing():
            with suppress(ProcessLookupError):      # it may have died just now
                os.kill(self.pid, signal.SIGKILL)
            self.transport.abort()


class Judges:
    """The trainer's end of all workers of this rank; with --reward_workers 0 it calls reward_fn itself."""

    def __init__(self, reward_fn, config):
        self.judge_here = partial(judge, reward_fn=reward_fn, seconds=config.reward_timeout)
        self.blocks = not inspect.iscoroutinefunction(reward_fn)
        self.wanted, self.workers = config.reward_workers, []
        self.limit = config.reward_timeout
        self.starting, self.alone = asyncio.Lock(), asyncio.Lock()
        self.asked = 0          # samples that are open
        self.in_a_row = 0       # samples that hung or killed, one after another
        self.last = ""          # what the last of those did
        if self.wanted:
            self.nursery, theirs = socket.socketpair()
            sys.stdout.flush()
            if os.fork() == 0:
                with the_end():
                    self.nursery.close()
                    nurse(theirs, self.judge_here, config.seed)
            theirs.close()

    async def judge(self, sample) -> float:
        """Sets sample.rewards, and what reward_fn changes of sample.metrics and sample.steps. Returns its seconds.

        Where it fails, dies, or takes longer than --reward_timeout, sample.failure says why, and the rewards are 0.
        """
        if not self.wanted:
            return await self.judge_here(sample)
        try:
            seconds, verdict = await self.verdict(sample)
            vars(sample).update(verdict)
            return seconds
        except (ConnectionError, TimeoutError) as error:
            fail(sample, f"reward_fn: {error}; the row was {sample.row}")
            return 0.0

    async def verdict(self, sample) -> tuple[float, dict]:
        """From a worker that has others, too; where that one dies, from one that has no other."""
        self.asked += 1
        try:
            return await self.ask(await self.free_worker(), sample)
        except (ConnectionError, TimeoutError):
            async with self.alone:
                if self.in_a_row >= IN_A_ROW:
                    raise ConnectionError(f"{self.last}, {IN_A_ROW} times in a row, so it was not called here")
                worker = await self.start()
                try:
                    return await self.ask(worker, sample, alone=True)
                finally:
                    worker.kill()
        finally:
            self.asked -= 1
            if not self.asked:
                self.in_a_row = 0

    async def ask(self, worker: Worker, sample, alone: bool = False) -> tuple[float, dict]:
        """One sample to one worker, which is killed where it says nothing for too long."""
        try:
            seconds, verdict = await worker.patience.wait("its process", worker.send(sample))
        except (ConnectionError, TimeoutError) as error:
            worker.kill()
            if alone:
                self.in_a_row += 1
                self.last = str(error)
            raise
        if self.blocks and seconds > self.limit:
            self.in_a_row += 1
            self.last = f"it took more than {self.limit:g} s"
        else:
            self.in_a_row = 0
        if self.in_a_row >= IN_A_ROW:
            for busy in self.workers:       # or each sample that is open might hang as long
                busy.kill()
        return seconds, verdict

    async def free_worker(self) -> Worker:
        """The one that has the fewest samples open."""
        async with self.starting:
            self.workers = [worker for worker in self.workers if not worker.transport.is_closing()]
            while len(self.workers) < self.wanted:
                self.workers.append(await self.start())
        return min(self.workers, key=lambda worker: len(worker.open))

    async def start(self) -> Worker:
        """A new one, from the nursery."""
        mine, theirs = socket.socketpair()
        try:
            socket.send_fds(self.nursery, [b"."], [theirs.fileno()])
            pid = int.from_bytes(self.nursery.recv(4), "big")
        except ConnectionError:
            pid = 0
        theirs.close()
        if not pid:
            raise UserError("the process from which those for reward_fn are forked has ended; take --reward_workers 0")
        _, worker = await asyncio.get_running_loop().create_unix_connection(
            lambda: Worker(pid, self.limit + SLACK), sock=mine)
        return worker


# ------------------------------------------------ in processes of their own ------------------------------------------
@contextmanager
def the_end():
    """This process ends with the block, whatever happens: it is a copy of the trainer, and must not go on as one."""
    try:
        yield
    except (asyncio.IncompleteReadError, ConnectionError):
        pass                                            # the trainer has ended
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def nurse(control: socket.socket, judge_here, seed: int):
    """Forks a worker for each connection that it gets, until the trainer ends."""
    os.setsid()         # signals from a terminal, or from torchrun, are the trainer's matter
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")                              # where memory runs out, the kernel ends these processes first
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)       # nobody waits for workers
    while True:
        message, connections, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            with the_end():
                control.close()
                work(socket.socket(fileno=connections[0]), judge_here, seed)
        os.close(connections[0])
        control.sendall(pid.to_bytes(4, "big"))


def work(connection: socket.socket, judge_here, seed: int):
    """Judges what it is sent, until the trainer ends."""
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)       # reward_fn may wait for processes of its own
    asyncio.run(serve(connection, judge_here, seed))


async def serve(connection: socket.socket, judge_here, seed: int):
    """Takes samples as they come; verdicts leave in the order in which they are found."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)

    async def answer(number: int, sample):
        before = list(sample.steps)
        draw_anew(hash((seed, *sample.key)))
        seconds = await judge_here(sample)
        changed = RETURNED if sample.steps != before else RETURNED - {"steps"}
        verdict = {name: getattr(sample, name) for name in changed}
        writer.write(json.dumps([number, seconds, verdict]).encode() + b"\n")
        sys.stdout.flush()      # what reward_fn printed, as a process that is killed does not

    open_ones = set()       # asyncio holds no task by itself
    while True:
        size, number = HEADER.unpack(await reader.readexactly(HEADER.size))
        task = asyncio.ensure_future(answer(number, pickle.loads(await reader.readexactly(size))))
        open_ones.add(task)
        task.add_done_callback(open_ones.discard)


def draw_anew(seed: int):
    """What reward_fn draws hangs on the run's seed and the sample alone, unless it is async and others draw between."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)
