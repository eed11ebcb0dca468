"""Tests of recipes/algorithms.py: each row by hand, critics against plain formulas, losses against TRL."""

import asyncio
import math
import re
from collections import defaultdict
from copy import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import train
from recipes.algorithms import ALGORITHMS, AlgorithmConfig
from recipes.formulas import number_units, policy_loss, token_returns
from recipes.trainer import AlgorithmTrainer, store
from tests.conftest import episode, parse_flags
from train import Sample, UserError

pytestmark = pytest.mark.usefixtures("columns")


def make_config(**flags) -> AlgorithmConfig:
    return AlgorithmConfig(**{"engine": "local", "device": "cpu"} | flags)


def make_trainer(config, mesh, trainer_class=AlgorithmTrainer):
    """A Trainer without models, engine and data."""
    trainer = object.__new__(trainer_class)
    trainer.config = config
    trainer.mesh = mesh
    trainer.actor = SimpleNamespace(model=SimpleNamespace())
    trainer.reference = None
    return trainer


def number_groups(samples: list[Sample], size: int):
    for i, sample in enumerate(samples):
        sample.key = (i // size, i % size)


def advantages_of(samples: list[Sample], mesh, **flags) -> list[list[float]]:
    """The advantages of the trained tokens of each sample."""
    config = make_config(**{"group_size": len(samples)} | flags)
    number_groups(samples, config.group_size)
    make_trainer(config, mesh).compare(samples)
    return [sample.tokens["advantage"][sample.tokens["mask"] == 1].tolist() for sample in samples]


def loss_of(samples, config, mesh, logprobs, old=-1.0, entropy=0.0, ref=0.0, engine=-1.0):
    """policy_loss with its gradient. A number is the same for all tokens; a tensor is [N]."""
    trainer = make_trainer(config, mesh)
    trainer.config = copy(config)
    trainer.config.entropy_coef = 1.0  # else samples without advantage are left out
    (batch,) = trainer.micro_batches(samples)
    counts = [int(sample.tokens["mask"].sum()) for sample in samples]
    order = [next(i for i, one in enumerate(samples) if one is sample) for sample in batch.samples]

    def packed(values):
        values = values if isinstance(values, torch.Tensor) else torch.full_like(logprobs, values)
        return torch.cat([values.split(counts)[i] for i in order])

    leaf = logprobs.detach().clone().requires_grad_()
    mine = packed(leaf)
    batch.old_logprobs = mine.detach() if old is None else packed(old)
    batch.engine_logprobs = packed(engine)
    batch.ref_logprobs = packed(ref)
    entropies = packed(entropy) * mine / mine.detach()  # so that its gradient is entropy / logprob
    loss, stats = policy_loss(mine, entropies, batch, config)
    loss.backward()
    store(batch.samples, "value", stats["clip_fraction"].float())
    clipped = [flag for sample in samples for flag in sample.tokens["value"][1:].astype(bool).tolist()]
    return loss.item(), leaf.grad.tolist(), clipped


# ---------------------------------------------- by hand -------------------------------------------------
def test_returns_by_hand():
    # Turns of 2, 1 and 2 tokens with rewards 1, 0 and 2 and gamma 1/2. From behind: the last turn has 2, the
    # one before 0 + 2/2 = 1, the first 1 + 1/2.
    def found(gamma, **flags):
        sample = episode(5, [1, 0, 2], turns=[0, 0, 1, 2, 2], ref_logprob=-2.0)
        return token_returns(sample, make_config(gamma=gamma, **flags)).tolist()

    assert found(0.5) == [1.5, 1.5, 1, 2, 2]
    assert found(1.0) == [3, 3, 2, 2, 2] and found(0.0) == [1, 1, 0, 2, 2]
    # A penalty of 1/8 per token: 2 - 1/8, 2 - 2/8; 0 + (14/8) / 2 - 1/8 = 6/8; 1 + (6/8) / 2 - 1/8 = 10/8,
    # and 9/8.
    flags = {"kl_coef": 1 / 8, "kl_in": "reward", "kl_estimator": "k1"}
    assert found(0.5, **flags) == [9 / 8, 10 / 8, 6 / 8, 14 / 8, 15 / 8]


# One group: completion a has two tokens and reward 1, b one token and reward 0. Of rewards 1 and 0 the mean
# is 1/2 and the standard deviation sqrt(1/4 + 1/4) = sqrt(1/2), so A = +-sqrt(1/2). Over the three tokens the
# returns are 1, 1, 0 with mean 2/3 and variance (1/9 + 1/9 + 4/9) / 2 = 1/3, so A = sqrt(1/3) twice and -2
# sqrt(1/3). The ratios are 1.5, 0.6 | 1.25, the old log-probs -1. Clipped to 0.8 .. 1.28 the surrogates are,
# with the sign of A, min(1.5, 1.28) = 1.28 (clipped), min(0.6, 0.8) = 0.6 | min(-1.25, -1.25) = -1.25:
# together 0.63 if all A are equal. A token weighs 1/4, 1/4 | 1/2 by sequence, 1/3 by token, 1/(2 * 4) with
# max_new_tokens = 4.
RATIOS = (1.5, 0.6, 1.25)
HALF = math.sqrt(1 / 2)
THIRD = math.sqrt(1 / 3)
LOGPS = [-1 + math.log(ratio) for ratio in RATIOS]
MEAN = math.sqrt(1.5 * 0.6)  # the ratio of sequence a: the geometric mean of its tokens'; that of b is 1.25
PAIR = [HALF, HALF, -HALF]
BY_HAND = {  # row: advantages, loss, gradient of the log-probs: -weight A ratio, where not clipped
    "grpo": (PAIR, -HALF * (1.28 / 4 + 0.6 / 4 - 1.25 / 2), [0, -HALF * 0.6 / 4, HALF * 1.25 / 2]),
    "dr_grpo": ([0.5, 0.5, -0.5], -0.5 / 8 * 0.63, [0, -0.5 * 0.6 / 8, 0.5 * 1.25 / 8]),
    # DAPO: overlong_buffer is 0 here; a later test has it.
    "dapo": (PAIR, -HALF / 3 * 0.63, [0, -HALF * 0.6 / 3, HALF * 1.25 / 3]),
    # GSPO: 0.949 is below 1.0004, so a is not clipped; nor is b, as min(-1.25, -1.0004) = -1.25. Each of a's
    # tokens moves the ratio of both: d/dlogp = -(1/4 + 1/4) A MEAN / 2.
    "gspo": (PAIR, -HALF * (MEAN / 2 - 1.25 / 2), [-HALF * MEAN / 4, -HALF * MEAN / 4, HALF * 1.25 / 2]),
    # CISPO: no ratio is above 5; the loss is -1/3 sum of ratio A logp.
    "cispo": (
        PAIR,
        -HALF / 3 * (1.5 * LOGPS[0] + 0.6 * LOGPS[1] - 1.25 * LOGPS[2]),
        [-HALF * 1.5 / 3, -HALF * 0.6 / 3, HALF * 1.25 / 3],
    ),
    "rloo": ([1, 1, -1], -1 / 8 * 0.63, [0, -0.6 / 8, 1.25 / 8]),  # 1 - 0 and 0 - 1
    "reinforce_pp": (
        [THIRD, THIRD, -2 * THIRD],
        -THIRD / 3 * (1.28 + 0.6 - 2 * 1.25),
        [0, -THIRD * 0.6 / 3, 2 * THIRD * 1.25 / 3],
    ),
    "rebn": (PAIR, -HALF / 8 * 0.63, [0, -HALF * 0.6 / 8, HALF * 1.25 / 8]),  # two turns, 1 and 0
    "reinforce": ([1, 1, 0], -1 / 8 * (LOGPS[0] + LOGPS[1]), [-1 / 8, -1 / 8, 0]),
}


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_every_row_by_hand(mesh, algo):
    advantages, expected, gradient = BY_HAND[algo]
    flags = {"algo": algo, "group_size": 2, "max_new_tokens": 4}
    samples = [episode(2, [1.0]), episode(1, [0.0])]
    assert sum(advantages_of(samples, mesh, **flags), []) == pytest.approx(advantages, abs=1e-5)
    loss, found, clipped = loss_of(samples, make_config(**flags), mesh, torch.tensor(LOGPS))
    assert loss == pytest.approx(expected, abs=1e-5)
    assert found == pytest.approx(gradient, abs=1e-5)
    assert clipped == [gradient[0] == 0, False, False]


LOG2 = math.log(2)
KL = {"kl_coef": 0.1, "ref": -1 - LOG2}


@pytest.mark.parametrize(
    "advantage, ratio, flags, expected",  # loss, gradient, whether it is clipped
    [
        (1, 1.5, {"clip_high": 0.3}, (-1.3, 0, True)),
        (1, 1.5, {"clip_high": 0.6}, (-1.5, -1.5, False)),
        (-1, 0.5, {"clip_low": 0.2}, (0.8, 0, True)),
        (-1, 0.5, {"clip_low": 0.6}, (0.5, 0.5, False)),
        (-1, 5.0, {}, (5, 5, False)),  # min(-5, -1.28) = -5 has no bound,
        (-1, 5.0, {"dual_clip": 3.0}, (3, 0, True)),  # with dual clip max(-5, 3 * -1)
        (1, 0.5, {"dual_clip": 3.0}, (-0.5, -0.5, False)),  # which leaves A > 0 alone
        # The weight is clipped at 5, the gradient is not removed.
        (2, 6.0, {"algo": "cispo"}, (-5 * 2 * (-1 + math.log(6)), -10, False)),
        # The engine had the token at -1 - log 3, three times less likely than the old policy, or less than
        # the cap.
        (1, 1.0, {"tis_cap": 2.0, "engine": -1 - math.log(3)}, (-2, -2, False)),
        (1, 1.0, {"tis_cap": 5.0, "engine": -1 - math.log(3)}, (-3, -3, False)),
        (1, 1.0, {"tis_cap": 2.0, "engine": -1 + LOG2}, (-0.5, -0.5, False)),
        # The reference had it at -1 - log 2: the gap g is log 2. k1 = g, k2 = g^2 / 2, k3 = exp(-g) - 1 + g;
        # gradients 1, g, 1 - exp(-g) = 1/2. The surrogate adds -1 and -1.
        (1, 1.0, KL | {"kl_estimator": "k1"}, (-1 + 0.1 * LOG2, -0.9, False)),
        (1, 1.0, KL | {"kl_estimator": "k2"}, (-1 + 0.05 * LOG2**2, -1 + 0.1 * LOG2, False)),
        (1, 1.0, KL, (-1 + 0.1 * (LOG2 - 0.5), -0.95, False)),
        (1, 1.0, KL | {"kl_in": "reward"}, (-1, -1, False)),  # in the advantage instead
        (1, 1.0, {"entropy_coef": 0.01, "entropy": 2.0}, (-1.02, -1 - 0.01 * 2 / -1, False)),
        (1, 1.0, {"old": None}, (-1, -1, False)),  # on-policy
    ],
)
def test_every_choice_of_the_loss_by_hand(mesh, advantage, ratio, flags, expected):
    """Of one token of weight 1 with log-prob -1 + log ratio and, if not given, old log-prob -1."""
    options = {name: flags[name] for name in ("old", "entropy", "ref", "engine") if name in flags}
    config = make_config(**{name: value for name, value in flags.items() if name not in options})
    sample = episode(1, [1.0], advantage=advantage)
    logprobs = torch.tensor([-1 + math.log(ratio)])
    loss, gradient, clipped = loss_of([sample], config, mesh, logprobs, **options)
    assert (loss, *gradient) == pytest.approx(expected[:2], abs=1e-6) and clipped == [expected[2]]


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("sequence", [1 / 6] * 3 + [1 / 2]),
        ("step", [1 / 6, 1 / 6, 1 / 3, 1 / 3]),
        ("token", [1 / 4] * 4),
        ("constant", [1 / 10] * 4),
    ],
)
def test_weights_by_hand(mesh, aggregation, expected):
    # Samples of 3 tokens (two turns: 2 and 1) and 1 token: 2 sequences, 3 steps, 4 tokens; at most 5 new
    # tokens.
    samples = [episode(3, [0.0, 0.0], turns=[0, 0, 1], advantage=1.0), episode(1, [0.0], advantage=1.0)]
    for budget in (100, 4):  # in another micro-batch a token weighs the same
        config = make_config(aggregation=aggregation, max_new_tokens=5, tokens_per_micro_batch=budget)
        batches = make_trainer(config, mesh).micro_batches(samples)
        assert len(batches) == (1 if budget == 100 else 2)
        assert torch.cat([batch.weights for batch in batches]).tolist() == pytest.approx(expected)


