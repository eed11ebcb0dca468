"""Tests of extras/monitor.py: FLOPs and speed by hand, and its remarks on a step."""

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3_5TextConfig

from extras import monitor
from extras.monitor import forward_flops, peak_flops, remarks
from tests.conftest import Config
from train import Batch, Sample

# One layer, H 4, MLP 8, 2 heads of 2, 1 key-value head.
MODEL = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}


# ---- Speed -----------------------------------------------------------------------------------------------
def test_forward_flops_by_hand():
    # q and o 16 each, k and v 8 each, MLP 3 * 32, so 144 weights. 3 + 2 tokens: 2 * 144 * 5 = 1440.
    # Attention: token t sees t tokens, (1 + 2 + 3) + (1 + 2) = 9 pairs, with 2 products of 2 * 4 FLOPs each:
    # 144. Head at 3 tokens: 2 * 4 * 10 * 3 = 240.
    config = Qwen2Config(**MODEL, num_hidden_layers=1, vocab_size=10)
    assert forward_flops(config, [3, 2], 3) == 1440 + 144 + 240
    # The second sequence shares its first token: 4 tokens are left of 5, and 8 pairs of 9.
    assert forward_flops(config, [3, 2], 3, [0, 1]) == 1440 * 4 / 5 + 144 * 8 / 9 + 240
    two_layers = Qwen2Config(**MODEL, num_hidden_layers=2, vocab_size=10)
    assert forward_flops(two_layers, [3, 2], 3) == 2 * (1440 + 144) + 240


