"""The two ways to reach SGLang: colocated, in processes on the trainer's own GPUs, and over HTTP, on servers elsewhere.

`SGLangEngine` in train.py decides what to sample and what to push; it speaks through one of these. Both have `loop`, on
which requests run, and: generate (one request), sleep (before an update), begin, send and end (a push), close.
"""
import asyncio
import json
import math
import os
import resource
import signal
import socket
import time
import uuid
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from packaging.version import Version

from tools.inputs import UserError
from tools.runlog import end, say
from tools.waits import Patience, deadline


FRAME = ("begin_weight_update", "end_weight_update")
START = 900             # seconds, at least, for SGLang to load a model and its kernels in


def recent(version: str) -> bool:
    """Whether this sglang is of 0.5.22 or later.

    Those want the calls of FRAME around new weights, which older ones do not know; and they let the cache be flushed
    while requests that were put back wait, which older ones refuse.
    """
    return Version(version) >= Version("0.5.22")


def run(loop: asyncio.AbstractEventLoop, work):
    """Runs a coroutine to its end on a loop, which may already run in another thread. Returns its result."""
    if loop.is_running():
        return asyncio.run_coroutine_threadsafe(work, loop).result()
    return loop.run_until_complete(work)


def unpack(answer: dict, version: int) -> tuple[list[int], list[float], list[int], bool]:
    """SGLang's answer as `rollout` wants it: ids [T], log-probs [T], versions [T], whether a limit cut it off.

    Versions are `version` where the answer does not say otherwise. A log-prob that is missing is NaN. Raises UserError
    where SGLang aborted the request, ConnectionError where the answer is not one.
    """
    if is_aborted(answer):
        raise UserError(f"SGLang aborted a request: {answer['meta_info']['finish_reason'].get('message')}")
    try:
        meta = answer["meta_info"]
        tokens = meta["output_token_logprobs"]
        if len(tokens) != meta["completion_tokens"]:
            raise ValueError(f"log-probs of {len(tokens)} tokens for {meta['completion_tokens']} tokens")
        ids = [int(token[1]) for token in tokens]
        logprobs = [math.nan if token[0] is None else float(token[0]) for token in tokens]
        versions = [version] * len(ids)
        for span in meta.get("weight_versions", []):    # servers: a push may come in the middle of a completion
            if span["version"].isdigit():
                versions[span["start"]:span["end"]] = [int(span["version"])] * (span["end"] - span["start"])
        if len(versions) != len(ids):
            raise ValueError("weight_versions of more tokens than there are")
        return ids, logprobs, versions, meta["finish_reason"]["type"] == "length"
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConnectionError(f"SGLang's answer is malformed: {error!r}; it was {str(answer)[:200]}") from error


def is_aborted(answer: dict) -> bool:
    """Whether SGLang gave a request up."""
    try:
        return answer["meta_info"]["finish_reason"]["type"] == "abort"
    except (KeyError, TypeError):
        return False


def leave_torchrun():
    """Process groups of SGLang's making would wait at torchrun's store."""
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)


@contextmanager
def deaf_children():
    """Processes that are started in here never hear of SIGTERM and SIGINT. One that ends us meanwhile ends them, too.

    torchrun, or a terminal, sends those to SGLang's processes as well, while a run that is to end still needs them.
    """
    start, ends = BaseProcess.start, (signal.SIGTERM, signal.SIGINT)

    def start_deaf(process):
        older = signal.pthread_sigmask(signal.SIG_BLOCK, ends)      # a child inherits the mask
        try:
            start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, older)

    def leave(number, frame):
        kill_children()
        os._exit(128 + number)

    resource_tracker.ensure_running()       # Python's own helper, whose start would undo the mask
    BaseProcess.start = start_deaf
    older = {number: signal.signal(number, leave) for number in ends}
    try:
        yield
    finally:
        BaseProcess.start = start
        for number, handler in older.items():
            signal.signal(number, handler)


def kill_children():
    """Those that are about to start do not watch yet whether we live."""
    for child in active_children():
        child.kill()


