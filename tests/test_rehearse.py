"""Tests of tools/rehearse.py: the code for GPUs on fake tensors, against plan and counts by hand."""

import io
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from multiprocessing import get_context
from unittest.mock import patch

import pytest
import torch
from transformers import Qwen2Config, Qwen3Config

from tools import plan, rehearse
from tools.shapes import SIZES, known_config
from train import Trainer, UserError

SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 3, "num_attention_heads": 14}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN2 = Qwen2Config(**SMALL)
QWEN3 = Qwen3Config(**SMALL | {"tie_word_embeddings": False, "head_dim": 64})
WIDE = Qwen3Config(**SMALL | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64})
DEEP = Qwen2Config(**SMALL | {"num_hidden_layers": 24, "vocab_size": 4096})
FLAGS = {"device": "cuda", "dtype": "bfloat16", "engine": "sglang", "tokens_per_micro_batch": 4096}


LAYER = 896 * (896 + 2 * 128) + 896 + 2 * 128 + 896 * 896 + 3 * 896 * 4864 + 2 * 896  # numbers in QWEN2's
ROOT = 151936 * 896 + 896  # and in what is outside of its layers


def config_of(processes: int, **flags) -> rehearse.RehearsalConfig:
    return rehearse.RehearsalConfig(processes=processes, gpu_gb=80, **FLAGS | flags)


def check_plan(config, model_config, found: dict):
    """Plan and rehearsal agree within 3 %."""
    for name, expected in rehearse.planned(config, model_config).items():
        assert expected == pytest.approx(found[name]["peak"], rel=0.03)


