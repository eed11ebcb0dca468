"""The tests of train.py, in its order: what it promises, section by section.

Numbers are worked out by hand in a comment, or come from a slow and plain reference. They need no GPU and no
network. What needs several processes is run by tests/parity.py. Details are tested in tests/: test_flags.py,
test_dataset.py, test_failures.py, test_sglang.py, test_gpu.py, test_extras.py and, for rewards.py,
test_rewards.py.
"""

import ast
import asyncio
import itertools
import json
import math
import os
import shutil
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

import train
from extras import head
from tests import parity
from tests.conftest import (
    COUNTDOWN,
    FORMS,
    GREETING,
    HERE,
    SGLANG_CPU,
    TINY,
    VOCAB,
    Config,
    FakeEngine,
    VariantTrainer,
    compared,
    inputs,
    mesh,
    mesh_of,
    needs_sglang,
    parse_flags,
    plain_logprobs,
    plain_update,
    random_model,
    read_rows,
    run,
    small,
    some_samples,
    tokenizer,
    whole,
)
from train import RLDataset, Sample, Trainer, UserError

__all__ = ["compared", "inputs", "mesh", "small", "tokenizer", "whole"]  # fixtures


# -------------------------------------------- 2. The task -------------------------------------------------
def test_append_by_hand():
    sample = Sample([], {})
    sample.append([7, 8])
    sample.append([9], turn=1, mask=1, logprob=[-0.5], version=3)
    names = ("id", "turn", "mask", "version", "logprob", "advantage", "weight")
    assert [sample.tokens[name].tolist() for name in names] == [
        [7, 8, 9], [0, 0, 1], [0, 0, 1], [0, 0, 3], [0, 0, -0.5], [0, 0, 0], [0, 0, 0],
    ]  # fmt: skip
    sample.turns = ["a", "b"]
    assert sample.text == "ab" and len(Sample([], {}).tokens) == 0  # no two samples share their tokens


# --------------------------------------------- 3. Rollout -------------------------------------------------
def test_prompts_without_markup_are_those_of_the_chat_template(tokenizer):
    rows = RLDataset(str(COUNTDOWN / "test.jsonl"))
    odd = [
        [{"role": "user", "content": text}]
        for text in ("", "\n", 'a "b" \\n {c}', "👍 é \u200b", "a <| b |> c", "<|x|>", "a\u0000b")
    ]
    for messages in [rows[i].messages for i in range(50)] + odd:
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert train.encode_prompt(tokenizer, messages) == expected


def test_rollout_keeps_the_sampled_ids_and_their_logprobs(tokenizer):
    # How turns follow one another in a sample's columns is shown in tests/test_turns.py.
    ids = [*tokenizer.encode("no")[:1], *map(tokenizer.convert_tokens_to_ids, "yes"), 2]
    assert tokenizer.encode(tokenizer.decode(ids)) != ids  # ids that text would not give back
    logprobs = [-0.1] * (len(ids) - 1) + [-0.5]
    engine = FakeEngine([(ids, logprobs, 7, True), ([5], [-1.0], [8], False)])
    sample = Sample(GREETING, {}, key=(3, 1))
    sample.append([3, 4])
    config = Config(seed=4, max_new_tokens=9)
    for turn, truncated in enumerate([True, False]):
        asyncio.run(train.rollout(sample, engine, tokenizer, config, 0.7, turn))
        assert sample.truncated == truncated
    assert sample.turns == [tokenizer.decode(ids[:-1]), tokenizer.decode([5])]  # no control token in text
    own = sample.tokens[2:]
    assert own["id"].tolist() == [*ids, 5]
    assert sample.tokens["mask"].tolist() == [0, 0] + [1] * (len(ids) + 1)
    assert own["turn"].tolist() == [0] * len(ids) + [1] and own["version"].tolist() == [7] * len(ids) + [8]
    assert own["logprob"].tolist() == pytest.approx([*logprobs, -1.0])
    seeds = [hash((4, 3, 1, turn)) for turn in (0, 1)]  # a turn has a seed of its own
    assert engine.requests == [([3, 4], 0.7, seeds[0], 9), ([3, 4, *ids], 0.7, seeds[1], 9)]


@pytest.mark.parametrize(
    "ids, logprobs", [([], []), ([5], []), ([5, 6], [-1.0]), ([5], [math.nan]), ([5], [-np.inf])]
)
def test_turns_without_tokens_or_logprobs_fail(tokenizer, ids, logprobs):
    engine = FakeEngine([(ids, logprobs, 1, False)])
    with pytest.raises(ValueError, match="no tokens, or log-probs that are missing or not finite"):
        asyncio.run(train.rollout(Sample(GREETING, {}), engine, tokenizer, Config(), 1.0))