class Colocated:
    """SGLang in processes of its own on the GPUs of a tensor-parallel group, whose first rank speaks to it."""

    def __init__(self, path: str, tp, config):
        leave_torchrun()
        self.engine, self.tp, self.patience = None, tp, Patience(config.engine_timeout, "--engine_timeout")
        self.loop, self.recent, self.buffer = asyncio.new_event_loop(), False, torch.empty(0)
        if tp.get_local_rank() == 0:
            import sglang
            gpu = dict(base_gpu_id=int(os.environ.get("LOCAL_RANK", 0)), enable_memory_saver=True)
            cpu = dict(attention_backend="torch_native", sampling_backend="pytorch", grammar_backend="none",
                       disable_cuda_graph=True, max_total_tokens=32768)     # what runs without CUDA's kernels
            with deaf_children(), self.deadline("its start", at_least=START):
                self.engine = sglang.Engine(
                    model_path=path, dtype=config.dtype, device=config.device, tp_size=tp.size(), log_level="error",
                    skip_tokenizer_init=True, **(gpu if config.device == "cuda" else cpu) | config.sglang_args)
            self.loop, self.recent = self.engine.loop, recent(sglang.__version__)
            self.flush()        # its first call sets signal handlers, that wait, or kill us without a word: now ours
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGQUIT, lambda *_: end("SGLang died: one of its processes crashed, or was killed; "
                                                         "what it said of that stands above", code=1))

    async def generate(self, version: int, **payload) -> tuple[list[int], list[float], list[int], bool]:
        """What one request gives, unpacked."""
        return unpack(await self.patience.wait("SGLang", self.engine.async_generate(**payload)), version)

    def sleep(self):
        """Gives weights, cache and graphs of this group's GPUs back to the trainer."""
        self.flush()
        self.ask("release_memory_occupation")
        self.barrier()                  # SGLang spans the GPUs of the whole group: no rank may use them sooner

    def begin(self):
        """Makes room for new weights: first the trainer's ranks let go of what they only cache."""
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        self.barrier()
        self.ask("resume_memory_occupation", tags=["weights"])
        self.ask("begin_weight_update")

    def send(self, tensors: list[tuple[str, torch.Tensor]], version: int):
        """One bucket of whole tensors, end to end, as a handle on CUDA or shared memory for each rank of SGLang."""
        if self.engine is None:
            return
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
        parts = [tensor.flatten().view(torch.uint8) for _, tensor in tensors]
        size = sum(map(len, parts))
        if parts[0].is_cuda:
            flat = torch.cat(parts)
        else:       # shared memory is kept from push to push: new pages would take longer than all the rest
            if len(self.buffer) < size:
                self.buffer = torch.empty(size, dtype=torch.uint8).share_memory_()
            flat = torch.cat(parts, out=self.buffer[:size])
        plan = FlattenedTensorBucket(named_tensors=[(name, tensor.to("meta")) for name, tensor in tensors])
        content = dict(flattened_tensor=flat, metadata=plan.get_metadata())
        handles = [MultiprocessingSerializer.serialize(content) for _ in range(self.tp.size())]
        self.ask("update_weights_from_tensor", handles, load_format="flattened_bucket", flush_cache=False)

    def end(self):
        """Takes the rest of the memory back. The cache is empty since `sleep`."""
        self.ask("end_weight_update")
        self.ask("resume_memory_occupation", tags=["kv_cache", "cuda_graph"])

    def barrier(self):
        """Waits for the ranks of the group, on gloo: it takes no memory of a GPU."""
        dist.all_reduce(torch.zeros(1), group=self.tp.get_group())

    def flush(self):
        """Empties the cache. SGLang refuses while it is busy, which it may be for a moment after its last answer."""
        for _ in range(600):
            with self.deadline("flush_cache"):
                if self.engine is None or self.engine.flush_cache().success:
                    return
            time.sleep(0.05)
        raise RuntimeError("sglang: flush_cache failed: still busy 30 s after its last answer")

    def close(self):
        """Ends SGLang's processes."""
        self.ask("shutdown")

    def deadline(self, what: str, at_least: float = 0.0):
        """Ends this rank, and so the run, when something of SGLang's takes too long."""
        seconds = max(self.patience.seconds, at_least)

        def late():
            kill_children()
            end(f"SGLang: {what} took over {seconds:g} s", code=1)
        return deadline(seconds, late)

    def ask(self, method: str, *args, **options):
        """Calls SGLang from the rank that may. It returns its failures: this raises RuntimeError for them."""
        if self.engine is None or method in FRAME and not self.recent:
            return
        with self.deadline(method):
            answer = getattr(self.engine, method)(*args, **options)
        success, message = answer if isinstance(answer, tuple) else (getattr(answer, "success", True), answer)
        if not success:
            raise RuntimeError(f"sglang: {method} failed: {message}")


