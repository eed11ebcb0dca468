"""Tests of recipes/lora.py: adapters against plain models with merged weights, and against peft."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from bench import kills
from extras import add_flags, checkpoint, monitor, variants
from recipes import lora
from tests import parity
from tests.conftest import (
    COUNTDOWN,
    HERE,
    TINY,
    VOCAB,
    alone,
    make_trainer,
    parse_flags,
    plain_logprobs,
    plain_update,
    run,
    some_samples,
)
from train import UserError

SMALL = ["--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "16", "--steps", "4"]
SMALL += ["--eval_every", "0", "--lora_rank", "4", "--lr", "1e-3"]


def fit(*arguments):
    """Trains in this process, with checkpoints, by a command line. Returns the trainer."""
    with pytest.MonkeyPatch.context() as patch:
        mesh = alone()
        patch.setattr(train, "init_distributed", lambda config: mesh)
        patch.setattr(sys, "argv", ["lora.py", *SMALL, *map(str, arguments)])
        patch.setattr(checkpoint.Stop, "listen", lambda self: None)
        trainer_class = checkpoint.extend(monitor.extend(lora.LoRATrainer))
        config = parse_flags(lora.LoRAConfig, sys.argv[1:])
        trainer = trainer_class(config, train.RLDataset, lambda sample: len(sample.text) % 7, None)
        trainer.fit()
        return trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of four steps, with a checkpoint after the second and the fourth. Not to be changed."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    return fit("--output_dir", folder, "--save_every", 2)


def small_trainer(mesh, **flags):
    config = add_flags(lora.LoRAConfig)(model=str(TINY), device="cpu", dtype="float32", **flags)
    return make_trainer(config, mesh, variants.extend(lora.LoRATrainer), lora.LoRAActor)


# ---- Exactness -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind, tied", parity.ADAPTED)
def test_gradients_and_merged_weights_equal_those_of_a_plain_model(inputs, compared, kind, tied, tp):
    """With W' = W + s B A and G the gradient of W', those of A and B are s B^T G and s G A^T."""
    name = f"{kind}-{'tied' if tied else 'untied'}"
    record = torch.load(compared / f"{name}-lora-{tp}.pt")
    adapters = record["adapters"]
    model = AutoModelForCausalLM.from_pretrained(inputs / name)
    weights = dict(model.named_parameters())
    pairs = {key.removesuffix("lora_A"): key for key in adapters if key.endswith("lora_A")}
    assert len(pairs) == 2 * 7 and len(adapters) == 4 * 7
    scale = 6 / 4
    with torch.no_grad():
        for prefix in pairs:
            weights[prefix + "weight"] += scale * adapters[prefix + "lora_B"] @ adapters[prefix + "lora_A"]
    assert record["merged"].keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(record["merged"][key], weight, rtol=1e-5, atol=1e-5)
    loss, gradients = plain_update(model, torch.load(inputs / f"{name}.pt", weights_only=False), "plain")
    assert record["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for prefix in pairs:
        whole = scale * gradients[prefix + "weight"]
        expected = {
            "lora_A": adapters[prefix + "lora_B"].T @ whole,
            "lora_B": whole @ adapters[prefix + "lora_A"].T,
        }
        for part, gradient in expected.items():
            found = record["gradients"][prefix + part]
            assert (found - gradient).norm() < 1e-5 * gradient.norm()


@pytest.mark.parametrize("kind, tied", parity.ADAPTED)
def test_gradients_equal_those_of_peft(inputs, compared, kind, tied):
    peft = pytest.importorskip("peft")
    name = f"{kind}-{'tied' if tied else 'untied'}"
    record = torch.load(compared / f"{name}-lora-1.pt")
    settings = peft.LoraConfig(r=4, lora_alpha=6, target_modules=lora.TARGETS.split())
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(inputs / name), settings)
    weights = dict(model.named_parameters())
    names = {f"base_model.model.{key}.default.weight": key for key in record["adapters"]}
    assert {key for key, weight in weights.items() if weight.requires_grad} == names.keys()
    for key, ours in names.items():
        weights[key].data = record["adapters"][ours]
    loss, gradients = plain_update(model, torch.load(inputs / f"{name}.pt", weights_only=False), "plain")
    assert record["loss"] == pytest.approx(loss.item(), abs=1e-6)
    for key, ours in names.items():
        assert (record["gradients"][ours] - gradients[key]).norm() < 1e-5 * gradients[key].norm()


def test_training_starts_from_the_model_itself_with_peft_s_distribution(mesh):
    trainer = small_trainer(mesh, lora_rank=8)
    model = AutoModelForCausalLM.from_pretrained(TINY)
    sample = some_samples()[0]
    found, _ = trainer.actor.model.logprobs(train.Batch([sample], "cpu"))
    torch.testing.assert_close(found, plain_logprobs(model, sample), rtol=1e-5, atol=2e-5)
    for name, weight in trainer.actor.parameters.items():
        whole = weight.full_tensor()
        if name.endswith("lora_A"):  # uniform, with a variance of 1 / (3 in)
            assert whole.var().item() == pytest.approx(1 / 3 / whole.shape[1], rel=0.25)
            assert whole.abs().max() <= whole.shape[1] ** -0.5
        else:
            assert not whole.any()


def test_only_adapters_learn(trained):
    actor = trained.actor
    assert all("lora_" in name for name in actor.parameters)
    assert {id(one) for one in actor.optimizer.state} == {id(one) for one in actor.parameters.values()}
    tiny = dict(AutoModelForCausalLM.from_pretrained(TINY).named_parameters())
    for name, weight in actor.model.named_parameters():
        if name in actor.parameters:
            assert weight.full_tensor().any()
        else:
            assert torch.equal(weight.full_tensor(), tiny[name])


def test_the_engine_has_the_merged_weights(trained):
    lines = (trained.folder / "metrics.jsonl").read_text().splitlines()
    differences = [json.loads(line)["logprob_diff"] for line in lines[1:]]
    assert len(differences) == 4 and max(differences) < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(trained.folder / "model")
    sample = some_samples()[0]
    found, _ = trained.actor.model.logprobs(train.Batch([sample], "cpu"), temperature=1.0)
    torch.testing.assert_close(found, plain_logprobs(merged, sample), rtol=1e-4, atol=1e-4)


def test_peft_loads_the_adapter(trained):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(TINY)
    model = peft.PeftModel.from_pretrained(base, trained.folder / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(trained.folder / "model")
    ids = torch.arange(40)[None]
    torch.testing.assert_close(model(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        assert not torch.allclose(model(ids).logits, merged(ids).logits, rtol=1e-3, atol=1e-3)


def test_the_reference_is_the_model_without_adapters(mesh):
    trainer = small_trainer(mesh, lora_rank=2, kl_coef=0.1)
    for weight in trainer.actor.parameters.values():
        lora.fill(weight, torch.randn(weight.shape))
    batch = train.Batch(some_samples(), "cpu")
    reference = trainer.load_policy()
    with torch.no_grad():
        found = reference.logprobs(batch)[0]
        plain = train.load_policy(str(TINY), mesh, trainer.config, VOCAB).logprobs(batch)[0]
        policy = trainer.actor.model.logprobs(batch)[0]
    assert torch.equal(found, plain) and not torch.allclose(policy, plain, atol=0.1)


@pytest.mark.sglang
@pytest.mark.skipif(not find_spec("sglang"), reason="needs sglang: .ci/sglang_cpu/install")
def test_sglang_gets_the_merged_weights(tmp_path):
    """Four steps at a learning rate that moves the log-probs far more than the bound."""
    flags = [*SMALL, "--model", TINY, "--device", "cpu", "--dtype", "float32", "--eval_data", ""]
    flags += ["--data", COUNTDOWN / "train.jsonl", "--engine", "sglang", "--output_dir", tmp_path]
    flags += ["--prompts_per_step", 8, "--max_new_tokens", 64, "--warmup_steps", 0]
    stubs = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(HERE / ".ci/sglang_cpu")}
    done = run("-m", "recipes.lora", *flags, timeout=500, SGLANG_CPU_OMP_THREADS_BIND="0", **stubs)
    assert done.returncode == 0, done.stderr[-3000:]
    history = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    differences = [record["logprob_diff"] for record in history if "logprob_diff" in record]
    print(differences)
    assert len(differences) == 4 and max(differences) < 1e-4
    assert any(record.get("grad_norm", 0) > 0 for record in history[:-1])
    sample = some_samples()[0]
    merged, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", TINY))
    assert (plain_logprobs(merged, sample) - plain_logprobs(base, sample)).abs().mean() > 1e-2


# ---- Runs ------------------------------------------------------------------------------------------------
def test_a_resumed_run_equals_its_run_to_the_bit(trained, tmp_path):
    other = tmp_path / "run"
    fit("--output_dir", other, "--save_every", 2, "--resume", trained.folder / "checkpoint-2")
    runs = [kills.read_run(folder) for folder in (trained.folder, other)]
    assert kills.count_differences(*runs) == {"metrics": 0, "samples": 0, "tensors": 0}
    adapters = [
        (folder / "adapter/adapter_model.safetensors").read_bytes() for folder in (trained.folder, other)
    ]
    assert adapters[0] == adapters[1]


@pytest.mark.parametrize("targets", ["", "q_proj, v_proj", "lm_head"])
def test_unknown_targets_end_in_one_line(mesh, targets):
    with pytest.raises(
        UserError, match="--lora_targets must be some of q_proj k_proj v_proj o_proj gate_proj"
    ):
        small_trainer(mesh, lora_targets=targets)


@pytest.mark.parametrize("flags", [{"lora_rank": 0}, {"lora_alpha": 0.0}, {"lora_alpha": float("inf")}])
def test_impossible_adapters_end_in_one_line(flags):
    with pytest.raises(UserError, match="--lora_rank must be at least 1"):
        lora.LoRAConfig(**flags)