def test_advantages_by_hand(mesh):
    # Two groups of two: rewards 1, 0 and 3, 3. A group of equal rewards carries no signal, exactly: the mean
    # of 0.1, 0.1, 0.1 is not 0.1 in floating point.
    samples = [episode(1, [reward]) for reward in (1.0, 0.0, 3.0, 3.0)]
    assert advantages_of(samples, mesh, algo="dr_grpo", group_size=2) == [[0.5], [-0.5], [0.0], [0.0]]
    assert advantages_of([episode(1, [0.1]) for _ in range(3)], mesh) == [[0.0]] * 3
    found = advantages_of(samples, mesh, algo="rloo", group_size=4)
    assert sum(found, []) == pytest.approx([1 - 2, 0 - 7 / 3, 3 - 4 / 3, 3 - 4 / 3])
    # Without a baseline, --normalize group divides by the std of the group, sqrt(1/2), alone.
    found = advantages_of(samples[:2], mesh, baseline="none", normalize="group")
    assert sum(found, []) == pytest.approx([math.sqrt(2), 0], abs=1e-5)
    # rebn with gamma 1/2: the turns of the first return 1 + 1/2 and 1, that of the second 0; their mean is
    # 2.5 / 3, the deviations 2/3, 1/6, -5/6, the variance (4/9 + 1/36 + 25/36) / 2 = 7/12. Each token has its
    # turn's.
    turns = [episode(3, [1.0, 1.0], turns=[0, 0, 1]), episode(1, [0.0])]
    scale = math.sqrt(12 / 7)
    found = advantages_of(turns, mesh, algo="rebn", gamma=0.5)
    assert sum(found, []) == pytest.approx([x * scale for x in (2 / 3, 2 / 3, 1 / 6, -5 / 6)], abs=1e-5)
    # With a baseline a completion is one action: 1 + 1/2 against 0.
    assert advantages_of(turns, mesh, algo="dr_grpo", gamma=0.5) == [[0.75] * 3, [-0.75]]


