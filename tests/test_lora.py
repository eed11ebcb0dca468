"""Tests of recipes/lora.py: adapters against plain models with merged weights, and against peft."""

import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from extras import add_flags, checkpoint, monitor, variants
from recipes import lora
from tests import parity, runs
from tests.conftest import (
    COUNTDOWN,
    SGLANG_CPU,
    TINY,
    VOCAB,
    alone,
    make_trainer,
    needs_sglang,
    parse_flags,
    plain_logprobs,
    plain_update,
    read_rows,
    run,
    some_samples,
)
from train import UserError

SMALL = ["--prompts_per_step", "4", "--group_size", "4", "--max_new_tokens", "16", "--steps", "4"]
SMALL += ["--eval_every", "0", "--lora_rank", "4", "--lr", "1e-3"]


def fit(*arguments):
    """Trains in this process, with checkpoints, by a command line. Returns the trainer."""
    mesh = alone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "init_distributed", lambda config: mesh)
        patch.setattr(checkpoint.Stop, "listen", lambda self: None)
        patch.setattr(sys, "argv", ["lora.py", *SMALL, *map(str, arguments)])
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
@pytest.mark.parametrize("name", parity.ADAPTED)
def test_gradients_and_merged_weights_equal_those_of_a_plain_model(inputs, compared, name, tp):
    """With W' = W + s B A and G the gradient of W', those of A and B are s B^T G and s G A^T."""
    record = torch.load(compared / f"{name}-lora-{tp}.pt")
    adapters = record["adapters"]
    model = AutoModelForCausalLM.from_pretrained(inputs / name)
    weights = dict(model.named_parameters())
    layers = [key.removesuffix("lora_A") for key in adapters if key.endswith("lora_A")]
    assert len(layers) == (7 + 6 if name.startswith("qwen3_5") else 7 + 7)  # a linear layer has 3 + 3
    scale = 6 / 4
    for layer in layers:
        weights[layer + "weight"].data += scale * adapters[layer + "lora_B"] @ adapters[layer + "lora_A"]
    torch.testing.assert_close(
        record["merged"], {key: one.data for key, one in weights.items()}, rtol=1e-5, atol=1e-5
    )
    loss, gradients = plain_update(model, torch.load(inputs / f"{name}.pt", weights_only=False), "plain")
    assert record["loss"] == pytest.approx(loss.item(), abs=1e-6)
    expected = {}
    for layer in layers:
        whole = scale * gradients[layer + "weight"]
        expected[layer + "lora_A"] = adapters[layer + "lora_B"].T @ whole
        expected[layer + "lora_B"] = whole @ adapters[layer + "lora_A"].T
    assert record["gradients"].keys() == adapters.keys() == expected.keys()
    for key, gradient in expected.items():
        assert (record["gradients"][key] - gradient).norm() < 1e-5 * gradient.norm(), key


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


def test_only_adapters_learn_and_the_engine_has_the_merged_weights(trained):
    actor = trained.actor
    assert all("lora_" in name for name in actor.parameters)
    assert {id(one) for one in actor.optimizer.state} == {id(one) for one in actor.parameters.values()}
    tiny = dict(AutoModelForCausalLM.from_pretrained(TINY).named_parameters())
    for name, weight in actor.model.named_parameters():
        if name in actor.parameters:
            assert weight.full_tensor().any()
        else:
            assert torch.equal(weight.full_tensor(), tiny[name])
    differences = [record["logprob_diff"] for record in read_rows(trained.folder / "metrics.jsonl")[1:]]
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


@needs_sglang
def test_sglang_gets_the_merged_weights(tmp_path):
    """Four steps at a learning rate that moves the log-probs far more than the bound."""
    flags = [*SMALL, "--model", TINY, "--device", "cpu", "--dtype", "float32", "--eval_data", ""]
    flags += ["--data", COUNTDOWN / "train.jsonl", "--engine", "sglang", "--output_dir", tmp_path]
    flags += ["--prompts_per_step", 8, "--max_new_tokens", 64, "--warmup_steps", 0]
    done = run("-m", "recipes.lora", *flags, timeout=500, SGLANG_CPU_OMP_THREADS_BIND="0", **SGLANG_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    history = read_rows(tmp_path / "metrics.jsonl")
    differences = [record["logprob_diff"] for record in history if "logprob_diff" in record]
    assert len(differences) == 4 and max(differences) < 1e-4
    assert any(record.get("grad_norm", 0) > 0 for record in history[:-1])
    sample = some_samples()[0]
    merged, base = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "model", TINY))
    assert (plain_logprobs(merged, sample) - plain_logprobs(base, sample)).abs().mean() > 1e-2


# ---- Runs ------------------------------------------------------------------------------------------------
def test_a_resumed_run_equals_its_run_to_the_bit(trained, tmp_path):
    folders = [trained.folder, tmp_path / "run"]
    fit("--output_dir", folders[1], "--save_every", 2, "--resume", trained.folder / "checkpoint-2")
    assert runs.differences(*folders) == runs.EQUAL
    adapters = [(folder / "adapter/adapter_model.safetensors").read_bytes() for folder in folders]
    assert adapters[0] == adapters[1]


TARGETS = "--lora_targets must be some of q_proj k_proj v_proj o_proj gate_proj"
SIZES = "--lora_rank must be at least 1, and --lora_alpha above 0"


@pytest.mark.parametrize(
    "flags, message",
    [({"lora_targets": targets}, TARGETS) for targets in ("", "q_proj, v_proj", "lm_head")]
    + [({"lora_rank": 0}, SIZES), ({"lora_alpha": 0.0}, SIZES), ({"lora_alpha": float("inf")}, SIZES)],
)
def test_impossible_adapters_end_in_one_line(mesh, flags, message):
    with pytest.raises(UserError, match=message):
        small_trainer(mesh, **flags)