# --------------------------------------- 4. Advantages and loss -------------------------------------------
def test_advantages_by_hand(recwarn):
    # Groups (1, 0, 0, 1): mean 1/2, std sqrt(4 * 1/4 / 3) = 1/sqrt(3); (3, 0, 0, 0): mean 3/4, std 3/2.
    rewards = torch.tensor([1.0, 0, 0, 1, 3, 0, 0, 0, 0.1, 0.1, 0.1, 0.1], dtype=torch.float64)
    found = train.group_advantages(rewards, 4)
    half = 3**0.5 / 2
    expected = [half, -half, -half, half, 1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0]
    assert found.tolist() == pytest.approx(expected, abs=1e-5) and (found[8:] == 0).all()
    tenths = torch.tensor([0.1] * 3, dtype=torch.float64)
    assert tenths.mean() != 0.1 and train.group_advantages(tenths, 3).tolist() == [0, 0, 0]
    assert train.group_advantages(tenths[:0], 4).tolist() == [] and not recwarn.list  # a rank without groups


def test_advantages_are_those_of_the_own_group_in_double_precision(small):
    samples = with_rewards(some_samples(groups=2), (1e6 + 1e-2, 1e6, 2, 5))  # two are equal in float32
    small().compare(samples)
    found = [sample.tokens["advantage"].tolist() for sample in samples]
    signs = zip([1, -1, -1, 1], samples)
    assert found == [pytest.approx([sign * 0.5**0.5] * len(one.tokens), rel=1e-3) for sign, one in signs]


def of_mask(*masks: list[int], **columns) -> list[Sample]:
    """Samples with these masks, whose ids count up from 5 over all of them."""
    samples = []
    first = 5
    for i, mask in enumerate(masks):
        samples.append(Sample([], {}, key=(i, 0)))
        samples[-1].append(range(first, first + len(mask)), mask=mask, **columns)
        first += len(mask)
    return samples


def test_weights_by_hand():
    samples = of_mask([0, 1, 0, 1], [0, 1])
    train.set_weights(samples, 4.0)  # a batch of 4, of which this rank has samples with 2 and 1 tokens
    assert samples[0].tokens["weight"].tolist() == pytest.approx([0, 1 / 4 / 2, 0, 1 / 4 / 2])
    assert samples[1].tokens["weight"].tolist() == pytest.approx([0, 1 / 4 / 1])


def loss_of_one(advantage: float, ratio: float, **flags):
    """Loss, gradient and statistics of a token of weight 1, whose old log-prob is -1."""
    logprobs = torch.tensor([-1 + math.log(ratio)], requires_grad=True)
    batch = SimpleNamespace(advantages=torch.tensor([advantage]), weights=torch.ones(1))
    batch.old_logprobs = torch.tensor([-1.0])
    loss, stats = train.grpo_loss(logprobs, torch.full((1,), 0.5), batch, Config(**flags))
    loss.backward()
    return loss.item(), logprobs.grad.item(), stats


LOSSES = [  # advantage, ratio, flags -> loss, gradient with respect to the log-prob, clipped
    # min(rho A, clip(rho) A): the gradient is -rho A, or 0 where the clip is the smaller one
    (1.0, 1.0, {}, -1, -1, False),
    (1.0, 1.5, {}, -1.28, 0, True),
    (1.0, 1.25, {}, -1.25, -1.25, False),  # clip_high is 0.28, not 0.2
    (1.0, 1.5, {"clip_high": 0.6}, -1.5, -1.5, False),
    (1.0, 0.5, {}, -0.5, -0.5, False),  # no bound from below for A > 0
    (2.0, 0.9, {}, -1.8, -1.8, False),
    (-1.0, 0.5, {}, 0.8, 0, True),
    (-1.0, 0.75, {}, 0.8, 0, True),  # clip_low is 0.2, not 0.28
    (-1.0, 0.5, {"clip_low": 0.6}, 0.5, 0.5, False),
    (-1.0, 5.0, {}, 5, 5, False),  # no bound from above for A < 0
    (0.0, 5.0, {}, 0, 0, False),
]


@pytest.mark.parametrize("advantage, ratio, flags, loss, gradient, clipped", LOSSES)
def test_loss_by_hand(advantage, ratio, flags, loss, gradient, clipped):
    found, slope, stats = loss_of_one(advantage, ratio, **flags)
    assert (found, slope) == pytest.approx((loss, gradient), abs=1e-6)
    assert stats["clip_fraction"].tolist() == [clipped] and stats["entropy"].tolist() == [0.5]


# --------------------------------------------- 5. Batches -------------------------------------------------
def test_batch_by_hand():
    first, second = of_mask([0, 1, 0, 1], [0, 1])
    first.tokens["logprob"] = [0, -1, 0, -2]
    first.tokens["advantage"] = [0, 0.5, 0, 0.25]
    first.tokens["weight"] = [0, 0.1, 0, 0.1]
    second.tokens["logprob"] = [0, -3]
    batch = train.Batch([first, second], "cpu")
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 10]] and batch.layout["position_ids"].tolist() == [
        [0, 1, 2, 3, 0, 1]
    ]
    bounds = batch.layout["bounds"]
    assert bounds.tolist() == [0, 4, 6] and bounds.dtype == torch.int32 and batch.layout["longest"] == 4
    assert batch.source.tolist() == [0, 2, 4] and batch.targets.tolist() == [6, 8, 10]
    assert batch.engine_logprobs.tolist() == [-1, -2, -3] and batch.advantages.tolist() == [0.5, 0.25, 0]
    assert batch.weights.tolist() == pytest.approx([0.1, 0.1, 0]) and batch.samples == [first, second]
    assert batch.old_logprobs is None


