"""Tests of extras/watchdog.py. Those with the real SGLang run this file as a script, in its own process."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

import train
from extras import watchdog
from extras.sglang_cpu import ARGUMENTS
from extras.watchdog import Patience, extend, limit, set_timeouts, watch
from tests.conftest import HERE, TINY, Config, run
from tests.real_sglang import ON_CPU, SGLANG_ENVIRONMENT, wait_for
from train import UserError

SGLANG_ARGS = json.dumps(ARGUMENTS | {"mem_fraction_static": 0.3})


# ---- Patience ----------------------------------------------------------------------------------------------
def outcomes(seconds: float, *calls) -> list:
    """What calls of one peer return or raise, all at once."""

    async def wait():
        patience = Patience("SGLang", seconds)
        waits = [patience.wait(call(patience)) for call in calls]
        return await asyncio.gather(*waits, return_exceptions=True)

    return asyncio.run(wait())


def sleeper(seconds: float):
    return lambda patience: asyncio.sleep(seconds, result=seconds)


def test_silence_is_death_but_a_queue_is_not():
    # The last one takes longer than 0.5 s, without a gap of 0.5 s between two responses.
    assert outcomes(0.5, sleeper(0.2), sleeper(0.4), sleeper(0.6)) == [0.2, 0.4, 0.6]
    first, second = outcomes(0.5, sleeper(0.2), sleeper(2))
    assert first == 0.2 and isinstance(second, TimeoutError)
    assert str(second) == "SGLang was silent for 0.5 s (--engine_timeout)"


def test_giving_up_ends_all_waits_for_this_peer_and_errors_pass_through():
    async def give_up(patience):
        patience.give_up()

    async def refuse(patience):
        raise ValueError("no")

    refused, ended, _ = outcomes(60, refuse, sleeper(30), give_up)
    assert isinstance(ended, ConnectionError) and str(ended) == "SGLang was given up"
    assert isinstance(refused, ValueError)


# ---- A pretended engine ------------------------------------------------------------------------------------
class PretendedSGLang:
    """What the watchdog uses of sglang.Engine."""

    loop = "a loop"

    def flush_cache(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SGLang's first call installs handlers of its own
        return SimpleNamespace(success=True)

    def release_memory_occupation(self, seconds):
        time.sleep(seconds)
        return "released"

    async def async_generate(self, seconds):
        await asyncio.sleep(seconds)
        return {"slept": seconds}


class PretendedEngine:
    """What the watchdog uses of train.SGLangEngine."""

    def __init__(self, path, tokenizer, mesh, config):
        self.engine = PretendedSGLang()


def start(rank: int = 0, engine_timeout: float = 0.2):
    """A watched engine of a rank of a tensor-parallel group."""
    tp = SimpleNamespace(get_local_rank=lambda: rank)
    return watch(PretendedEngine)("path", None, {"tp": tp}, SimpleNamespace(engine_timeout=engine_timeout))


@pytest.fixture
def ended(monkeypatch):
    """The messages with which the process would have ended; signal handlers are restored."""
    messages = []

    def exit_because(reason):
        messages.append(reason)
        raise SystemExit

    monkeypatch.setattr(watchdog, "exit_because", exit_because)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
    yield messages
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_watched_engine_does_what_the_engine_does(ended):
    engine = start().engine
    assert engine.loop == "a loop"
    assert engine.release_memory_occupation(0.01) == "released"
    assert asyncio.run(engine.async_generate(seconds=0.01)) == {"slept": 0.01}
    time.sleep(0.3)
    assert not ended  # nothing that was in time
    assert isinstance(start(rank=1).engine, PretendedSGLang)  # only the first rank talks to SGLang


def test_the_trainer_starts_the_watched_engine(whole, ended, monkeypatch):
    class Refusing(PretendedEngine):
        def __init__(self, *arguments):
            raise UserError("this one")

    monkeypatch.setattr(train.Trainer, "sglang_class", Refusing)
    watched = extend(train.Trainer)
    assert issubclass(watched.sglang_class, Refusing) and watched.sglang_class is not Refusing
    with pytest.raises(UserError, match="this one"):
        whole(trainer_class=watched, engine="sglang")


def test_all_groups_get_the_timeout(mesh):
    set_timeouts(4321)
    for one in mesh.values():
        backend = one.get_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 4321
    set_timeouts(1800)


def test_a_slow_call_or_start_and_silence_end_the_run(ended, monkeypatch):
    engine = start().engine
    engine.release_memory_occupation(0.5)
    assert ended.pop() == "SGLang: release_memory_occupation took over 0.2 s (--engine_timeout)"
    with pytest.raises(SystemExit):
        asyncio.run(engine.async_generate(seconds=5))
    assert ended.pop() == "SGLang was silent for 0.2 s (--engine_timeout)"
    monkeypatch.setattr(watchdog, "START_SECONDS", 0.1)
    engine_init = PretendedEngine.__init__
    monkeypatch.setattr(PretendedEngine, "__init__", lambda *args: time.sleep(0.5) or engine_init(*args))
    start()
    assert ended == ["SGLang: its start took over 0.2 s (--engine_timeout)"]


def test_the_start_has_at_least_900_seconds(ended, monkeypatch):
    limits = []
    monkeypatch.setattr(
        watchdog, "limit", lambda task, seconds: limits.append(seconds) or limit(task, seconds)
    )
    start(engine_timeout=5)
    assert limits == [900, 5]  # the start, and its first call


def test_an_engine_that_stays_busy_ends_the_run(ended, monkeypatch):
    engine = start().engine
    answers = [SimpleNamespace(success=False), SimpleNamespace(success=False), SimpleNamespace(success=True)]
    monkeypatch.setattr(PretendedSGLang, "flush_cache", lambda self: answers.pop(0))
    assert engine.flush_cache().success and not answers
    monkeypatch.setattr(PretendedSGLang, "flush_cache", lambda self: SimpleNamespace(success=False))
    monkeypatch.setattr(watchdog, "BUSY_SECONDS", 0.2)
    with pytest.raises(SystemExit):
        engine.flush_cache()
    assert ended == ["SGLang is still busy 0.2 s after its last response"]


def test_the_own_handler_of_sigterm_stays_and_sigquit_ends_the_run(ended):
    start()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGQUIT)  # what SGLang sends when a child of it is gone
        time.sleep(1)
    assert ended[0].startswith("SGLang died: one of its processes crashed or was killed")


# A call that is blocked in C, not in Python's own code, with a child that must not outlive it.
FREEZING = """
import ctypes
from multiprocessing import get_context
from time import sleep
from extras.watchdog import limit

