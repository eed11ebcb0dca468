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
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

import train
from extras import watchdog
from extras.local_engine import LocalEngine
from extras.sglang_cpu import ARGUMENTS
from extras.watchdog import Patience, extend, limit, watch
from tests import fake_sglang
from tests.conftest import HERE, TINY, Config, run
from tests.real_sglang import ON_CPU, SGLANG_ENVIRONMENT, wait_for

SGLANG_ARGS = json.dumps(ARGUMENTS | {"mem_fraction_static": 0.3})


# ---- Patience ----------------------------------------------------------------------------------------------
def outcomes(seconds: float, *calls) -> list:
    """What calls of one peer return or raise, all at once; a number sleeps so long."""

    async def wait():
        patience = Patience("SGLang", seconds)
        asked = [call(patience) if callable(call) else asyncio.sleep(call, result=call) for call in calls]
        return await asyncio.gather(*map(patience.wait, asked), return_exceptions=True)

    return asyncio.run(wait())


def test_silence_is_death_but_a_queue_is_not():
    # The last one takes longer than 0.5 s, without a gap of 0.5 s between two responses.
    assert outcomes(0.5, 0.2, 0.4, 0.6) == [0.2, 0.4, 0.6]
    first, second = outcomes(0.5, 0.2, 2)
    assert first == 0.2 and isinstance(second, TimeoutError)
    assert str(second) == "SGLang was silent for 0.5 s (--engine_timeout)"


def test_giving_up_ends_all_waits_for_this_peer_and_errors_pass_through():
    async def give_up(patience):
        patience.give_up()

    async def refuse(patience):
        raise ValueError("no")

    refused, ended, _ = outcomes(60, refuse, 30, give_up)
    assert isinstance(ended, ConnectionError) and str(ended) == "SGLang was given up"
    assert isinstance(refused, ValueError)


# ---- A stand-in for SGLang ---------------------------------------------------------------------------------
class SlowSGLang(fake_sglang.FakeEngine):
    """Takes `naps` seconds for its start and for calls."""

    def __init__(self, **options):
        time.sleep(self.naps.get("start", 0))
        super().__init__(**options)

    def note(self, name: str, *arguments):
        super().note(name, *arguments)
        if name == "flush_cache":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # SGLang's first call installs handlers of its own
        if name != "async_generate":
            time.sleep(self.naps.get(name, 0))

    async def complete(self, input_ids, **sampling):
        await asyncio.sleep(self.naps.get("async_generate", 0))
        reason = {"type": "stop"}
        return {"finish_reason": reason, "output_token_logprobs": [(-1.0, 5, None)], "completion_tokens": 1}


@pytest.fixture
def ended(monkeypatch):
    """The messages with which the process would have ended; what the engine changes is restored."""
    messages = []

    def exit_because(reason):
        messages.append(reason)
        raise SystemExit

    fake_sglang.install(monkeypatch, SlowSGLang)
    monkeypatch.setattr(watchdog, "exit_because", exit_because)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
    sharing = torch.multiprocessing.get_sharing_strategy()
    yield messages
    torch.multiprocessing.set_sharing_strategy(sharing)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(mesh, tokenizer, engine_timeout: float = 0.2, **naps):
    """A watched engine."""
    SlowSGLang.naps = naps
    config = Config(device="cpu", dtype="float32", engine_timeout=engine_timeout, sglang_args="{}")
    return watch(train.SGLangEngine)(str(TINY), tokenizer, mesh, config)


def sample(engine):
    return asyncio.run(engine.generate(np.array([5]), 1.0, 0))


def test_what_is_in_time_ends_nothing(ended, mesh, tokenizer):
    engine = start(mesh, tokenizer, async_generate=0.01, release_memory_occupation=0.01, flush_cache=0.01)
    engine.push(iter([[("a", torch.ones(1))]]))
    assert sample(engine)[0] == (5,)
    engine.sleep()
    time.sleep(0.3)
    names = [name for name, *_ in engine.engine.calls]
    assert not ended and "release_memory_occupation" in names and "end_weight_update" in names