def test_a_filler_has_weight_0():
    batch = train.Batch([], "cpu")
    assert batch.weights.tolist() == batch.advantages.tolist() == [0] and batch.layout["bounds"].tolist() == [
        0,
        2,
    ]
    assert batch.source.tolist() == [0] and batch.samples == []


def of_length(*lengths: int) -> list[Sample]:
    return of_mask(*[[1] * length for length in lengths])


def sizes(packs: list) -> list[list[int]]:
    return [[len(sample.tokens) for sample in part] for part in packs]


def test_pack_by_hand():
    # Longest first, to the emptiest: 9 | 7 -> 9 | 7 5 -> 9 4 | 7 5 -> 9 4 | 7 5 3; all within 15.
    assert sizes(train.Batch.pack(of_length(3, 9, 5, 7, 4), 15, 2)) == [[9, 4], [7, 5, 3]]
    assert sizes(train.Batch.pack(of_length(20, 5, 5), 12, 2)) == [[20], [5, 5]]  # one may be over the budget
    assert sizes(train.Batch.pack(of_length(6, 6), 12, 1)) == [[6, 6]]  # the budget itself is within it
    assert sizes(train.Batch.pack(of_length(6, 7), 12, 1)) == [[7], [6]]
    assert sizes(train.Batch.pack(of_length(5), 10, 3)) == [[5], [], []] and train.Batch.pack([], 10, 1) == [
        []
    ]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_pack_loses_nothing_and_keeps_the_budget(count):
    lengths = np.random.default_rng(0).lognormal(4, 0.9, 300).astype(int).clip(1, 900)
    samples = of_length(*lengths)
    packs = train.Batch.pack(samples, 4096, count)
    assert sorted(id(s) for part in packs for s in part) == sorted(map(id, samples))
    assert max(map(sum, sizes(packs))) <= 4096
    assert len(packs) == max(count, math.ceil(lengths.sum() / 4096))  # no more than the tokens need


# -------------------------------------------- 7. Sharding -------------------------------------------------
@pytest.mark.parametrize("name", [*FORMS, "llama-untied"])
def test_packed_logprobs_equal_one_by_one(mesh, tmp_path, name):
    kind, form = name.split("-")
    folder = random_model(tmp_path, kind, form == "tied")
    policy = train.load_policy(str(folder), mesh, Config(temperature=0.6, device="cpu"), VOCAB)
    model = AutoModelForCausalLM.from_pretrained(folder)
    samples = some_samples()
    logprobs, entropy = policy.logprobs(train.Batch(samples, "cpu"))
    expected = torch.cat([plain_logprobs(model, sample, 0.6) for sample in samples])
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    tokens = samples[0].tokens
    logits = model(torch.tensor([tokens["id"].tolist()])).logits[0, :, :VOCAB] / 0.6
    source = [t - 1 for t, trained in enumerate(tokens["mask"]) if trained]
    plain = torch.distributions.Categorical(logits=logits[source]).entropy()
    torch.testing.assert_close(entropy[: len(source)], plain, rtol=1e-4, atol=1e-4)


# -------------------------------------------- 8. Log-probs ------------------------------------------------
def test_a_head_is_copied_to_float32_only_for_its_gradient(mesh, monkeypatch):
    head = torch.randn(64, 4).bfloat16().requires_grad_()
    copied = []
    kept = torch.Tensor.float
    monkeypatch.setattr(torch.Tensor, "float", lambda self: copied.append(self.shape) or kept(self))
    arguments = (torch.randn(3, 4).bfloat16(), torch.tensor([1, 2, 3]), head, 1.0, 64, mesh["tp"])
    with torch.no_grad():
        train.head_logprobs(*arguments)
    assert head.shape not in copied
    train.head_logprobs(*arguments)
    assert head.shape in copied


HEADS = pytest.mark.parametrize("head_logprobs", [train.head_logprobs, head.head_logprobs])


@HEADS
def test_the_gradient_of_a_bfloat16_head_is_summed_in_float32(mesh, head_logprobs):
    # Three chunks of 256 tokens add 256, 1/2 and -256 to the gradient of row 0. With the 8 bits of bfloat16
    # 256 + 1/2 would be 256.
    states = torch.tensor([1.0, 2**-9, -1.0]).repeat_interleave(256)[:, None].bfloat16()
    weight = torch.zeros(2**16, 1).bfloat16().requires_grad_()
    targets = torch.zeros(768, dtype=torch.int64)
    logprobs, _ = head_logprobs(states, targets, weight, 1.0, 2**16, mesh["tp"])
    (gradient,) = torch.autograd.grad(logprobs.sum(), weight)
    assert gradient[0].item() == 0.5


