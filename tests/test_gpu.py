"""Tests of what train.py does on a GPU only, on a machine without one."""

import inspect
import itertools
import os

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

import train
from train import Config

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one setting
NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


def start(monkeypatch, given: dict = {}, **flags) -> dict:
    """What init_distributed does and has set by the time that it joins its process group."""
    found = {}

    def set_device(gpu):  # initializes CUDA, which reads its settings
        found["gpu"] = gpu
        found["settings"] = [name for name in ALLOCATOR if name in os.environ]

    def init_process_group(backend, **options):
        found["backend"] = backend
        found["nccl"] = [os.environ.get(name) for name in NCCL]
        found["left"] = [name for name in ALLOCATOR if name in os.environ]
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(train, "RANK", 5)
        patch.setattr(train, "LOCAL_RANK", 1)
        patch.setattr(torch.cuda, "set_device", set_device)
        patch.setattr(train.dist, "init_process_group", init_process_group)
        patch.setattr(os, "environ", given.copy())
        with pytest.raises(InterruptedError):
            train.init_distributed(Config(**flags))
    return found


@pytest.mark.parametrize("name", ALLOCATOR)
def test_sglang_s_trainer_has_no_expandable_segments(monkeypatch, name):
    """Handles of their memory cannot be opened by SGLang, and its memory saver does not see them."""
    given = {name: "expandable_segments:True"}
    found = start(monkeypatch, given, device="cuda", engine="sglang")
    assert found["settings"] == found["left"] == []  # nor has SGLang, which inherits it
    for engine in ("local", "http://host:1"):
        assert start(monkeypatch, given, device="cuda", engine=engine)["settings"] == [name]


def test_each_process_has_its_own_gpu_and_gloo_carries_what_is_on_the_cpu(monkeypatch):
    found = start(monkeypatch, device="cuda", engine="sglang")
    assert (found["gpu"], found["backend"]) == (1, "cpu:gloo,cuda:nccl")  # of this machine
    found = start(monkeypatch, device="cpu", engine="local")
    assert found["backend"] == "gloo" and "gpu" not in found


def test_nccl_has_sglang_s_settings_unless_the_user_has_others(monkeypatch):
    assert start(monkeypatch, device="cuda")["nccl"] == ["0", "0"]
    assert start(monkeypatch, {NCCL[0]: "1"}, device="cuda")["nccl"] == ["1", "0"]
    assert start(monkeypatch, {NCCL[1]: "1"}, device="cuda")["nccl"] == ["0", "1"]


class Pretended(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_the_gpu_kernel_is_asked_for_what_the_cpu_computes(monkeypatch):
    def plain_varlen(*arguments, **options):
        signature = inspect.signature(varlen_attn)
        given = signature.bind(*arguments, **options).arguments  # raises where torch would
        assert given["max_q"] == given["max_k"] == 9
        assert given["window_size"] == (-1, 0) and given["enable_gqa"]
        bounds = [given[name] for name in ("cu_seq_q", "cu_seq_k")]
        assert bounds[0].dtype == bounds[1].dtype == torch.int32
        parts = []
        for queries, keys in zip(
            *(itertools.starmap(slice, itertools.pairwise(one.tolist())) for one in bounds)
        ):
            q, k, v = given["query"][queries], given["key"][keys], given["value"][keys]
            q, k, v = (part.as_subclass(torch.Tensor).float() for part in (q, k, v))
            k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))  # [length, heads, width]
            scores = torch.einsum("qhd,khd->hqk", q, k) * given["scale"]
            later = torch.ones(scores.shape[1:]).triu(1 + len(k) - len(q)).bool()  # the last sees all keys
            scores = scores.masked_fill(later, -torch.inf)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(parts)

    monkeypatch.setattr(train.varlen, "varlen_attn", plain_varlen)
    q, k, v = (torch.randn(1, heads, 12, 8).bfloat16() for heads in (4, 2, 2))
    options = {"mask": None, "scaling": 0.3, "longest": 9, "keys": [*range(5), 0, 1, *range(5, 12)]}
    options["bounds"] = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    options["key_bounds"] = torch.tensor([0, 4, 5, 14], dtype=torch.int32)
    pretended = [part.as_subclass(Pretended) for part in (q, k, v)]
    on_gpu, _ = train.packed_attention(None, *pretended, **options)
    on_cpu, _ = train.packed_attention(None, q.float(), k.float(), v.float(), **options)
    assert on_gpu.shape == on_cpu.shape == (1, 12, 4, 8)
    torch.testing.assert_close(on_gpu.as_subclass(torch.Tensor), on_cpu, rtol=1e-4, atol=1e-4)
