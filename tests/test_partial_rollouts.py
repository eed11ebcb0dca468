"""Tests of recipes/partial_rollouts.py, with the local engine, a stand-in for SGLang, and the real one."""

import asyncio
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from extras import add_flags
from recipes.partial_engine import ENGINES, Aborted, AbortingSGLang, PartialLocal, PartialSGLang
from recipes.partial_rollouts import PartialConfig, PartialRollouts
from tests.conftest import (
    COUNTDOWN,
    HERE,
    TINY,
    VOCAB,
    extend,
    make_trainer,
    needs_sglang,
    plain_logprobs,
    random_model,
    read_rows,
    run,
)
from tests.real_sglang import ON_CPU
from tests.runs import EQUAL, differences
from tests.test_local_engine import make_engine
from train import Sample, UserError

Config = add_flags(PartialConfig)
PartialTrainer = extend(PartialRollouts)
PROMPT = np.array([5, 6, 7], np.int32)


def length_of(seed: int) -> int:
    """Made-up lengths of completions: most of them short, a few long."""
    return 2 + int(3 * np.random.default_rng(abs(seed)).lognormal(0, 1.0))


class LongTail(PartialLocal):
    """A local engine whose completions have the lengths of `length_of`, and which notes its evaluations."""

    async def generate(self, ids, temperature, seed, max_new_tokens):
        return await super().generate(ids, temperature, seed, min(length_of(seed), max_new_tokens))


# ---- Completions that are stopped and continued ---------------------------------------------------------
def play(engine: PartialLocal, seeds, tokens: int | None = None, limit: int = 24, temperature: float = 0.7):
    """Requests completions of PROMPT; stops after about so many tokens. Returns those that are done."""

    async def generate_all():
        engine.start(len(seeds))
        tasks = [asyncio.ensure_future(engine.generate(PROMPT, temperature, seed, limit)) for seed in seeds]
        for _ in range(tokens or 0):
            await asyncio.sleep(0)
        if tokens is None:
            await asyncio.wait(tasks)
        await engine.stop(tasks)
        return {seed: task.result() for seed, task in zip(seeds, tasks) if not task.cancelled()}

    return engine.loop.run_until_complete(generate_all())


@pytest.fixture(params=["qwen3", "qwen3_5"])
def endless(request, tmp_path, tokenizer):
    """A local engine of a random model that never stops by itself."""
    engine = make_engine(random_model(tmp_path / "one", request.param), tokenizer)
    engine.stops = {None}
    engine.vocab_size = VOCAB
    return PartialLocal(engine)


def test_a_completion_continued_with_the_same_weights_is_the_unbroken_one(endless):
    seeds = [3, -4, 5]
    unbroken = play(endless, seeds)
    endless.turns.clear()
    assert play(endless, seeds, tokens=9) == {}
    first = {seed: len(turn["id"]) for seed, turn in endless.turns.items()}
    assert set(first) == set(seeds) and all(0 < length < 12 for length in first.values())
    assert play(endless, seeds, tokens=8) == {}  # stopped twice
    assert all(first[seed] < len(endless.turns[seed]["id"]) < 24 for seed in seeds)
    continued = play(endless, seeds)
    for seed in seeds:
        ids, logprobs, versions, truncated = continued[seed]
        assert ids.tolist() == unbroken[seed][0].tolist() and len(ids) == 24
        np.testing.assert_allclose(logprobs, unbroken[seed][1], atol=1e-4)
        assert truncated is True and set(versions.tolist()) == {0}


def test_across_a_push_each_token_has_the_version_and_log_prob_of_its_weights(endless, tmp_path):
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    play(endless, [3, 4], tokens=9)
    begun = {seed: turn["id"] for seed, turn in endless.turns.items()}
    endless.push([list(other.named_parameters())])
    assert endless.version == 1
    for seed, (ids, logprobs, versions, _) in play(endless, [3, 4]).items():
        n = len(begun[seed])
        assert ids[:n].tolist() == begun[seed] and len(ids) == 24
        assert versions.tolist() == [0] * n + [1] * (24 - n)
        whole = Sample([], {})
        whole.append(PROMPT)
        whole.append(ids, mask=1)
        with torch.no_grad():
            expected = plain_logprobs(before, whole, 0.7), plain_logprobs(other, whole, 0.7)
        np.testing.assert_allclose(logprobs[:n], expected[0][:n], atol=1e-4)
        np.testing.assert_allclose(logprobs[n:], expected[1][n:], atol=1e-4)
        assert np.abs(logprobs[n:] - expected[0][n:].numpy()).max() > 0.01


