"""Tests of extras/wandb_log.py. That the last numbers survive SGLang's end is in test_sglang_cpu.py."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest.mock import Mock

import pytest
import wandb

from extras import wandb_log
from tests.conftest import VariantTrainer, run
from train import UserError


def test_a_run_logs_offline_where_wandb_cannot_be_reached(monkeypatch, tmp_path, capsys):
    asked = []

    def init(mode, **options):
        asked.append((mode, options["settings"].finish_timeout))
        if mode == "online":
            raise error

    monkeypatch.setattr(wandb, "init", init)
    error = wandb.errors.CommError("connection refused")
    wandb_log.start("online", project="grpo", dir=tmp_path)
    assert asked == [("online", 60), ("offline", 60)]
    assert f"wandb: connection refused; logged in {tmp_path}/wandb" in capsys.readouterr().out
    error = wandb.errors.AuthenticationError("no such key")
    with pytest.raises(UserError, match="--wandb online: no such key"):
        wandb_log.start("online", project="grpo", dir=tmp_path)


@pytest.fixture
def calls(monkeypatch):
    """What is asked of Weights & Biases, whose `run` stays set when it has ended."""
    calls = []
    monkeypatch.setattr(wandb, "run", None)
    monkeypatch.setattr(wandb, "init", lambda **options: monkeypatch.setattr(wandb, "run", options["mode"]))
    monkeypatch.setattr(wandb, "log", lambda metrics, step: calls.append((step, metrics["loss"])))
    monkeypatch.setattr(wandb, "teardown", lambda code: calls.append(f"end with {code}"))
    return calls


def make(whole, calls, **flags):
    trainer = whole(trainer_class=wandb_log.extend(VariantTrainer), steps=2, **flags)
    trainer.step = lambda: ({"loss": 0.5}, [])
    trainer.eval_data = []
    write = trainer.write
    trainer.write = lambda step, metrics, samples: write(step, {"loss": 0.5}, samples)
    trainer.engine.close = lambda: calls.append("engine closed")
    return trainer


def test_numbers_are_logged_and_the_log_ends_before_the_engine(whole, calls):
    make(whole, calls, wandb="offline").fit()
    assert calls == [(0, 0.5), (1, 0.5), (2, 0.5), "end with 0", "engine closed"]


@pytest.mark.parametrize("error, code", [(UserError("over"), 1), (KeyboardInterrupt(), 0)])
def test_a_run_that_is_ended_early_ends_its_log(whole, calls, error, code):
    trainer = make(whole, calls, wandb="online")
    trainer.publish = Mock(side_effect=error)
    with pytest.raises(type(error)):
        trainer.fit()
    assert calls == [f"end with {code}"]


def test_without_the_flag_a_run_of_the_users_own_is_left_alone(whole, calls, monkeypatch):
    monkeypatch.setattr(wandb, "init", pytest.fail)
    monkeypatch.setattr(wandb, "run", "the user's own")
    make(whole, calls).fit()
    assert calls == ["engine closed"]


# ---- A server that fails ---------------------------------------------------------------------------------
PROGRAM = """
import sys
import wandb
from extras import wandb_log
wandb_log.SECONDS = 3
wandb_log.start("online", project="grpo", dir=sys.argv[1])
for step in range(3):
    wandb.log({"loss": 0.5}, step=step)
wandb.teardown(0)
"""
PROJECT = {"id": "cA==", "name": "grpo", "entity": {"id": "bWU=", "name": "me"}}
BUCKET = {"id": "cg==", "name": "run", "displayName": "run", "config": "{}", "project": PROJECT}
VERSION = {"cliVersionInfo": {"max_cli_version": "9.0.0"}, "latestLocalVersionInfo": None, "features": []}
VIEWER = {"id": "bWU=", "username": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}
ANSWER = {"serverInfo": VERSION, "viewer": VIEWER, "model": None, "project": None, "entity": None}
ANSWER["upsertBucket"] = {"bucket": BUCKET | {"historyLineCount": 0}, "inserted": True}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["an error", "it goes"])
def test_a_run_goes_on_without_its_server(tmp_path, fault):
    """The real client, with a server that answers every request with an error, or is gone after the start."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path.endswith("file_stream"):  # the first numbers
                gone.set()
            if gone.is_set():
                return
            body = json.dumps({"data": ANSWER}).encode()
            self.send_response(500 if fault == "an error" else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_POST

        def log_message(self, *arguments):
            pass

    gone = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_port}", "WANDB_API_KEY": "0" * 40}
        done = run("-c", PROGRAM, tmp_path, WANDB_INIT_TIMEOUT="5", **address)
        server.shutdown()
    assert done.returncode == 0, done.stderr[-3000:]
    is_offline = f"logged in {tmp_path}/wandb, for `wandb sync`" in done.stdout
    assert is_offline == (fault != "it goes") and gone.is_set() == (fault == "it goes")
    (log,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb" if is_offline else "run-*/*.wandb")
    assert log.read_bytes().count(b"loss") >= 3
