"""--reward_workers N: calls reward_fn in N processes per rank, so that a hang or a crash costs one sample.

Nothing inside a process can interrupt a C function that does not return, or survive a segmentation fault.
Each rank therefore forks a nursery before it has threads, connections or a GPU; the nursery forks the workers
and their replacements, so reward_fn may be a closure or a bound method. Each call has a socket of its own:
the trainer sends a pickled sample, the worker answers with one line of JSON. A worker that closes the socket
has died; one that does not answer in time is killed, together with the processes that it started.

A worker calls reward_fn for one sample at a time; if reward_fn is async, for many side by side. When such a
shared worker is lost, each sample that was open there is tried again, alone in a worker, to find the culprit.

Security: the trainer reads JSON, so a worker that a hostile completion has taken over cannot execute code in
the trainer through its replies. But it is a process of the same user with access to the same files: workers
contain accidents, not attacks. A subprocess that reward_fn starts in a session of its own must end by itself.

Why no library: pebble.ProcessPool (5.2.3) would still need the nursery and the protocol, cannot run async
calls side by side in a worker, blocks for 3 s on each hang in C, and shares one locked pipe among its
workers, so that a kill at the wrong moment stalls them all (noxdafox/pebble#163). In concurrent.futures and
loky one death breaks the whole pool.
"""

import asyncio
import ctypes
import inspect
import json
import numbers
import os
import pickle
import random
import signal
import socket
import sys
import sysconfig
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from train import UserError, flag

GRACE = 5.0  # seconds beyond --reward_timeout after which the worker of an async reward_fn is killed
STREAK = 5  # after this many lost workers in a row, samples that still wait fail without a call
ASYNC_CALLS = 128  # open calls of an async reward_fn per rank; each takes a file descriptor
REPLY_BYTES = 2**20  # longest reply that the trainer reads
FORK = 0  # request to the nursery; any other number is the pid of a worker to kill
PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


@dataclass
class Flags:
    reward_workers: int = flag(0, "processes per rank for reward_fn; 0: the trainer's own process")


class RewardError(Exception):
    """A call of reward_fn that gave no reward."""


class WorkerLost(RewardError):
    """The worker died, or was killed because it did not answer."""


class Worker:
    """The trainer's view of a worker process."""

    def __init__(self, pid: int, control: socket.socket):
        self.pid = pid
        self.control = control  # carries the sockets of calls to the worker
        self.calls = 0  # open calls

    def open_call(self) -> socket.socket:
        """The trainer's end of a new socket. If the worker is dead, it is closed at the other end."""
        trainer_end, worker_end = socket.socketpair()
        with suppress(OSError):
            socket.send_fds(self.control, [b"."], [worker_end.fileno()])
        worker_end.close()
        return trainer_end

    def is_dead(self) -> bool:
        try:
            return self.control.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