@HEADS
@pytest.mark.parametrize(
    "temperature, rows, used, length",
    [(1.0, 64, 64, 7), (0.7, 64, 61, 300), (1.3, 64, 1, 256), (1.0, 2**16, 2**16, 257)],  # of 2 chunks
)
def test_head_logprobs_equal_plain_autograd(mesh, head_logprobs, temperature, rows, used, length):
    generator = torch.Generator().manual_seed(0)
    width = 16 if rows == 64 else 4
    states = torch.randn(length, width, generator=generator).requires_grad_()
    weight = torch.randn(rows, width, generator=generator).requires_grad_()
    targets = torch.randint(0, used, (length,), generator=generator)
    outside = torch.randn(2, length, generator=generator)  # gradients of some loss
    plain = torch.log_softmax((states @ weight.T)[:, :used] / temperature, -1)
    expected = plain.gather(1, targets[:, None])[:, 0], -(plain.exp() * plain).sum(-1)
    found = head_logprobs(states, targets, weight, temperature, used, mesh["tp"])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    found = torch.autograd.grad((outside * torch.stack(found)).sum(), (states, weight))
    expected = torch.autograd.grad((outside * torch.stack(expected)).sum(), (states, weight))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------- 9. Actor --------------------------------------------------
def check_gradients(inputs, outputs, all_cases: dict):
    """Compares what tests/parity.py has written for these cases with plain models."""
    cases = [(processes, case) for processes in all_cases for case in all_cases[processes]]
    for name, kind in itertools.product(FORMS, parity.LOSSES):
        samples = torch.load(inputs / f"{name}.pt", weights_only=False)
        loss, gradients = plain_update(AutoModelForCausalLM.from_pretrained(inputs / name), samples, kind)
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        for processes, case in [one for one in cases if kind in parity.losses_of(one[1], all_cases)]:
            record = torch.load(outputs / f"{name}-{kind}-{processes}-{case}.pt")
            assert record["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
            assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert record["clipped_norm"] == pytest.approx(min(norm, 0.1), rel=1e-4)
            assert record["gradients"].keys() == gradients.keys()
            for key, gradient in gradients.items():
                difference = (record["gradients"][key] - gradient).abs().max()
                # Few numbers, each a sum over all tokens of terms that cancel.
                bound = 3e-5 if key.endswith(("A_log", "dt_bias")) else 1e-5
                assert difference < bound * gradient.abs().max(), key
            assert (record["batches"] > 1) == (case[2] < 10**6)


def test_loss_and_gradient_do_not_depend_on_ranks_split_or_tp(inputs, compared):
    check_gradients(inputs, compared, parity.FEW)


@pytest.mark.slow
def test_loss_and_gradient_in_all_cases(inputs, tmp_path):
    done = run("tests/parity.py", "all", inputs, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    check_gradients(inputs, tmp_path, parity.CASES)


def test_whole_weights_are_those_of_the_folder_and_the_export_loads(inputs, compared):
    # tests/parity.py has compared the whole weights to the bit.
    for name in FORMS:
        exported = AutoModelForCausalLM.from_pretrained(compared / f"{name}-export")
        original = AutoModelForCausalLM.from_pretrained(inputs / name)
        assert exported.config.dtype == torch.bfloat16
        for key, value in original.state_dict().items():
            assert torch.equal(exported.state_dict()[key], value.bfloat16()), (name, key)
        tied = exported.lm_head.weight is exported.model.embed_tokens.weight
        assert tied == name.endswith("-tied")
        files = (compared / f"{name}-export").glob("*.safetensors")
        keys = [key for file in files for key in safe_open(file, "pt").keys()]
        assert ("lm_head.weight" in keys) != tied and (compared / f"{name}-export/tokenizer.json").exists()


def weights_of(actor) -> dict:
    return {name: value.full_tensor().detach().clone() for name, value in actor.parameters.items()}


def test_an_export_copies_what_a_model_needs_and_nothing_else(small, tmp_path, monkeypatch):
    trainer = small()
    folder = tmp_path / "small"
    needed = {path.name for path in folder.iterdir()} | {"merges.txt", "vocab.json"}
    others = "model.gguf old.pth pytorch_model.bin model-00001-of-00002.safetensors train.json data.jsonl"
    others += " model.safetensors.index.json onnx/model.onnx .git/config notes.txt rewards.py"
    for name in [*others.split(), "merges.txt", "vocab.json", "run/model.partial/of_a_run_that_was_killed"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for _ in range(2):  # an output folder may lie inside the model's folder
        trainer.actor.save(str(folder), folder / "run/model")
        found = {path.name for path in (folder / "run/model").rglob("*")}
        assert found == needed and not (folder / "run/model.partial").exists()
    AutoModelForCausalLM.from_pretrained(folder / "run/model")
    monkeypatch.setattr(train, "save_torch_state_dict", lambda weights, folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # as on a full disk
        trainer.actor.save(str(folder), tmp_path / "model")
    monkeypatch.setattr(train, "RANK", 1)
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    trainer.actor.save(str(folder), tmp_path / "model")  # other ranks hold no weights and write nothing
    assert not (tmp_path / "model").exists()


def test_samples_without_advantage_count_but_stay_out(small):
    trainer, samples = small(), some_samples()
    for sample in samples[:4]:
        sample.tokens["advantage"] = 0
    (batch,) = trainer.micro_batches(samples)
    used = sorted(samples[4:], key=lambda sample: -len(sample.tokens))
    assert batch.samples == used
    trained = used[0].tokens["mask"].sum()
    assert batch.weights[0].item() == pytest.approx(1 / (len(samples) * trained))
    for flags in ({"kl_coef": 0.1}, {"entropy_coef": 0.1}):  # then each sample has a gradient
        vars(trainer.config).update({"kl_coef": 0.0, "entropy_coef": 0.0} | flags)
        assert len(trainer.micro_batches(samples)[0].samples) == len(samples)


def test_a_rank_without_any_advantage_takes_part_and_nothing_moves(small, monkeypatch):
    trainer, samples = small(), some_samples()
    before = weights_of(trainer.actor)
    with monkeypatch.context() as patch:
        patch.setattr(train, "reduce_over", as_if_another_rank_had(7))
        assert [len(trainer.micro_batches(some)) for some in (samples, [])] == [7, 7]
    for sample in samples:
        sample.tokens["advantage"] = 0
    metrics = trainer.actor.backward(trainer.micro_batches(samples), trainer.forward)
    assert trainer.actor.optimizer_step() == 0 and metrics["loss"] == 0 and metrics["entropy"] == 0
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer.actor).items())


def test_statistics_are_means_over_real_tokens(small):
    trainer, samples = small(tokens_per_micro_batch=30), some_samples()
    batches = trainer.micro_batches(samples)
    assert len(batches) > 3

    def forward(batch):
        loss, stats = VariantTrainer.forward(trainer, batch)
        return loss, stats | {name: torch.full_like(batch.weights, 7.0) for name in ("loss", "tokens")}

    together = trainer.actor.backward([*batches, train.Batch([], "cpu")], forward)
    (whole,) = small().micro_batches(samples)
    logprobs, entropy = trainer.actor.model.logprobs(whole)
    difference = (logprobs - whole.engine_logprobs).abs().mean().item()
    loss = -(whole.weights * whole.advantages).sum().item()  # whatever else has this name
    expected = {"entropy": entropy.mean().item(), "logprob_diff": difference, "clip_fraction": 0}
    assert together == pytest.approx(expected | {"loss": loss, "tokens": 7.0}, rel=1e-4)


@pytest.mark.parametrize("value", [math.nan, 1e30])  # the norm of the latter is inf
def test_a_gradient_that_is_not_finite_changes_nothing(small, value):
    trainer = small()
    actor = trainer.actor

    def step(weight=None):
        batches = trainer.micro_batches(some_samples())
        if weight:
            batches[0].weights[3] = weight
        actor.backward(batches, trainer.forward)
        norm = actor.optimizer_step()
        return math.isfinite(norm), actor.scheduler.last_epoch, weights_of(actor)["model.norm.weight"]

    _, _, before = step()
    finite, steps, weight = step(value)
    assert (finite, steps) == (False, 1) and torch.equal(weight, before)
    finite, steps, weight = step()  # nothing of it is left
    assert (finite, steps) == (True, 2) and not torch.equal(weight, before)


@pytest.mark.parametrize(
    "warmup, expected", [(4, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]), (1, [0.5] * 6), (0, [0.5] * 6)]
)
def test_the_optimizer_follows_its_flags(small, warmup, expected):
    actor = small(lr=0.5, warmup_steps=warmup).actor
    rates = []
    for _ in range(6):
        rates.append(actor.optimizer.param_groups[0]["lr"])
        actor.optimizer.step()
        actor.scheduler.step()
    assert rates == pytest.approx(expected)  # the first rollout teaches something, too
    assert actor.optimizer.param_groups[0]["weight_decay"] == 0
    assert actor.optimizer.param_groups[0]["betas"] == (0.9, 0.99)


# --------------------------------------------- 11. Trainer ------------------------------------------------
def test_prompts_are_a_new_permutation_every_epoch(whole):
    trainer = whole(steps=10**9, prompts_per_step=6)  # no list of all of them is made
    prompts = list(itertools.islice(trainer.prompts, 66))  # three epochs of 20 rows, and a part of a fourth
    assert [place for place, _ in prompts] == list(range(66))
    rows = [row for _, row in prompts]
    epochs = [rows[:20], rows[20:40], rows[40:60]]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert list(itertools.islice(train.shuffled(20, 0), 66)) == prompts  # as on any other rank
    assert list(itertools.islice(train.shuffled(20, 1), 66)) != prompts


@pytest.mark.parametrize("updates", [1, 2])
def test_groups_are_dealt_to_ranks_within_each_update(updates):
    dealt = {}
    for rank in range(2):
        trainer = object.__new__(VariantTrainer if updates > 1 else Trainer)
        trainer.config = Config(prompts_per_step=8, updates_per_step=updates, group_size=3, temperature=0.5)
        trainer.mesh = mesh_of(rank, 2)
        trainer.prompts, trainer.prompts_drawn, trainer.data = enumerate(range(100, 130)), 0, "data"
        trainer.sample = lambda *args: args
        for draw in range(3):
            data, dealt[rank, draw], size, temperature = trainer.rollout()
            assert (data, size, temperature, trainer.prompts_drawn) == ("data", 3, 0.5, 8 * draw + 8)
    for draw in range(3):
        mine, other = dealt[0, draw], dealt[1, draw]
        assert sorted(mine + other) == list(enumerate(range(100, 130)))[8 * draw : 8 * draw + 8]
        for update in range(updates):  # as many for each rank
            assert sum(place % updates == update for place, _ in mine) == 4 // updates


def test_groups_have_one_prompt_and_samples_of_their_own(whole):
    trainer = whole(max_new_tokens=4)
    trainer.publish()

    def texts(prompts: list, trainer=trainer) -> list[str]:
        return [one.text for one in trainer.sample(trainer.data, prompts, 3, 1.0)]

    samples = trainer.sample(trainer.data, [(8, 3), (9, 5)], 3, 1.0)
    assert [sample.key for sample in samples] == [(8, 0), (8, 1), (8, 2), (9, 0), (9, 1), (9, 2)]
    expected = train.encode_prompt(trainer.tokenizer, trainer.data[3].messages)
    for sample in samples[:3]:
        assert sample.row == trainer.data[3].row and not sample.failure
        assert sample.reward == sample.tokens["id"].sum() % 7
        assert sample.tokens["id"][: len(expected)].tolist() == expected
        assert not sample.tokens["mask"][: len(expected)].any()
        assert sample.tokens["mask"][len(expected) :].all()
    assert len({sample.tokens["id"].tobytes() for sample in samples[:3]}) > 1  # each with its own seed
    again = texts([(9, 5)])
    assert again == [one.text for one in samples[3:]]  # whatever is sampled beside it
    assert texts([(9, 5)], whole(max_new_tokens=4, seed=1)) != again
    assert texts([(10, 5)]) != again  # the same row in the next epoch
    samples[0].row["note"] = "of one sample"
    assert samples[1].row == trainer.data[3].row
    assert trainer.prompt_limit == 1024 - 4  # the context of assets/tiny without a completion
    trainer.prompt_limit = len(expected)
    assert len(texts([(8, 3)])) == 3
    trainer.prompt_limit -= 1
    assert texts([(8, 3)]) == []  # no room for a turn


def with_rewards(samples: list[Sample], rewards) -> list[Sample]:
    for sample, reward in zip(samples, rewards):
        sample.reward = float(reward)
    return samples


def test_a_failed_group_is_left_out(small):
    trainer, seen = small(tokens_per_micro_batch=10**6), []
    samples = with_rewards(some_samples(), itertools.cycle([0, 1]))
    samples[3].failure = "ZeroDivisionError"
    trainer.check_engine = lambda gap: None
    trainer.forward = lambda batch: seen.append(batch) or VariantTrainer.forward(trainer, batch)
    trainer.learn(samples)
    (batch,) = seen
    assert sorted(sample.key for sample in batch.samples) == [(g, i) for g in (0, 2, 3, 4, 5) for i in (0, 1)]
    shares = [one.tokens["weight"].sum() for one in batch.samples]
    assert shares == pytest.approx([1 / 10] * 10)  # of the loss


def as_if_another_rank_had(count: int):
    """reduce_over for two ranks, of which the other one has so many of everything."""
    results = {dist.ReduceOp.SUM: sum, dist.ReduceOp.MAX: max, dist.ReduceOp.MIN: min}
    return lambda mesh, values, op=dist.ReduceOp.SUM: [results[op]([value, count]) for value in values]


def test_the_reference_stays_the_initial_policy(small, whole):
    models = whole(kl_coef=0.1)
    assert models.reference is not models.actor.model and whole().reference is None
    trainer = small(kl_coef=0.1, updates_per_step=2)
    samples = with_rewards(some_samples(), itertools.cycle([0, 1]))
    trainer.reference = train.load_policy(trainer.config.model, trainer.mesh, trainer.config, VOCAB)
    trainer.check_engine = lambda gap: None
    assert trainer.learn(samples)["kl"] > 1e-6  # of the second update; the first has exactly 0
    assert all(isinstance(one, DTensor) for one in trainer.reference.parameters())  # none stays gathered
    seen = []
    forward = trainer.forward
    trainer.forward = lambda batch: (seen.append(batch), forward(batch))[1]
    assert trainer.learn(samples)["kl"] > 1e-3
    with torch.no_grad():
        for batch in seen:
            assert torch.equal(batch.ref_logprobs, trainer.reference.logprobs(batch)[0])


def test_the_bound_ends_the_run_before_the_optimizer_step(small):
    trainer = small(dtype="float32")
    before = weights_of(trainer.actor)
    with pytest.raises(UserError, match="log-probs of engine and actor differ by .* nats"):
        trainer.learn(with_rewards(some_samples(), itertools.cycle([0, 1])))
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer.actor).items())


