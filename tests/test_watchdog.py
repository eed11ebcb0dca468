"""Tests of extras/watchdog.py. Those with the real SGLang run this file as a script, in its own process."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

import train
from extras import watchdog
from extras.watchdog import Patience, deadline, extend, set_timeouts, watch
from tests.conftest import Config

HERE = Path(__file__).resolve().parent.parent
TINY = HERE / "assets/tiny"
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "PYTHONPATH": f"{HERE}:{HERE / '.ci/sglang_cpu'}",
}


SGLANG_ARGS = {  # what runs without CUDA kernels
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.3,
}


# ---- Patience ----------------------------------------------------------------------------------------------
def test_silence_is_death_but_a_queue_is_not():
    async def wait(*seconds):
        patience = Patience("SGLang", 0.5)
        calls = [patience.wait(asyncio.sleep(s, result=s)) for s in seconds]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert asyncio.run(wait(0.2, 0.4, 0.6)) == [
        0.2,
        0.4,
        0.6,
    ]  # the last one is longer than .5, without a gap
    first, second = asyncio.run(wait(0.2, 2))
    assert first == 0.2
    assert isinstance(second, TimeoutError)
    assert str(second) == "SGLang was silent for 0.5 s (--engine_timeout)"


def test_giving_up_ends_all_waits_for_this_peer_only():
    async def wait():
        one, other = Patience("one", 60), Patience("other", 60)
        asyncio.get_running_loop().call_later(0.1, one.give_up)
        calls = [one.wait(asyncio.sleep(30)), other.wait(asyncio.sleep(0.3, 5))]
        return await asyncio.gather(*calls, return_exceptions=True)

    ended, result = asyncio.run(wait())
    assert isinstance(ended, ConnectionError) and str(ended) == "one was given up"
    assert result == 5


def test_an_error_of_the_call_passes_through():
    async def refuse():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(Patience("SGLang", 1).wait(refuse()))


# ---- Deadlines ---------------------------------------------------------------------------------------------
def test_deadlines_nest_and_leave_nothing_behind():
    fired = []
    handler = signal.getsignal(signal.SIGALRM)
    with deadline(0.2, lambda: fired.append("outer")):
        with deadline(0.1, lambda: fired.append("inner")):
            time.sleep(0.15)
        with deadline(9, lambda: fired.append("never")):
            pass
        time.sleep(0.2)
    assert fired == ["inner", "outer"]
    assert signal.getsignal(signal.SIGALRM) is handler
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


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


class Leader:
    """The mesh of a process that is alone."""

    def get_local_rank(self):
        return 0


MESH = {"tp": Leader()}


@pytest.fixture
def ended(monkeypatch):
    """The messages with which the process would have ended."""
    messages = []

    def exit_because(reason):
        messages.append(reason)
        raise SystemExit

    monkeypatch.setattr(watchdog, "exit_because", exit_because)
    return messages


@pytest.fixture
def engine(ended):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
    yield watch(PretendedEngine)("a path", None, MESH, SimpleNamespace(engine_timeout=0.2)).engine
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_watched_engine_does_what_the_engine_does(engine, ended):
    assert engine.loop == "a loop"
    assert engine.release_memory_occupation(0.01) == "released"
    assert asyncio.run(engine.async_generate(seconds=0.01)) == {"slept": 0.01}
    assert not ended


def test_only_the_first_rank_of_a_group_watches(monkeypatch):
    monkeypatch.setattr(Leader, "get_local_rank", lambda self: 1)
    follower = watch(PretendedEngine)("a path", None, MESH, SimpleNamespace(engine_timeout=0.2))
    assert isinstance(follower.engine, PretendedSGLang)


def test_extend_makes_the_trainer_start_the_watched_engine(monkeypatch):
    monkeypatch.setattr(train.Trainer, "sglang_class", PretendedEngine)
    found = extend(train.Trainer).sglang_class
    assert issubclass(found, PretendedEngine) and found is not PretendedEngine


def test_all_groups_get_the_timeout(mesh):
    set_timeouts(4321)
    for one in mesh.values():
        backend = one.get_group()._get_backend(torch.device("cpu"))
        assert backend.options._timeout.total_seconds() == 4321
    set_timeouts(1800)


def test_a_slow_call_ends_the_run(engine, ended):
    with pytest.raises(SystemExit):
        engine.release_memory_occupation(5)
    assert ended == ["SGLang: release_memory_occupation took over 0.2 s (--engine_timeout)"]


def test_a_silent_engine_ends_the_run(engine, ended):
    with pytest.raises(SystemExit):
        asyncio.run(engine.async_generate(seconds=5))
    assert ended == ["SGLang was silent for 0.2 s (--engine_timeout)"]


def test_a_slow_start_ends_the_run(ended, monkeypatch):
    monkeypatch.setattr(watchdog, "START_SECONDS", 0.1)
    monkeypatch.setattr(PretendedEngine, "__init__", lambda *args: time.sleep(5))
    with pytest.raises(SystemExit):
        watch(PretendedEngine)("a path", None, MESH, SimpleNamespace(engine_timeout=0.2))
    assert ended == ["SGLang: its start took over 0.2 s (--engine_timeout)"]


def test_an_engine_that_stays_busy_ends_the_run(engine, ended, monkeypatch):
    answers = [SimpleNamespace(success=False), SimpleNamespace(success=False), SimpleNamespace(success=True)]
    monkeypatch.setattr(PretendedSGLang, "flush_cache", lambda self: answers.pop(0))
    assert engine.flush_cache().success and not answers
    monkeypatch.setattr(PretendedSGLang, "flush_cache", lambda self: SimpleNamespace(success=False))
    monkeypatch.setattr(watchdog, "BUSY_SECONDS", 0.2)
    with pytest.raises(SystemExit):
        engine.flush_cache()
    assert ended == ["SGLang is still busy 0.2 s after its last response"]


def test_the_end_is_one_line_and_a_report_to_torchrun(tmp_path):
    report = tmp_path / "error.json"
    command = [sys.executable, "-c", "from extras.watchdog import exit_because; exit_because('it froze')"]
    environment = ENVIRONMENT | {"TORCHELASTIC_ERROR_FILE": str(report)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "train.py: it froze\n")
    assert json.loads(report.read_text())["message"]["message"] == "it froze"


def test_the_start_has_at_least_900_seconds(monkeypatch):
    seconds = []
    monkeypatch.setattr(watchdog, "limit", lambda task, limit: seconds.append(limit) or deadline(limit, None))
    sigquit = signal.getsignal(signal.SIGQUIT)
    watch(PretendedEngine)("a path", None, MESH, SimpleNamespace(engine_timeout=5))
    signal.signal(signal.SIGQUIT, sigquit)
    assert seconds == [900, 5]  # the start, and its first call


def test_the_own_handler_of_sigterm_stays(engine, ended):
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGQUIT)  # what SGLang sends when a child of it is gone
        time.sleep(1)
    assert ended[0].startswith("SGLang died: one of its processes crashed or was killed")


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
    after = [sys.executable, script, "after"]
    done = subprocess.run(after, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout == "alive True\n" and done.returncode == -signal.SIGTERM, done.stderr
    process = subprocess.Popen([sys.executable, script, "during"], env=ENVIRONMENT, stdout=subprocess.PIPE)
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
    config.sglang_args = json.dumps(SGLANG_ARGS)
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
    done = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=400, start_new_session=True
    )
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


def wait_for(condition, process: subprocess.Popen, seconds: int = 300):
    """Waits until a condition holds, while a process lives."""
    for _ in range(10 * seconds):
        if condition():
            return
        assert process.poll() is None, "the process ended"
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s")


@pytest.mark.sglang
def test_the_death_of_sglang_ends_a_run_with_one_line(tmp_path):
    log = (tmp_path / "log").open("w+")
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "train.py",
    ]
    flags = ["--engine", "sglang", "--prompts_per_step", "64", "--group_size", "4", "--max_new_tokens", "64"]
    flags += [
        "--eval_every",
        "0",
        "--output_dir",
        str(tmp_path / "run"),
        "--sglang_args",
        json.dumps(SGLANG_ARGS),
    ]
    training = subprocess.Popen(launcher + flags, cwd=HERE, env=ENVIRONMENT, stdout=log, stderr=log)
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
