"""Real runs of the embedded job, in two processes, into which faults are injected.

This file is also the program that they run: train.py with a fault in it. The environment variable FAULT names
what happens, on which rank, and when that rank passes an instant for the n-th time; HARMS strike rewards.
"""

import ctypes
import gc
import json
import os
import random
import re
import resource
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

import train
from extras import servers
from extras.checkpoint import checkpoints
from tests.conftest import TINY, Config
from tests.runs import EQUAL, differences, read_metrics, start, wait_for

STEPS = 6
FLAGS = ["--steps", STEPS, "--prompts_per_step", 8, "--group_size", 4, "--max_new_tokens", 32]
FLAGS += ["--eval_every", 2, "--eval_data", "assets/countdown/test.jsonl:train[:8]", "--save_every", 1]
FLAGS += ["--reward_timeout", 2]


# ---- The program -----------------------------------------------------------------------------------------
FAULT = os.environ.get("FAULT", "").split()  # for example SIGKILL 1 update 3
SURVIVED = os.environ.get("SURVIVED", "")  # "harm", or "reference": what such a run must be equal to
HARMS = {  # by the sample's key: what its reward does in a worker
    (9, 0): lambda: 1 / 0,
    (10, 1): lambda: time.sleep(1e6),
    (18, 2): lambda: os.kill(os.getpid(), signal.SIGKILL),
}
SPOILED = 5  # the number of the optimizer step whose gradient is NaN on rank 1: the first one of step 3
COUNTED = ("files", "threads", "processes")
MEASURED = (20, 60)  # the steps after which a long run is measured, if the variable LONG is set
passed = Counter()  # how often this process has passed an instant


def strike(instant: str):
    """The fault, if it is this rank's and this instant's."""
    passed[instant] += 1
    if FAULT[1:] != [str(train.RANK), instant, str(passed[instant])]:
        return
    if FAULT[0] == "full_disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # for a larger file
    else:
        os.kill(os.getpid(), getattr(signal, FAULT[0]))


def reward_fn(sample) -> float:
    """The embedded job's, with an instant in the middle of a rollout."""
    strike("reward")
    if SURVIVED and tuple(sample.key) in HARMS:
        harm = HARMS[sample.key] if SURVIVED == "harm" else HARMS[9, 0]
        harm()
    return train.reward_fn(sample)


class FaultyActor(train.Actor):
    def optimizer_step(self) -> float:
        strike("update")  # between the backward pass and the optimizer step
        if SURVIVED and passed["update"] == SPOILED:
            if SURVIVED == "reference":
                self.optimizer.zero_grad()
                return float("nan")
            if train.RANK == 1:
                next(iter(self.parameters.values())).grad.to_local()[:1] = torch.nan
        return super().optimizer_step()

    def save(self, path, folder: Path):
        super().save(path, folder)
        strike("save")  # a checkpoint's model is complete, its state is not


class Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2() returns."""

    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


class MeasuredTrainer(train.Trainer):
    """Writes down what must not grow."""

    def step(self):
        found = super().step()
        passed["step"] += 1
        if passed["step"] in MEASURED:
            gc.collect()
            mallinfo = ctypes.CDLL(None).mallinfo2
            mallinfo.restype = Mallinfo
            memory = mallinfo()
            processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
            row = {
                "megabytes": (memory.hblkhd + memory.uordblks) / 1e6,  # in use, by large blocks and others
                "objects": sys.getallocatedblocks(),
                "files": sum(process.num_fds() for process in processes),
                "threads": sum(process.num_threads() for process in processes),
                "processes": len(processes),
            }
            with (self.folder / "measured.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        return found


# ---- Runs ------------------------------------------------------------------------------------------------
def launch(folder: Path, *more, processes: int = 2, **environment):
    """Starts this file as a program; RUN_FOLDER marks all processes of the run."""
    command = ["-m", "tests.test_faults", *FLAGS, "--output_dir", folder, *more]
    marks = {"RUN_FOLDER": str(folder)} | environment
    return start(folder.with_suffix(".log"), *command, processes=processes, **marks)


def living(folder: Path) -> list[psutil.Process]:
    """The processes of a run that are left."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_own = process.environ().get("RUN_FOLDER") == str(folder)
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def finish(process, folder: Path, code: int = 0) -> str:
    """Waits for the end of a run, after which none of its processes may live. Returns what it said."""
    try:
        found = process.wait(timeout=300)
        end = time.monotonic() + 5
        while living(folder) and time.monotonic() < end:
            time.sleep(0.1)
        said = folder.with_suffix(".log").read_text()
        assert found == code and not living(folder), said[-3000:]
        return said
    finally:
        for one in living(folder):
            one.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A function that returns the folder of a run to which nothing happened."""

    @cache
    def make(processes: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        finish(launch(folder, processes=processes), folder)
        return folder

    return make


ENDS = [  # FAULT, torchrun's exit code, what is said, and the last step that is saved
    ("SIGKILL 1 reward 30", 1, r"Signal 9 \(SIGKILL\)", 1),
    ("SIGKILL 1 update 3", 1, r"Signal 9 \(SIGKILL\)", 2),
    ("SIGKILL 0 save 2", 1, r"Signal 9 \(SIGKILL\)", 3),
    ("full_disk 0 save 2", 1, r"train.py: \S+/partial could not be written: .* checkpoints are intact", 4),
    ("SIGTERM 1 reward 20", 0, r"SIGTERM: ended after step 5; --resume \S+ continues from there", 5),
]


@pytest.mark.slow
def test_a_run_that_faults_end_time_and_again_equals_one_without_faults(tmp_path, undisturbed):
    folder = tmp_path / "run"
    for fault, code, message, step in ENDS:
        process = launch(folder, "--resume", "auto", FAULT=fault)
        said = finish(process, folder, code)
        assert re.search(message, said), (fault, said[-3000:])
        assert checkpoints(folder)[-1].name == f"checkpoint-{step}", fault
    finish(launch(folder, "--resume", "auto"), folder)
    assert differences(undisturbed(2), folder) == EQUAL
    assert len(read_metrics(folder)) == STEPS + 1


@pytest.mark.slow
@pytest.mark.parametrize("processes, kills", [(0, 2), (2, 2)])
def test_a_run_killed_at_random_instants_equals_one_without_kills(tmp_path, undisturbed, processes, kills):
    """All of its processes at once, each time within the steps after its first checkpoint since the start."""
    folder = tmp_path / "run"
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(kills):
        before = checkpoints(folder)
        process = launch(folder, "--resume", "auto", processes=processes)
        wait_for(lambda: checkpoints(folder) != before, process)
        time.sleep(generator.uniform(0, 1))
        for one in living(folder):
            one.kill()
        process.wait()
    finish(launch(folder, "--resume", "auto", processes=processes), folder)
    assert differences(undisturbed(processes), folder) == EQUAL


@pytest.mark.slow
def test_a_run_survives_failing_rewards_and_a_spoiled_gradient(tmp_path):
    """It equals a run in which the same samples just fail, and the same optimizer step is left out."""
    folder, reference = tmp_path / "run", tmp_path / "reference"
    said = finish(launch(folder, "--reward_workers", 1, SURVIVED="harm"), folder)
    assert "reward_fn or env_step took over 2 s (--reward_timeout)" in (folder / "samples.jsonl").read_text()
    assert "A sample failed" in said
    finish(launch(reference, SURVIVED="reference"), reference)
    assert differences(reference, folder) == EQUAL
    records = read_metrics(folder)
    assert [record.get("failures", 0) * 32 for record in records] == [0, 0, 2, 1, 0, 0, 0]
    assert [record["step"] for record in records[1:] if record["grad_norm"] is None] == [3]


@pytest.mark.slow
def test_a_long_run_keeps_nothing(tmp_path):
    """In 40 steps it may allocate what settles later (its libraries do for some 150 steps), not a leak."""
    folder = tmp_path / "run"
    small = ["--steps", MEASURED[-1], "--prompts_per_step", 4, "--eval_every", 10, "--save_every", 10]
    finish(launch(folder, *small, "--lr", 1e-9, "--reward_workers", 1, processes=0, LONG="1"), folder)
    before, after = [json.loads(line) for line in (folder / "measured.jsonl").open()]
    assert [after[name] for name in COUNTED] == [before[name] for name in COUNTED]
    assert after["objects"] - before["objects"] < 50 * 40  # a sample has about 40
    assert after["megabytes"] - before["megabytes"] < 4  # a copy of the weights has 2.6


# ---- Servers ---------------------------------------------------------------------------------------------
INFO = {"output_token_logprobs": [[-0.5, 7, None]], "completion_tokens": 1, "weight_version": "0"}
INFO["finish_reason"] = {"type": "stop"}
GOOD = json.dumps({"meta_info": INFO}).encode()
BROKEN = {"an error": (500, GOOD), "no JSON": (200, b"<html>Bad gateway</html>"), "half": (200, GOOD[:40])}


@pytest.mark.sglang  # for aiohttp, which comes with it
@pytest.mark.parametrize("answer", [*BROKEN, "none"])
def test_a_request_is_repeated_after_broken_answers(monkeypatch, mesh, tokenizer, answer):
    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            left = answers.pop()
            if left != "none":
                status, body = BROKEN.get(left, (200, GOOD))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    async def connect(self):
        """Without a group for weights."""

    answers = ["good", answer, answer]
    monkeypatch.setattr(servers, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(servers.Server, "connect", connect)
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        flags = {"engine": f"http://127.0.0.1:{server.server_port}", "device": "cpu", "engine_timeout": 60}
        engine = servers.ServerEngine(str(TINY), tokenizer, mesh, Config(**flags))
        ids, *_ = engine.loop.run_until_complete(engine.generate(np.array([5, 6]), 1.0, 0))
        server.shutdown()
    assert list(ids) == [7] and not answers and len(engine.alive) == 1


if __name__ == "__main__":
    train.Actor = FaultyActor
    trainer = MeasuredTrainer if os.environ.get("LONG") else train.Trainer
    train.main(reward_fn=reward_fn, trainer=trainer)
