"""--reward_workers N: calls reward_fn in N processes per rank, so that a hang or a crash costs one sample.

Nothing inside a process can interrupt a C function that does not return, or survive a segmentation fault.
Each rank therefore forks a nursery before it has threads, connections or a GPU; the nursery forks the workers
and their replacements, so reward_fn may be a closure or a bound method. A worker has one call at a time: the
trainer sends it a pickled sample, and receives a line of JSON. A worker that closes its socket has died; one
whose call exceeds --reward_timeout is killed together with the processes that it started.

Security: the trainer reads JSON, so a worker that a hostile completion has taken over cannot execute code in
the trainer through its replies. But it is a process of the same user with access to the same files: workers
contain accidents, not attacks. A subprocess that reward_fn starts in a session of its own must end by itself.

Why no library: pebble.ProcessPool (5.2.3) would still need the nursery, blocks for 3 s on each hang in C, and
shares one locked pipe among its workers, so that a kill at the wrong moment stalls them all
(noxdafox/pebble#163). In concurrent.futures and loky one death breaks the whole pool.
"""

import asyncio
import ctypes
import json
import numbers
import os
import pickle
import random
import select
import signal
import socket
import sys
import time
import traceback
from contextlib import nullcontext, suppress
from dataclasses import dataclass

import numpy as np
import torch

from train import UserError, call, flag

REPLY_BYTES = 2**20  # longest reply that the trainer reads
FORK = 0  # request to the nursery; any other number is the pid of a worker to kill
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


@dataclass
class Flags:
    reward_workers: int = flag(0, "processes per rank for reward_fn; 0: the trainer's own process")


class RewardWorkers:
    """The workers of one rank. Construct it before the process has threads, connections or a GPU."""

    def __init__(self, reward_fn, config):
        if sys.platform != "linux":
            raise UserError("--reward_workers requires Linux; set it to 0")
        self.slots = asyncio.Semaphore(config.reward_workers)  # for calls at the same time
        self.idle = []  # (pid, socket) of each worker without a call
        self.nursery, nursery_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        trainer_pid = os.getpid()
        sys.stdout.flush()  # or the workers' copies of the buffer would be written, too
        self.nursery_pid = os.fork()
        if self.nursery_pid == 0:
            try:  # this process must never continue as a copy of the trainer
                self.nursery.close()
                run_nursery(nursery_end, trainer_pid, reward_fn, config)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        nursery_end.close()

    async def call(self, sample) -> tuple[object, dict]:
        """Calls reward_fn(sample) in an idle worker. Returns its result and sample.metrics, both unchecked.

        Raises RuntimeError with a message of one line if reward_fn raised or ended its process; UserError if
        the sample cannot be pickled or the nursery has died. A worker whose call is cancelled is killed.
        """
        try:
            request = pickle.dumps(sample)
        except Exception as error:
            why = f"a sample cannot be sent to a reward worker ({describe(error)})"
            needed = "keep in sample.state only what can be pickled, or set --reward_workers to 0"
            raise UserError(f"{why}: {needed}") from error
        pid, connection = self.idle_worker()
        try:
            result, metrics, failure = json.loads(await exchange(connection, request))
        except BaseException as error:
            code = self.kill_worker(pid, connection)
            if not isinstance(error, OSError | ValueError | TypeError | RecursionError):
                raise  # CancelledError: --reward_timeout is over
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise RuntimeError(f"reward_fn's process died without a valid reply ({cause})") from error
        self.idle.append((pid, connection))
        if failure:
            raise RuntimeError(failure)
        return result, metrics

    def idle_worker(self) -> tuple[int, socket.socket]:
        """Pid and socket of a worker that is alive and says nothing; a new one if there is none."""
        while self.idle:
            pid, connection = self.idle.pop()
            events = select.poll()
            events.register(connection, select.POLLIN)
            if not events.poll(0):
                return pid, connection
            self.kill_worker(pid, connection)  # it died after its last call: nobody's fault
        connection, worker_end = socket.socketpair()
        connection.setblocking(False)
        pid = self.ask_nursery(FORK, [worker_end.fileno()])
        worker_end.close()
        return pid, connection

    def kill_worker(self, pid: int, connection: socket.socket) -> int:
        """Kills a worker and the processes that it started. Returns its exit code, negative for a signal."""
        code = self.ask_nursery(pid)
        connection.close()  # not before the kill, or the worker would end by itself
        return code

    def ask_nursery(self, number: int, descriptors: list[int] = ()) -> int:
        """The nursery's answer to a request: the pid of a new worker, or the exit code of a killed one."""
        try:
            socket.send_fds(self.nursery, [number.to_bytes(4, "big")], descriptors)
            answer = self.nursery.recv(4)
        except OSError:
            answer = b""
        if not answer:
            raise UserError("the process that forks the reward workers has died; set --reward_workers to 0")
        return int.from_bytes(answer, "big", signed=True)