def test_a_turn_whose_prompt_has_changed_begins_anew_and_finished_ones_return_at_once(endless):
    play(endless, [3], tokens=9)
    endless.turns[3]["prompt"] = [1, 2]  # as if an env_step had answered differently
    endless.turns[3]["id"][0] = -1
    ids, _, _, _ = play(endless, [3])[3]
    assert ids.min() >= 0
    endless.engine.generate = None  # not called
    again, *_ = play(endless, [3])[3]
    assert again.tolist() == ids.tolist()


# ---- SGLang, with a stand-in ----------------------------------------------------------------------------
class StandIn:
    """An engine of train.py with its sglang.Engine. A request ends once aborted, with tokens 7, 8, ..."""

    def __init__(self, tokens: int):
        self.version = 4
        self.tokens = tokens
        self.requests = []
        self.reason = {"type": "abort", "message": "Aborted"}
        self.aborted = asyncio.Event()
        self.engine = SimpleNamespace(async_generate=self.answer, tokenizer_manager=self)
        self.loop = asyncio.new_event_loop()

    async def generate(self, ids, temperature, seed, max_new_tokens):
        self.requests.append((ids.tolist(), seed, max_new_tokens))
        info = (await self.engine.async_generate())["meta_info"]
        logprobs, new_ids, _ = zip(*info["output_token_logprobs"])
        return new_ids, np.array(logprobs, float), self.version, info["finish_reason"]["type"] == "length"

    async def answer(self):
        await self.aborted.wait()
        tokens = [(-0.5 * i, 7 + i, None) for i in range(self.tokens)]
        return {"meta_info": {"finish_reason": self.reason, "output_token_logprobs": tokens}}

    def abort_request(self, abort_all: bool):
        assert abort_all
        self.aborted.set()


def test_what_sglang_aborts_is_continued_but_for_its_last_token():
    engine = StandIn(tokens=3)
    partial = PartialSGLang(engine)
    assert play(partial, [1], tokens=5, limit=6) == {}
    assert (partial.turns[1]["id"], partial.turns[1]["logprob"]) == ([7, 8], [0.0, -0.5])
    engine.reason = {"type": "stop"}
    engine.version = 5
    ids, logprobs, versions, truncated = play(partial, [1], limit=6)[1]
    assert engine.requests == [([5, 6, 7], 1, 6), ([5, 6, 7, 7, 8], 1, 4)]
    assert ids.tolist() == [7, 8, 7, 8, 9] and versions.tolist() == [4, 4, 5, 5, 5] and truncated is False
    assert logprobs.tolist() == [0.0, -0.5, 0.0, -0.5, -1.0]


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_request_that_sglang_had_not_begun_begins_later(tokens):
    engine = StandIn(tokens)
    partial = PartialSGLang(engine)
    assert play(partial, [1], tokens=5) == {} and partial.turns[1]["id"] == []
    engine.reason, engine.tokens = {"type": "length"}, 2  # the end of the context comes before the limit
    assert play(partial, [1])[1][0].tolist() == [7, 8]


def test_an_abort_that_nobody_asked_for_is_an_error():
    engine = StandIn(tokens=3)
    partial = PartialSGLang(engine)
    engine.aborted.set()
    with pytest.raises(Aborted, match="SGLang aborted a request: .*Aborted"):
        engine.loop.run_until_complete(partial.generate(PROMPT, 1.0, 1, 6))
    with pytest.raises(Aborted):
        play(partial, [1])
    assert isinstance(engine.engine, AbortingSGLang) and partial.turns == {}


# ---- The update -----------------------------------------------------------------------------------------
def test_flags():
    for flags, message in [
        ({"engine": "http://a:1"}, "--engine must be sglang or local"),
        ({"engine": "local", "oversample": 0.5}, "--oversample must be 1 or more, not 0.5"),
        ({"engine": "local", "max_staleness": -1}, "--max_staleness must be 0 or more"),
    ]:
        with pytest.raises(UserError, match=message):
            Config(**flags)


def test_ratios_start_from_the_sampler_and_tokens_that_are_too_old_have_no_gradient(tmp_path, mesh):
    """Four tokens of ages 0, 1, 2 and 3, with --max_staleness 2; only that of age 0 is compared."""
    config = Config(model=str(random_model(tmp_path)), engine="local", device="cpu", max_staleness=2)
    trainer = make_trainer(config, mesh, PartialTrainer)
    trainer.engine.version = 9
    sample = Sample([], {})
    sample.append([5, 6])
    sample.append([7, 8, 9, 10], mask=1, version=[6, 7, 8, 9], advantage=1.0, weight=0.25)
    plain = AutoModelForCausalLM.from_pretrained(config.model)
    now = plain_logprobs(plain, sample)
    shift = torch.tensor([-0.1, 0.1, -0.2, 0.003])  # the sampler's log-probs are so much lower
    sample.tokens["logprob"][2:] = (now - shift).detach().numpy()
    batch = trainer.batch_class([sample], "cpu")
    loss, stats = trainer.forward(batch)
    ratios = (now - now.detach() + shift).exp()
    expected = -0.25 * ratios[1:].sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    loss.backward()
    expected.backward()
    found = {name: one.grad.full_tensor() for name, one in trainer.actor.model.named_parameters()}
    for name, one in plain.named_parameters():
        torch.testing.assert_close(found[name], one.grad, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(stats["logprob_diff"], 0.003, atol=1e-4)
    filler = trainer.batch_class([], "cpu")
    assert torch.isfinite(trainer.forward(filler)[1]["logprob_diff"]).all()


# ---- Whole runs in this process -------------------------------------------------------------------------
@pytest.fixture
def partial(whole, monkeypatch):
    """A function that makes a trainer with completions of the lengths of `length_of`."""
    monkeypatch.setitem(ENGINES, "local", LongTail)

    def make(**options):
        flags = {"max_new_tokens": 40, "trainer_class": PartialTrainer, "config": Config, "oversample": 2.0}
        trainer = whole(**flags | options)
        trainer.engine.engine.stops = {None}
        trainer.max_failures = 1.0
        trainer.publish()
        return trainer

    return make


def steps(trainer, number: int) -> list[list[Sample]]:
    """The samples of so many steps; `trainer.history` gets their metrics."""
    found = []
    trainer.history = []
    for _ in range(number):
        metrics, samples = trainer.step()
        trainer.history.append(metrics)
        found.append(samples)
    return found


def test_every_step_trains_as_many_groups_and_every_prompt_once(partial):
    trainer = partial(max_staleness=1)
    found = steps(trainer, 6)
    trained = []
    for samples in found:
        numbers = [sample.key[0] for sample in samples]
        assert numbers == sorted(numbers) and len(set(numbers)) == 4 and len(numbers) == 8
        assert [sample.key[1] for sample in samples] == [0, 1] * 4
        trained += numbers[::2]
    waiting = [number for number, _ in trainer.groups]
    assert sorted(trained + waiting) == list(range(6 * 4 + 4)) and trainer.prompts_drawn == 28
    assert trained != sorted(trained)  # some had to wait for a later step
    seeds = {hash((0, number, i, 0)) for number in waiting for i in range(2)}
    assert trainer.engine.turns.keys() <= seeds and {key[0] for key in trainer.finished} <= set(waiting)
    carried = [
        one
        for samples in found
        for one in samples
        if len(set(one.tokens["version"][one.tokens["mask"] == 1])) > 1
    ]
    assert carried
    for step, samples in enumerate(found, start=1):
        for sample in samples:
            versions = sample.tokens["version"][sample.tokens["mask"] == 1]
            assert len(versions) == min(40, length_of(hash((0, *sample.key, 0))))
            assert (np.diff(versions) >= 0).all() and versions[-1] <= step
    for samples, metrics in zip(found, trainer.history):
        tokens = np.concatenate([one.tokens[one.tokens["mask"] == 1] for one in samples])
        ages = trainer.history.index(metrics) + 1 - tokens["version"]
        assert metrics["age_0"] == pytest.approx((ages == 0).mean())
        assert metrics["age_1"] == pytest.approx((ages == 1).mean())
        assert metrics["too_old_tokens"] == pytest.approx((ages > 1).mean())
        assert 0 < metrics["idle_rollout_slots"] < 1 and metrics["logprob_diff"] < 1e-5
    assert trainer.history[-1]["leftover_tokens"] == sum(
        len(turn["id"]) for turn in trainer.engine.turns.values()
    )


def test_newest_tokens_have_the_log_probs_of_the_weights_that_were_pushed_last(partial):
    trainer = partial(lr=0.01)
    steps(trainer, 2)
    samples = trainer.rollout()
    model = trainer.engine.model
    for sample in samples:
        tokens = sample.tokens[sample.tokens["mask"] == 1]
        with torch.no_grad():
            expected = plain_logprobs(model, sample).numpy()
        is_newest = tokens["version"] == trainer.engine.version
        np.testing.assert_allclose(tokens["logprob"][is_newest], expected[is_newest], atol=1e-4)


def test_without_oversampling_it_is_the_core(partial, whole):
    trainer = partial(oversample=1.0)
    samples = steps(trainer, 2)[1]
    assert trainer.engine.turns == {} and trainer.groups == [] and trainer.prompts_drawn == 8
    assert trainer.history[1]["age_0"] == 1 and trainer.history[1]["leftover_tokens"] == 0
    assert [sample.key for sample in samples] == [(number, i) for number in range(4, 8) for i in range(2)]


def test_completions_do_not_depend_on_where_they_were_stopped(partial):
    """With a learning rate of 0 a prompt has the same completions as without over-sampling."""
    texts = []
    for oversample in (1.0, 2.0):
        found = sum(steps(partial(oversample=oversample, lr=0.0), 5), [])
        texts.append({sample.key: sample.tokens["id"].tolist() for sample in found})
    both = texts[0].keys() & texts[1].keys()
    assert len(both) > 20 and all(texts[0][key] == texts[1][key] for key in both)


def test_a_carried_sample_that_fails_takes_its_group_out_of_the_loss(partial):
    begun = []

    def reward_fn(sample):
        versions = sample.tokens["version"][sample.tokens["mask"] == 1]
        if versions[0] != versions[-1]:
            raise ValueError("a carried one")
        return sample.key[1]

    trainer = partial(reward_fn=reward_fn)
    compare = trainer.compare
    trainer.compare = lambda samples: begun.append({sample.key[0] for sample in samples}) or compare(samples)
    found = steps(trainer, 5)
    failed = {sample.key[0] for samples in found for sample in samples if sample.failure}
    assert failed and not failed & set.union(*begun)
    assert all(len(samples) == 8 for samples in found)


def test_prompts_that_are_too_long_take_their_place_without_samples(partial):
    trainer = partial()
    first = trainer.rollout()
    trainer.prompt_limit = 0  # from now on no prompt fits, and the four groups in play are left
    later = [trainer.rollout() for _ in range(3)]
    assert len(first) == 8 and [len(samples) for samples in later[1:]] == [0, 0]
    assert trainer.prompts_drawn == 4 * 4 + 4 and len(trainer.groups) == 4


def test_what_a_checkpoint_carries_suits_other_ranks_and_other_recipes(partial):
    trainer = partial()
    trainer.prompts_drawn = 12
    trainer.restore_carried([None])  # a checkpoint of train.py, which carries nothing
    assert trainer.trained == 12 and trainer.groups == []
    trainer.restore_carried(None)  # one that is older than this recipe
    turn = [77, {"prompt": [1], "id": [2], "logprob": [-1.0], "version": [3], "truncated": None}]
    part = {"groups": [[9, 4], [11, 5]], "trained": 8, "turns": [turn]}
    trainer.restore_carried([part, part | {"groups": [[8, 3]]}])  # of two ranks: now one plays all of them
    assert trainer.groups == [(8, 3), (9, 4), (11, 5)] and trainer.engine.turns == {} and trainer.trained == 8
    trainer.restore_carried([part])
    assert trainer.groups == [(9, 4), (11, 5)] and trainer.engine.turns == {77: turn[1]}
    assert json.loads(json.dumps(trainer.carried())) == part


def test_an_evaluation_neither_continues_nor_ends_what_is_carried(partial):
    trainer = partial(eval_data=f"{COUNTDOWN}/test.jsonl:train[:3]")
    steps(trainer, 1)
    before = json.dumps(trainer.carried())
    assert trainer.evaluate()["eval_failures"] == 0
    assert json.dumps(trainer.carried()) == before and not trainer.engine.is_playing


def test_episodes_of_several_turns_are_continued(partial):
    replies = []

    async def env_step(sample):
        await asyncio.sleep(0)
        replies.append((sample.key, len(sample.turns)))
        return "<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"

    trainer = partial(env_step=env_step, max_turns=3)
    found = sum(steps(trainer, 4), [])
    spread = 0
    for sample in found:
        assert not sample.failure
        tokens = sample.tokens[sample.tokens["mask"] == 1]
        assert tokens["turn"].max() + 1 == len(sample.turns)
        spread += len(set(tokens["version"])) > 1
        for turn in range(len(sample.turns)):
            length = min(40, length_of(hash((0, *sample.key, turn))))
            assert (tokens["turn"] == turn).sum() == length
    assert spread and len({sample.key for sample in found}) == 32


# ---- Processes, resumes, the real SGLang -------------------------------------------------------------------
LONG_TAIL = """
from recipes import partial_rollouts as recipe
from recipes.partial_engine import ENGINES
from recipes.problems import ProblemDataset
from tests.test_partial_rollouts import LongTail
import train

ENGINES["local"] = LongTail
train.main(recipe.PartialConfig, ProblemDataset, recipe.reward_fn, trainer=recipe.PartialRollouts)
"""
SMALL = "--steps 6 --prompts_per_step 4 --group_size 2 --max_new_tokens 40 --lr 1e-3 --gate off".split()


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["--dp_replicate 1", "--tp_size 2"])
def test_two_processes_carry_on_and_a_resumed_run_is_the_unbroken_one(tmp_path, layout):
    """Each process stops at its own share. The checkpoint after step 4 has what both carry then."""
    flags = [*SMALL, *layout.split(), "--data", f"{COUNTDOWN}/train.jsonl", "--eval_data", ""]
    flags += ["--model", TINY, "--engine", "local", "--device", "cpu", "--dtype", "float32"]
    script = tmp_path / "long_tail.py"
    script.write_text(LONG_TAIL)
    options = {"processes": 2, "PYTHONPATH": str(HERE)}
    done = run(script, *flags, "--save_every", 4, "--output_dir", tmp_path / "whole", **options)
    assert done.returncode == 0, done.stderr[-3000:]
    history = read_rows(tmp_path / "whole/metrics.jsonl")[1:]
    assert max(record["age_1"] for record in history) > 0.05 and "were sampled and not trained" in done.stdout
    samples = read_rows(tmp_path / "whole/samples.jsonl")
    numbers = {(sample["step"], sample["key"][0]) for sample in samples}
    assert len(samples) == 48 and len(numbers) == len({number for _, number in numbers}) == 24
    state = json.loads((tmp_path / "whole/checkpoint-4/state.json").read_text())
    assert [part["trained"] for part in state["carried"]] == [16, 16]
    assert sum(len(part["groups"]) for part in state["carried"]) == 4 and state["prompts_drawn"] == 20
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    flags = ["--resume", tmp_path / "resumed/checkpoint-4", "--output_dir", tmp_path / "resumed"]
    done = run(script, *flags, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert differences(tmp_path / "whole", tmp_path / "resumed") == EQUAL


@needs_sglang
def test_sglang_aborts_and_continues(tmp_path):
    """Its log-probs of the newest tokens are the actor's; carried completions keep those of their weights."""
    flags = ["--engine", "sglang", "--output_dir", tmp_path, "--eval_every", 2, "--steps", 4]
    flags += ["--eval_data", f"{COUNTDOWN}/test.jsonl:train[:4]", "--prompts_per_step", 4]
    flags += ["--group_size", 2, "--max_new_tokens", 48, "--token_groups", 100]
    done = run("-m", "recipes.partial_rollouts", *flags, **ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    history = read_rows(tmp_path / "metrics.jsonl")[1:]
    assert max(record["age_1"] for record in history) > 0 and all(r["logprob_diff"] < 1e-5 for r in history)
    numbers = {(sample["step"], sample["key"][0]) for sample in read_rows(tmp_path / "samples.jsonl")}
    assert len(numbers) == len({number for _, number in numbers}) == 16