if __name__ == "__main__":
    child = get_context("spawn").Process(target=sleep, args=(60,))
    child.start()
    print(child.pid, flush=True)
    with limit("a call", 0.5), limit("a longer one", 50):
        ctypes.CDLL(None).sleep(60)
"""


def test_the_end_is_one_line_and_a_report_to_torchrun(tmp_path):
    report = tmp_path / "error.json"
    script = tmp_path / "freezes.py"
    script.write_text(FREEZING)
    done = run(script, **ON_CPU, TORCHELASTIC_ERROR_FILE=str(report), timeout=50)
    said = "SGLang: a call took over 0.5 s (--engine_timeout)"
    assert (done.returncode, done.stderr) == (1, f"train.py: {said}\n")
    assert json.loads(report.read_text())["message"]["message"] == said
    assert not is_running(int(done.stdout))


# ---- Children and signals ----------------------------------------------------------------------------------
STARTING = """
import multiprocessing, os, signal, sys, time
from extras.watchdog import deaf_children

def sleep():
    time.sleep(60)

if __name__ == "__main__":
    if sys.argv[1] == "during":
        with deaf_children():
            multiprocessing.get_context("spawn").Process(target=sleep).start()
            print("started", flush=True)
            time.sleep(60)
    with deaf_children():
        child = multiprocessing.get_context("spawn").Process(target=sleep, daemon=True)
        child.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child.pid, number)
    child.join(2)
    print("alive", child.is_alive(), flush=True)
    child.kill()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