class RewardWorkers:
    """The workers of one rank. Construct it before the process has threads, connections or a GPU."""

    def __init__(self, reward_fn, config):
        if sys.platform != "linux":
            raise UserError("--reward_workers requires Linux; set it to 0")
        call = getattr(reward_fn, "__call__", None)  # for an object that is called like a function
        self.shared = inspect.iscoroutinefunction(reward_fn) or inspect.iscoroutinefunction(call)
        self.count = config.reward_workers
        self.timeout = config.reward_timeout
        self.workers = []
        self.slots = asyncio.Semaphore(max(ASYNC_CALLS, self.count) if self.shared else self.count)
        self.retrying = asyncio.Lock()
        self.open = 0  # calls that run or wait
        self.streak = 0  # lost workers in a row
        self.nursery, nursery_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        trainer_pid = os.getpid()
        sys.stdout.flush()  # or the nursery's copy of the buffer would be written, too
        sys.stderr.flush()
        self.nursery_pid = os.fork()
        if self.nursery_pid == 0:
            self.nursery.close()
            run_and_exit(run_nursery, nursery_end, trainer_pid, reward_fn, config)
        nursery_end.close()

    async def call(self, sample) -> tuple[object, dict]:
        """Calls reward_fn(sample) in a worker. Returns its result and sample.metrics, both unchecked.

        Raises RewardError with a message of one line if reward_fn raised, took longer than --reward_timeout
        or ended its process; UserError if the sample cannot be pickled or the nursery has died. All calls
        must come from the same event loop.
        """
        self.open += 1
        try:
            async with self.slots:
                reply = await self.call_worker(to_request(sample))
        finally:
            self.open -= 1
            if self.open == 0:
                self.streak = 0
        if reply["failure"]:
            raise RewardError(reply["failure"])
        return reply["result"], reply["metrics"]

    async def call_worker(self, request: bytes) -> dict:
        """The reply of the least busy worker, or on the second try that of a worker with no other call."""
        if not self.shared:
            return await self.call_alone(self.least_busy_worker, request)
        with suppress(WorkerLost):
            return await self.exchange(self.least_busy_worker(), request)
        async with self.retrying:
            return await self.call_alone(self.start_worker, request)

    async def call_alone(self, get_worker, request: bytes) -> dict:
        """The reply of a worker that has no other call: if it is lost, this sample is the culprit."""
        limit = max(STREAK, self.count)
        if self.streak >= limit:
            raise RewardError(f"reward_fn was not called: the last {limit} calls hung or ended their process")
        worker = get_worker()
        try:
            reply = await self.exchange(worker, request)
        except BaseException:
            self.streak += 1
            self.kill_worker(worker)  # if this task was cancelled, the worker is still busy
            raise
        self.streak = 0
        if self.shared:
            self.kill_worker(worker)
        return reply

    async def exchange(self, worker: Worker, request: bytes) -> dict:
        """Sends a request and returns the reply. Kills a worker without a valid one and raises WorkerLost."""
        worker.calls += 1
        reader, writer = await asyncio.open_unix_connection(sock=worker.open_call(), limit=REPLY_BYTES)
        writer.transport.set_write_buffer_limits(0)
        reading = asyncio.ensure_future(reader.readline())
        try:
            writer.write(request)
            await writer.drain()  # time starts when all is sent: an engine may keep this event loop busy
            writer.write_eof()
            await asyncio.wait({reading}, timeout=self.timeout + (GRACE if self.shared else 0.0))
            if not reading.done():
                self.kill_worker(worker)
                raise WorkerLost(timeout_message(self.timeout))
            return parse_reply(reading.result())
        except (OSError, ValueError, RecursionError) as error:  # no line, too long a line, an invalid one
            code = self.kill_worker(worker)
            cause = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise WorkerLost(f"reward_fn's process died without a valid reply ({cause})") from error
        finally:
            worker.calls -= 1
            reading.cancel()
            writer.transport.abort()

    def least_busy_worker(self) -> Worker:
        """The worker for the next call. Replaces the dead."""
        for worker in list(self.workers):
            if worker.calls == 0 and worker.is_dead():  # it died after its last call: nobody's fault
                self.kill_worker(worker)
        while len(self.workers) < self.count:
            self.workers.append(self.start_worker())
        return min(self.workers, key=lambda worker: worker.calls)

    def start_worker(self) -> Worker:
        control, worker_end = socket.socketpair()
        pid = self.ask_nursery(FORK, [worker_end.fileno()])
        worker_end.close()
        return Worker(pid, control)

    def kill_worker(self, worker: Worker) -> int:
        """Kills a worker and the processes that it started. Returns its exit code, negative for a signal."""
        if worker in self.workers:
            self.workers.remove(worker)
        if worker.control.fileno() < 0:
            return -signal.SIGKILL  # it was already killed
        code = self.ask_nursery(worker.pid)
        worker.control.close()  # not before the kill, or the worker would end by itself
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

    def close(self):
        """Ends the nursery and all workers."""
        if self.nursery.fileno() < 0:
            return
        with suppress(OSError):
            self.nursery.shutdown(socket.SHUT_RDWR)
        self.nursery.close()
        os.waitpid(self.nursery_pid, 0)


def to_request(sample) -> bytes:
    """A sample, pickled. Raises UserError."""
    try:
        return pickle.dumps(sample)
    except Exception as error:
        raise UserError(
            f"a sample cannot be sent to a reward worker ({describe(error)}): keep in sample.state only what "
            "can be pickled, or set --reward_workers to 0"
        ) from error


def parse_reply(line: bytes) -> dict:
    """A reply as to_reply makes it, result and metrics unchecked. Raises ValueError or RecursionError."""
    reply = json.loads(line)
    types = {name: type(value) for name, value in reply.items()} if isinstance(reply, dict) else {}
    if not (types.get("metrics") is dict and types.get("failure") is str and "result" in types):
        raise ValueError("not a reply")
    return reply


def timeout_message(seconds: float) -> str:
    return f"reward_fn took longer than --reward_timeout {seconds:g} s"


