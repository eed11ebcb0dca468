"""Tests of bench/reference.py: published settings, rewards by hand, the verdict, two steps of each."""

import re
import sys

import pytest

from bench import reference
from extras import add_flags, optimizer, updates, variants
from tests import conftest
from tests.conftest import TINY, parse_flags, read_rows, run
from tests.test_recipes import spoken, write_rows
from train import UserError

ANSWER = "3 + 3 = <<3+3=6>>6\nSo 1,200 times that.\n#### 7,200"


def config_of(name: str, *arguments: str):
    """The config of a reference, as its command makes it."""
    one = reference.REFERENCES[name]
    flags = reference.command_line(one.flags | {"goal": one.goal})
    return parse_flags(reference.ReferenceConfig, [*flags, *arguments])


# What the sources say, by the names here. miles: global-batch-size 256 is one update; no warm-up, no KL.
# SkyRL: a train_batch_size of 1024 and mini-batches of 256 are 4 updates; an epoch is 7473 // 1024 steps.
MILES = "prompts_per_step 32, group_size 8, updates_per_step 1, max_new_tokens 1024, temperature 1.0, "
MILES += "lr 1e-06, warmup_steps 0, lr_schedule constant_with_warmup, adam_beta1 0.9, adam_beta2 0.98, "
MILES += "weight_decay 0.1, max_grad_norm 1.0, clip_low 0.2, clip_high 0.28, kl_coef 0.0, entropy_coef 0.0, "
MILES += "aggregation sequence, normalize group, dynamic_sampling 4, eval_every 20, eval_temperature 0.0, "
SKYRL = "prompts_per_step 1024, group_size 5, updates_per_step 4, max_new_tokens 1024, temperature 1.0, "
SKYRL += "lr 1e-06, warmup_steps 0, lr_schedule constant_with_warmup, adam_beta1 0.9, adam_beta2 0.999, "
SKYRL += "weight_decay 0.01, max_grad_norm 1.0, clip_low 0.2, clip_high 0.2, kl_coef 0.001, kl_in loss, "
SKYRL += "kl_estimator k3, entropy_coef 0.0, aggregation token, normalize group, dynamic_sampling 0, "
SKYRL += "tis_cap 0.0, eval_every 5, eval_temperature 0.0, "
PUBLISHED = {
    "qwen3-0.6b": MILES + "model Qwen/Qwen3-0.6B, steps 60, goal 0.71",
    "qwen2.5-0.5b": MILES + "model Qwen/Qwen2.5-0.5B-Instruct, steps 250, goal 0.55",
    "qwen2.5-1.5b": SKYRL + "model Qwen/Qwen2.5-1.5B-Instruct, steps 7, goal 0.69",
}


@pytest.mark.parametrize("name", reference.REFERENCES)
def test_the_settings_are_the_published_ones(name):
    config = config_of(name)
    for setting in PUBLISHED[name].split(", "):
        key, value = setting.split()
        assert f"{getattr(config, key)}" == value, key
    assert (config.data, config.eval_data) == ("openai/gsm8k/main", "openai/gsm8k/main:test")
    assert config.chat_template_kwargs == ""
    assert re.search(rf"^{re.escape(name)} ", reference.__doc__, re.MULTILINE)


def test_flags_of_the_command_line_have_priority():
    config = config_of("qwen3-0.6b", "--data", "x.jsonl", "--steps", "2", "--weight_decay", "0", "--goal=.5")
    assert (config.data, config.steps, config.weight_decay, config.goal) == ("x.jsonl", 2, 0.0, 0.5)
    assert config.eval_data == "openai/gsm8k/main:test"  # the number is that of the test set
    for arguments in (["--eval_every", "0"], ["--eval_data", ""]):
        with pytest.raises(UserError, match="without an evaluation there is no verdict"):
            config_of("qwen3-0.6b", *arguments)


@pytest.mark.parametrize(
    "text, miles, skyrl",
    [
        (r"so \boxed{7200}", 1, 0),
        (r"\boxed{6}, no: \boxed{\$7,200 \text{ dollars}}", 1, 0),
        (r"\boxed{7200.5} #### 7200.5", 0, 0),
        ("7200", 0, 0),
        ("#### 7,200", 0, 1),
        ("#### 6, no: #### 7200", 0, 0),  # the first one counts
        ("#### 7200.", 0, 0),  # to the letter
        ("####7200", 0, 0),
        (r"\boxed{7200", 0, 0),
        ("", 0, 0),
    ],
)
def test_rewards_by_hand(text, miles, skyrl):
    for answer in (ANSWER, "7200"):
        sample = spoken(text, row={"answer": answer})
        assert (reference.miles_reward(sample), reference.skyrl_reward(sample)) == (miles, skyrl)


