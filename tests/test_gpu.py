"""Tests of what train.py does on a GPU only, on a machine without one."""

import inspect
import itertools
import os

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

import train
from train import Config


class Started(Exception):
    """Raised instead of joining processes that are not there."""


@pytest.fixture
def start(monkeypatch):
    """A function that runs init_distributed up to its process group; returns what it did and set by then."""
    before = dict(os.environ)
    found = {}
    monkeypatch.setattr(train, "RANK", 5)
    monkeypatch.setattr(train, "LOCAL_RANK", 1)

    def set_device(gpu):  # initializes CUDA, which reads its settings
        found["gpu"] = gpu
        found["settings"] = [name for name in ALLOCATOR if name in os.environ]

    def init_process_group(backend, **options):
        found["backend"] = backend
        found["nccl"] = {name: os.environ.get(name) for name in NCCL}
        raise Started

    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.setattr(train.dist, "init_process_group", init_process_group)

    def start(environment: dict, **flags) -> dict:
        for name in (*ALLOCATOR, *NCCL):
            os.environ.pop(name, None)
        os.environ.update(environment)
        found.clear()
        with pytest.raises(Started):
            train.init_distributed(Config(**flags))
        return found

    yield start
    os.environ.clear()
    os.environ.update(before)


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # two names of one setting
NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


@pytest.mark.parametrize("name", ALLOCATOR)
def test_sglang_s_trainer_has_no_expandable_segments(start, name):
    """Handles of their memory cannot be opened by SGLang, and its memory saver does not see them."""
    given = {name: "expandable_segments:True"}
    assert start(given, device="cuda", engine="sglang")["settings"] == []
    assert name not in os.environ  # nor has SGLang, which inherits it
    for engine in ("local", "http://host:1"):
        assert start(given, device="cuda", engine=engine)["settings"] == [name]


def test_each_process_has_its_own_gpu_and_gloo_carries_what_is_on_the_cpu(start):
    found = start({}, device="cuda", engine="sglang")
    assert found["gpu"] == 1  # of this machine
    assert found["backend"] == "cpu:gloo,cuda:nccl"
    found = start({}, device="cpu", engine="local")
    assert found["backend"] == "gloo" and "gpu" not in found


def test_nccl_has_sglang_s_settings_unless_the_user_has_others(start):
    assert start({}, device="cuda")["nccl"] == dict.fromkeys(NCCL, "0")
    for name in NCCL:
        assert start({name: "1"}, device="cuda")["nccl"] == dict.fromkeys(NCCL, "0") | {name: "1"}


class Pretended(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


def test_the_gpu_kernel_is_asked_for_what_the_cpu_computes(monkeypatch):
    def plain_varlen(*arguments, **options):
        signature = inspect.signature(varlen_attn)
        given = signature.bind(*arguments, **options).arguments  # raises where torch would
        assert given["max_q"] == given["max_k"] == 7
        assert given["window_size"] == (-1, 0) and given["enable_gqa"]
        assert given["cu_seq_q"] is given["cu_seq_k"] and given["cu_seq_q"].dtype == torch.int32
        parts = []
        for start, end in itertools.pairwise(given["cu_seq_q"].tolist()):
            q, k, v = (given[name][start:end] for name in ("query", "key", "value"))
            q, k, v = (part.as_subclass(torch.Tensor).float() for part in (q, k, v))
            k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))  # [length, heads, width]
            scores = torch.einsum("qhd,khd->hqk", q, k) * given["scale"]
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
            parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        return torch.cat(parts)

    monkeypatch.setattr(train, "varlen_attn", plain_varlen)
    q, k, v = (torch.randn(1, heads, 12, 8).bfloat16() for heads in (4, 2, 2))
    options = {"mask": None, "scaling": 0.3, "longest": 7}
    options["bounds"] = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    pretended = [part.as_subclass(Pretended) for part in (q, k, v)]
    on_gpu, _ = train.packed_attention(None, *pretended, **options)
    on_cpu, _ = train.packed_attention(None, q.float(), k.float(), v.float(), **options)
    assert on_gpu.shape == on_cpu.shape == (1, 12, 4, 8)
    torch.testing.assert_close(on_gpu.as_subclass(torch.Tensor), on_cpu, rtol=1e-4, atol=1e-4)