class Servers:
    """Several SGLang servers as one.

    A request goes to the server that has the fewest of this rank's requests open. A server that fails, or is silent,
    is given up for good on all ranks, and its requests go to the others; what it had begun is lost, and no sample is.
    Global rank 0 broadcasts the weights, to each server in a process group of its own, so that one may die in a push
    (gloo; nccl's watchdog ends the run after --engine_timeout).
    """

    def __init__(self, config):
        leave_torchrun()
        self.loop, self.session = asyncio.new_event_loop(), None
        self.patience = Patience(config.engine_timeout, "--engine_timeout")
        urls = [url.strip().rstrip("/") for url in config.engine.split(",")]
        first = dist.get_rank() % len(urls)     # each rank prefers another one
        self.open, self.lost, self.told = dict.fromkeys(urls[first:] + urls[:first], 0), {}, set()
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))    # each open request is a socket
        self.backend, self.groups, self.recent = "nccl" if config.device == "cuda" else "gloo", {}, {}
        for server in self.open if dist.get_rank() == 0 else ():
            try:
                run(self.loop, self.join(server))
            except OSError as error:
                raise UserError(f"--engine {server} cannot be used: {error}") from error

    async def generate(self, version: int, **payload) -> tuple[list[int], list[float], list[int], bool]:
        """What one request gives, unpacked, from whichever server is left. Raises UserError when none is."""
        failures, aborts = Counter(), 0
        while self.open:
            server = min(self.open, key=self.open.get)
            self.open[server] += 1
            try:
                answer = await self.post(server, "generate", **payload)
                if is_aborted(answer) and aborts < 100:
                    aborts += 1
                    await asyncio.sleep(1)      # `pause` does that to an older sglang; more often, it is the request
                    continue
                unpacked = unpack(answer, version)
                if not str(answer["meta_info"].get("weight_version")).isdigit():
                    raise TimeoutError(f"{server} has weights that this run did not push; was it started again?")
                return unpacked
            except ConnectionError as error:
                failures[server] += 1
                if failures[server] == 3:
                    self.give_up(server, error)
                await asyncio.sleep(failures[server])
            except TimeoutError as error:
                self.give_up(server, error)
            finally:
                if server in self.open:
                    self.open[server] -= 1
        raise self.none_left()

    def sleep(self):
        """Nothing to do: the servers have GPUs of their own."""

    def begin(self):
        """Opens a push; requests in flight wait for its end."""
        self.agree()
        if dist.get_rank() == 0:
            self.everywhere(self.pause)
            self.everywhere(self.post, "begin_weight_update")

    def send(self, tensors: list[tuple[str, torch.Tensor]], version: int):
        """Broadcasts one bucket of whole tensors, flattened; each server loads it as the weights of `version`."""
        if dist.get_rank() > 0:
            return
        payload = dict(names=[name for name, _ in tensors], shapes=[list(tensor.shape) for _, tensor in tensors],
                       dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
                       load_format="flattened_bucket", flush_cache=False, weight_version=str(version))
        flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in tensors])
        self.everywhere(self.broadcast, flat, payload)

    def end(self):
        """Closes a push: without the old weights' cache, sampling goes on."""
        if dist.get_rank() == 0:
            self.everywhere(self.post, "end_weight_update")
            self.everywhere(self.flush)
            self.everywhere(self.post, "continue_generation")
        self.agree()

    def close(self):
        """Leaves the servers as they were found, but for their weights."""
        if dist.get_rank() == 0:
            self.everywhere(self.leave)
        if self.session:
            run(self.loop, self.session.close())

    # -------------------------------------------- below: one server ---------------------------------------------------
    async def post(self, server: str, path: str, **payload):
        """One call. Raises ConnectionError where it breaks, TimeoutError for silence, UserError for a refusal."""
        if path in FRAME and not self.recent[server]:
            return {}
        import aiohttp      # sglang and datasets bring it; needed here only
        if self.session is None:
            self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True),
                                                 timeout=aiohttp.ClientTimeout(total=None))
        method = "GET" if path == "server_info" else "POST"

        async def call():
            async with self.session.request(method, f"{server}/{path}", json=payload) as response:
                return response.status, await response.text(errors="replace")
        try:
            status, text = await self.patience.wait(server, call())
        except aiohttp.ClientError as error:
            raise ConnectionError(f"{server} failed: {type(error).__name__} {error}") from error
        if status >= 500:
            raise ConnectionError(f"{server} failed: {path} gave HTTP {status}")
        try:
            answer = json.loads(text) if text.startswith("{") else {}
        except ValueError as error:
            raise ConnectionError(f"{server} failed: {path} gave broken JSON, {text[:200]!r}") from error
        if status >= 400 or answer.get("success") is False:
            raise UserError(f"{server} refused {path}: {text[:300]}")
        return answer

    async def pause(self, server: str):
        """Puts requests in flight back into the queue, to go on with new weights; an older sglang starts them anew."""
        await self.post(server, "pause_generation", mode="retract" if self.recent[server] else "abort")

    async def flush(self, server: str):
        """Empties the cache. A server refuses while it is busy, which it may be for a moment after it was paused."""
        for attempt in range(600):
            try:
                return await self.post(server, "flush_cache")
            except UserError:
                await asyncio.sleep(0.05)
        raise TimeoutError(f"{server} was still busy 30 s after it was paused")

    async def join(self, server: str):
        """Makes the process group in which this rank, its first, sends weights to one server, all the others."""
        from sglang.srt.utils import init_custom_process_group
        info = await self.post(server, "server_info")
        self.recent[server] = recent(info["version"])
        try:
            await self.post(server, "end_weight_update")    # of a run that was killed in the middle of a push
        except UserError:
            pass                                            # there was none, as usual
        parts = urlsplit(server)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        with socket.create_connection((parts.hostname, port)) as connection:
            host = connection.getsockname()[0]          # our address, as the server sees it
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        common = dict(world_size=1 + info["tp_size"], group_name=f"weights-{uuid.uuid4().hex[:8]}",
                      backend=self.backend)
        mine = asyncio.to_thread(init_custom_process_group, init_method=f"tcp://{host}:{port}", rank=0, **common,
                                 timeout=timedelta(seconds=self.patience.seconds))
        theirs = self.post(server, "init_weights_update_group", master_address=host, master_port=port, rank_offset=1,
                           **common)
        group, _ = await asyncio.gather(mine, theirs)
        self.groups[server] = common["group_name"], group

    async def leave(self, server: str):
        """Ends the group that `join` made. The run is over: a server that is gone, or new, does no harm."""
        name, group = self.groups[server]
        try:
            await asyncio.gather(self.post(server, "destroy_weights_update_group", group_name=name),
                                 asyncio.to_thread(dist.destroy_process_group, group))
        except UserError:
            pass

    async def broadcast(self, server: str, flat: torch.Tensor, payload: dict):
        """Sends bytes to one server; the call over HTTP says what they are."""
        name, group = self.groups[server]

        def send():
            if flat.is_cuda:
                torch.cuda.set_device(flat.device)      # a thread starts with the first GPU
            dist.broadcast(flat, src=0, group=group)
        try:
            await asyncio.gather(self.post(server, "update_weights_from_distributed", group_name=name, **payload),
                                 asyncio.to_thread(send))
        except (RuntimeError, UserError) as error:      # gloo's; or the server is a new one, and knows no group
            raise ConnectionError(f"{server} failed in the middle of a push: {error}") from error

    # -------------------------------------------- below: all servers --------------------------------------------------
    def everywhere(self, action, *args):
        """Does `await action(server, *args)` for all servers at once, and gives up those that fail."""
        async def attempt(server):
            try:
                await action(server, *args)
            except (ConnectionError, TimeoutError) as error:
                self.give_up(server, error)

        async def attempts():
            await asyncio.gather(*map(attempt, list(self.open)))
        run(self.loop, attempts())

    def give_up(self, server: str, error: Exception):
        """Never asks this server again: it might come back with other weights. To be called on the loop."""
        if self.open.pop(server, None) is not None:
            self.lost[server] = str(error)
            self.patience.give_up(server)

    def none_left(self) -> UserError:
        """What to say when all are lost, and why."""
        return UserError(f"no SGLang server is left: {'; '.join(self.lost.values())}")

    def agree(self):
        """Whoever is lost to one rank is lost to all; all ranks call it. Raises UserError when no server is left."""
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.lost)

        async def give_up_all():
            for lost in parts:
                for server, reason in lost.items():
                    self.give_up(server, reason)
        run(self.loop, give_up_all())
        if not self.open:
            raise self.none_left()
        for server in set(self.lost) - self.told if dist.get_rank() == 0 else ():
            say(f"the run goes on without {server}: {self.lost[server]}")
        self.told = set(self.lost)
