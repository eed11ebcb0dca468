"""Tests of extras/monitor.py: FLOPs by hand, and what it says about a step."""

import builtins
import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from transformers import Qwen2Config

from extras import monitor
from extras.monitor import (
    FORGET_AFTER,
    Monitor,
    draw_curve,
    forward_flops,
    hardware,
    peak_flops,
    token_details,
)
from train import Batch, Sample

CONFIG = {"group_size": 2, "updates_per_step": 1, "kl_coef": 0.0}
RECORD = {"loss": 0.5, "truncated": 0.0, "clip_fraction": 0.0, "entropy": 1.0}
MIXED = [[1, 0]]


# ---------------------------------------------- speed -------------------------------------------------
def test_forward_flops_by_hand():
    # One layer, H 4, MLP 8, 2 heads of 2, 1 key-value head: q and o 16 each, k and v 8 each, MLP 3 * 32, so
    # 144 weights. 3 + 2 tokens: 2 * 144 * 5 = 1440. Attention: token t sees t tokens, (1 + 2 + 3) + (1 + 2) =
    # 9 pairs, with 2 products of 2 * 4 FLOPs each: 144. Head at 3 tokens: 2 * 4 * 10 * 3 = 240.
    sizes = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=10)
    assert forward_flops(config, [3, 2], 3) == 1440 + 144 + 240
    two_layers = Qwen2Config(**sizes, num_hidden_layers=2, vocab_size=10)
    assert forward_flops(two_layers, [3, 2], 3) == 2 * (1440 + 144) + 240


