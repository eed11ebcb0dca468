"""Tests of --dtype float16 (extras/loss_scale.py) and --fp32_logits (extras/head.py)."""

import json
import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch

import train
from extras import checkpoint, gate, head, loss_scale, monitor, updates
from extras.loss_scale import LossScale, scale_loss
from recipes import lora
from recipes.ppo import PPO, PPOConfig
from tests import parity
from tests.conftest import (
    Config,
    VariantTrainer,
    alone,
    make_trainer,
    parse_flags,
    random_model,
    some_samples,
)
from tests.runs import EQUAL, differences, read_metrics
from train import Actor

logging.getLogger("c10d-NullHandler-dcp_logger").setLevel(logging.ERROR)


# ---- The scale -------------------------------------------------------------------------------------------
def learned(trainer) -> tuple[dict, dict, dict]:
    """The metrics of an update, its gradients and the weights after it."""
    trainer.check_engine = lambda gap: None
    gradients = {}

    def note_gradients(*_):
        gradients.update((name, one.grad.full_tensor()) for name, one in trainer.actor.parameters.items())

    trainer.actor.optimizer.register_step_pre_hook(note_gradients)
    metrics = trainer.update(trainer.micro_batches(some_samples()))
    return metrics, gradients, {name: one.full_tensor() for name, one in trainer.actor.parameters.items()}


@pytest.mark.parametrize("value", [1.0, 2.0**16, 2.0**-9])
def test_a_scaled_update_is_the_update_to_the_bit(small, value):
    flags = {
        "dtype": "float32",
        "max_grad_norm": 0.05,
        "tokens_per_micro_batch": 60,
    }  # several passes, a clip
    plain = learned(small(**flags))
    trainer = small(**flags)
    scale_loss(trainer.actor)
    trainer.actor.loss_scale.value = value
    metrics, *rest = learned(trainer)
    assert metrics.pop("loss_scale") == value
    assert metrics == plain[0] and metrics["grad_norm"] > 0.05  # both unscaled
    for found, expected in zip(rest, plain[1:]):
        assert all(torch.equal(found[name], expected[name]) for name in expected) and expected


def test_small_gradients_survive_in_float16(small):
    _, expected, _ = learned(small(dtype="float32"))
    errors = {}
    for value in (2.0**-10, 2.0**16):
        trainer = small(dtype="float16")
        scale_loss(trainer.actor)
        trainer.actor.loss_scale.value = value
        _, found, _ = learned(trainer)
        difference = sum((found[name] - expected[name]).square().sum() for name in expected)
        errors[value] = (difference / sum(one.square().sum() for one in expected.values())).sqrt().item()
    assert errors[2.0**16] < 0.01 < 3 * errors[2.0**16] < errors[2.0**-10]


def test_the_scale_is_halved_at_once_and_doubled_after_good_steps(monkeypatch):
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    scale = LossScale()
    values = []
    for letter in "ggbgggggbbgg":
        scale.update(letter == "g")
        values.append(math.log2(scale.value))
    assert values == [16, 16, 15, 15, 15, 16, 16, 16, 15, 14, 14, 14] and scale.good_steps == 2


def test_an_overflow_of_one_rank_leaves_the_update_out_on_all(compared):
    everyones = torch.load(compared / "overflow.pt", weights_only=False)
    for history in everyones:
        norms, scales, updates, weights, moments = zip(*history)
        assert [math.isfinite(norm) for norm in norms] == [True, False, True]
        assert [scale["value"] for scale in scales] == [2.0**16, 2.0**15, 2.0**15]
        assert [scale["good_steps"] for scale in scales] == [1, 0, 1]
        assert updates == (1, 1, 2)  # nor does the learning rate move on
        for states in (weights, moments):
            assert all(map(torch.equal, states[0], states[1]))
            assert not all(map(torch.equal, states[1], states[2]))
    assert len(everyones) == 2 and everyones[0][0][0] == everyones[1][0][0]


def test_all_that_learns_has_a_scale_in_float16_alone(mesh, tmp_path):
    folder = str(random_model(tmp_path))
    for dtype in ("float16", "float32"):
        config = lora.LoRAConfig(model=folder, device="cpu", dtype=dtype, lora_rank=2)
        actor = make_trainer(config, mesh, lora.LoRATrainer, lora.LoRAActor).actor
        critic = Actor(train.load_policy(folder, mesh, config, 500), mesh, config)

        class Made(train.Trainer):
            def __init__(self, config):
                self.actor, self.critic = actor, critic

        trainer = loss_scale.extend(Made)(config)
        assert isinstance(actor, lora.LoRAActor)  # still: engines get merged weights
        scales = checkpoint.loss_scales({"actor": trainer.actor, "critic": trainer.critic})
        assert [*scales] == (["actor", "critic"] if dtype == "float16" else [])
        assert dtype == "float32" or scales["actor"] is not scales["critic"]


# ---- Runs ------------------------------------------------------------------------------------------------
FLAGS = "--dtype float16 --prompts_per_step 4 --group_size 4 --max_new_tokens 24 --steps 4 --eval_every 0 "
FLAGS += "--save_every 2 --updates_per_step 2"