@pytest.fixture(scope="module")
def elsewhere():
    """Calls functions in one other process: this one has a process group, and a rehearsal makes another."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def test_a_rehearsal_by_hand(elsewhere):
    config = config_of(4)
    found = elsewhere(rehearse.rehearse, config, QWEN2)
    check_plan(config, QWEN2, found)
    # FSDP's units are three layers and the root. A pass gathers all of them, the backward pass the layers
    # again (the root stays), and it reduces all. Two micro-batches.
    collectives = found["update"]["collectives"]
    assert collectives["allgather_base"][0] == 2 * (4 + 3) and collectives["reduce_scatter_base"][0] == 2 * 4
    assert collectives["allgather_base"][1] == 2 * 2 * (2 * 3 * LAYER + ROOT)  # in bfloat16
    assert collectives["reduce_scatter_base"][1] == 2 * 4 * (3 * LAYER + ROOT)  # in fp32
    assert found["push"]["collectives"]["allgather_base"] == (4, 2 * (3 * LAYER + ROOT))
    assert found["push"]["end"] == pytest.approx(found["update: step"]["end"], rel=0.001)  # all is freed
    # Parameters in fp32 after the build; with Adam's moments three times that.
    shard = 4 * (3 * LAYER + ROOT) / 4
    assert found["build"]["end"] == pytest.approx(shard, rel=0.01)
    assert found["update: step"]["end"] == pytest.approx(3 * shard, rel=0.01)
    # Once per optimizer step the host waits for the statistics, and for the norm.
    waits = found["update"]["syncs"] | found["update: step"]["syncs"]
    assert [line.split()[-1] for line in waits] == ["GPU", "norm.isfinite():", "norm.item()"]


def test_groups_share_their_prompts_or_not(elsewhere):
    flags = {"groups": 4, "group_size": 4, "prompt_length": 1000, "max_new_tokens": 250}
    found = {}
    for shares in (True, False):
        config = config_of(4, **flags | {"tokens_per_micro_batch": 4000, "share_prompts": shares})
        phases = elsewhere(rehearse.rehearse, config, QWEN2)
        check_plan(config, QWEN2, phases)
        found[shares] = phases["update"]
    assert found[True]["tokens"] == [4000, 4000]
    assert sorted(found[False]["tokens"]) == [2500] * 2 + [3750] * 4
    # 8,000 tokens instead of 20,000 go through the layers; the head sees 4,000 in both.
    assert 0.4 < found[True]["flops"] / found[False]["flops"] < 0.7


def test_offload_empties_the_gpu_while_the_engine_samples(elsewhere):
    config = config_of(2, offload=True, kl_coef=0.01, tokens_per_micro_batch=1024)
    found = elsewhere(rehearse.rehearse, config, QWEN3)
    check_plan(config, QWEN3, found)
    parameters = found["build"]["end"] / 2  # the other half is the reference's
    assert found["first update: rollout"]["end"] == 0
    assert found["update: rollout"]["end"] < 1e6  # Adam's step counts, of 512 bytes each
    # Parameters, Adam's moments, and the reference.
    assert found["update: step"]["end"] == pytest.approx(4 * parameters, rel=0.01)
    assert found["push"]["end"] == pytest.approx(parameters, rel=0.01)  # neither of them


def test_lora_by_hand(elsewhere):
    config = config_of(2, lora_rank=16, base_dtype="bfloat16", tokens_per_micro_batch=1024, kl_coef=0.01)
    found = elsewhere(rehearse.rehearse, config, QWEN2)
    check_plan(config, QWEN2, found)
    inputs_and_outputs = 2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864)
    adapters = 3 * 16 * inputs_and_outputs
    frozen = 3 * LAYER + ROOT
    # Only adapters are reduced, in fp32, and have Adam's moments; the reference takes nothing.
    assert found["update"]["collectives"]["reduce_scatter_base"] == (2 * 3, 2 * 4 * adapters)
    assert found["build"]["end"] == pytest.approx((2 * frozen + 4 * adapters) / 2, rel=0.01)
    assert found["update: step"]["end"] == pytest.approx((2 * frozen + 12 * adapters) / 2, rel=0.01)


def rehearse_with_waits() -> dict:
    """A rehearsal of a loss that waits for the GPU."""
    loss = Trainer.loss

    def waiting(self, logprobs, entropy, batch):
        value, stats = loss(self, logprobs, entropy, batch)
        value.item()
        return value, stats

    with patch.object(Trainer, "loss", waiting):
        config = config_of(2, tokens_per_micro_batch=1024)
        return rehearse.rehearse(config, Qwen2Config(**SMALL | {"vocab_size": 1024, "num_hidden_layers": 1}))


def test_a_wait_for_the_gpu_in_the_loss_is_found(elsewhere):
    waits = elsewhere(rehearse_with_waits)["update"]["syncs"]
    (count,) = [count for line, count in waits.items() if "value.item()" in line]
    assert count == 2  # one for each micro-batch


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, model_config, flags",
    [
        (4, QWEN2, {"tp_size": 2}),
        (4, QWEN3, {"tp_size": 2, "dp_replicate": 2}),
        (4, DEEP, {"dp_replicate": 2, "tokens_per_micro_batch": 1024}),  # most of it are sums over copies
        (2, QWEN3, {"kl_coef": 0.01}),
        (1, QWEN2, {"gradient_checkpointing": False}),
        (64, QWEN3, {}),
        (4, WIDE, {"tp_size": 4, "offload": True, "lora_rank": 8, "base_dtype": "float32"}),
    ],
)
def test_plan_agrees_with_the_rehearsal(elsewhere, processes, model_config, flags):
    config = config_of(processes, **flags)
    check_plan(config, model_config, elsewhere(rehearse.rehearse, config, model_config))


def test_what_cannot_be_rehearsed_is_one_line():
    with pytest.raises(UserError, match="--dtype must be bfloat16 or float16"):
        rehearse.read_flags(["--dtype", "float32"])


def run_main() -> tuple[int, str]:
    """The command, for a small model. Returns the exit code and what it printed."""
    command = ["rehearse", "--processes", "2", "--gpu_gb", "12"]
    with patch.object(sys, "argv", command), patch.object(plan, "find_config", lambda name: QWEN2):
        with redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as ended:
            rehearse.main()
    return ended.value.code, printed.getvalue()


def test_a_run_that_does_not_fit_ends_with_what_to_change(elsewhere):
    code, printed = elsewhere(run_main)
    assert code == 1 and "update " in printed and "1 x train.py:" in printed
    assert printed.splitlines()[-1].startswith("It does not fit into 12 GB. It would with --")


@pytest.mark.parametrize("name", SIZES)
def test_known_sizes_make_models_of_their_names(name):
    config = known_config(f"Qwen/{name}")
    hidden, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    width = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    heads = width * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    size = layers * hidden * (heads + 3 * mlp)
    size += config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    billions = float(name.split("-")[1].removesuffix("B"))
    assert size / 1e9 == pytest.approx(billions, rel=0.13)
    assert known_config("Qwen/other") is None
