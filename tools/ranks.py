"""The processes of a run: how they find each other, the meshes they form, and what they tell each other.

It works without torchrun, too: one process is alone. Values travel on gloo even between GPUs.
"""
import logging
import os
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
