"""Tests of extras/sglang_cpu.py, with a stand-in for sglang and with the real one."""

import json
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from extras import sglang_cpu
from train import Config

FIRST = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16))]
SECOND = [("c", torch.arange(3))]


class PlainBucket:
    """What sglang's FlattenedTensorBucket does with named tensors."""

    def __init__(self, named_tensors):
        self.metadata = [(name, tensor.shape, tensor.dtype) for name, tensor in named_tensors]
        parts = [tensor.flatten().view(torch.uint8) for _, tensor in named_tensors]
        self.flattened_tensor = torch.cat(parts)

    def get_flattened_tensor(self):
        return self.flattened_tensor

    def get_metadata(self):
        return self.metadata


def check_buckets(module, plain):
    sglang_cpu.keep_pages()
    addresses = []
    for named in (FIRST, SECOND, FIRST):
        bucket = module.FlattenedTensorBucket(named_tensors=named)
        flat = bucket.get_flattened_tensor()
        assert torch.equal(flat, plain(named_tensors=named).get_flattened_tensor())
        assert bucket.get_metadata() == plain(named_tensors=named).get_metadata()
        assert flat.is_shared()
        addresses.append(flat.data_ptr())
    assert addresses[1] == addresses[0] and addresses[2] == addresses[0]  # the same pages again
    large = [("d", torch.ones(100))]
    assert torch.equal(
        module.FlattenedTensorBucket(named_tensors=large).get_flattened_tensor().view(torch.float32),
        large[0][1],
    )


def test_buckets_stay_in_the_same_shared_memory(monkeypatch):
    parents = ("sglang", "sglang.srt", "sglang.srt.weight_sync")
    modules = {name: ModuleType(name) for name in (*parents, "sglang.srt.weight_sync.tensor_bucket")}
    module = modules["sglang.srt.weight_sync.tensor_bucket"]
    modules["sglang.srt.weight_sync"].tensor_bucket = module
    module.FlattenedTensorBucket = PlainBucket
    for name, one in modules.items():
        monkeypatch.setitem(sys.modules, name, one)
    check_buckets(module, PlainBucket)


@pytest.mark.sglang
@pytest.mark.skipif(not find_spec("sglang"), reason="needs sglang: .ci/sglang_cpu/install")
def test_buckets_of_the_real_sglang(monkeypatch):
    from sglang.srt.weight_sync import tensor_bucket

    plain = tensor_bucket.FlattenedTensorBucket
    monkeypatch.setattr(tensor_bucket, "FlattenedTensorBucket", plain)
    check_buckets(tensor_bucket, plain)


@pytest.mark.parametrize(
    "device, engine, added", [("cpu", "sglang", True), ("cpu", "local", False), ("cuda", "sglang", False)]
)
def test_arguments_are_those_for_a_cpu_unless_given(monkeypatch, device, engine, added):
    kept = []
    monkeypatch.setattr(sglang_cpu, "keep_pages", lambda: kept.append(True))
    trainer = sglang_cpu.extend(type("Plain", (), {"__init__": lambda self, config, data: kept.append(data)}))
    config = Config(device=device, engine=engine, sglang_args='{"max_total_tokens": 7}')
    trainer(config, "data")
    found = SimpleNamespace(**json.loads(config.sglang_args))
    assert found.max_total_tokens == 7 and kept == [True] * added + ["data"]
    assert getattr(found, "attention_backend", None) == ("torch_native" if added else None)