def test_mfu_by_hand(monkeypatch):
    sizes = {"hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**sizes, num_hidden_layers=1, vocab_size=10)
    speed = Monitor(CONFIG).speed
    monkeypatch.setattr(monitor.torch.cuda, "is_available", lambda: False)
    assert speed({"time_update": 2.0}, config, [3, 2], 3, 4) == {}
    monkeypatch.setattr(monitor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(monitor.torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    # Forward and backward take three times 1824 FLOPs; 2 s on 4 cards of 989 TFLOP/s.
    expected = {"mfu": pytest.approx(3 * 1824 / 2 / 4 / 989e12)}
    assert speed({"time_update": 2.0}, config, [3, 2], 3, 4) == expected
    assert speed({}, config, [3, 2], 3, 4) == {}
    monkeypatch.setattr(monitor.torch.cuda, "get_device_name", lambda: "Some Other Card")
    assert speed({"time_update": 2.0}, config, [3, 2], 3, 4) == {}


def test_speed_by_hand(monkeypatch):
    # This rank: 2 s of sampling 3 tokens, an update of 5 tokens. The other one: 4 s, 6 sampled, 15 trained.
    sample = Sample([], {})
    sample.append([7, 7])
    sample.append([8, 8, 8], mask=1, advantage=0.5)
    idle = Sample([], {})
    idle.append([7] * 9)  # not in the update

    class Packer:
        def micro_batches(self, samples):
            return [Batch([sample], "cpu"), Batch([], "cpu")]  # the second one is a filler

    trainer = object.__new__(monitor.extend(Packer))
    trainer.tokens = 0
    trainer.micro_batches([sample, idle])
    trainer.mesh = {"dp": SimpleNamespace(size=lambda: 2)}
    trainer.largest_gap = 0.25
    trainer.seconds = Counter(rollout=2.0, logprobs=1.0, update=4.0, push=0.5, step=8.0, reward=1.5)

    def reduce_over(mesh, values, op=dist.ReduceOp.SUM):
        if op == dist.ReduceOp.SUM:
            return [mine + other for mine, other in zip(values, [6, 15, 0.5, 4.0], strict=True)]
        others = [4.0, 1.0, 5.0, 0.5, 8.0, 0.0, 15, 0.125]
        return [max(pair) for pair in zip(values, others, strict=True)]

    monkeypatch.setattr(monitor, "reduce_over", reduce_over)
    monkeypatch.setattr(monitor, "peak_gb", lambda: 1.5)
    assert trainer.speed([sample, idle]) == {
        **{"time_rollout": 4.0, "time_logprobs": 1.0, "time_update": 5.0, "time_push": 0.5, "time_step": 8.0},
        **{"time_reward": 2.0, "rollout_tokens_per_s": 9 / 4, "train_tokens_per_s": 20 / 6, "peak_gb": 1.5},
        **{"idle_rollout": 1 - 3 / 4, "idle_update": 1 - 10 / 15, "logprob_diff_max": 0.25},
    }


@pytest.mark.parametrize(
    "card, peak",
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", None),
    ],
)
def test_a_card_is_not_taken_for_another_one(card, peak):
    assert peak_flops(card) == peak


def test_hardware_can_be_written_as_json():
    assert json.loads(json.dumps(hardware()))["processes"] == 1


# ---------------------------------------------- numbers per token -------------------------------------
def test_what_is_kept_of_tokens_by_hand():
    columns = [
        ("id", "i4"),
        ("mask", "u1"),
        ("version", "i4"),
        ("logprob", "f4"),
        ("turn", "i4"),
        ("weight", "f4"),
    ]
    tokens = np.zeros(6, columns)
    tokens["id"] = [5, 6, 7, 8, 9, 10]
    tokens["mask"] = [0, 1, 1, 0, 1, 0]
    tokens["version"] = [0, 4, 4, 0, 4, 0]
    tokens["logprob"] = [0, -1, -2, 0, -3, 0]
    tokens["turn"] = [0, 0, 0, 0, 1, 1]
    kept = token_details(tokens)
    assert kept == {
        "ids": [5, 6, 7, 8, 9, 10],
        "trained": [[1, 3], [4, 5]],
        "versions": 4,
        "logprobs": [-1.0, -2.0, -3.0],
        "turn_ids": [0, 0, 1],
    }
    assert json.loads(json.dumps(kept)) == kept
    assert token_details(tokens[:1]) == {"ids": [5], "trained": []}


# ---------------------------------------------- sentences ----------------------------------------------
@pytest.mark.parametrize(
    "config, record, rewards, said",
    [
        (
            {},
            {},
            [[1, 0], [1, 1], [0, 0], [0.5, 0.5]],
            "1 of 4 groups carry a signal (1 all correct, 1 all wrong, 1 all equal).",
        ),
        ({}, {"loss": 0.0}, [[1, 0], [0, 0]], "A loss near 0 is expected"),
        ({"updates_per_step": 2}, {"loss": 0.0}, MIXED, "1 of 1 groups carry a signal."),
        (
            {},
            {},
            [[0, 0], [0, 0]],
            "None of the 2 groups carries a signal (2 all equal), so there is nothing",
        ),
        ({"baseline": "none"}, {}, MIXED, ""),
        ({}, {"truncated": 0.5}, MIXED, "50% of the completions were cut off: raise --max_new_tokens"),
        ({}, {"clip_fraction": 0.4}, MIXED, "40% of the tokens were clipped: lower --lr"),
        ({"ratio": "sequence"}, {"clip_fraction": 0.4}, MIXED, "1 of 1 groups carry a signal."),
    ],
)
def test_what_is_said_of_a_first_step(config, record, rewards, said):
    found = Monitor(CONFIG | config).diagnose(RECORD | record, rewards, [])
    assert said in found and (said or not found)
    assert "\n" not in found
    if said.endswith("."):  # and nothing else
        assert found == said


def test_prompts_that_are_too_easy_or_too_hard():
    diagnose = Monitor(CONFIG).diagnose
    diagnose(RECORD, MIXED, [])
    assert "(2 all correct), so there is nothing to learn from this step: use harder prompts" in diagnose(
        RECORD, [[1, 1], [1, 1]], []
    )
    other = Monitor(CONFIG)
    other.diagnose(RECORD, MIXED, [])
    assert (
        "(2 all wrong)" in (said := other.diagnose(RECORD, [[0, 0], [0, 0]], [])) and "easier prompts" in said
    )


def test_a_sentence_is_said_once_and_again_when_it_is_worse():
    monitor_ = Monitor(CONFIG)
    shares = [0.1, 0.4, 0.41, 0.38, 0.5, 0.61, 0.62, 0.0, 0.7, 0.95]
    said = [monitor_.diagnose(RECORD | {"truncated": share}, MIXED, []) for share in shares]
    # 0.4 is above the threshold; 0.61 exceeds 1.5 times 0.4, and 0.95 exceeds 1.5 times 0.61.
    assert ["cut off" in sentence for sentence in said] == [bool(n) for n in [0, 1, 0, 0, 0, 1, 0, 0, 0, 1]]
    assert said[0] == "1 of 1 groups carry a signal." and not any(said[2:5])


def test_a_sentence_is_said_again_after_it_had_gone_away():
    for gone, again in [(FORGET_AFTER - 1, False), (FORGET_AFTER, True)]:
        diagnose = Monitor(CONFIG).diagnose
        assert "cut off" in diagnose(RECORD | {"truncated": 0.5}, MIXED, [])
        for _ in range(gone):
            assert diagnose(RECORD, MIXED, []) == ""
        assert ("cut off" in diagnose(RECORD | {"truncated": 0.5}, MIXED, [])) is again


def test_a_healthy_run_is_silent_after_its_first_step():
    diagnose = Monitor(CONFIG).diagnose
    said = [diagnose(RECORD | {"loss": 0.0}, [[1, 0], [1, 0], [1, 1], [0, 0]], []) for _ in range(50)]
    assert said[0].startswith("2 of 4 groups carry a signal (1 all correct, 1 all wrong). A loss near 0")
    assert set(said[1:]) == {""}


def test_groups_without_a_signal_are_news_when_they_become_many():
    diagnose = Monitor(CONFIG).diagnose
    steps = [1, 1, 3, 6, 6, 7, 8]  # of eight groups, those without a signal
    said = [diagnose(RECORD, [[1, 0]] * (8 - wrong) + [[0, 0]] * wrong, []) for wrong in steps]
    assert said[0] == "7 of 8 groups carry a signal (1 all wrong)."
    assert said[3] == "2 of 8 groups carry a signal (6 all wrong)."
    assert said[6].startswith("None of the 8 groups carries a signal (8 all wrong)")
    assert said[1] == said[2] == said[4] == said[5] == ""


def test_entropy_that_collapses():
    monitor_ = Monitor(CONFIG)
    assert "Entropy" not in monitor_.diagnose(RECORD, [[1, 1], [0, 0], [1, 0]], [])
    low = RECORD | {"entropy": 0.1}
    assert "Entropy" not in monitor_.diagnose(low, [[1, 1], [1, 1], [1, 0]], [])  # the task is solved
    assert "Entropy fell to 10% of its value" in monitor_.diagnose(low, [[0, 0], [0, 0], [1, 0]], [])
    assert "Entropy" not in monitor_.diagnose(RECORD | {"entropy": 0.09}, [[0, 0], [0, 0], [1, 0]], [])
    assert "Entropy fell to 4%" in monitor_.diagnose(RECORD | {"entropy": 0.04}, [[0, 0], [0, 0], [1, 0]], [])


def test_each_cause_of_failures_is_said_once():
    diagnose = Monitor(CONFIG).diagnose
    rewards = [[1, 0]] * 10
    said = diagnose(RECORD, rewards, ["TimeoutError: 60 s passed.", "TimeoutError: 61 s passed."])
    assert (
        "2 samples failed, and their groups were left out of the update: TimeoutError: 60 s passed." in said
    )
    assert ".." not in said
    assert diagnose(RECORD, rewards, ["TimeoutError: 62 s passed"]) == ""
    said = diagnose(RECORD, rewards, ["TimeoutError: 60 s passed", "KeyError: 'x'"])
    assert said == "1 sample failed, and its group was left out of the update: KeyError: 'x'."
    assert "9 samples" in diagnose(RECORD, rewards, ["TimeoutError: 60 s passed"] * 9)  # clearly more


def test_a_resumed_monitor_repeats_nothing():
    steps = [(RECORD | {"truncated": share, "loss": 0.0}, [[1, 0], [0, 0]]) for share in (0.4, 0.4, 0.7)]
    whole = Monitor(CONFIG)
    expected = [whole.diagnose(*step, ["E: x"]) for step in steps]
    assert expected[0] and not expected[1] and expected[2]
    before = Monitor(CONFIG)
    before.diagnose(*steps[0], ["E: x"])
    state = json.loads(json.dumps(before.state()))
    after = Monitor(CONFIG, **state)
    assert [after.diagnose(*step, ["E: x"]) for step in steps[1:]] == expected[1:]
    assert after.state() == whole.state()


def test_a_step_with_nothing_in_it_says_nothing():
    assert Monitor(CONFIG).diagnose({}, [], []) == ""


def test_failures_are_counted_by_what_was_raised():
    where = '  File "mine.py", line 3, in reward_fn\n    return 1 / 0\n'
    failures = [where + "ZeroDivisionError: division by zero\n"] * 2 + ["TimeoutError: 60 s passed."]
    first, second = monitor.failure_findings(failures, 6)
    assert first.severity == 2 / 6 and second.severity == 1 / 6
    assert first.sentence == (
        "2 samples failed, and their groups were left out of the update: ZeroDivisionError: division by zero "
        '(File "mine.py", line 3, in reward_fn).'
    )
    assert second.sentence.endswith("update: TimeoutError: 60 s passed.")


def test_groups_that_were_left_out_carry_no_signal(monkeypatch):
    samples = [Sample([], {}, key=(i // 2, i % 2), reward=float(i % 2)) for i in range(4)]
    samples[3].failure = "TimeoutError"
    monkeypatch.setattr(monitor.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(monitor.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(monitor.dist, "gather_object", lambda one, parts: parts.__setitem__(0, one))
    counts = monitor.gather_counts(samples, {"tp": SimpleNamespace(get_local_rank=lambda: 0)})
    assert counts["rewards"] == [[0.0, 1.0]] and counts["failures"] == ["TimeoutError"]


# ---------------------------------------------- the curve ----------------------------------------------
def test_a_curve_that_cannot_be_drawn_ends_no_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    draw_curve(tmp_path)  # no metrics.jsonl
    assert "curve.png was not drawn: FileNotFoundError" in capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    real_import = builtins.__import__

    def without_matplotlib(name, *arguments, **options):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_matplotlib)
        draw_curve(tmp_path)
    assert not (tmp_path / "curve.png").exists()
    draw_curve(tmp_path)
    assert (tmp_path / "curve.png").exists() and capsys.readouterr().out == ""
