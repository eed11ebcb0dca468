"""Tests of recipes/ppo.py and recipes/critic.py: GAE, credit and value loss by hand; runs."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

import train
from recipes.critic import Critic, critic_metrics, gae
from recipes.formulas import trained
from recipes.ppo import PPO, PPOConfig, token_advantages
from recipes.prm import PRMConfig
from tests.conftest import episode, extend, read_rows, run
from train import UserError

pytestmark = pytest.mark.usefixtures("columns")
STEPS = [0, 0, 1, 1]  # two of two tokens
HALF = math.sqrt(1 / 2)


def make_config(**flags) -> PPOConfig:
    return PPOConfig(**{"engine": "local", "device": "cpu"} | flags)


def test_gae_by_hand():
    # Two actions with rewards 0 and 1, values 0.5 and 0.25, gamma 0.5, lambda 0.5. Last: 1 - 0.25 = 0.75.
    # First: delta = 0 + 0.5 * 0.25 - 0.5 = -0.375, plus 0.5 * 0.5 * 0.75 = 0.1875. With lambda 1: the return
    # less the value, 0.5 * 1 - 0.5 = 0; with lambda 0: delta.
    assert gae([0, 1], [0.5, 0.25], [0.5, 0.5], 0.5) == [-0.1875, 0.75]
    assert gae([0, 1], [0.5, 0.25], [0.5, 0.5], 1.0) == [0.0, 0.75]
    assert gae([0, 1], [0.5, 0.25], [0.5, 0.5], 0.0) == [-0.375, 0.75]


PENALTY = {"kl_coef": 0.2, "kl_in": "reward"}


@pytest.mark.parametrize(
    "critic, gae_lambda, value, flags, expected",
    [
        # Two steps with rewards 0 and 1, all values 1/2, gamma 1/2. With lambda 1 the advantage is the
        # discounted reward less the value. From behind, ppo discounts each token: 1, 1/2, 1/4, 1/8; tppo only
        # the first step: 1, 1, and 1/2, 1/2. appo has one of each per step: 1 and 1/2.
        ("ppo", 1.0, 0.5, {}, [1 / 8 - 0.5, 1 / 4 - 0.5, 0, 0.5]),
        ("tppo", 1.0, 0.5, {}, [0, 0, 0.5, 0.5]),
        ("appo", 1.0, 0.5, {}, [0, 0, 0.5, 0.5]),
        # With lambda 0 tppo sees one token ahead: V - V = 0 inside, 0 + V/2 - V at the end of the first step,
        # 1 - V at the last; appo one step: 0 + V/2 - V, 1 - V. A step's value is that of its first token.
        ("tppo", 0.0, 0.5, {}, [0, -0.25, 0, 0.5]),
        ("appo", 0.0, [0.5, 9, 0.5, 9], {}, [-0.25, -0.25, 0.5, 0.5]),
        # The reference has each token at -1.5 instead of -1: k1 is 1/2, of which 1/5 counts: 0.1 per token,
        # 0.2 per step.
        ("appo", 0.0, 0.0, PENALTY, [-0.2, -0.2, 0.8, 0.8]),
    ],
)
def test_credit_to_tokens_and_to_steps_by_hand(critic, gae_lambda, value, flags, expected):
    sample = episode(4, [0.0, 1.0], STEPS, value=value, ref_logprob=-1.5)
    config = make_config(critic=critic, gamma=0.5, gae_lambda=gae_lambda, **flags)
    assert token_advantages(sample, config).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "critic, flags, advantages",
    [
        # Two samples of one step with rewards 1 and 0; values of tokens 0, 1 are 1/4, 1/2 in both. ppo has
        # the advantages 3/4, 1/2 and -1/4, -1/2; with appo a step has the value 1/4, and so 3/4 and -1/4. The
        # return is the reward.
        ("ppo", {"normalize": "none"}, [0.75, 0.5, -0.25, -0.5]),
        ("appo", {"normalize": "none"}, [0.75, 0.75, -0.25, -0.25]),
        # Over tokens: mean 1/8, variance (25 + 9 + 9 + 25) / 64 / 3; over steps: mean 1/4, variance 1/2.
        ("ppo", {}, [x / math.sqrt(68 / 3) for x in (5, 3, -3, -5)]),
        ("appo", {}, [HALF, HALF, -HALF, -HALF]),
        # Over the std of the group's first tokens, without a mean: 1 / sqrt(2).
        ("ppo", {"normalize": "group"}, [x / HALF for x in (0.75, 0.5, -0.25, -0.5)]),
    ],
)
def test_advantages_and_returns_of_a_batch_by_hand(mesh, critic, flags, advantages):
    trainer = object.__new__(PPO)
    trainer.config = make_config(critic=critic, group_size=2, **flags)
    trainer.critic = SimpleNamespace(model=SimpleNamespace(values=None))
    trainer.line_ends = []
    trainer.store_values = lambda *arguments: None  # they are there
    trainer.mesh = mesh
    samples = [episode(2, [reward], value=[0.25, 0.5]) for reward in (1.0, 0.0)]
    trainer.compare(samples)
    assert trained(samples)["advantage"].tolist() == pytest.approx(advantages, rel=1e-5)
    assert trained(samples)["return"].tolist() == [1.0, 1.0, 0.0, 0.0]


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


# The learning rate is so low that the first of two updates leaves the policy where it was.
FLAGS = {"critic_lr": 1e-3, "kl_coef": 0.01, "kl_in": "reward", "lr": 1e-5}


def run_ppo(folder, processes: int, **flags) -> list[dict]:
    """The metrics of a short run of the command."""
    flags |= {"steps": 3, "prompts_per_step": 4, "updates_per_step": 2, "group_size": 4, "eval_every": 0}
    flags |= {"max_new_tokens": 48, "output_dir": folder}
    arguments = [word for name, value in flags.items() for word in (f"--{name}", value)]
    done = run("-m", "recipes.ppo", *arguments, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return read_rows(folder / "metrics.jsonl")


def check_run(folder):
    """What holds for a run of any critic with FLAGS."""
    history = read_rows(folder / "metrics.jsonl")[1:]
    assert all(math.isfinite(record["value_loss"]) for record in history)
    assert history[0]["value"] == 0 and history[-1]["value"] != 0  # at first it expects nothing
    assert history[0]["kl"] == pytest.approx(0, abs=1e-4)
    assert all(record["grad_norm"] is not None for record in history)
    with safe_open(folder / "model/model.safetensors", "pt") as weights:
        assert not any("value_head" in name for name in weights.keys())


def test_ppo_runs(whole):
    trainer = whole(trainer_class=extend(PPO), config=PPOConfig, steps=2, updates_per_step=2, **FLAGS)
    trainer.fit()
    check_run(trainer.folder)


@pytest.mark.slow
def test_tppo_runs_on_two_processes(tmp_path):
    run_ppo(tmp_path, 2, critic="tppo", **FLAGS)
    check_run(tmp_path)


@pytest.mark.slow
def test_appo_does_not_depend_on_the_number_of_ranks_or_tp(tmp_path):
    histories = []
    flags = FLAGS | {"critic": "appo", "lr": 1e-4}  # at which the second update is off-policy
    for processes, tp in ((0, 1), (2, 1), (2, 2)):
        histories.append(run_ppo(tmp_path / f"{processes}-{tp}", processes, tp_size=tp, **flags))
    for other in histories[1:]:
        for name in ("reward", "loss", "grad_norm", "value_loss", "value", "explained_variance"):
            assert other[1][name] == pytest.approx(histories[0][1][name], rel=1e-3, abs=1e-5), name