"""


def test_children_are_deaf_to_signals_unless_these_end_the_parent(tmp_path):
    script = tmp_path / "starts.py"
    script.write_text(STARTING)
    done = run(script, "after", **ON_CPU)
    assert done.stdout == "alive True\n" and done.returncode == -signal.SIGTERM, done.stderr
    command = [sys.executable, script, "during"]
    process = subprocess.Popen(command, env=SGLANG_ENVIRONMENT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"started\n"
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # while the child is still importing
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


# ---- The real SGLang ---------------------------------------------------------------------------------------
def find_schedulers(pid: int) -> list[psutil.Process]:
    """SGLang's scheduler processes below a process; their command lines say so once they are up."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "sglang::scheduler" in " ".join(child.cmdline())]


def survive_and_freeze():
    """Starts a watched SGLang, sends SIGTERM to the whole process group, samples, and freezes SGLang."""
    from transformers import AutoTokenizer

    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    config = Config(device="cpu", dtype="float32", engine="sglang", engine_timeout=20, max_new_tokens=8)
    config.sglang_args = SGLANG_ARGS
    mesh = train.init_distributed(config)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    ids = train.encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])
    engine = watch(train.SGLangEngine)(str(TINY), tokenizer, mesh, config)
    os.killpg(0, signal.SIGTERM)
    time.sleep(3)
    new_ids, *_ = engine.loop.run_until_complete(engine.generate(np.array(ids), 1.0, 0))
    print(f"sampled {len(new_ids) > 0} after {received}", flush=True)
    for scheduler in find_schedulers(os.getpid()):
        scheduler.suspend()
    start = time.monotonic()
    print([child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    if sys.argv[2] == "generate":
        engine.loop.run_until_complete(engine.generate(np.array(ids), 1.0, 0))
    else:
        engine.sleep()
    print(f"not ended after {time.monotonic() - start} s", flush=True)


@pytest.mark.sglang
@pytest.mark.parametrize("call", ["generate", pytest.param("sleep", marks=pytest.mark.slow)])
def test_sglang_survives_a_signal_to_the_run_and_a_freeze_ends_it(call):
    command = [sys.executable, __file__, "survive_and_freeze", call]
    options = {"capture_output": True, "text": True, "timeout": 400, "start_new_session": True}
    done = subprocess.run(command, env=SGLANG_ENVIRONMENT, **options)
    survived, children = done.stdout.splitlines()[-2:]
    assert survived == f"sampled True after [{signal.SIGTERM:d}]", done.stderr[-3000:]
    said = {
        "generate": "train.py: SGLang was silent for 20 s (--engine_timeout)",
        "sleep": "train.py: SGLang: flush_cache took over 20 s (--engine_timeout)",
    }
    assert done.stderr.splitlines().count(said[call]) == 1 and done.returncode == 1, done.stderr[-3000:]
    time.sleep(3)
    assert not [pid for pid in map(int, re.findall(r"\d+", children)) if is_running(pid)]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.sglang
def test_the_death_of_sglang_ends_a_run_with_one_line(tmp_path):
    log = (tmp_path / "log").open("w+")
    command = (
        "-m torch.distributed.run --standalone --nproc_per_node=2 train.py --engine sglang --eval_every 0"
    )
    command += " --prompts_per_step 64 --group_size 4 --max_new_tokens 64 --output_dir"
    command = [sys.executable, *command.split(), tmp_path / "run", "--sglang_args", SGLANG_ARGS]
    training = subprocess.Popen(command, cwd=HERE, env=SGLANG_ENVIRONMENT, stdout=log, stderr=log)
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, training)
        time.sleep(1)  # into the rollout of a step
        children = psutil.Process(training.pid).children(recursive=True)
        schedulers = find_schedulers(training.pid)
        assert len(schedulers) == 2
        start = time.monotonic()
        schedulers[1].kill()
        assert training.wait(timeout=60) != 0
        print(f"ended {time.monotonic() - start:.1f} s after the death of its engine")
    finally:
        training.kill()
        log.seek(0)
        text = log.read()
    assert len(re.findall("train.py: SGLang died", text)) == 1, text[-3000:]
    assert "SGLang died" in text.partition("Root Cause")[2]  # torchrun's last words
    time.sleep(3)
    assert not [child for child in children if is_running(child.pid)]


if __name__ == "__main__":
    {"survive_and_freeze": survive_and_freeze}[sys.argv[1]]()
