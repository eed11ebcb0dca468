"""Tests of what train.py does on a GPU only, on a machine without one."""

import inspect
import itertools

import torch
from torch.nn.attention.varlen import varlen_attn

import train


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