@pytest.mark.parametrize("updates", [1, 2])
def test_the_bound_holds_for_any_loss(whole, updates):
    class OwnLoss(VariantTrainer):
        def loss(self, logprobs, entropy, batch):
            mine = {"loss": torch.full_like(logprobs, 7.0), "logprob_diff": logprobs}
            return -(batch.weights * batch.advantages * logprobs).sum(), mine

    trainer = whole(trainer_class=OwnLoss, updates_per_step=updates, lr=0.01)
    trainer.publish()
    metrics, _ = trainer.step()
    assert 0 < metrics["logprob_diff"] < 1e-5 and metrics["loss"] != 7.0
    samples = trainer.rollout()
    for sample in samples:
        sample.tokens["logprob"] -= 1e-3
    with pytest.raises(UserError, match="differ by 1.0e-03 nats"):
        trainer.learn(samples)


@pytest.mark.parametrize("dtype, below, above", [("float32", 9e-5, 2e-4), ("bfloat16", 0.04, 0.06)])
def test_the_bound_depends_on_the_dtype(dtype, below, above):
    trainer = object.__new__(Trainer)
    trainer.config = Config(dtype=dtype)
    trainer.check_engine(below)
    for gap in (above, math.nan):
        with pytest.raises(UserError, match="differ by"):
            trainer.check_engine(gap)


