"""Weights on their way out of the sharded model: gathered whole, in buckets, and written as a Hugging Face folder.

All ranks call these functions together.
"""
import json
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

FILE_BYTES = 2**32      # of an exported file, at most
SHAPES = {}             # of all ranks' shards, by the group and the weights: they do not change in a run


@torch.no_grad()
def whole_tensors(weights: list[DTensor], device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gathers weights from their shards, already cast, by one collective an axis of the mesh.

    One a weight, as full_tensor does it, is mostly latency. Shards may be uneven or empty: each rank tells its shapes.
    """
    parts, mesh = [weight.to_local().to(device, dtype) for weight in weights], weights[0].device_mesh
    for axis in range(mesh.ndim):       # FSDP's axes stand first, and have cut what tensor parallelism had cut before
        split = [i for i, weight in enumerate(weights) if not weight.placements[axis].is_replicate()]
        if not split or mesh.size(axis) == 1:
            continue
        group, shapes = mesh.get_group(axis), [None] * mesh.size(axis)
        key = group, tuple((weights[i].shape, weights[i].placements) for i in split)
        if key not in SHAPES:       # the key is the same on all ranks: all of them ask, or none
            dist.all_gather_object(shapes, [parts[i].shape for i in split], group)
            SHAPES[key] = shapes
        shapes = SHAPES[key]
        lengths = [[shape.numel() for shape in of_rank] for of_rank in shapes]
        flat = torch.cat([parts[i].flatten() for i in split])
        longest = max(map(sum, lengths))
        rows = [flat.new_empty(longest) for _ in shapes]
        dist.all_gather(rows, pad(flat, (0, longest - len(flat))), group)
        pieces = [row[:sum(length)].split(length) for row, length in zip(rows, lengths)]
        for place, i in enumerate(split):
            tensors = [piece[place].view(shape[place]) for piece, shape in zip(pieces, shapes)]
            parts[i] = torch.cat(tensors, dim=weights[i].placements[axis].dim)
    return parts


def buckets(weights: dict[str, DTensor], limit: float, dtype: torch.dtype) -> list[list[str]]:
    """Names, in order, in lists whose whole tensors take at most `limit` bytes; a larger one has a list of its own."""
    lists, used = [], limit
    for name, value in weights.items():
        size = value.numel() * dtype.itemsize
        if used + size > limit:
            lists.append([])
            used = 0
        lists[-1].append(name)
        used += size
    return lists


def whole_weights(weights: dict[str, DTensor], limit: float, device: str, dtype: torch.dtype
                  ) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Names and whole tensors, in order, in lists of at most `limit` bytes. Each rank must take them all."""
    for names in buckets(weights, limit, dtype):
        yield list(zip(names, whole_tensors([weights[name] for name in names], device, dtype)))


def move(policy, device: str):
    """Takes a train.Policy to a device, with Adam's state if it has one: out of the engine's way, or back."""
    if hasattr(policy, "optimizer"):
        for state in policy.optimizer.state.values():
            state |= {name: value.to(device) for name, value in state.items()}
    policy.model.to(device)
    if device == "cpu" and torch.cuda.is_available():
        torch.cuda.empty_cache()


def export(weights: dict[str, DTensor], folder: Path, config, limit: float, device: str, dtype: torch.dtype):
    """Writes weights and the model's config as a Hugging Face folder, in files of about 4 GB, from global rank 0.

    The ranks of another machine may have another disk, so none of them writes slices for others to join. Rank 0 has a
    file at a time in CPU memory, and the device `limit` bytes.
    """
    files, places, first = buckets(weights, FILE_BYTES, dtype), {}, dist.get_rank() == 0
    for number, names in enumerate(files, 1):
        whole = {}
        for bucket in whole_weights({name: weights[name] for name in names}, limit, device, dtype):
            whole |= {name: tensor.cpu() for name, tensor in bucket} if first else {}
        places |= dict.fromkeys(names, f"model-{number:05}-of-{len(files):05}.safetensors")
        if first:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(whole, folder / places[names[0]], metadata={"format": "pt"})
    if first:
        size = sum(value.numel() for value in weights.values()) * dtype.itemsize
        (folder / "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {"total_size": size}, "weight_map": places}, indent=1))
        config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(folder)