@pytest.mark.parametrize(
    "slow, action, said",
    [
        ("start", lambda engine: None, "SGLang: its start took over 0.2 s"),
        ("flush_cache", lambda engine: engine.sleep(), "SGLang: sleep took over 0.2 s (--engine_timeout)"),
        ("shutdown", lambda engine: engine.close(), "SGLang: shutdown took over 0.2 s"),
        ("async_generate", sample, "SGLang was silent for 0.2 s (--engine_timeout)"),
    ],
)
def test_a_slow_call_or_start_and_silence_end_the_run(
    ended, monkeypatch, mesh, tokenizer, slow, action, said
):
    monkeypatch.setattr(watchdog, "START_SECONDS", 0.1)
    engine = start(mesh, tokenizer, **{slow: 0.5 if slow == "start" else 0})
    engine.engine.naps[slow] = 0.5
    with suppress(SystemExit):
        action(engine)
    assert ended[0].startswith(said)


def test_the_start_has_at_least_900_seconds_and_only_one_rank_waits(ended, monkeypatch, mesh, tokenizer):
    class Rank(train.SGLangEngine):
        def barrier(self):
            """Ranks that are not there."""

    limits = []
    monkeypatch.setattr(watchdog, "limit", lambda *task: limits.append(task) or limit(*task))
    start(mesh, tokenizer, engine_timeout=5)
    assert limits == [("its start", 900)]
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    tp = SimpleNamespace(get_local_rank=group.rank, get_group=lambda: group)
    engine = watch(Rank)(str(TINY), tokenizer, {"tp": tp}, Config(device="cpu"))
    engine.sleep()
    assert len(limits) == 1


def test_the_trainer_has_a_watched_engine_and_all_groups_its_timeout(ended, whole, mesh):
    trainer = whole(trainer_class=extend(train.Trainer), engine_timeout=1440)
    assert isinstance(trainer.engine, LocalEngine)
    trainer.config.engine = "sglang"
    engine = trainer.make_engine()
    assert isinstance(engine, train.SGLangEngine) and "limit" in vars(type(engine))
    for one in mesh.values():
        backend = one.get_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 4320
    watchdog.set_timeouts(1800)


def test_the_own_handler_of_sigterm_stays_and_sigquit_ends_the_run(ended, mesh, tokenizer):
    start(mesh, tokenizer)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGQUIT)  # what SGLang sends when a child of it is gone
        time.sleep(1)
    assert ended[0].startswith("SGLang died: one of its processes crashed or was killed")


# ---- Children and signals ----------------------------------------------------------------------------------
STARTING = """
import ctypes, multiprocessing, os, signal, sys, time
from extras.watchdog import deaf_children, limit

if __name__ == "__main__":
    with deaf_children():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
        print(child.pid, flush=True)
        time.sleep(60 if sys.argv[1] == "during" else 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child.pid, number)
    child.join(2)
    print(child.is_alive(), signal.getsignal(signal.SIGTERM), flush=True)
    with limit("a call", 0.5), limit("a longer one", 50):
        ctypes.CDLL(None).sleep(60)  # blocked in C, not in Python's own code
"""


def test_children_are_deaf_and_the_end_is_one_line_and_a_report_to_torchrun(tmp_path):
    report = tmp_path / "error.json"
    script = tmp_path / "starts.py"
    script.write_text(STARTING)
    done = run(script, "after", **ON_CPU, TORCHELASTIC_ERROR_FILE=str(report), timeout=50)
    child, alive = done.stdout.splitlines()
    assert alive == "True 0"  # the parent's handler is SIG_DFL again
    said = "SGLang: a call took over 0.5 s (--engine_timeout)"
    assert (done.returncode, done.stderr) == (1, f"train.py: {said}\n")
    assert json.loads(report.read_text())["message"]["message"] == said
    assert not is_running(int(child))