# Linear layers with 2 key heads and 4 value heads, K 8 and V 16, and one attention layer.
HYBRID = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID |= {"head_dim": 16, "vocab_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "num_hidden_layers": 4}


def test_forward_flops_of_a_hybrid_by_hand():
    # 32 inputs to q and k of 16 each, v and z of 64 each, beta and decay of 4 each, and 64 outputs to 32:
    # 7,424 weights; 4 taps of 96 channels: 384; 3 products with 4 states of 8 x 16: 1,536. Attention: q, gate
    # and o of 64 each, k and v of 32 each: 8,192 weights. MLPs: 3 * 32 * 48 each. Pairs: 3 + 1, of 4 * 64.
    config = Qwen3_5TextConfig(**HYBRID)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    per_token = 2 * (3 * (7424 + 384 + 1536) + 8192 + 4 * 4608)
    assert forward_flops(config, [2, 1], 2) == 3 * per_token + 4 * 256 + 2 * 2 * 32 * 64


def test_forward_flops_of_a_hybrid_are_those_that_torch_counts():
    """torch counts whole squares of attention, and transformers' chunks of 64 tokens within linear layers."""
    config = Qwen3_5TextConfig(**HYBRID, attn_implementation="eager")
    n = 256
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        AutoModelForCausalLM.from_config(config)(torch.arange(n)[None] % 64, use_cache=False)
    squares = 256 * (n * n - n * (n + 1) // 2)
    chunks = 3 * n * 4 * 64 * 2 * (8 + 8 + 16)  # k k, q k, and that with v: per value head 64 columns each
    found = counter.get_total_flops() - squares - chunks
    assert found == pytest.approx(forward_flops(config, [n], n), rel=1e-3)  # the convolution's padding


def test_a_card_is_not_taken_for_another_one():
    cards = {"NVIDIA H100 PCIe": 756e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}
    cards |= {"NVIDIA A10G": 70e12, "NVIDIA A10": 125e12, "NVIDIA A100-SXM4-80GB": 312e12}
    cards |= {"NVIDIA H20": 148e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "Tesla T4": None}
    assert {card: peak_flops(card) for card in cards} == cards


@pytest.mark.parametrize("card", ["", "NVIDIA H100 80GB HBM3"])
def test_speed_by_hand(monkeypatch, card):
    # This rank: 2 s of sampling 3 tokens, an update of 5. The other one: 4 s, 6 sampled, 20 in the update, of
    # which 15 are computed.
    sample = Sample([], {})
    sample.append([7, 7])
    sample.append([8, 8, 8], mask=1, advantage=0.5)
    idle = Sample([], {})
    idle.append([7] * 9)  # not in the update

    class Packer:
        def micro_batches(self, samples):
            return [Batch([sample], "cpu"), Batch([], "cpu")]  # the second one is a filler

    trainer = object.__new__(monitor.extend(Packer))
    trainer.mesh = {"dp": SimpleNamespace(size=lambda: 2)}
    model = SimpleNamespace(config=Qwen2Config(**MODEL, num_hidden_layers=1, vocab_size=10))
    trainer.actor = SimpleNamespace(model=model)
    trainer.tokens = trainer.sample_tokens = trainer.flops = 0
    trainer.micro_batches([sample, idle])
    trainer.gaps = [torch.tensor(0.125), torch.tensor(0.25)]
    trainer.seconds = Counter(rollout=2.0, logprobs=1.0, update=4.0, push=0.5, step=8.0, reward=1.5)

    def reduce_over(mesh, values, op=dist.ReduceOp.SUM):
        if op == dist.ReduceOp.SUM:
            return [mine + other for mine, other in zip(values, [6, 15, 20, 1e6, 0.5, 4.0], strict=True)]
        others = [4.0, 1.0, 5.0, 0.5, 8.0, 0.0, 15, 0.125]
        return [max(pair) for pair in zip(values, others, strict=True)]

    monkeypatch.setattr(monitor, "reduce_over", reduce_over)
    monkeypatch.setattr(monitor, "peak_gb", lambda: 1.5)
    monkeypatch.setattr(monitor.dist, "get_world_size", lambda: 4)  # two tensor-parallel groups of two
    monkeypatch.setattr(monitor.torch.cuda, "is_available", lambda: bool(card))
    monkeypatch.setattr(monitor.torch.cuda, "get_device_name", lambda: card)
    found = trainer.speed([sample, idle])
    # 5 tokens: 2 * 144 * 5 + 15 * 2 * 8 + 2 * 4 * 10 * 3 = 1920 FLOPs. Forward and backward take three times
    # those of both ranks, within 5 s on 4 cards.
    exact = {"rel": 1e-9, "abs": 0}  # the default for abs is larger than this MFU
    mfu = {"mfu": pytest.approx(3 * (1920 + 1e6) / 5 / 4 / 989e12, **exact)} if "H100" in card else {}
    assert found == mfu | {
        **{"time_rollout": 4.0, "time_logprobs": 1.0, "time_update": 5.0, "time_push": 0.5, "time_step": 8.0},
        **{"time_reward": 2.0, "rollout_tokens_per_s": 9 / 4, "train_tokens_per_s": 25 / 6, "peak_gb": 1.5},
        **{"idle_rollout": 1 - 3 / 4, "idle_update": 1 - 10 / 15, "logprob_diff_max": 0.25},
        "shared_tokens": pytest.approx(1 - 20 / 25),  # five of the other rank's 20 are shared
    }


def test_seconds_of_a_reward_that_raises_are_counted():
    class Core:
        async def score(self, sample):
            raise ValueError

    trainer = object.__new__(monitor.extend(Core))
    trainer.seconds = Counter()
    with pytest.raises(ValueError):
        asyncio.run(trainer.score(None))
    assert trainer.seconds["reward"] > 0


# ---- Remarks ---------------------------------------------------------------------------------------------
MIXED = "1 of 1 groups carry a signal."
NEAR_ZERO = (
    " A loss near 0 is expected: before the update every ratio is 1, and the advantages of a group sum to 0. "
)


def said_of(rewards: list[list[float]], metrics=(), step=1, **flags) -> str:
    """The remarks on a step with these rewards by group, and with a failed sample of another group."""
    outcomes = [(group, reward, False) for group, all_of_it in enumerate(rewards) for reward in all_of_it]
    outcomes += [(-1, 0.0, True), (-1, 1.0, False)]
    return remarks(
        step,
        {"loss": 0.5, "grad_norm": 0.1} | dict(metrics),
        outcomes,
        SimpleNamespace(**vars(Config()) | flags),
    )


def test_truncated_completions_are_remarked_on():
    assert said_of([[1, 0]], {"truncated": 0.3}) == said_of([[1, 0]]) == MIXED
    said = said_of([[1, 0]], {"truncated": 0.5})
    assert said.startswith(f"{MIXED} 50% of the completions were cut off: raise --max_new_tokens, ")


@pytest.mark.parametrize(
    "metrics, flags, said",
    [
        ({"loss": 1e-9}, {}, f"{NEAR_ZERO}The gradient is not 0. Watch the reward."),
        ({"loss": 0.0, "grad_norm": 0.0}, {}, f"{NEAR_ZERO}Watch the reward."),
        ({"loss": 0.0}, {"step": 11}, ""),
        ({"loss": 0.0}, {"updates_per_step": 2}, ""),
        ({"loss": 0.0}, {"kl_coef": 0.1}, ""),
    ],
)
def test_a_loss_near_zero_is_explained_where_it_is_expected(metrics, flags, said):
    assert said_of([[1, 0]], metrics, **flags) == MIXED + said


def test_groups_with_a_signal_are_counted():
    rewards = [[1, 0], [1, 1], [0, 0], [0.5, 0.5], [0, 0]]
    assert said_of(rewards) == "1 of 5 groups carry a signal (1 all correct, 2 all wrong, 1 all equal)."
    assert said_of(rewards, baseline="none") == ""  # nothing is compared within a group
    assert said_of([]) == ""  # all have failed


@pytest.mark.parametrize(
    "rewards, reason, mean",
    [
        ([[1, 1], [0, 0], [1, 1], [1, 1]], "(3 all correct, 1 all wrong)", "0.75"),
        ([[0, 0], [0, 0]], "(2 all equal)", "0"),  # one value alone may be right or wrong
    ],
)
def test_what_to_do_if_no_group_carries_a_signal(rewards, reason, mean):
    assert said_of(rewards) == (
        f"None of the {len(rewards)} groups carries a signal {reason}, so there is nothing to learn from "
        f"this step: the mean reward is {mean}; use prompts that the policy solves sometimes, or raise "
        "--group_size."
    )


def test_remarks_are_on_the_first_step_and_on_every_tenth_after_it(monkeypatch, capsys):
    class Core:
        def write(self, step, metrics, samples):
            metrics["truncated"] = 0.4  # the mean of the samples

    trainer = object.__new__(monitor.extend(Core))
    trainer.config = Config()
    trainer.mesh = {"tp": SimpleNamespace(get_local_rank=lambda: 0)}
    monkeypatch.setattr(monitor.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(monitor.dist, "gather_object", lambda one, parts: parts.__setitem__(0, one))
    for step in range(22):
        trainer.write(step, {}, [Sample([], {}, reward=1.0), Sample([], {})] if step else [])
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(" |")[0] for line in printed] == ["step 1", "step 11", "step 21"]
    assert all("1 of 1 groups" in line and "40% of the completions were cut off" in line for line in printed)
