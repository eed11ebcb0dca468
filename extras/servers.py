"""--engine http://host:port[,http://...]: SGLang servers that are already running, also on other machines.

`ServerEngine` follows the engine protocol of train.py. It balances requests over the servers, gives a failed
server's requests to the others, and broadcasts new weights to all of them. Each token carries the version of
the weights that sampled it, so a push may come in the middle of a completion.
"""

import asyncio
import json
import math
import os
import resource
import socket
import uuid
from collections import ChainMap, Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import AutoConfig

from extras import watchdog
from train import UserError

MAX_FAILURES = 3  # broken responses to one request before its server is given up
RETRY_SECONDS = 1.0
FLUSH_ATTEMPTS = 600  # a paused server stays busy for a moment, and refuses to flush its cache until then
FLUSH_SECONDS = 0.05  # between two attempts


# ---- The flag, and responses -----------------------------------------------------------------------------
def parse_urls(engine: str) -> list[str]:
    """Splits the value of --engine into URLs. Raises UserError for anything but http(s)://host[:port]."""
    urls = [url.strip().rstrip("/") for url in engine.split(",")]
    for url in urls:
        parts = urlsplit(url)
        try:
            is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port that is not a number up to 65535
            is_valid = False
        if not is_valid:
            raise UserError(f"--engine must be sglang, local or http://host:port[,http://...], not {url!r}")
        if "@" in parts.netloc:
            raise UserError("--engine holds a user or a password, which config.json would show: use a proxy")
    if len(set(urls)) < len(urls):
        raise UserError(f"--engine names a server twice: {engine}")
    return urls


def parse_response(response: dict, version: int) -> tuple[list[int], list[float], list[int], bool]:
    """Reads a response of /generate: ids [T], log-probs [T], weight versions [T], whether it was truncated.

    Tokens have `version` unless the response names another one. A missing log-prob becomes NaN. Raises
    UserError if SGLang aborted the request, ConnectionError if the response is malformed.
    """
    try:
        info = response["meta_info"]
        reason = info["finish_reason"]
        if reason["type"] == "abort":
            raise UserError(f"SGLang aborted a request: {reason.get('message')}")
        tokens = info["output_token_logprobs"]
        ids = [int(token[1]) for token in tokens]
        logprobs = [math.nan if token[0] is None else float(token[0]) for token in tokens]
        versions = [version] * len(ids)
        for span in info.get("weight_versions", []):  # present if a push came in the middle of the completion
            if span["version"].isdigit():
                count = span["end"] - span["start"]
                versions[span["start"] : span["end"]] = [int(span["version"])] * count
        if not len(ids) == len(versions) == info["completion_tokens"]:
            raise ValueError(f"{len(ids)} log-probs and {len(versions)} versions for the tokens")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConnectionError(f"malformed response from SGLang: {error!r}: {str(response)[:200]}") from error
    return ids, logprobs, versions, reason["type"] == "length"