def test_penalties_join_the_advantage_but_not_the_reward(mesh):
    # The engine had each token at -1, the reference at -1.5: k1 is 1/2 a token, of which 1/10 counts. A group
    # sees the whole: 1 - 0.1 against 0 - 0.05.
    samples = [episode(2, [1.0], ref_logprob=-1.5), episode(1, [0.0], ref_logprob=-1.5)]
    flags = {"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"}
    found = advantages_of(samples, mesh, algo="dr_grpo", **flags)
    assert sum(found, []) == pytest.approx([0.475, 0.475, -0.475]) and samples[0].reward == 1
    # 10 tokens at most, of which the last 5 cost: 8 tokens pay 3/5, 4 tokens nothing. 1 - 0.6 against 0.
    samples = [episode(8, [1.0]), episode(4, [0.0])]
    found = advantages_of(samples, mesh, algo="dr_grpo", overlong_buffer=0.5, max_new_tokens=10)
    assert sum(found, []) == pytest.approx([0.2] * 8 + [-0.2] * 4) and samples[0].reward == 1


# ----------------------------------------------- flags --------------------------------------------------
@pytest.mark.parametrize(
    "flags, message",
    [
        ({"algo": "reinforce", "clip_high": 0.3}, "--clip_high 0.3 would have no effect"),
        ({"algo": "reinforce", "ratio": "sequence"}, "--ratio sequence would have no effect"),
        ({"algo": "cispo", "dual_clip": 3.0}, "--dual_clip 3.0 would have no effect"),
        ({"dual_clip": 0.5}, "--dual_clip must be"),
        ({"kl_estimator": "k1"}, "--kl_coef is 0"),
        ({"kl_in": "reward"}, "--kl_coef is 0"),
        ({"algo": "rebn", "dynamic_sampling": 2}, "--dynamic_sampling 2 would have no effect"),
        ({"algo": "dapo", "max_turns": 3}, "--overlong_buffer must be 0"),
        ({"overlong_buffer": 2.0}, "--overlong_buffer is"),
        ({"gamma": -0.1}, "--gamma must be 0 or more"),
        ({"algo": "rebn", "normalize_std": True, "normalize": "turns"}, "--normalize_std contradicts"),
    ],
)
def test_flags_that_misfit_are_refused(flags, message):
    with pytest.raises(UserError, match=re.escape(message)):
        make_config(**flags)


