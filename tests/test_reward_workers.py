"""--reward_workers: what a reward function in a process of its own can and cannot do to the trainer."""

import asyncio
import ctypes
import faulthandler
import json
import os
import random
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
from extras.reward_workers import RewardError, RewardWorkers
from tests.conftest import Config
from train import Sample, UserError


def make_samples(count: int, **fields) -> list[Sample]:
    return [Sample(messages=[], row={}, key=(0, i), **fields) for i in range(count)]


def call_all(reward_fn, samples: list[Sample], workers: int = 2, timeout: float = 20.0, then=None) -> list:
    """What each call returned or raised, sample by sample. Calls `then(workers)` before they end."""
    pool = RewardWorkers(reward_fn, Config(reward_workers=workers, reward_timeout=timeout))

    async def gather():
        calls = [pool.call(sample) for sample in samples]
        return await asyncio.gather(*calls, return_exceptions=True)

    try:
        outcomes = asyncio.run(gather())
        if then:
            then(pool)
        return outcomes
    finally:
        pool.close()


def wait_until(condition, seconds: float = 15.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hang_or_a_crash_fails_one_sample(workers):
    def reward_fn(sample):
        if sample.key == (0, 2):
            sum(range(10**15))  # C code that no signal handler interrupts
        if sample.key == (0, 5):
            os.kill(os.getpid(), signal.SIGKILL)
        if sample.key == (0, 6):
            faulthandler.disable()  # or pytest's would print a traceback
            ctypes.string_at(0)  # a segmentation fault
        if sample.key == (0, 7):
            sys.exit("gives up")
        if sample.key == (0, 8):
            os._exit(3)
        return sample.key[1] / 2

    outcomes = call_all(reward_fn, make_samples(12), workers, timeout=2.0)
    failures = {i: str(outcome) for i, outcome in enumerate(outcomes) if isinstance(outcome, Exception)}
    assert failures.keys() == {2, 5, 6, 7, 8}
    assert failures[2] == "reward_fn took longer than --reward_timeout 2 s"
    assert failures[5].endswith("died without a valid reply (killed by SIGKILL)")
    assert failures[6].endswith("died without a valid reply (killed by SIGSEGV)")
    assert failures[7].startswith("SystemExit: gives up")
    assert failures[8].endswith("died without a valid reply (exit code 3)")
    assert all(outcomes[i] == (i / 2, {}) for i in range(12) if i not in failures)


@pytest.mark.parametrize("harm", ["hang", "crash"])
def test_a_hang_or_a_crash_of_an_async_reward_fails_one_sample(monkeypatch, harm):
    monkeypatch.setattr(reward_workers, "GRACE", 0.1)

    async def reward_fn(sample):
        await asyncio.sleep(0.01)  # all samples are open by then
        if sample.key == (0, 3):
            time.sleep(60) if harm == "hang" else os._exit(0)
        await asyncio.sleep(0.05)
        return 1.0

    def see(pool):
        assert pool.workers == []  # the one that hangs is killed

    outcomes = call_all(reward_fn, make_samples(8), workers=1, timeout=2.0, then=see)
    assert isinstance(outcomes[3], RewardError)
    assert outcomes[:3] + outcomes[4:] == [(1.0, {})] * 7


def test_async_rewards_wait_side_by_side():
    inside = []

    async def reward_fn(sample):
        inside.append(sample)
        while len(inside) < 40:  # for ever, if they came one by one
            await asyncio.sleep(0.01)
        return 1.0

    assert call_all(reward_fn, make_samples(40), workers=1) == [(1.0, {})] * 40


def test_an_async_reward_that_waits_too_long_fails_alone():
    async def reward_fn(sample):
        await asyncio.sleep(60 if sample.key[1] == 1 else 0)
        return os.getpid()

    first, late, last = call_all(reward_fn, make_samples(3), workers=1, timeout=1.0)
    assert "took longer than --reward_timeout 1 s" in str(late) and "(" not in str(late)
    assert first == last


def test_a_reward_may_time_out_by_itself():
    async def reward_fn(sample):
        raise TimeoutError

    (outcome,) = call_all(reward_fn, make_samples(1))
    assert str(outcome).startswith("TimeoutError (") and "--reward_timeout" not in str(outcome)


def test_a_reward_that_always_hangs_does_not_cost_its_timeout_for_each_sample():
    def reward_fn(sample):
        time.sleep(60)

    messages = [str(outcome) for outcome in call_all(reward_fn, make_samples(40), timeout=0.2)]
    called = [message for message in messages if "took longer than --reward_timeout 0.2 s" in message]
    spared = [message for message in messages if "was not called: the last 5 calls hung" in message]
    assert len(called) in (5, 6) and len(called) + len(spared) == 40


def test_a_new_batch_of_samples_is_tried_again_after_one_that_hung():
    def reward_fn(sample):
        if sample.state.get("hangs"):
            time.sleep(60)
        return 1.0

    def another_batch(pool):
        assert asyncio.run(pool.call(make_samples(1)[0])) == (1.0, {})

    call_all(reward_fn, make_samples(10, state={"hangs": True}), workers=1, timeout=0.1, then=another_batch)


@pytest.mark.slow
def test_an_event_loop_that_was_busy_is_no_timeout():
    async def call_and_block(pool):
        await pool.call(make_samples(1)[0])  # starts the worker
        call = asyncio.ensure_future(pool.call(make_samples(1, state={"text": "x" * 1_000_000})[0]))
        for _ in range(10):  # an engine in the trainer's process blocks the event loop when it generates
            await asyncio.sleep(0)
            time.sleep(0.45)
        return await call

    pool = RewardWorkers(lambda sample: 1.0, Config(reward_workers=1, reward_timeout=0.4))
    assert asyncio.run(call_and_block(pool)) == (1.0, {})
    pool.close()


def test_a_worker_that_dies_between_two_calls_costs_nothing():
    def kill_it_and_call(pool):
        (worker,) = pool.workers
        os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE)
        assert asyncio.run(pool.call(make_samples(1)[0])) == (1.0, {})
        assert not psutil.pid_exists(worker.pid)

    call_all(lambda sample: 1.0, make_samples(1), workers=1, then=kill_it_and_call)