def fit(trainer_class, config_class, *arguments, value: float = 0):
    """Trains in this process in float16; the scale begins with a value of its own, unless it is 0."""
    with pytest.MonkeyPatch.context() as patch:
        mesh = alone()
        patch.setattr(train, "init_distributed", lambda config: mesh)
        patch.setattr(checkpoint.Stop, "listen", lambda self: None)
        patch.setattr(sys, "argv", ["train.py", *FLAGS.split(), *map(str, arguments)])
        wrapped = updates.extend(monitor.extend(head.extend(loss_scale.extend(trainer_class))))
        config = parse_flags(config_class, sys.argv[1:])
        trainer = checkpoint.extend(wrapped)(
            config, train.RLDataset, lambda sample: len(sample.text) % 7, None
        )
        for actor in trainer.learners().values() if value else ():
            actor.loss_scale.value = value
        trainer.fit()
    return trainer


@pytest.mark.parametrize(
    "trainer_class, config_class",
    [pytest.param(PPO, PPOConfig, marks=pytest.mark.slow), (lora.LoRATrainer, lora.LoRAConfig)],
)
@pytest.mark.usefixtures("columns")
def test_a_run_goes_on_after_overflows_and_resumes_to_the_bit(
    tmp_path, monkeypatch, trainer_class, config_class
):
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    whole, branch = tmp_path / "whole", tmp_path / "branch"
    classes = trainer_class, config_class
    run = fit(*classes, "--output_dir", whole, value=2.0**40)
    first, *_, last = read_metrics(whole)[1:]
    assert first["grad_norm"] is None and last["loss_scale"] < first["loss_scale"] == 2.0**40 * 0.75
    again = fit(*classes, "--resume", whole / "checkpoint-2", "--output_dir", branch)
    assert differences(whole, branch) == EQUAL
    for name, actor in run.learners().items():
        assert again.learners()[name].loss_scale == actor.loss_scale != LossScale(2.0**40)


# ---- The gate, and logits in fp32 ------------------------------------------------------------------------
def test_the_gate_tells_float16_from_bfloat16():
    probe = gate.Gate(SimpleNamespace(config=Config(dtype="float16", device="cpu", engine="local")), None)
    assert train.BOUND["float32"] < probe.bound == train.BOUND["float16"] < train.BOUND["bfloat16"]
    for gap, cause in ((0.8, ""), (1.2, "dtype: "), (6, "another model")):
        scores = gate.Scores(torch.zeros(1), torch.zeros(1), torch.full((1,), gap * probe.bound), None)
        assert probe.weights_cause(scores).startswith(cause) and (not cause) == (
            not probe.weights_cause(scores)
        )


def oracle(states, whole, targets, outside) -> dict:
    """What `parity.score_head` computes, in fp64 from the same 16-bit numbers."""
    states, whole = states.double().requires_grad_(), whole.double().requires_grad_()
    logps = torch.log_softmax((states @ whole.T)[:, :120] / 0.8, -1)
    scores = torch.stack([logps.gather(1, targets[:, None])[:, 0], -(logps.exp() * logps).sum(-1)])
    (outside * scores).sum().backward()
    return {"scores": scores.detach(), "by_states": states.grad, "by_head": whole.grad}


def errors(found: dict) -> dict:
    """The largest error of log-probs and entropies, and the relative errors of gradients."""
    expected = oracle(*found["inputs"])
    relative = {name: (found[name] - one).norm() / one.norm() for name, one in expected.items()}
    return relative | {"scores": (found["scores"] - expected["scores"]).abs().max()}


@pytest.mark.parametrize("dtype, rounding", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_fp32_logits_are_those_of_fp64(mesh, compared, dtype, rounding):
    split = torch.load(compared / f"head-{dtype}.pt")
    for found in (split, parity.score_head(dtype, mesh["tp"], True)):
        distance = errors(found)
        assert distance["scores"] < 1e-4
        assert distance["by_states"] < rounding and distance["by_head"] < rounding  # of the results
        assert found["by_states"].dtype == found["by_head"].dtype == dtype
    assert errors(parity.score_head(dtype, mesh["tp"], False))["scores"] > rounding  # logits up to 60


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_flag_takes_rounding_out_of_the_logits_of_both_sides(whole, dtype):
    gaps = {}
    for fp32_logits in (True, False):
        trainer = whole(trainer_class=head.extend(VariantTrainer), dtype=dtype, fp32_logits=fp32_logits)
        trainer.publish()
        gaps[fp32_logits] = trainer.step()[0]["logprob_diff"]
    assert gaps[True] < gaps[False] < train.BOUND[dtype]


@pytest.mark.parametrize("fp32_logits", [True, False])
def test_sglang_follows_the_flag_also_after_a_resume(fp32_logits):
    plain = type("Plain", (), {"__init__": lambda self, config: None})
    saved = json.dumps({"tp_size": 2, "enable_fp32_lm_head": not fp32_logits})
    config = Config(engine="sglang", sglang_args=saved, fp32_logits=fp32_logits)
    head.extend(plain)(config)
    assert json.loads(config.sglang_args) == {"tp_size": 2, "enable_fp32_lm_head": fp32_logits}