# ---- One server ------------------------------------------------------------------------------------------
class Server:
    """One SGLang server: HTTP calls, and the process group that carries weights from rank 0 to it.

    Each server has a group of its own, so that one may die during a push (with gloo; NCCL's watchdog ends the
    run after --engine_timeout). Methods raise ConnectionError or TimeoutError if the server failed, UserError
    if it refused.
    """

    def __init__(self, url: str, timeout: float, backend: str):
        self.url = url
        self.backend = backend
        self.patience = watchdog.Patience(url, timeout)
        self.open_requests = 0  # from this rank
        self.failure = ""  # why it was given up
        self.session = None
        self.group_name = ""
        self.group = None

    async def post(self, path: str, **payload) -> dict:
        """Calls one endpoint and returns its JSON object, or {} if the response is plain text."""
        import aiohttp  # SGLang depends on it; nothing else here needs it

        if self.session is None:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            no_limit = aiohttp.ClientTimeout(total=None)
            self.session = aiohttp.ClientSession(connector=connector, timeout=no_limit)
        method = "GET" if path == "server_info" else "POST"

        async def request() -> tuple[int, str]:
            async with self.session.request(method, f"{self.url}/{path}", json=payload) as response:
                return response.status, await response.text(errors="replace")

        try:
            status, text = await self.patience.wait(request())
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{self.url} failed: {type(error).__name__} {error}") from error
        if status >= 500:
            raise ConnectionError(f"{self.url} failed: {path} returned HTTP {status}")
        try:
            response = json.loads(text) if text.startswith("{") else {}
        except ValueError as error:
            raise ConnectionError(f"{self.url} failed: {path} returned {text[:200]!r}") from error
        if status >= 400 or response.get("success") is False:
            raise UserError(f"{self.url} refused {path}: {text[:300]}")
        return response

    async def connect(self):
        """Creates the process group: this rank is its first member, the server's ranks are the others."""
        from sglang.srt.utils import init_custom_process_group

        info = await self.post("server_info")
        with suppress(UserError):  # as usual, none is open
            await self.post("end_weight_update")  # left open by a run that was killed during a push
        host, port = self.find_address()
        self.group_name = f"weights-{uuid.uuid4().hex[:8]}"
        shared = {"world_size": 1 + info["tp_size"], "group_name": self.group_name, "backend": self.backend}
        own = {"init_method": f"tcp://{host}:{port}", "rank": 0} | shared
        own["timeout"] = timedelta(seconds=self.patience.seconds)
        theirs = {"master_address": host, "master_port": port, "rank_offset": 1} | shared
        join = asyncio.to_thread(init_custom_process_group, **own)
        invite = self.post("init_weights_update_group", **theirs)
        self.group, _ = await asyncio.gather(join, invite)

    def find_address(self) -> tuple[str, int]:
        """This machine's address as the server sees it, and a free port."""
        parts = urlsplit(self.url)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        with socket.create_connection((parts.hostname, port)) as connection:
            host = connection.getsockname()[0]
        with socket.socket() as free:
            free.bind(("", 0))
            return host, free.getsockname()[1]

    async def disconnect(self):
        """Ends the process group. A refusal is ignored: the run is over."""
        leave = asyncio.to_thread(dist.destroy_process_group, self.group)
        dismiss = self.post("destroy_weights_update_group", group_name=self.group_name)
        with suppress(UserError):
            await asyncio.gather(dismiss, leave)

    async def receive(self, flat: torch.Tensor, description: dict):
        """Broadcasts one bucket, `flat` [bytes], to the server, and tells it over HTTP what the bytes are."""

        def broadcast():
            if flat.is_cuda:
                torch.cuda.set_device(flat.device)  # a new thread starts with the first GPU
            dist.broadcast(flat, src=0, group=self.group)

        load = self.post("update_weights_from_distributed", group_name=self.group_name, **description)
        try:
            await asyncio.gather(load, asyncio.to_thread(broadcast))
        except (RuntimeError, UserError) as error:  # of gloo, or of a restarted server, which knows no group
            raise ConnectionError(f"{self.url} failed during a push: {error}") from error

    async def flush(self):
        """Empties the cache of the old weights."""
        for _ in range(FLUSH_ATTEMPTS):
            try:
                await self.post("flush_cache")
                return
            except UserError:
                await asyncio.sleep(FLUSH_SECONDS)
        seconds = FLUSH_ATTEMPTS * FLUSH_SECONDS
        raise TimeoutError(f"{self.url} was still busy {seconds:g} s after it was paused")