async def exchange(connection: socket.socket, request: bytes) -> bytes:
    """Sends a request to a worker, and returns its reply."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(connection, request)
    line = b""
    while not line.endswith(b"\n"):
        chunk = await loop.sock_recv(connection, REPLY_BYTES)
        line += chunk
        if not chunk or len(line) > REPLY_BYTES:
            raise ValueError("no reply, or too long a reply")
    return line


def describe(error: BaseException) -> str:
    """Type and message of an exception, in one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(": ")


# ------------------------------------- In the nursery and the workers -------------------------------------


def run_nursery(control: socket.socket, trainer_pid: int, reward_fn, config):
    """Forks and kills workers on request. Kills them all when the trainer ends."""
    os.setsid()  # signals from a terminal or a launcher are for the trainer
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a launcher ignored it, waitpid would find nobody
    control.settimeout(1.0)
    pids = set()
    while os.getppid() == trainer_pid:
        try:
            message, descriptors, *_ = socket.recv_fds(control, 4, 1)
        except TimeoutError:
            continue
        if not message:
            break
        number = int.from_bytes(message, "big")
        if number == FORK:
            answer = os.fork()
            if answer == 0:
                control.close()
                return run_worker(socket.socket(fileno=descriptors[0]), reward_fn, config)
            os.close(descriptors[0])
            pids.add(answer)
        else:
            pids.discard(number)
            answer = kill(number)
        control.send(answer.to_bytes(4, "big", signed=True))
    for pid in pids:
        kill(pid)


def kill(pid: int) -> int:
    """Kills a worker and the processes that it started. Returns its exit code, negative for a signal."""
    for send_signal in (os.killpg, os.kill):  # both, because it may not have made its group yet
        with suppress(ProcessLookupError):
            send_signal(pid, signal.SIGKILL)
    for _ in range(100):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return -signal.SIGKILL  # the kernel has not ended it yet, for example because a disk does not answer


def run_worker(connection: socket.socket, reward_fn, config):
    """Answers calls until the trainer closes its end of the connection or the nursery ends."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills a worker before the trainer
    runner = asyncio.Runner()  # one event loop for all calls, because connections of a reward_fn belong to it
    requests = connection.makefile("rb")
    while requests.peek():
        reply = runner.run(score(pickle.load(requests), reward_fn, config))
        sys.stdout.flush()  # what reward_fn printed: a process that is killed does not flush
        connection.sendall(reply.encode() + b"\n")


async def score(sample, reward_fn, config) -> str:
    """Calls reward_fn on a sample. Returns JSON: [result, metrics, failure ("" if there is none)]."""
    random.seed(f"{config.seed} {sample.key}")  # draws in reward_fn depend on nothing else
    np.random.seed(random.getrandbits(32))
    torch.default_generator.manual_seed(random.getrandbits(63))
    try:
        result = await call(reward_fn, sample, None)  # the trainer has the time limit
        return json.dumps([result, sample.metrics, ""], default=to_json)
    except BaseException as error:  # also SystemExit: it is a failure of this sample only
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/lib/python" not in f.filename and f.filename != __file__]  # the user's
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
        return json.dumps([None, {}, describe(error) + place])


def to_json(value):
    """NumPy's numbers as Python's; anything else as text, which the trainer rejects and shows."""
    return float(value) if isinstance(value, numbers.Real) else repr(value)[:500]


def extend(trainer_class: type) -> type:
    """A trainer whose reward_fn may run in workers; what it changes in a sample is sample.metrics."""

    class WorkersTrainer(trainer_class):
        workers = None

        def __init__(self, config, dataset_class, reward_fn, env_step):
            if config.reward_workers:  # first: threads, connections and GPUs do not survive a fork
                self.workers = RewardWorkers(reward_fn, config)
                reward_fn = self.call_worker
            super().__init__(config, dataset_class, reward_fn, env_step)
            if self.workers and self.reward_fn != self.call_worker:
                raise UserError(
                    "--reward_workers: this recipe replaces reward_fn; let it pass its own to main"
                )

        async def score(self, sample):
            # The wait for a worker does not count towards --reward_timeout, which limits the call.
            async with self.workers.slots if self.workers else nullcontext():
                await super().score(sample)

        async def call_worker(self, sample):
            result, sample.metrics = await self.workers.call(sample)
            return result

    return WorkersTrainer