def test_a_signal_during_the_start_ends_the_parent_and_its_children(tmp_path):
    script = tmp_path / "starts.py"
    script.write_text(STARTING)
    command = [sys.executable, script, "during"]
    process = subprocess.Popen(command, env=SGLANG_ENVIRONMENT, stdout=subprocess.PIPE)
    assert process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()  # while the child is still importing
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert family and not psutil.wait_procs(family, timeout=10)[1]


# ---- The real SGLang ---------------------------------------------------------------------------------------
def find_schedulers(pid: int) -> list[psutil.Process]:
    """SGLang's scheduler processes below a process; their command lines say so once they are up."""
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if "sglang::scheduler" in " ".join(child.cmdline())]


def survive_and_freeze(call: str):
    """Starts a watched SGLang, sends SIGTERM to the whole process group, samples, and freezes SGLang."""
    from transformers import AutoTokenizer

    received = []
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    config = Config(device="cpu", dtype="float32", engine="sglang", engine_timeout=20, max_new_tokens=8)
    config.sglang_args = SGLANG_ARGS
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    engine = watch(train.SGLangEngine)(str(TINY), tokenizer, train.init_distributed(config), config)
    request = np.array([5, 6, 7]), 1.0, 0
    os.killpg(0, signal.SIGTERM)
    time.sleep(3)
    new_ids, *_ = engine.loop.run_until_complete(engine.generate(*request))
    print(f"sampled {len(new_ids) > 0} after {received}", flush=True)
    for scheduler in find_schedulers(os.getpid()):
        scheduler.suspend()
    print(*[child.pid for child in psutil.Process().children(recursive=True)], flush=True)
    engine.loop.run_until_complete(engine.generate(*request)) if call == "generate" else engine.sleep()


@pytest.mark.sglang
@pytest.mark.parametrize("call", ["generate", pytest.param("sleep", marks=pytest.mark.slow)])
def test_sglang_survives_a_signal_to_the_run_and_a_freeze_ends_it(call):
    options = {"capture_output": True, "text": True, "timeout": 400, "start_new_session": True}
    done = subprocess.run([sys.executable, __file__, call], env=SGLANG_ENVIRONMENT, **options)
    survived, children = done.stdout.splitlines()[-2:]
    assert survived == f"sampled True after [{signal.SIGTERM:d}]", done.stderr[-3000:]
    said = {"generate": "SGLang was silent for 20 s", "sleep": "SGLang: sleep took over 20 s"}[call]
    line = f"train.py: {said} (--engine_timeout)"
    assert done.stderr.splitlines().count(line) == 1 and done.returncode == 1, done.stderr[-3000:]
    time.sleep(3)
    assert not any(map(is_running, map(int, children.split())))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.sglang
def test_the_death_of_sglang_ends_a_run_with_one_line(tmp_path):
    log = (tmp_path / "log").open("w+")
    flags = "--engine sglang --eval_every 0 --prompts_per_step 64 --group_size 4 --max_new_tokens 64"
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc_per_node=2 train.py".split()]
    command += [*flags.split(), "--output_dir", tmp_path / "run", "--sglang_args", SGLANG_ARGS]
    training = subprocess.Popen(command, cwd=HERE, env=SGLANG_ENVIRONMENT, stdout=log, stderr=log)
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, training)
        time.sleep(1)  # into the rollout of a step
        children = psutil.Process(training.pid).children(recursive=True)
        _, scheduler = find_schedulers(training.pid)
        scheduler.kill()
        assert training.wait(timeout=60) != 0
    finally:
        training.kill()
        log.seek(0)
        text = log.read()
    assert len(re.findall("train.py: SGLang died", text)) == 1, text[-3000:]
    assert "SGLang died" in text.partition("Root Cause")[2]  # torchrun's last words
    time.sleep(3)
    assert not any(is_running(child.pid) for child in children)


if __name__ == "__main__":
    survive_and_freeze(sys.argv[1])
