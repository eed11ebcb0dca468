"""Tests of recipes/ppo.py and recipes/critic.py: GAE, credit and value loss by hand; runs."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

import train
from recipes.critic import Critic, critic_metrics, gae
from recipes.formulas import trained
from recipes.ppo import PPO, PPOConfig, token_advantages
from recipes.prm import PRMConfig
from recipes.trainer import add_column
from train import Sample, UserError

REPO = Path(__file__).parent.parent
torch.set_num_threads(1)  # on busy cores more can stall for seconds


@pytest.fixture(scope="module", autouse=True)
def columns():
    """Tokens with the critic's columns, for this module only."""
    before = list(train.TOKEN)
    add_column("value")
    add_column("return")
    yield
    train.TOKEN[:] = before


def make_config(**flags) -> PPOConfig:
    return PPOConfig(**{"engine": "local", "device": "cpu"} | flags)


def episode(tokens: int, rewards: list[float], turns: list[int] | None = None, **columns) -> Sample:
    """A sample with a prompt of one token and so many trained ones."""
    sample = Sample([], {})
    sample.append([7])
    sample.append([7] * tokens, mask=1, **{"turn": turns or 0, "logprob": -1.0, **columns})
    sample.rewards = rewards
    return sample


def test_gae_by_hand():
    # Two actions with rewards 0 and 1, values 0.5 and 0.25, gamma 0.5, lambda 0.5. Last: 1 - 0.25 = 0.75.
    # First: delta = 0 + 0.5 * 0.25 - 0.5 = -0.375, plus 0.5 * 0.5 * 0.75 = 0.1875. With lambda 1: the return
    # less the value, 0.5 * 1 - 0.5 = 0; with lambda 0: delta.
    assert gae([0, 1], [0.5, 0.25], [0.5, 0.5], 0.5) == [-0.1875, 0.75]
    assert gae([0, 1], [0.5, 0.25], [0.5, 0.5], 1.0) == [0.0, 0.75]
    assert gae([0, 1], [0.5, 0.25], [0.5, 0.5], 0.0) == [-0.375, 0.75]


@pytest.mark.parametrize(
    "critic, expected",
    [("ppo", [1 / 8, 1 / 4, 1 / 2, 1]), ("tppo", [1 / 2, 1 / 2, 1, 1]), ("appo", [1 / 2, 1 / 2, 1, 1])],
)
def test_credit_to_tokens_and_to_steps_by_hand(critic, expected):
    # Two steps of two tokens with rewards 0 and 1, all values 1/2, gamma 1/2, lambda 1: the advantage is the
    # discounted reward less the value. From behind, ppo discounts each token: 1, 1/2, 1/4, 1/8; tppo only the
    # first step: 1, 1, and 1/2, 1/2. appo has one of each per step: 1 and 1/2.
    sample = episode(4, [0.0, 1.0], turns=[0, 0, 1, 1], value=0.5)
    found = token_advantages(sample, make_config(critic=critic, gamma=0.5))
    assert found.tolist() == pytest.approx([x - 0.5 for x in expected])


def test_credit_one_step_ahead_by_hand():
    # With lambda 0 tppo sees one token ahead: V - V = 0 inside, 0 + V/2 - V at the end of the first step, 1 -
    # V at the last; appo one step: 0 + V/2 - V, 1 - V. The value of a step is that of its first token.
    turns = [0, 0, 1, 1]
    options = {"gamma": 0.5, "gae_lambda": 0.0}
    sample = episode(4, [0.0, 1.0], turns, value=0.5)
    assert token_advantages(sample, make_config(critic="tppo", **options)).tolist() == [0, -0.25, 0, 0.5]
    sample = episode(4, [0.0, 1.0], turns, value=[0.5, 9, 0.5, 9])
    assert token_advantages(sample, make_config(critic="appo", **options)).tolist() == [
        -0.25,
        -0.25,
        0.5,
        0.5,
    ]


def test_a_penalty_is_part_of_the_reward():
    # The engine had each token at -1, the reference at -1.5: k1 is 1/2, of which 1/5 counts: 0.1 per token.
    before = list(train.TOKEN)
    add_column("ref_logprob")
    sample = episode(4, [0.0, 1.0], [0, 0, 1, 1], ref_logprob=-1.5)
    options = {"gamma": 0.5, "gae_lambda": 0.0, "kl_coef": 0.2, "kl_in": "reward"}
    found = token_advantages(sample, make_config(critic="appo", **options))
    train.TOKEN[:] = before
    assert found.tolist() == pytest.approx([-0.2, -0.2, 0.8, 0.8])


def test_values_and_returns_are_kept_for_the_critic():
    # One step of tokens 0, 1 with values 1/4, 1/2 and reward 1: advantages 3/4, 1/2; the return is 1 for
    # both.
    trainer = object.__new__(PPO)
    trainer.config = make_config(group_size=1, normalize="none")
    trainer.critic = SimpleNamespace(model=SimpleNamespace(values=None))
    trainer.store_values = lambda *arguments: None  # they are there
    trainer.mesh = {"dp": None}
    sample = episode(2, [1.0], value=[0.25, 0.5])
    trainer.compare([sample])
    assert trained([sample])["advantage"].tolist() == [0.75, 0.5]
    assert trained([sample])["return"].tolist() == [1.0, 1.0]