def test_a_flag_that_is_given_wins_over_the_row():
    config = make_config(algo="gspo", clip_high=0.1)
    assert (config.ratio, config.clip_low, config.clip_high) == ("sequence", 3e-4, 0.1)
    assert not make_config(algo="dapo", mask_truncated=False).mask_truncated
    assert make_config(algo="dapo", aggregation="sequence").aggregation == "sequence"
    assert make_config(normalize_std=False).normalize == "none"
    assert make_config(algo="rloo", normalize_std=True).normalize == "group"
    assert make_config().normalize_std and not make_config(algo="dr_grpo").normalize_std
    assert make_config(algo="rebn", group_size=1).compares_groups is False


def test_flags_parse():
    arguments = "--algo dapo --mask_truncated False --aggregation step --gamma 0.5 --model x".split()
    config = parse_flags(AlgorithmConfig, arguments)
    assert (config.mask_truncated, config.aggregation, config.gamma) == (False, "step", 0.5)
    assert (config.dynamic_sampling, config.clip_low) == (4, 0.2)


# ---------------------------------------------- rollout -------------------------------------------------
def drawing_trainer(mesh, draws: list, **flags):
    """A Trainer whose rollouts have these rewards, group by group."""

    class Drawn(AlgorithmTrainer):
        def sample(self, dataset, prompts, group_size, temperature):
            samples = []
            for (place, _), rewards in zip(prompts, draws[self.prompts_drawn // 2 - 1]):
                for i, reward in enumerate(rewards):
                    sample = episode(1, [float(reward or 0)])
                    sample.key = (place, i)
                    sample.failure = "failed" if reward is None else ""
                    samples.append(sample)
            return samples

    config = make_config(group_size=2, prompts_per_step=2, **flags)
    trainer = make_trainer(config, mesh, Drawn)
    trainer.engine = None
    trainer.prompts_drawn = 0
    trainer.data = range(3)
    trainer.prompts = train.shuffled(3, 0)
    return trainer


@pytest.mark.parametrize("more, expected, used", [(0, [0], 1), (1, [0], 2), (2, [0, 4], 3), (9, [0, 4], 3)])
def test_dynamic_sampling_replaces_groups_without_signal(mesh, more, expected, used):
    # Draw 1 has one group that differs, draw 2 none, draw 3 both: 2 more draws fill the step with those.
    draws = [[[1, 0], [1, 1]], [[0, 0], [0, 0]], [[0, 1], [1, 0]], [[1, 0], [0, 1]]]
    trainer = drawing_trainer(mesh, draws, dynamic_sampling=more)
    samples = trainer.rollout()
    places = sorted({sample.key[0] for sample in samples})
    assert len(samples) == 4 and trainer.prompts_drawn == 2 * used
    assert places == (expected if len(expected) == 2 else [0, 1])


@pytest.mark.parametrize("size, updates", [(5, 2), (64, 3), (10, 4), (8, 2), (7, 1)])
@pytest.mark.parametrize("first", [0, 1])
def test_no_sampled_group_is_dropped(mesh, size, updates, first):
    trainer = make_trainer(make_config(prompts_per_step=size, updates_per_step=updates), mesh)
    drawn = dict.fromkeys(range(first * size, (first + 1) * size), 1.0)
    assert trainer.choose(drawn) == set(drawn)
    later = {place: 1.0 for place in range((first + 1) * size, (first + 2) * size)}
    chosen = trainer.choose({place: 0.0 for place in drawn} | later)  # a group for each that is replaced
    assert len(chosen) == size and chosen & set(later)
    counts = [sum(place % updates == i for place in chosen) for i in range(updates)]
    assert counts == [sum(place % updates == i for place in drawn) for i in range(updates)]


def test_dynamic_sampling_fills_each_update_and_keeps_failures(mesh):
    # The group of the second update carries no signal: only a group for that update replaces it.
    draws = [[[1, 0], [1, 1]], [[1, 0], [0, 1]]]
    trainer = drawing_trainer(mesh, draws, dynamic_sampling=1, updates_per_step=2)
    assert {sample.key[0] for sample in trainer.rollout()} == {0, 3}
    trainer = drawing_trainer(mesh, [[[1, 0], [None, 1]]], dynamic_sampling=1)  # a failure is not drawn again
    assert {sample.key[0] for sample in trainer.rollout()} == {0, 1}


def test_truncated_completions_leave_no_gradient(mesh):
    samples = [episode(1 + i, [1.0], advantage=1.0) for i in range(4)]
    for sample in samples[::2]:
        sample.truncated = True
    trainer = make_trainer(make_config(mask_truncated=True, aggregation="token", group_size=2), mesh)
    (batch,) = trainer.micro_batches(samples)
    assert not any(sample.truncated for sample in batch.samples)
    assert batch.weights.tolist() == pytest.approx([1 / 6] * 6)  # 2 + 4 tokens
    for sample in samples:
        sample.truncated = True
    (filler,) = trainer.micro_batches(samples)
    assert filler.samples == [] and not filler.weights.any() and len(filler.owners) == len(filler.steps) == 1


def test_rewards_are_one_per_turn(mesh):
    trainer = make_trainer(make_config(), mesh)
    sample = Sample([], {}, turns=["a", "b"])
    for found, rewards in ((2.0, [0.0, 2.0]), ([1, 2], [1.0, 2.0])):
        trainer.reward_fn = lambda sample: found
        asyncio.run(trainer.score(sample))
        assert sample.rewards == rewards and sample.reward == sum(rewards)
    for found, failure in (([1.0], "1 rewards for 2 turns"), (math.nan, "nan")):
        trainer.reward_fn = lambda sample: found
        with pytest.raises(ValueError, match=failure):
            asyncio.run(trainer.score(sample))


# TRL, where it is installed
TRL = {  # case: what TRL is told, and what we are told
    "grpo": ({"loss_type": "grpo"}, {"algo": "grpo"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"algo": "dr_grpo"}),
    "dapo": ({"loss_type": "dapo"}, {"algo": "dapo"}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {"algo": "gspo", "clip_low": 0.2, "clip_high": 0.28},
    ),
    "cispo": ({"loss_type": "cispo"}, {"algo": "cispo"}),
    "bnpo": ({"loss_type": "bnpo"}, {"aggregation": "token"}),
    "dual clip": ({"loss_type": "grpo", "delta": 3.0}, {"dual_clip": 3.0}),
    "kl": ({"loss_type": "dapo", "beta": 0.1}, {"algo": "dapo", "kl_coef": 0.1}),
    "tis": ({"loss_type": "grpo", "use_vllm": True}, {"tis_cap": 2.0}),
}


def trl_trainer(case: str, logps: torch.Tensor, config) -> SimpleNamespace:
    """What TRL's _compute_loss needs of a GRPOTrainer."""
    flags = dict(TRL[case][0])
    delta = flags.pop("delta", None)
    options = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logps, torch.zeros_like(logps), None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "args": SimpleNamespace(use_bias_correction_kl=False, steps_per_generation=1, delta=delta),
        "epsilon_low": config.clip_low,
        "epsilon_high": 1 + config.clip_high if case == "cispo" else config.clip_high,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "model": SimpleNamespace(training=True),
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": 11,
        "_entropy_bonus_enabled": False,
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        "_metrics": {"train": defaultdict(list)},
    }
    return SimpleNamespace(**options | flags)


@pytest.mark.parametrize("case", TRL)
def test_loss_and_gradient_equal_those_of_trl(mesh, case):
    trl = pytest.importorskip("trl")
    generator = torch.Generator().manual_seed(3)
    lengths = [5, 1, 3, 8, 2, 8]
    mask = torch.tensor([[1] * n + [0] * (8 - n) for n in lengths])
    logps = (torch.randn(6, 8, generator=generator) * 0.7 - 1.5).requires_grad_()
    old, ref, engine = (logps.detach() + 0.5 * torch.randn(6, 8, generator=generator) for _ in range(3))
    advantages = torch.randn(6, generator=generator)
    config = make_config(**TRL[case][1], max_new_tokens=11)
    inputs = dict.fromkeys(["prompt_ids", "prompt_mask"], mask[:, :1])
    inputs |= dict.fromkeys(["completion_ids", "completion_mask"], mask)
    inputs |= {"advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": ref}
    inputs |= {"num_items_in_batch": mask.sum()}
    inputs |= {"importance_sampling_ratio": (old - engine).exp().clamp(max=2.0)}
    theirs = trl.GRPOTrainer._compute_loss(trl_trainer(case, logps, config), None, inputs)
    (expected,) = torch.autograd.grad(theirs, logps)
    samples = [episode(n, [0.0], advantage=advantage) for n, advantage in zip(lengths, advantages.tolist())]
    real = mask.bool()
    others = {"old": old[real], "ref": ref[real], "engine": engine[real]}
    loss, gradient, _ = loss_of(samples, config, mesh, logps[real], **others)
    assert loss == pytest.approx(theirs.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(torch.tensor(gradient), expected[real], rtol=1e-5, atol=1e-6)


# ----------------------------------------------- units --------------------------------------------------
def test_units_are_numbered_over_all_samples(mesh):
    samples = [episode(3, [0, 0], turns=[0, 0, 1]), episode(1, [0]), episode(2, [0, 0], turns=[0, 1])]
    owners, steps = number_units(samples)
    assert owners.tolist() == [0, 0, 0, 1, 2, 2] and steps.tolist() == [0, 0, 1, 2, 3, 4]
    for algo in ("grpo", "rebn", "reinforce_pp"):  # a rank may have no groups
        trainer = make_trainer(make_config(algo=algo), mesh)
        trainer.compare([])
        assert len(trainer.micro_batches([])) == 1


def test_all_tokens_of_a_step_have_one_ratio(mesh):
    # Steps of 2 and 1 tokens with ratios 1.25 * 0.96 = 1.2 and 0.9; weights 1/3. Each token moves its step's.
    sample = episode(3, [0, 0], turns=[0, 0, 1], advantage=1.0)
    logprobs = torch.tensor([1.25, 0.96, 0.9]).log() - 1
    loss, gradient, clipped = loss_of([sample], make_config(ratio="step"), mesh, logprobs)
    assert loss == pytest.approx(-(1.2 + 1.2 + 0.9) / 3)
    assert gradient == pytest.approx([-0.8, -0.8, -0.3]) and not any(clipped)


# ----------------------------------------------- ranks --------------------------------------------------
def split_over_ranks(rank: int, ranks: int, folder: Path):
    """For each row the advantages and weights of this rank's tokens, by sample; written to a file."""
    if dist.is_initialized():  # of the parent, whose connections a fork does not share
        dist.distributed_c10d._world.pg_map.clear()
        dist.distributed_c10d._update_default_pg(None)
    store = dist.FileStore(f"{folder}/store-{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found = {}
    for algo in ALGORITHMS:
        samples = []
        for i in range(12):
            turns = np.repeat(np.arange(1 + i % 2), 1 + i % 3)  # one or two, of equal lengths
            rewards = [float((i * k) % 5) for k in range(1, 2 + i % 2)]
            samples.append(episode(len(turns), rewards, turns))
        number_groups(samples, 2)
        mine = [sample for sample in samples if sample.key[0] % ranks == rank]
        config = make_config(algo=algo, group_size=2, aggregation="step" if algo == "rebn" else None)
        trainer = make_trainer(config, {"dp": SimpleNamespace(get_group=lambda: None)})
        trainer.compare(mine)
        trainer.micro_batches(mine)
        for sample in mine:
            found[algo, sample.key] = np.concatenate([sample.tokens["advantage"], sample.tokens["weight"]])
    torch.save(found, folder / f"{ranks}-{rank}")


def test_no_row_depends_on_the_number_of_ranks(tmp_path):
    found = []
    for ranks in (1, 2, 3):
        torch.multiprocessing.start_processes(split_over_ranks, (ranks, tmp_path), ranks, start_method="fork")
        parts = [torch.load(tmp_path / f"{ranks}-{rank}", weights_only=False) for rank in range(ranks)]
        found.append({key: values for part in parts for key, values in part.items()})
    assert len(found[0]) == 12 * len(ALGORITHMS)
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, values in other.items():
            assert values == pytest.approx(found[0][key], abs=1e-6), key
