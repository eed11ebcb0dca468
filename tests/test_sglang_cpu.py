"""Tests of extras/sglang_cpu.py and of the stubs in .ci/sglang_cpu, and a run with the real sglang."""

import json
from importlib.util import module_from_spec, spec_from_file_location

import pytest
import torch

from extras import sglang_cpu
from tests.conftest import HERE, Config, needs_sglang, run
from tests.real_sglang import ON_CPU


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
def test_arguments_are_those_for_a_cpu_unless_given(device, engine, added):
    data = []
    trainer = sglang_cpu.extend(type("Plain", (), {"__init__": lambda self, config, one: data.append(one)}))
    config = Config(device=device, engine=engine, sglang_args='{"max_total_tokens": 7}')
    trainer(config, "data")
    found = json.loads(config.sglang_args)
    assert found["max_total_tokens"] == 7 and data == ["data"]
    assert found.get("attention_backend") == ("torch_native" if added else None)


@needs_sglang
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