def test_every_step_samples_with_the_weights_of_the_last_one(whole):
    trainer = whole(lr=0.01, updates_per_step=2, max_new_tokens=24)
    trainer.publish()
    for step in (1, 2, 3):
        metrics, samples = trainer.step()
        assert metrics["logprob_diff"] < 1e-5 and metrics["grad_norm"] > 0
        assert {int(one.tokens["version"][-1]) for one in samples} == {step}
    samples = trainer.rollout()
    batch = train.Batch(samples, "cpu")
    with torch.no_grad():
        found = trainer.actor.model.logprobs(batch)[0]
        old = train.load_policy(str(TINY), trainer.mesh, trainer.config, 511).logprobs(batch)[0]
    assert (found - batch.engine_logprobs).abs().max() < 1e-4  # while the first policy is far away by now
    assert (old - batch.engine_logprobs).abs().mean() > 1e-2


def test_evaluation_is_the_mean_reward_of_greedy_completions(whole, monkeypatch):
    trainer = whole(eval_data=f"{COUNTDOWN}/test.jsonl:train[:5]", reward_fn=lambda sample: len(sample.text))
    trainer.publish()
    asked = []
    sample = trainer.sample
    trainer.sample = lambda *args: asked.append((args, sample(*args))) or asked[-1][1]
    score = trainer.evaluate()["eval_score"]
    ((data, prompts, size, temperature), samples) = asked[0]
    assert data is trainer.eval_data and [row for _, row in prompts] == [0, 1, 2, 3, 4]
    assert (size, temperature) == (1, 0.0) and score == np.mean([len(one.text) for one in samples])
    assert trainer.evaluate()["eval_score"] == score
    mesh, trainer.mesh = trainer.mesh, mesh_of(1, 2)  # of two ranks the second one
    monkeypatch.setattr(train, "reduce_over", as_if_another_rank_had(3))
    trainer.max_failures = 1.0
    score = trainer.evaluate()["eval_score"]
    assert asked[-1][0][1] == [(1, 1), (3, 3)]  # numbers seed the sampling, whatever rank samples
    assert score == (sum(len(one.text) for one in asked[-1][1]) + 3) / (2 + 3)  # over both
    monkeypatch.undo()
    trainer.mesh = mesh
    trainer.reward_fn = lambda sample: 1.0 if sample.key[0] == 1 else 1 / 0
    found = trainer.evaluate()
    assert found == {"eval_score": 0.2, "eval_failures": 0.8}  # a failed sample counts as 0


