"""--reward_workers: what a reward function in a process of its own can and cannot do to the trainer."""

import asyncio
import ctypes
import faulthandler
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch

from extras import reward_workers
from extras.reward_workers import RewardWorkers
from tests.conftest import Config
from train import Sample, Trainer, UserError


class Core:
    """The part of the core's Trainer that the extra wraps."""

    score = Trainer.score

    def __init__(self, config, dataset_class, reward_fn, env_step):
        self.config = config
        self.reward_fn = reward_fn


def make_samples(count: int, **fields) -> list[Sample]:
    return [Sample(messages=[], row={}, key=(0, i), **fields) for i in range(count)]


def score_all(reward_fn, samples: list[Sample], workers: int = 2, timeout: float = 20.0, then=None) -> list:
    """The reward of each sample, or what its scoring raised. Calls `then(trainer)` before the workers end."""
    config = Config(reward_workers=workers, reward_timeout=timeout)
    trainer = reward_workers.extend(Core)(config, None, reward_fn, None)

    async def gather():
        calls = [trainer.score(sample) for sample in samples]
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        errors = asyncio.run(gather())
        if then:
            then(trainer)
        return [error or sample.reward for error, sample in zip(errors, samples)]
    finally:
        end_workers(trainer.workers)


def end_workers(workers: RewardWorkers):
    """Ends the nursery, as the end of the trainer does."""
    workers.nursery.close()
    os.waitpid(workers.nursery_pid, 0)


def wait_until(condition, seconds: float = 15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


# ---------------------------------------------- hangs and crashes -------------------------------------------
@pytest.mark.parametrize("workers, is_async", [(1, False), (2, False), (2, True)])
def test_a_hang_or_a_crash_fails_one_sample(workers, is_async):
    def time_out():
        raise TimeoutError  # of its own

    harms = {  # of a sample: what it does, and what is said of it
        2: (
            lambda: sum(range(10**15)),
            "",
        ),  # C code that no signal handler interrupts: only the core's limit
        5: (lambda: os.kill(os.getpid(), signal.SIGKILL), "died without a valid reply (killed by SIGKILL)"),
        6: (lambda: ctypes.string_at(0), "died without a valid reply (killed by SIGSEGV)"),
        7: (lambda: sys.exit("gives up"), "SystemExit: gives up ("),
        8: (lambda: os._exit(3), "died without a valid reply (exit code 3)"),
        10: (time_out, "TimeoutError ("),
    }

    def sync_reward_fn(sample):
        if sample.key[1] in harms:
            faulthandler.disable()  # or pytest's would print a traceback
            harms[sample.key[1]][0]()
        return sample.key[1] / 2

    async def async_reward_fn(sample):
        await asyncio.sleep(60 if sample.key == (0, 9) else 0)
        return sync_reward_fn(sample)

    def see(trainer):
        idle = {pid for pid, _ in trainer.workers.idle}
        nursery = psutil.Process(trainer.workers.nursery_pid)
        assert {child.pid for child in nursery.children()} == idle and len(idle) <= workers

    reward_fn = async_reward_fn if is_async else sync_reward_fn
    found = score_all(reward_fn, make_samples(12), workers, timeout=2.0, then=see)
    failures = {i: error for i, error in enumerate(found) if isinstance(error, Exception)}
    assert failures.keys() == {*harms} | ({9} if is_async else set())
    for i, error in failures.items():
        assert isinstance(error, TimeoutError if i in (2, 9) else RuntimeError)
        assert i == 9 or harms[i][1] in str(error)
    assert all(found[i] == i / 2 for i in range(12) if i not in failures)


def test_the_wait_for_a_worker_does_not_count_as_time_of_the_call():
    assert score_all(lambda sample: time.sleep(0.4) or 1.0, make_samples(6), 1, timeout=1.5) == [1.0] * 6


def test_async_calls_of_a_worker_share_an_event_loop():
    lock = asyncio.Lock()  # stands for a connection: it belongs to the first loop that waits for it

    async def reward_fn(sample):
        async with lock:
            waits = asyncio.ensure_future(lock.acquire())
            await asyncio.sleep(0.01)
        await waits
        lock.release()
        return 1.0

    assert score_all(reward_fn, make_samples(3), workers=1) == [1.0] * 3


@pytest.mark.parametrize("harm", ["dies", "writes"])
def test_what_a_worker_does_between_two_calls_costs_nothing(harm):
    def reward_fn(sample):
        writer = threading.Timer(0.1, write_to_sockets, [b'[9.0, {}, ""]\n'])
        writer.start() if harm == "writes" else None
        return 1.0

    def see(trainer):
        ((pid, connection),) = trainer.workers.idle
        if harm == "dies":
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        assert select.select([connection], [], [], 10)[0]  # the end of the connection, or the text
        sample = make_samples(1)[0]
        asyncio.run(trainer.score(sample))
        assert sample.reward == 1.0 and not psutil.pid_exists(pid)

    score_all(reward_fn, make_samples(1), workers=1, then=see)


def write_to_sockets(text: bytes):
    """Writes to all sockets of this process."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            connection = socket.socket(fileno=int(name))
            connection.settimeout(0.5)
            connection.sendall(text)
            connection.detach()


def test_a_hostile_reply_fails_one_sample():
    replies = [b"{}", b"5", b"[1,2]", b"[" * 100_000, b"\xff", b"cos\nsystem"]
    replies.append(b"[1.0, {}," + b" " * reward_workers.REPLY_BYTES + b' ""]')

    def reward_fn(sample):
        if sample.key[1] % 2:
            write_to_sockets(replies[sample.key[1] // 2] + b"\n")
            time.sleep(60)
        return 1.0

    found = score_all(reward_fn, make_samples(2 * len(replies)), workers=1)
    assert found[::2] == [1.0] * len(replies)
    assert all("died without a valid reply" in str(error) for error in found[1::2])


# ---------------------------------------------- results -----------------------------------------------------
def test_what_comes_back_and_what_does_not():
    total = 10.0

    class Task:
        def reward_fn(self, sample):  # a bound method that is also a closure
            sample.metrics["drawn"] = random.random() + np.random.rand() + float(torch.rand(()))
            sample.metrics["numpy"] = np.float32(0.5)
            sample.state["told"] = "changed"
            return [total, np.int64(sample.state["number"])]

    async def call_in_turn():
        return [await workers.call(sample) for sample in samples]

    samples = [Sample([], {}, key=(1, i), state={"number": i}) for i in range(2)]
    workers = RewardWorkers(Task().reward_fn, Config(reward_workers=1))
    first, second = asyncio.run(call_in_turn())
    assert (first[0], second[0]) == ([10.0, 0.0], [10.0, 1.0])
    assert first[1]["numpy"] == 0.5 and first[1]["drawn"] != second[1]["drawn"]
    assert [sample.state for sample in samples] == [{"number": 0}, {"number": 1}]
    samples.reverse()
    assert asyncio.run(call_in_turn()) == [second, first]  # whatever came before
    end_workers(workers)


def test_a_trainer_without_workers_calls_its_reward_itself():
    def reward_fn(sample):
        sample.metrics["pid"] = os.getpid()
        return 1.0

    samples = make_samples(1, metrics={"before": 2.0})
    assert score_all(reward_fn, samples) == [1.0]
    assert samples[0].metrics["before"] == 2.0 and samples[0].metrics["pid"] != os.getpid()
    asyncio.run(reward_workers.extend(Core)(Config(), None, reward_fn, None).score(samples[0]))
    assert samples[0].metrics["pid"] == os.getpid()


def test_a_failing_reward_names_its_line_and_changes_nothing():
    def reward_fn(sample):
        sample.metrics["text"] = "high"
        json.loads("{\n\n")  # the error's innermost line is not the user's

    (sample,) = make_samples(1, metrics={"kept": 1.0})
    (error,) = score_all(reward_fn, [sample])
    line = reward_fn.__code__.co_firstlineno + 2
    assert str(error) == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 3 column 1 (char 3) "
        f"({__file__}:{line})"
    )
    assert sample.metrics == {"kept": 1.0}


def test_what_is_no_number_is_rejected():
    results = [torch.tensor(1.0), None, "high", {1: 2}, float("nan")]

    def reward_fn(sample):
        result = results[sample.key[1] // 2]
        sample.metrics["a"] = result if sample.key[1] % 2 else 1.0
        return 1.0 if sample.key[1] % 2 else result

    found = score_all(reward_fn, make_samples(2 * len(results)))
    assert all(isinstance(error, TypeError | ValueError) for error in found)


# ---------------------------------------------- mistakes that end the run -----------------------------------
def test_what_cannot_be_pickled_ends_in_one_line():
    (error,) = score_all(lambda sample: 1.0, make_samples(1, state={"lock": threading.Lock()}))
    assert isinstance(error, UserError) and "\n" not in str(error)
    assert re.search("cannot pickle.*sample.state.*set --reward_workers to 0", str(error))


def test_without_the_nursery_the_run_ends_in_one_line():
    async def kill_the_nursery():
        call = asyncio.ensure_future(workers.call(make_samples(1)[0]))
        await asyncio.sleep(0.5)
        (worker,) = psutil.Process(workers.nursery_pid).children()
        os.kill(workers.nursery_pid, signal.SIGKILL)
        assert not psutil.wait_procs([worker], timeout=10)[1]
        await call

    workers = RewardWorkers(lambda sample: sum(range(10**15)), Config(reward_workers=1))
    with pytest.raises(UserError, match="forks the reward workers has died; set --reward_workers to 0"):
        asyncio.run(kill_the_nursery())
    end_workers(workers)


def test_where_workers_are_impossible_the_run_ends_in_one_line(monkeypatch):
    class Recipe(Core):
        def __init__(self, config, dataset_class, reward_fn, env_step):
            super().__init__(config, dataset_class, lambda sample: 0.0, env_step)

    with pytest.raises(UserError, match="--reward_workers: this recipe replaces reward_fn"):
        reward_workers.extend(Recipe)(Config(reward_workers=1), None, lambda sample: 1.0, None)
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="--reward_workers requires Linux; set it to 0"):
        RewardWorkers(lambda sample: 1.0, Config(reward_workers=1))


# ---------------------------------------------- the end -----------------------------------------------------
def test_no_process_outlives_the_trainer_and_none_ends_before_it():
    def reward_fn(sample):
        subprocess.Popen(["sleep", "600"])
        sum(range(10**15))

    pid = os.fork()
    if pid == 0:
        become_trainer(reward_fn)
    trainer = psutil.Process(pid)
    family = []
    try:
        wait_until(lambda: len(trainer.children(recursive=True)) == 6)
        nursery, bystander = trainer.children()
        family = nursery.children(recursive=True) + [nursery]  # two workers and their subprocesses
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            nursery.send_signal(number)
        time.sleep(0.2)
        assert len(family) == 5 and all(process.status() != psutil.STATUS_ZOMBIE for process in family)
        groups = {os.getpgid(process.pid) for process in family}
        assert os.getpgid(pid) not in groups  # a terminal and torchrun send signals to this group
    finally:
        trainer.kill()
        os.waitpid(pid, 0)
    try:
        assert not psutil.wait_procs(family, timeout=10)[1]
    finally:
        bystander.kill()


def become_trainer(reward_fn):
    """A process with reward workers, and another child that holds a copy of its sockets."""
    workers = RewardWorkers(reward_fn, Config(reward_workers=2))
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)

    async def gather():
        await asyncio.gather(*[workers.call(sample) for sample in make_samples(2)])

    asyncio.run(gather())
    os._exit(0)