# ---- All servers -----------------------------------------------------------------------------------------
class ServerEngine:
    """Several SGLang servers as one engine.

    A request goes to the server with the fewest open requests of this rank. A server that fails or is silent
    is given up for good, on all ranks, and its requests are repeated on the others: a partial completion is
    lost, a sample is not. Rank 0 broadcasts the weights.
    """

    def __init__(self, path: str, tokenizer, mesh, config):
        self.config = config
        self.version = 0
        self.loop = asyncio.new_event_loop()
        self.rank, self.ranks = mesh["tp"].get_local_rank(), mesh["tp"].size()
        self.vocab_size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
        self.reported: set[str] = set()  # servers whose loss was printed
        # Explicit, because a server may have other defaults.
        self.sampling = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
        self.sampling["stop_token_ids"] = [tokenizer.eos_token_id]
        urls = parse_urls(config.engine)
        first = dist.get_rank() % len(urls)  # among equally busy servers, each rank prefers another one
        backend = "nccl" if config.device == "cuda" else "gloo"
        timeout = getattr(config, "engine_timeout", watchdog.Flags.engine_timeout)
        self.servers = [Server(url, timeout, backend) for url in urls[first:] + urls[:first]]
        # SGLang's process groups would otherwise wait at torchrun's store.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # each open request is a socket
        if dist.get_rank() == 0:
            self.connect()

    @property
    def alive(self) -> list[Server]:
        """The servers that were not given up."""
        return [server for server in self.servers if not server.failure]

    # ---- Sampling ----
    def local_prompts(self, prompts: list) -> list:
        """The prompts of the tensor-parallel group that this rank plays: every rank its part."""
        return prompts[self.rank :: self.ranks]

    async def generate(
        self, ids: np.ndarray, temperature: float, seed: int, max_new_tokens: int | None = None
    ) -> tuple[list[int], list[float], list[int], bool]:
        """Samples a completion of `ids` [T]. Returns ids [t], log-probs [t], versions [t], truncated.

        SGLang uses the seed only in its deterministic mode (--enable-deterministic-inference of the server).
        Raises UserError if no server is left, or if one refuses the request.
        """
        sampling = self.sampling | {"temperature": temperature, "sampling_seed": seed}
        sampling["max_new_tokens"] = max_new_tokens or self.config.max_new_tokens
        payload = {"input_ids": np.asarray(ids).tolist(), "sampling_params": sampling}
        payload["return_logprob"] = True
        failures = Counter()
        while self.alive:
            server = min(self.alive, key=lambda server: server.open_requests)
            server.open_requests += 1
            try:
                response = await server.post("generate", **payload)
                completion = parse_response(response, self.version)
                if not str(response["meta_info"].get("weight_version")).isdigit():
                    why = "has weights that this run did not push; was it restarted?"
                    raise TimeoutError(f"{server.url} {why}")
                return completion
            except ConnectionError as error:
                failures[server] += 1
                if failures[server] == MAX_FAILURES:
                    self.give_up(server, error)
                else:
                    await asyncio.sleep(failures[server] * RETRY_SECONDS)
            except TimeoutError as error:
                self.give_up(server, error)
            finally:
                server.open_requests -= 1
        raise self.none_left()

    def sleep(self):
        """Does nothing: the servers have GPUs of their own."""

    # ---- Weights ----
    def push(self, buckets: Iterable[list[tuple[str, torch.Tensor]]]):
        """Sends new weights to all servers; requests in flight wait and then continue.

        All ranks call it together; each bucket is emptied once it is sent. Raises UserError if no server is
        left, or if one refuses.
        """
        self.version += 1
        is_sender = dist.get_rank() == 0
        self.agree_on_failures()
        if is_sender:
            self.run_on_all(Server.post, "pause_generation", mode="retract")  # requests return to the queue
            self.run_on_all(Server.post, "begin_weight_update")
        for bucket in buckets:  # making a bucket is collective: all ranks take part
            if is_sender:
                self.send(bucket)
            bucket.clear()  # freed before the next one is made
        if is_sender:
            self.run_on_all(Server.post, "end_weight_update")
            self.run_on_all(Server.flush)
            self.run_on_all(Server.post, "continue_generation")
        self.agree_on_failures()

    def send(self, bucket: list[tuple[str, torch.Tensor]]):
        """Broadcasts one bucket of whole tensors as one flat tensor."""
        description = {
            "names": [name for name, _ in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": str(self.version),
        }
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in bucket])  # [bytes]
        self.run_on_all(Server.receive, flat, description)

    # ---- Life and death of servers ----
    def connect(self):
        """Connects rank 0 to each server. Raises UserError if one cannot be used."""
        for server in self.servers:
            try:
                self.run_coroutine(server.connect())
            except OSError as error:
                raise UserError(f"--engine {server.url} cannot be used: {error}") from error
            except ImportError as error:
                needed = f"requires sglang here, too ({error}): pip install -r requirements.txt"
                raise UserError(f"--engine {server.url} {needed}") from error

    def close(self):
        """Leaves the servers as they were found, except for their weights."""
        if dist.get_rank() == 0:
            self.run_on_all(Server.disconnect)
        for server in self.servers:
            if server.session:
                self.run_coroutine(server.session.close())

    def run_on_all(self, action, *args, **options):
        """Awaits `action(server, ...)` for all servers at once, and gives up those that fail."""

        async def attempt(server: Server):
            try:
                await action(server, *args, **options)
            except (ConnectionError, TimeoutError) as error:
                self.give_up(server, error)

        async def attempt_all():
            await asyncio.gather(*map(attempt, self.alive))

        self.run_coroutine(attempt_all())

    def run_coroutine(self, coroutine):
        """Runs a coroutine on the loop, which may be running in another thread. Returns its result."""
        if self.loop.is_running():
            return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()
        return self.loop.run_until_complete(coroutine)

    def give_up(self, server: Server, error: Exception | str):
        """Never calls this server again: it might return with other weights. Must be called on the loop."""
        if not server.failure:
            server.failure = str(error)
            server.patience.give_up()

    def none_left(self) -> UserError:
        """The error that says why each server was given up."""
        return UserError(f"no SGLang server is left: {'; '.join(server.failure for server in self.servers)}")

    def agree_on_failures(self):
        """Gives up, on all ranks, the servers that any rank gave up. Raises UserError if none is left."""
        parts = [None] * dist.get_world_size()
        own = {server.url: server.failure for server in self.servers if server.failure}
        dist.all_gather_object(parts, own)
        failures = dict(ChainMap(*parts))

        async def give_up_all():
            for server in self.servers:
                if server.url in failures:
                    self.give_up(server, failures[server.url])

        self.run_coroutine(give_up_all())
        if not self.alive:
            raise self.none_left()
        for server in self.servers:
            if server.failure and server.url not in self.reported and dist.get_rank() == 0:
                self.reported.add(server.url)
                tqdm.write(f"continuing without {server.url}: {server.failure}")


Engine = ServerEngine  # the name by which train.py finds it