def test_a_cancelled_call_leaves_no_busy_worker():
    def reward_fn(sample):
        time.sleep(60 if sample.key[1] == 0 else 0)
        return 1.0

    async def cancel_the_first(pool):
        first, second = make_samples(2)
        with suppress(TimeoutError):
            await asyncio.wait_for(pool.call(first), 0.2)
        return await pool.call(second)

    pool = RewardWorkers(reward_fn, Config(reward_workers=1, reward_timeout=5))
    assert asyncio.run(cancel_the_first(pool)) == (1.0, {})
    pool.close()


def test_what_comes_back_and_what_does_not():
    total = 10.0

    class Task:
        def reward_fn(self, sample):  # a bound method that is also a closure
            sample.metrics["drawn"] = random.random() + np.random.rand() + float(torch.rand(()))
            sample.metrics["numpy"] = np.float32(0.5)
            sample.state["told"] = "changed"
            return [total, np.int64(sample.state["number"])]

    samples = [Sample([], {}, key=(1, i), state={"number": i}) for i in range(2)]
    first, second = call_all(Task().reward_fn, samples)
    assert (first[0], second[0]) == ([10.0, 0.0], [10.0, 1.0])
    assert first[1]["numpy"] == 0.5 and first[1]["drawn"] != second[1]["drawn"]
    assert [sample.state for sample in samples] == [{"number": 0}, {"number": 1}]
    assert call_all(Task().reward_fn, samples[::-1], workers=1) == [second, first]  # whatever came before


def test_a_trainer_calls_its_reward_in_a_worker_without_a_limit_of_its_own():
    def reward_fn(sample):
        sample.metrics["pid"] = os.getpid()
        return 1.0

    class Core:
        def __init__(self, config, dataset_class, reward_fn, env_step):
            self.given = (config, dataset_class, env_step)
            self.reward_fn, self.reward_timeout = reward_fn, config.reward_timeout

    trainer_class = reward_workers.extend(Core)
    (sample,) = make_samples(1, metrics={"before": 2.0})
    trainer = trainer_class(Config(reward_workers=1), "dataset", reward_fn, "env_step")
    assert trainer.given[1:] == ("dataset", "env_step") and trainer.reward_timeout is None
    assert asyncio.run(trainer.reward_fn(sample)) == 1.0
    assert sample.metrics["before"] == 2.0 and sample.metrics["pid"] != os.getpid()
    trainer = trainer_class(Config(), "dataset", reward_fn, "env_step")
    assert trainer.reward_fn is reward_fn and trainer.reward_timeout == 60

    class Recipe(Core):
        def __init__(self, config, dataset_class, reward_fn, env_step):
            super().__init__(config, dataset_class, lambda sample: 0.0, env_step)

    with pytest.raises(UserError, match="--reward_workers: this recipe replaces reward_fn"):
        reward_workers.extend(Recipe)(Config(reward_workers=1), "dataset", reward_fn, "env_step")


