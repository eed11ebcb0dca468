"""The processes of a run: how they find each other, the meshes they form, and what they tell each other.

It works without torchrun, too: one process is alone. Values travel on gloo even between GPUs.
"""
import asyncio
import logging
import os
import signal
import time
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from tools.inputs import UserError


def init_distributed(config) -> dict[str, DeviceMesh]:
    """Joins torchrun's processes, or is alone; returns `make_meshes`. Raises UserError where sizes misfit."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)     # a hint on speed, each time
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    backend = "cpu:gloo,cuda:nccl" if config.device == "cuda" else "gloo"   # gloo everywhere: it carries Python objects
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"):  # SGLang sets them, but only in the ranks that start it
            os.environ.setdefault(name, "0")
    patience = timedelta(seconds=3 * config.engine_timeout)     # ranks wait for each other longer than for SGLang
    dist.init_process_group(backend, timeout=timedelta(minutes=2), **alone)     # to find each other takes seconds
    _set_pg_timeout(patience)
    world = dist.get_world_size()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    tp = config.tp_size or (2 if config.device == "cuda" and local % 2 == 0 else 1)
    if tp < 1 or local % tp:
        raise UserError(f"--tp_size {tp} does not divide the number of processes, {local} on a machine")
    if world // tp % config.dp_replicate:
        raise UserError(f"--dp_replicate {config.dp_replicate} does not divide the {world // tp} data-parallel ranks")
    if config.prompts_per_step < world // tp * config.updates_per_step:
        raise UserError(f"--prompts_per_step must be at least --updates_per_step times {world // tp} ranks")
    meshes = make_meshes(config.device, config.dp_replicate, world // tp // config.dp_replicate, tp)
    for mesh in meshes.values():
        for group in mesh.get_all_groups():
            _set_pg_timeout(patience, group)        # a new group starts with 30 minutes
    return meshes


def make_meshes(device: str, replicas: int, shards: int, tp: int) -> dict[str, DeviceMesh]:
    """All ranks as three meshes: each layer is split over "tp", the pieces are sharded over "fsdp", data over "dp".

    "fsdp" and "dp" are the same ranks; with replicas, "fsdp" has two dimensions: a copy of the model each, its shards.
    """
    mesh = init_device_mesh(device, (replicas, shards, tp), mesh_dim_names=("replicate", "shard", "tp"))
    both = mesh["replicate", "shard"]
    return {"dp": both._flatten("dp"), "tp": mesh["tp"], "fsdp": both if replicas > 1 else mesh["shard"]}


def reduce(values: list[float], mesh: DeviceMesh, op=dist.ReduceOp.SUM) -> list[float]:
    """Each number reduced over the ranks of a mesh."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op, mesh.get_group())
    return tensor.tolist()


def gather(items: list, mesh: DeviceMesh) -> list:
    """The items of all ranks of a mesh in one list, the same on each of them."""
    if mesh.size() == 1:
        return items
    parts = [None] * mesh.size()
    dist.all_gather_object(parts, items, mesh.get_group())
    return sum(parts, [])


class Stopped(Exception):
    """Somebody wants the run to end, and all ranks know."""


class Stop:
    """SIGTERM or Ctrl-C, sent to any rank, ends the run between two steps; a second one ends the process at once.

    torchrun passes on at once what a terminal has sent already, so a second signal counts from SECONDS later.
    """
    SECONDS = 2.0

    def __init__(self):
        self.heard, self.since, self.tasks, self.dropping = 0, 0.0, [], False

    def listen(self):
        """From now on; not sooner, for SGLang sets handlers of its own when it starts."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.hear)

    def hear(self, number: int, frame):
        """The handler."""
        if self.heard and time.monotonic() - self.since > self.SECONDS:
            os._exit(128 + number)
        self.heard, self.since = number, self.since or time.monotonic()
        if self.dropping:
            self.cancel()

    def cancel(self):
        """Ends the episodes that are under way."""
        for task in self.tasks:
            task.get_loop().call_soon_threadsafe(task.cancel)

    @contextmanager
    def may_drop(self):
        """Around a rollout: when the run is to end, nobody needs to wait for it."""
        self.dropping = True
        yield
        self.dropping = False

    async def together(self, episodes: list, gather) -> list:
        """The results of coroutines at once, as `gather` collects them; none if they have been dropped."""
        self.tasks = [asyncio.ensure_future(episode) for episode in episodes]
        if self.heard and self.dropping:
            self.cancel()
        try:
            return await gather(*self.tasks)
        except asyncio.CancelledError:
            return []

    def check(self):
        """Raises Stopped on all ranks if any of them is to end."""
        heard = torch.tensor(self.heard)
        dist.all_reduce(heard, dist.ReduceOp.MAX)
        if heard:
            raise Stopped(signal.Signals(int(heard)).name)
