"""Tests of extras/sglang_cpu.py, with a stand-in for sglang and with the real one."""

import json
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import SimpleNamespace

import pytest
import torch

from extras import sglang_cpu
from tests import fake_sglang
from tests.conftest import HERE, Config, run
from tests.real_sglang import ON_CPU

FIRST = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(2, dtype=torch.bfloat16))]
SECOND = [("c", torch.arange(3))]


def check_buckets(module):
    """Buckets have the content and the metadata that SGLang gives them, in the same shared pages."""
    plain = module.FlattenedTensorBucket
    sglang_cpu.keep_pages()
    addresses = set()
    for named in (FIRST, SECOND, FIRST):
        bucket = module.FlattenedTensorBucket(named_tensors=named)
        flat = bucket.get_flattened_tensor()
        assert torch.equal(flat, plain(named_tensors=named).get_flattened_tensor())
        assert bucket.get_metadata() == plain(named_tensors=named).get_metadata()
        assert flat.is_shared()
        addresses.add(flat.data_ptr())
    assert len(addresses) == 1
    large = module.FlattenedTensorBucket(named_tensors=[("d", torch.ones(100))])
    assert torch.equal(large.get_flattened_tensor().view(torch.float32), torch.ones(100))


def test_buckets_stay_in_the_same_shared_memory(monkeypatch):
    modules = fake_sglang.install(monkeypatch)
    modules["weight_sync"].tensor_bucket = modules["tensor_bucket"]
    check_buckets(modules["tensor_bucket"])


@pytest.mark.sglang
@pytest.mark.skipif(not find_spec("sglang"), reason="needs sglang: .ci/sglang_cpu/install")
def test_buckets_of_the_real_sglang(monkeypatch):
    from sglang.srt.weight_sync import tensor_bucket

    monkeypatch.setattr(tensor_bucket, "FlattenedTensorBucket", tensor_bucket.FlattenedTensorBucket)
    check_buckets(tensor_bucket)


def load_stub(name: str):
    """A fresh copy of one of the stubs for packages without a build for a CPU."""
    spec = spec_from_file_location(name, HERE / f".ci/sglang_cpu/{name}/__init__.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)


@pytest.mark.parametrize("has_gpu, module", [(False, torch.cpu), (True, torch.cuda)])
def test_without_a_gpu_sglang_s_device_is_the_cpu_in_a_cuda_build_of_torch_too(monkeypatch, has_gpu, module):
    def of_a_cuda_build(device=None):
        return getattr(torch, str(device or "cuda"))

    monkeypatch.setattr(torch, "get_device_module", of_a_cuda_build)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    load_stub("sgl_kernel")
    assert torch.get_device_module() is module
    assert torch.get_device_module("cpu") is torch.cpu and torch.get_device_module("cuda") is torch.cuda


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


@pytest.mark.sglang
@pytest.mark.skipif(not find_spec("sglang"), reason="needs sglang: .ci/sglang_cpu/install")
def test_a_run_with_sglang_ends_well_and_wandb_has_its_last_numbers(tmp_path):
    """SGLang ends by killing all children of its rank, and the process that writes for wandb is one."""
    flags = ["--engine", "sglang", "--wandb", "offline", "--output_dir", tmp_path, "--eval_every", 0]
    flags += ["--steps", 1, "--prompts_per_step", 4, "--group_size", 2, "--max_new_tokens", 32]
    done = run("train.py", *flags, **ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1 and last["logprob_diff"] < 1e-5
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = log.read_bytes()  # records that hold values as JSON
    for name in ("logprob_diff", "reward", "grad_norm"):
        assert json.dumps(last[name]).encode() in content, name
    assert "teardown_atexit" not in done.stderr  # wandb's last words to a process that is gone
