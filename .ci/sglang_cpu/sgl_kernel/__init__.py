"""Test support, not product code: a stub for sglang's kernels, which have no build for a CPU without AMX.

sglang imports it where it runs on a CPU; so it also sees to what sglang asks of torch there.
"""

from importlib import import_module

import torch

get_device_module = torch.get_device_module


def device_module(device=None):
    """torch.get_device_module, which without a device is torch.cuda in a CUDA build, even without a GPU."""
    return get_device_module("cpu" if device is None else device)


if not torch.cuda.is_available():
    torch.get_device_module = device_module


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """For request r, row req_to_token[r, start:end] takes the next end - start entries of out_cache_loc."""
    used = 0
    for request, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist()):
        req_to_token[request, first:last] = out_cache_loc[used : used + last - first]
        used += last - first


def operator(name: str):
    """A function of mamba.py, which imports sglang and so cannot be imported with this file."""
    return lambda *args, **kwargs: getattr(import_module("sgl_kernel.mamba"), name)(*args, **kwargs)


for name in (  # sglang looks them up as it imports its Qwen3.5
    "fused_gdn_gating fused_sigmoid_gating_delta_rule_update fused_qkvzba_split_reshape_cat_contiguous "
    "fused_qk_gemma_rmsnorm fused_qk_gemma_rmsnorm_with_gate fused_sigmoid_mul fused_rmsnorm_gated"
).split():
    setattr(torch.ops.sgl_kernel, f"{name}_cpu", operator(f"{name}_cpu"))


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stub")

    return absent