def test_lines_of_a_single_turn_are_steps():
    trainer = SimpleNamespace(line_ends=[3])
    sample = episode(5, [2.0])
    sample.tokens["id"][1:] = [5, 3, 3, 6, 3]
    PPO.split_lines(trainer, sample)
    assert sample.tokens["turn"].tolist() == [0, 0, 0, 1, 2, 2] and sample.rewards == [0.0, 0.0, 2.0]


def test_value_loss_by_hand():
    # V = 2 from V_old = 1 with R = 1.5, and V = 1 from 1 with R = 3. The first, clipped to 1.2, costs
    # max(1/4, 0.09) / 2, and the second (1 - 3)^2 / 2 = 2. Gradients V - R, weights 1.
    critic = object.__new__(Critic)
    critic.config = make_config()
    values = torch.tensor([2.0, 1.0], requires_grad=True)
    critic.model = SimpleNamespace(values=lambda batch: values)
    sample = episode(2, [0.0], value=1.0, **{"return": [1.5, 3.0]})
    batch = train.Batch([sample], "cpu")
    batch.weights = torch.ones(2)
    loss, stats = critic.loss(batch)
    assert loss.item() == pytest.approx(0.125 + 2)
    loss.backward()
    assert values.grad.tolist() == [0.5, -2.0]
    # Returns 1.5 and 3 have a variance of 0.5625; the errors of the old values are 0.25 and 4: 1 - 2.125 /
    # 0.5625.
    means = {name: found.mean().item() for name, found in stats.items()} | {"loss": loss.item()}
    expected = {"value_loss": 2.125, "value": 1.0, "explained_variance": 1 - 2.125 / 0.5625}
    assert critic_metrics(means) == pytest.approx(expected)


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"algo": "gspo"}, "--algo gspo"),
        ({"baseline": "mean"}, "--baseline must be none, not mean"),
        ({"gae_lambda": 1.5}, "--gae_lambda"),
        ({"critic_lr": 0.0}, "--critic_lr"),
        ({"value_clip": -1.0}, "--value_clip"),
    ],
)
def test_flags_that_misfit_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        make_config(**flags)


def test_a_critic_chooses_and_a_flag_wins():
    config = make_config(critic="appo", aggregation="token", kl_coef=0.1)
    assert (config.ratio, config.normalize, config.aggregation) == ("step", "turns", "token")
    assert (config.kl_estimator, config.kl_in, config.compares_groups) == ("k1", "loss", False)
    config = PRMConfig(prm="x", critic="none", engine="local", device="cpu")
    assert (config.gamma, config.ratio, config.aggregation) == (0.0, "step", "step")
    assert PRMConfig(prm="x", critic="none", gamma=0.9, engine="local", device="cpu").gamma == 0.9


def run(folder: Path, *arguments, processes: int = 0) -> list[dict]:
    """The metrics of a short run of recipes.ppo."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    small = "--steps 3 --prompts_per_step 4 --updates_per_step 2 --group_size 4 --max_new_tokens 48".split()
    command = [sys.executable, *(launcher if processes else []), "-m", "recipes.ppo", *small, *arguments]
    command += ["--eval_every", "0", "--output_dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize(
    "critic, processes",
    [
        ("ppo", 0),
        pytest.param("appo", 2, marks=pytest.mark.slow),
        pytest.param("tppo", 2, marks=pytest.mark.slow),
    ],
)
def test_ppo_runs(tmp_path, critic, processes):
    flags = ["--critic", critic, "--critic_lr", "1e-3", "--kl_coef", "0.01", "--kl_in", "reward"]
    flags += ["--lr", "1e-5"]  # so low that the first of two updates leaves the policy where it was
    history = run(tmp_path, *flags, processes=processes)[1:]
    assert all(math.isfinite(record["value_loss"]) for record in history)
    assert history[0]["value"] == 0 and history[-1]["value"] != 0  # at first it expects nothing
    assert history[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert all(np.isfinite(record["grad_norm"]) for record in history)
    with safe_open(tmp_path / "model/model.safetensors", "pt") as weights:
        assert not any("value_head" in name for name in weights.keys())


@pytest.mark.slow
def test_ppo_does_not_depend_on_the_number_of_ranks_or_tp(tmp_path):
    runs = []
    for name, processes, flags in (("one", 0, []), ("two", 2, []), ("tp", 2, ["--tp_size", "2"])):
        runs.append(run(tmp_path / name, "--critic", "appo", "--lr", "1e-4", *flags, processes=processes))
    for other in runs[1:]:
        for name in ("reward", "loss", "grad_norm", "value_loss", "value", "explained_variance"):
            assert other[1][name] == pytest.approx(runs[0][1][name], rel=1e-3, abs=1e-5), name