def test_fit_evaluates_learns_and_exports_in_this_order(whole, tmp_path):
    trainer = whole(steps=5, eval_every=2, eval_data=f"{COUNTDOWN}/test.jsonl:train[:1]")
    seen = []
    trainer.step = lambda: seen.append("step") or ({"reward": 1.0}, [])
    trainer.evaluate = lambda: seen.append("evaluate") or {"eval_score": 0.5}
    trainer.publish = lambda: seen.append("publish")
    trainer.engine.close = lambda: seen.append("close")
    trainer.fit()
    between = ["step", "step", "evaluate"]
    assert seen == ["publish", "evaluate", *between, *between, "step", "evaluate", "close"]
    records = read_rows(trainer.folder / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(6))
    assert [record["step"] for record in records if "eval_score" in record] == [0, 2, 4, 5]
    assert json.loads((trainer.folder / "config.json").read_text())["steps"] == 5
    exported = AutoModelForCausalLM.from_pretrained(trainer.folder / "model")
    original = AutoModelForCausalLM.from_pretrained(TINY)
    assert all(torch.equal(a, b) for a, b in zip(exported.parameters(), original.parameters()))


def test_a_step_sleeps_between_sampling_and_learning(whole):
    trainer, seen = whole(), []
    for name in ("rollout", "learn", "publish"):
        setattr(trainer, name, lambda *args, name=name: seen.append(name))
    trainer.engine.sleep = lambda: seen.append("sleep")
    trainer.step()
    assert seen == ["rollout", "sleep", "learn", "publish"]


def test_log_records(whole):
    trainer = whole()
    samples = of_mask([0, 1, 1], [0, 1])[::-1]
    samples[0].reward, samples[0].metrics = 1.0, {"habit": 0.5}
    samples[1].truncated, samples[1].failure, samples[1].turns = True, "E", ["te", "xt"]
    samples[1].row = {"when": {1}}  # nothing that JSON knows
    trainer.write(3, {"loss": 0.25}, samples)
    (metrics,) = read_rows(trainer.folder / "metrics.jsonl")
    means = {"reward": 0.5, "response_length": 1.5, "truncated": 0.5, "failures": 0.5, "habit": 0.5}
    assert metrics == {"step": 3, "loss": 0.25} | means
    first, second = read_rows(trainer.folder / "samples.jsonl")
    assert first["key"] == [0, 0] and second["key"] == [1, 0] and first["step"] == 3
    assert (first["text"], first["failure"], first["row"]) == ("text", "E", {"when": "{1}"})
    assert second["reward"] == 1.0 and second["metrics"]["response_length"] == 1