def describe(error: BaseException) -> str:
    """Type and message of an exception, in one line of at most 500 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500].rstrip(": ")


# ------------------------------------- In the nursery and the workers -------------------------------------


def run_and_exit(function, *args):
    """Runs a function in a forked process, which must never continue as a copy of the trainer."""
    try:
        function(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def run_nursery(control: socket.socket, trainer_pid: int, reward_fn, config):
    """Forks and kills workers on request. Kills them all when the trainer ends."""
    nursery_pid = os.getpid()
    pids = set()

    def end_if_orphaned(*_):
        if os.getpid() == nursery_pid and os.getppid() != trainer_pid:
            for pid in pids:
                kill_group(pid)
            os._exit(0)

    os.setsid()  # signals from a terminal or a launcher are for the trainer
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end_if_orphaned)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if a launcher ignored it, waitpid would find nobody
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 4, 1)
        number = int.from_bytes(message, "big")
        if not message:
            break
        if number == FORK:
            answer = os.fork()
            if answer == 0:
                control.close()
                run_and_exit(run_worker, socket.socket(fileno=descriptors[0]), reward_fn, config)
            os.close(descriptors[0])
            pids.add(answer)
        else:
            pids.discard(number)
            kill_group(number)
            answer = exit_code(number)
        control.send(answer.to_bytes(4, "big", signed=True))
    for pid in pids:
        kill_group(pid)


def kill_group(pid: int):
    """Kills a worker and the processes that it started. Its pid stays taken until somebody waits for it."""
    for kill in (os.killpg, os.kill):  # both, because it may not have made its group yet
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def exit_code(pid: int) -> int:
    """The exit code of a killed child, or SIGKILL's if the kernel takes over a second to end it."""
    for _ in range(100):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return -signal.SIGKILL


def run_worker(control: socket.socket, reward_fn, config):
    """Answers calls until the trainer closes its end of `control` or the nursery ends."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills a worker before the trainer
    asyncio.run(serve(control, reward_fn, config))


async def serve(control: socket.socket, reward_fn, config):
    """Starts a task for each socket that arrives."""
    tasks = set()  # asyncio itself keeps no reference to a task

    def accept():
        message, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            os._exit(0)  # without waiting for tasks and threads
        connection = socket.socket(fileno=descriptors[0])
        task = asyncio.ensure_future(answer_call(connection, reward_fn, config))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    asyncio.get_running_loop().add_reader(control, accept)
    await asyncio.Event().wait()


async def answer_call(connection: socket.socket, reward_fn, config):
    """Reads a sample, calls reward_fn and writes one line of JSON."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    with suppress(ConnectionError):  # the trainer no longer waits for this call
        reply = await score(await reader.read(), reward_fn, config)
        sys.stdout.flush()  # what reward_fn printed: a process that is killed does not flush
        writer.write(reply.encode() + b"\n")
        await writer.drain()
    writer.close()


async def score(request: bytes, reward_fn, config) -> str:
    """Calls reward_fn on a pickled sample. Returns JSON: result, metrics, failure ("" if there is none)."""
    try:
        sample = pickle.loads(request)
        seed_generators(f"{config.seed} {sample.key}")
        result = reward_fn(sample)
        if inspect.isawaitable(result):
            task = asyncio.ensure_future(result)
            await asyncio.wait({task}, timeout=config.reward_timeout)
            if not task.done():
                task.cancel()
                return to_reply(failure=timeout_message(config.reward_timeout))
            result = task.result()
        return to_reply(result, sample.metrics)
    except BaseException as error:  # also SystemExit: it is a failure of this sample only
        return to_reply(failure=describe(error) + place(error))


def to_reply(result=None, metrics: dict = {}, failure: str = "") -> str:
    return json.dumps({"result": result, "metrics": metrics, "failure": failure}, default=to_json)


def seed_generators(key: str):
    """Makes draws in reward_fn depend on the key only; if it is async, until its first await."""
    random.seed(key)
    np.random.seed(random.getrandbits(32))
    torch.default_generator.manual_seed(random.getrandbits(63))


def to_json(value):
    """NumPy's numbers as Python's; anything else as text, which the trainer rejects and shows."""
    return float(value) if isinstance(value, numbers.Real) else repr(value)[:500]


def place(error: BaseException) -> str:
    """The innermost file and line of the user's code, outside Python and installed packages."""
    packages = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*packages, __file__, "<frozen")):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


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
            if self.workers:
                self.reward_timeout = None  # it applies in the worker: a call also waits for a free one

        async def call_worker(self, sample):
            result, sample.metrics = await self.workers.call(sample)
            return result

    return WorkersTrainer