def test_prompts(tmp_path):
    chat = [{"role": "user", "content": "What?"}]
    rows = write_rows(tmp_path, {"question": "What?", "answer": ANSWER}, {"messages": chat, "label": "7200"})
    ours, theirs = (reference.MilesDataset(str(rows))[i] for i in range(2))
    assert ours.messages[0]["content"].startswith("What?\nPlease reason") and len(ours.messages) == 1
    assert theirs.messages == chat and reference.miles_reward(spoken(r"\boxed{7200}", row=theirs.row)) == 1
    (message,) = reference.SkyRLDataset(str(rows))[0].messages
    assert message["content"].startswith("What? Let's") and message["content"].endswith('after "####".')
    with pytest.raises(UserError, match="row 1 needs question and answer"):
        reference.SkyRLDataset(str(rows))[1]


@pytest.mark.parametrize(
    "last, is_reached, words",
    [
        (0.71, True, "reached: eval_score 0.7100 at step 60, +0.0000 from 0.71 (standard error 0.0125; "),
        (
            0.7096,
            False,
            "not reached: eval_score 0.7096 at step 60, -0.0004 from 0.71 (standard error 0.0125; ",
        ),
    ],
)
def test_the_verdict_is_that_of_the_last_evaluation(last, is_reached, words):
    history = [{"step": 0, "eval_score": 0.5}, {"step": 20, "eval_score": 0.8}, {"step": 21}]
    history += [{"step": 60, "eval_score": last}]
    assert reference.verdict(history, 0.71, 1319) == (is_reached, words + "at first 0.5000, best 0.8000)")


def problems(number: int) -> list[dict]:
    """Rows like GSM8K's."""
    return [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(number)]


def odd_or_even(sample) -> float:
    """A reward that differs within groups of any model."""
    return float(sample.tokens["id"].sum() % 2)


@pytest.mark.parametrize("name", reference.REFERENCES)
def test_two_steps_of_each(name, whole, tmp_path, monkeypatch):
    one = reference.REFERENCES[name]
    path = str(write_rows(tmp_path, *problems(9)))
    monkeypatch.setattr(conftest, "RLDataset", one.dataset)
    trainer_class = updates.extend(optimizer.extend(variants.extend(reference.ReferenceTrainer)))
    flags = one.flags | {"goal": 0.25, "model": str(TINY), "data": path, "eval_data": path, "steps": 2}
    flags |= {"prompts_per_step": 4, "max_new_tokens": 8, "gradient_checkpointing": False}
    config = add_flags(reference.ReferenceConfig)
    trainer = whole(odd_or_even, trainer_class=trainer_class, config=config, **flags)
    before = [weight.to_local().clone() for weight in trainer.actor.parameters.values()]
    trainer.fit()
    after = [weight.to_local() for weight in trainer.actor.parameters.values()]
    moved = max((b - a).abs().max().item() for a, b in zip(before, after))
    updates_made = 2 * trainer.config.updates_per_step
    assert 0 < moved < 2 * updates_made * 1e-6  # Adam moves a weight by about the rate, before rounding
    history = read_rows(trainer.folder / "metrics.jsonl")
    assert [metrics["step"] for metrics in history] == [0, 1, 2] and history[1]["grad_norm"] > 0
    assert ("kl" in history[2]) == (name == "qwen2.5-1.5b")
    is_reached, line = reference.ReferenceTrainer.outcome
    assert is_reached == (history[2]["eval_score"] >= 0.25)
    assert f"eval_score {history[2]['eval_score']:.4f} at step 2" in line


@pytest.mark.parametrize("arguments", [[], ["qwen"], ["--steps", "2"]])
def test_a_name_that_is_none_is_refused(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reference.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        reference.run()
    assert "name one of qwen3-0.6b qwen2.5-0.5b qwen2.5-1.5b, not " in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_ends_with_its_verdict(tmp_path):
    rows = write_rows(tmp_path, *problems(6))
    flags = f"--model {TINY} --device cpu --dtype float32 --engine local --data {rows} --eval_data {rows} "
    flags += "--steps 2 --prompts_per_step 2 --group_size 2 --dynamic_sampling 0 --max_new_tokens 4"
    for processes, goal, code in ((1, "0", 0), (0, "1", 1)):
        folder = tmp_path / f"run{code}"
        words = ["qwen3-0.6b", *flags.split(), "--goal", goal, "--output_dir", folder]
        done = run("-m", "bench.reference", *words, processes=processes)
        assert done.returncode == code, done.stderr[-2000:]
        line = done.stdout.splitlines()[-1]
        assert re.match(r"(not )?reached: eval_score 0.0000 at step 2, [+-]\d.0000 from [01] ", line)
        assert line.startswith("not") == bool(code)