def test_no_run_and_no_model_is_written_over(whole, tmp_path):
    for name in ("metrics.jsonl", "model"):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(UserError, match="already holds a run or a model"):
            whole(output_dir=str(tmp_path / name))
    trainer = whole(output_dir=str(tmp_path / "new"), steps=0, eval_data=f"{COUNTDOWN}/test.jsonl:train[:1]")
    trainer.fit()  # an evaluation alone exports nothing
    files = {path.name for path in (tmp_path / "new").iterdir()}
    assert files == {"config.json", "metrics.jsonl", "samples.jsonl"}
    assert str(os.getpid()) in train.FOLDER and train.time.strftime(train.FOLDER).startswith("runs/")


def test_a_short_run_does_not_depend_on_the_ranks(compared):
    folders = [compared / name for name in ("1-1-1", "4-2-2")]
    samples = [read_rows(folder / "samples.jsonl") for folder in folders]
    assert len(samples[0]) == 2 * 8 * 4 and samples[0] == samples[1]
    histories = [read_rows(folder / "metrics.jsonl") for folder in folders]
    assert all(record["grad_norm"] > 0 for record in histories[0][1:])
    for record, expected in zip(*histories, strict=True):
        assert record == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_the_embedded_job_learns(mesh, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "init_distributed", lambda config: mesh)
    flags = ["--steps", "12", "--eval_every", "12", "--lr", "2e-4", "--output_dir", str(tmp_path / "run")]
    config = parse_flags(Config, flags)
    config.eval_data += ":train[:64]"
    VariantTrainer(config, RLDataset, train.reward_fn, None).fit()
    history = read_rows(tmp_path / "run/metrics.jsonl")
    assert history[12]["eval_score"] > history[0]["eval_score"] + 0.15
    assert np.mean([record["reward"] for record in history[10:]]) > history[1]["reward"] + 0.1
    assert all(record["logprob_diff"] < 1e-5 for record in history[1:])


# ------------------------------------------ the form of the files -----------------------------------------
def imported(path) -> set[str]:
    """Top-level names of all modules that a file imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level else node.module.split(".")[0])
    return names


def test_train_imports_rewards_alone_and_rewards_nothing_of_this_repository():
    ours = {path.stem for path in HERE.glob("*.py")} | {path.name for path in HERE.iterdir() if path.is_dir()}
    assert {"rewards", "extras", "recipes", "tools"} <= ours
    assert imported(HERE / "train.py") & (ours | {"."}) == {"rewards"}
    assert imported(HERE / "rewards.py") & (ours | {"."}) == set()


def test_train_is_short():
    text = (HERE / "train.py").read_text()
    assert len(text.splitlines()) < 900
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.skipif(not find_spec("ruff"), reason="needs ruff")
@pytest.mark.parametrize("command", ["format --check", "check"])
def test_train_is_formatted(command):
    done = run("-m", "ruff", *command.split(), "train.py", "rewards.py", "test_train.py", "tests/parity.py")
    assert done.returncode == 0, done.stdout + done.stderr


# -------------------------------------------- the lone pair -----------------------------------------------
SGLANG_ARGS = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "max_total_tokens": 32768,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.3,
}


@needs_sglang
@pytest.mark.parametrize("tp_size", [1, 2])
def test_the_lone_pair_trains_with_sglang(tmp_path, tp_size):
    """In an empty folder but for train.py and rewards.py."""
    for name in ("train.py", "rewards.py"):
        shutil.copy(HERE / name, tmp_path)
    flags = ["--model", TINY, "--data", COUNTDOWN / "train.jsonl", "--device", "cpu", "--dtype", "float32"]
    flags += ["--eval_data", f"{COUNTDOWN}/test.jsonl:train[:32]", "--eval_every", 3, "--engine", "sglang"]
    flags += ["--steps", 3, "--prompts_per_step", 8, "--group_size", 8, "--max_new_tokens", 64, "--lr", 1e-4]
    flags += ["--warmup_steps", 0, "--tp_size", tp_size, "--output_dir", "run"]
    flags += ["--sglang_args", json.dumps(SGLANG_ARGS)]
    environment = SGLANG_CPU | {"SGLANG_CPU_OMP_THREADS_BIND": "|".join("01"[:tp_size])}
    done = run("train.py", *flags, cwd=tmp_path, processes=2, timeout=500, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    history = read_rows(tmp_path / "run/metrics.jsonl")
    assert [record["step"] for record in history] == [0, 1, 2, 3]
    assert all(record["logprob_diff"] < 1e-6 and record["grad_norm"] > 0 for record in history[1:])
    assert history[0]["eval_score"] > 0 and history[3]["eval_score"] > 0 and history[1]["failures"] == 0
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    original = AutoModelForCausalLM.from_pretrained(TINY).state_dict()
    assert exported.keys() == original.keys()
    assert not torch.equal(exported["model.norm.weight"], original["model.norm.weight"])
