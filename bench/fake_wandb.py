"""Servers of Weights & Biases that fail, for bench.faults: closed, silent, or lost in the middle of a run.

Each is a context manager that yields further environment variables and further flags.
"""

import gzip
import json
import socket
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ME = dict(id="bWU=", username="me", entity="me", flags="{}", teams=dict(edges=[]))
PROJECT = dict(id="cA==", name="grpo", entity=dict(id="bWU=", name="me"))
BUCKET = dict(
    id="cg==",
    name="run",
    displayName="run",
    description=None,
    config="{}",
    sweepName=None,
    project=PROJECT,
    historyLineCount=0,
)


def at(port: int) -> tuple[dict, dict]:
    """The environment and flags of a run whose wandb is at this port."""
    return dict(WANDB_BASE_URL=f"http://127.0.0.1:{port}"), {}


@contextmanager
def closed(folder: Path):
    """A port at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield at(free.getsockname()[1])


@contextmanager
def silent(folder: Path):
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        yield at(server.getsockname()[1])


@contextmanager
def lost(folder: Path):
    """A server that answers until the fault's note exists, and then drops every request."""
    server = Server(("127.0.0.1", 0), partial(Answers, folder.parent / "note"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield at(server.server_port)
    finally:
        server.shutdown()
        server.server_close()


class Server(ThreadingHTTPServer):
    """Serves many requests at once, and is silent about those that broke off."""

    request_queue_size = 1024
    daemon_threads = True

    def handle_error(self, *who):
        """Ignores a run that has ended without reading its answer."""


class Answers(BaseHTTPRequestHandler):
    """Just enough of wandb for `wandb.init(mode="online")`, as the client of wandb 0.31 asks."""

    def __init__(self, note: Path, *parts):
        self.note = note
        super().__init__(*parts)

    def log_message(self, *parts):
        """Says nothing."""

    def do_POST(self):
        """One request."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.note.exists():
            return
        found = {}
        if self.path == "/graphql":
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            found = dict(data=self.answer(json.loads(body)))
        text = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST

    def answer(self, asked: dict) -> dict:
        """The data for a query."""
        query = asked["query"]
        if "upsertBucket" in query:
            return dict(upsertBucket=dict(bucket=BUCKET, inserted=True))
        if "createRunFiles" in query:
            url = f"http://127.0.0.1:{self.server.server_port}/file"
            files = [dict(name=name, uploadUrl=url) for name in asked["variables"]["files"]]
            return dict(createRunFiles=dict(runID=BUCKET["id"], uploadHeaders=[], files=files))
        version = dict(cliVersionInfo=dict(max_cli_version="9.0.0"), latestLocalVersionInfo=None, features=[])
        return dict(serverInfo=version, viewer=ME, model=None, project=None, entity=None)