def test_a_failing_reward_names_its_line_and_changes_nothing():
    def reward_fn(sample):
        sample.metrics["text"] = "high"
        json.loads("{\n\n")  # the error's innermost line is not the user's

    (sample,) = make_samples(1, metrics={"kept": 1.0})
    (outcome,) = call_all(reward_fn, [sample])
    line = reward_fn.__code__.co_firstlineno + 2
    assert str(outcome) == (
        "JSONDecodeError: Expecting property name enclosed in double quotes: line 3 column 1 (char 3) "
        f"({__file__}:{line})"
    )
    assert sample.metrics == {"kept": 1.0}


@pytest.mark.parametrize("result", [torch.tensor(1.0), None, "high", {1: 2}, float("nan")])
def test_what_is_no_number_is_left_to_the_trainer_to_reject(result):
    def reward_fn(sample):
        sample.metrics["a"] = result
        return result

    ((found, metrics),) = call_all(reward_fn, make_samples(1))
    assert not isinstance(found, int | float) or found != found
    assert set(metrics) == {"a"}


HOSTILE = [b"{}\n", b"[]\n", b"[" * 100_000 + b"\n", b"x" * 2**21 + b"\n", b"\xff\n", b"cos\nsystem\n"]


@pytest.mark.parametrize("reply", HOSTILE)
def test_a_hostile_reply_fails_one_sample(reply):
    def reward_fn(sample):
        if sample.key[1] == 1:
            for name in os.listdir("/proc/self/fd"):  # it got hold of the socket
                with suppress(OSError):
                    connection = socket.socket(fileno=int(name))
                    connection.settimeout(0.5)
                    connection.sendall(reply)
            time.sleep(60)
        return 1.0

    first, hostile, last = call_all(reward_fn, make_samples(3), workers=1)
    assert isinstance(hostile, RewardError)
    assert first == last == (1.0, {})


def test_what_cannot_be_pickled_ends_in_one_line():
    (outcome,) = call_all(lambda sample: 1.0, make_samples(1, state={"lock": threading.Lock()}))
    assert isinstance(outcome, UserError)
    assert "cannot pickle" in str(outcome) and "sample.state" in str(outcome)
    assert "set --reward_workers to 0" in str(outcome) and "\n" not in str(outcome)


def test_without_the_nursery_the_run_ends_in_one_line():
    pool = RewardWorkers(lambda sample: 1.0, Config(reward_workers=1))
    os.kill(pool.nursery_pid, signal.SIGKILL)
    with pytest.raises(UserError, match="forks the reward workers has died; set --reward_workers to 0"):
        asyncio.run(pool.call(make_samples(1)[0]))
    pool.close()


def test_elsewhere_than_on_linux_the_run_ends_in_one_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UserError, match="--reward_workers requires Linux; set it to 0"):
        RewardWorkers(lambda sample: 1.0, Config(reward_workers=1))


def test_close_ends_all_processes():
    def see(pool):
        nursery = psutil.Process(pool.nursery_pid)
        family.extend([nursery, *nursery.children(recursive=True)])

    family = []
    call_all(lambda sample: subprocess.Popen(["sleep", "600"]).poll() or 1.0, make_samples(4), then=see)
    assert len(family) >= 3
    assert not psutil.wait_procs(family, timeout=10)[1]


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
    pool = RewardWorkers(reward_fn, Config(reward_workers=2, reward_timeout=600))
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)

    async def gather():
        await asyncio.gather(*[pool.call(sample) for sample in make_samples(2)])

    asyncio.run(gather())
    os._exit(0)
