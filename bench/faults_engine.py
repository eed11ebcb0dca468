"""The faults of an engine, for `python -m bench.faults --only engine`: they need the real sglang.

SGLang dies (SIGKILL) or hangs (SIGSTOP): rank 1's scheduler where it is colocated, otherwise one of two
servers. And a server returns invalid answers: a proxy spoils one of them, or all from an instant on.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from bench.fake_wandb import Server
from bench.faults import Case, injected
from bench.measure import ASSETS, ROOT

CPU = dict(SGLANG_USE_CPU_ENGINE="1", PYTHONPATH=f"{ROOT}/.ci/sglang_cpu", SGLANG_CPU_OMP_THREADS_BIND="0")
SERVER = [
    "-m",
    "sglang.launch_server",
    "--model-path",
    str(ASSETS / "tiny"),
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--grammar-backend",
    "none",
    "--disable-cuda-graph",
    "--max-total-tokens",
    "32768",
    "--skip-tokenizer-init",
    "--sleep-on-idle",
]
SPOILED = ("half its tokens", "no tokens", "no log-probs", "no meta_info", "half of the JSON", "no JSON")
SILENCE = 30  # --engine_timeout


def engine_cases() -> list[Case]:
    """All of them."""
    found = []
    for how in ("KILL", "STOP"):
        for place, around in (("colocated", colocated), ("one of two servers", two_servers)):
            cases = injected(
                "engine",
                "signal",
                ("rollout 1", "push 3", "evaluation 4"),
                1,
                around=around,
                FAULT_SIGNAL=how,
            )
            found += [replace(case, fault=f"{place}, {how}") for case in cases]
            if around is colocated:  # with one process, no other rank is there to notice
                found += [
                    replace(
                        case,
                        fault=f"{place}, {how}, one process",
                        env=case.env | dict(FAULT_RANK="0"),
                        processes=1,
                    )
                    for case in cases
                ]
    for kind in SPOILED:
        for instants, count in ((("rollout 1", "rollout 3", "evaluation 4"), 1), (("rollout 3",), 10**9)):
            cases = injected("engine", "answers", instants, around=partial(spoiling, kind, count))
            found += [
                replace(case, fault=f"{'one answer has' if count == 1 else 'all answers have'} {kind}")
                for case in cases
            ]
    return [replace(case, flags=dict(engine_timeout=SILENCE), patience=4.0 * SILENCE) for case in found]


# ---- Engines -----------------------------------------------------------------------------------------------
@contextmanager
def colocated(folder: Path):
    """SGLang in the run's own processes."""
    yield CPU, dict(engine="sglang", sglang_args='{"sleep_on_idle": true}')


@contextmanager
def two_servers(folder: Path):
    """Two servers: one that stays, and one that the fault hits."""
    process, url = launch(folder.parent / "server")
    try:
        ready(process, url)
        yield CPU | dict(FAULT_GROUP=str(process.pid)), dict(engine=f"{url},{steady()}")
    finally:
        end(process)


@contextmanager
def spoiling(kind: str, count: int, folder: Path):
    """A server behind a proxy, which spoils `count` answers once the fault's note exists."""
    note = folder.parent / "note"
    lock = threading.Lock()
    left = [count]

    def spoil(body: bytes) -> bytes:
        with lock:
            due = note.exists() and left[0] > 0
            left[0] -= due
        return spoiled(kind, body) if due else body

    proxy = Server(("127.0.0.1", 0), partial(Proxy, steady(), spoil))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield CPU, dict(engine=f"http://127.0.0.1:{proxy.server_port}")
    finally:
        proxy.shutdown()
        proxy.server_close()


def launch(log: Path) -> tuple[subprocess.Popen, str]:
    """Starts a server of SGLang in a process group of its own. Returns it and its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, *SERVER, "--port", str(port)],
        cwd=ROOT,
        stdout=log.open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=os.environ | CPU | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
    )
    return process, f"http://127.0.0.1:{port}"


def ready(process: subprocess.Popen, url: str):
    """Waits until a server answers."""
    while True:
        try:
            if urllib.request.urlopen(f"{url}/health", timeout=10).status == 200:
                return
        except OSError:
            pass
        if process.poll() is not None:
            sys.exit("a server of SGLang did not start")
        time.sleep(0.5)


@cache
def steady() -> str:
    """The address of a server that no fault hits; started once, it ends with this process."""
    process, url = launch(Path(tempfile.mkstemp()[1]))
    atexit.register(end, process)
    ready(process, url)
    return url


def end(process: subprocess.Popen):
    """Kills a server with all its processes, including frozen ones."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


# ---- Answers -----------------------------------------------------------------------------------------------
def spoiled(kind: str, body: bytes) -> bytes:
    """An answer to `generate` as a broken server would give it."""
    if kind == "no JSON":
        return b"<html>Bad gateway</html>"
    if kind == "half of the JSON":
        return body[: len(body) // 2]
    answer = json.loads(body)
    tokens = answer["meta_info"]["output_token_logprobs"]
    if kind == "no meta_info":
        del answer["meta_info"]
    elif kind == "no log-probs":
        answer["meta_info"]["output_token_logprobs"] = [[None, *others] for _, *others in tokens]
    else:
        answer["meta_info"]["output_token_logprobs"] = tokens[
            : len(tokens) // 2 if kind == "half its tokens" else 0
        ]
    return json.dumps(answer).encode()


class Proxy(BaseHTTPRequestHandler):
    """Forwards every request, and returns every answer; those to `generate` through spoil(body)."""

    def __init__(self, target: str, spoil, *parts):
        self.target = target
        self.spoil = spoil
        super().__init__(*parts)

    def log_message(self, *parts):
        """Says nothing."""

    def do_POST(self):
        """One request."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = urllib.request.Request(
            self.target + self.path,
            body or None,
            method=self.command,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        if self.path == "/generate" and status == 200:
            text = self.spoil(text)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST
