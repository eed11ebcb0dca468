"""Tests of extras/local_engine.py, against transformers and by hand."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from extras.local_engine import LocalEngine, sample_tokens
from tests.conftest import VOCAB, plain_logprobs, random_model
from train import Sample


def make_engine(folder: Path, tokenizer, max_new_tokens: int = 24, tp=(0, 1)) -> LocalEngine:
    config = SimpleNamespace(device="cpu", dtype="float32", max_new_tokens=max_new_tokens)
    mesh = {"tp": SimpleNamespace(get_local_rank=lambda: tp[0], size=lambda: tp[1])}
    return LocalEngine(str(folder), tokenizer, mesh, config)


def sample(engine: LocalEngine, requests: list, temperature: float = 1.0) -> list[tuple]:
    """The completions of (prompt, seed) pairs that are requested at once."""

    async def all_of_them():
        pairs = [(np.array(ids, np.int32), seed) for ids, seed in requests]
        return await asyncio.gather(*[engine.generate(ids, temperature, seed) for ids, seed in pairs])

    return engine.loop.run_until_complete(all_of_them())


def test_sample_tokens_inverts_the_distribution_function():
    logits = torch.tensor([0.2, 0.0, 0.3, 0.5]).log().repeat(6, 1)  # the function's steps: 0.2, 0.2, 0.5, 1
    uniforms = torch.tensor([0.0, 0.19, 0.21, 0.49, 0.51, 1 - 2**-24])
    ids, logprobs = sample_tokens(logits, uniforms, 1.0)
    assert ids.tolist() == [0, 0, 2, 2, 3, 3]
    torch.testing.assert_close(logprobs, torch.tensor([0.2, 0.2, 0.3, 0.3, 0.5, 0.5]).log())
    # At temperature 1/2 the probabilities are squared: 0.04, 0, 0.09, 0.25 over 0.38.
    ids, logprobs = sample_tokens(logits[:1], torch.tensor([0.2]), 0.5)
    assert ids.item() == 2 and logprobs.item() == pytest.approx(math.log(0.09 / 0.38), rel=1e-5)
    ids, logprobs = sample_tokens(logits[:1], torch.tensor([0.0]), 0.0)
    assert ids.item() == 3 and logprobs.item() == pytest.approx(math.log(0.5), rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_engine_agrees_with_transformers_and_with_itself(tmp_path, tokenizer, kind):
    folder = random_model(tmp_path, kind)
    engine = make_engine(folder, tokenizer)
    engine.vocab_size = VOCAB  # as plain_logprobs has it
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts = [[5, 6, 7], [9] * 11, [5, 6, 7], [100, 200]]
    together = sample(engine, list(zip(prompts, range(4))), 0.7)
    for seed, prompt in enumerate(prompts):  # neighbors change nothing
        (alone,) = sample(engine, [(prompt, seed)], 0.7)
        assert alone[0].tolist() == together[seed][0].tolist()
    assert together[0][0].tolist() != together[2][0].tolist()  # another seed, another completion
    for prompt, (ids, logprobs, version, truncated) in zip(prompts, together):
        whole = Sample([], {})
        whole.append(prompt)
        whole.append(ids, mask=1)
        expected = plain_logprobs(model, whole, 0.7)
        torch.testing.assert_close(torch.from_numpy(logprobs), expected, rtol=0, atol=1e-4)
        assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
        assert truncated is (ids[-1] != tokenizer.eos_token_id).item() and (not truncated or len(ids) == 24)
        assert version == 0  # nothing was pushed yet
    greedy, *_ = sample(engine, [(prompts[1], 0)], 0.0)[0]
    beyond = list(range(VOCAB, model.config.vocab_size))
    options = {"do_sample": False, "eos_token_id": tokenizer.eos_token_id, "suppress_tokens": beyond}
    expected = model.generate(torch.tensor([prompts[1]]), max_new_tokens=24, **options)
    assert greedy.tolist() == expected[0, 11:].tolist()


def test_engine_never_samples_beyond_the_vocabulary_and_returns_the_stop_id(tmp_path, tokenizer):
    engine = make_engine(random_model(tmp_path, tied=False), tokenizer, max_new_tokens=12)
    with torch.no_grad():  # the padding rows of the head are by far the most likely
        engine.model.lm_head.weight[len(tokenizer) :] = 100 * engine.model.lm_head.weight[:1]
    answers = sample(engine, [([1, 2, 3], seed) for seed in range(40)])
    sampled = np.concatenate([ids for ids, *_ in answers])
    assert len(tokenizer) < engine.model.config.vocab_size and sampled.max() < len(tokenizer)
    with torch.no_grad():  # a head of zeros except for EOS, which is then all but certain
        engine.model.lm_head.weight.zero_()
        states = engine.model.model(torch.tensor([[1, 2, 3]])).last_hidden_state[0, -1]
        engine.model.lm_head.weight[tokenizer.eos_token_id] = 100 * states
    ((ids, _, _, truncated),) = sample(engine, [([1, 2, 3], 0)])
    assert ids.tolist() == [tokenizer.eos_token_id] and truncated is False


def test_limits_and_temperatures_may_differ_between_requests_and_no_graph_is_kept(tmp_path, tokenizer):
    engine = make_engine(random_model(tmp_path), tokenizer)
    engine.stops = {None}  # only the limit ends a completion
    engine.wave_size = 2
    forward, logits = engine.forward, []
    engine.forward = lambda *arguments: logits.append(forward(*arguments)) or logits[-1]

    async def mixed():
        prompt = np.array([5, 6, 7], np.int32)
        kinds = [(1.0, 4), (0.0, 3), (1.0, None), (1.0, 4), (1.0, 4)]
        return await asyncio.gather(*(engine.generate(prompt, heat, 0, limit) for heat, limit in kinds))

    answers = engine.loop.run_until_complete(mixed())
    assert [len(ids) for ids, *_ in answers] == [4, 3, 24, 4, 4]
    assert all(truncated for *_, truncated in answers)
    assert answers[0][0].tolist() == answers[2][0][:4].tolist() == answers[4][0].tolist()  # the same seed
    assert logits and not any(of_token.requires_grad for of_token in logits)  # memory would grow per token


def test_a_push_changes_weights_and_version(tmp_path, tokenizer):
    engine = make_engine(random_model(tmp_path / "new", tied=False), tokenizer)
    names = {name: value.detach().clone() for name, value in engine.model.named_parameters()}
    before = sample(engine, [([1, 2, 3], 0)], 0.0)[0]
    other = {name: -value if "lm_head" in name else value for name, value in names.items()}
    engine.push([list(other.items())[:3], list(other.items())[3:]])
    after = sample(engine, [([1, 2, 3], 0)], 0.0)[0]
    assert (before[2], after[2]) == (0, 1) and before[0].tolist() != after[0].tolist()
    engine.push([list(names.items())])
    again = sample(engine, [([1, 2, 3], 0)], 0.0)[0]
    assert again[2] == 2 and again[0].tolist() == before[0].tolist()


def test_ranks_of_a_tensor_parallel_group_share_its_prompts(tmp_path, tokenizer):
    folder = random_model(tmp_path)
    engines = [make_engine(folder, tokenizer, tp=(rank, 2)) for rank in range(2)]
    assert [engine.local_prompts([0, 1, 2, 3, 4]) for engine in engines] == [[0, 2, 4], [1, 3]]


def test_an_error_reaches_everyone_who_waits(tmp_path, tokenizer):
    folder = random_model(tmp_path, "qwen2")
    engine = make_engine(folder, tokenizer, max_new_tokens=4)
    with pytest.raises(IndexError):
        sample(engine, [([1, 99999], 0), ([1, 2], 1)])  # an id that the embedding lacks
    assert len(sample(engine, [([1, 2], 1)])[0][0]) <= 4  # and the next wave is served


def test_a_cancelled_request_leaves_its_neighbors_alone(tmp_path, tokenizer):
    engine = make_engine(random_model(tmp_path), tokenizer)
    prompt = np.array([1, 2, 3], np.int32)

    async def one_gives_up():
        tasks = [asyncio.ensure_future(engine.generate(prompt, 1.0, seed)) for seed in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the wave has begun
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = engine.loop.run_until_complete(one_gives_up())
    assert isinstance(answers[1], asyncio.CancelledError)
    for seed in (0, 2):
        assert answers[seed][0].tolist() == sample(engine, [(prompt, seed)])[0][0].tolist()


def test_an_abort_returns_what_there_is_and_nothing_for_those_that_still_wait(tmp_path, tokenizer):
    engine = make_engine(random_model(tmp_path), tokenizer)
    engine.stops = {None}
    engine.wave_size = 1
    prompt = np.array([1, 2, 3], np.int32)

    async def aborted():
        tasks = [asyncio.ensure_future(engine.generate(prompt, 1.0, seed)) for seed in (4, 5)]
        for _ in range(9):
            await asyncio.sleep(0)
        engine.abort()
        return await asyncio.gather(*tasks)

    begun, waited = engine.loop.run_until_complete(aborted())
    ((whole, *_),) = sample(engine, [(prompt, 4)])  # an abort does not end later requests
    assert 1 < len(begun[0]) < 9 and begun[0].tolist() == whole[: len(begun[0])].tolist() and len(whole) == 24
    assert len(waited[0]) == len(waited[1]) == 0 and begun[3] is waited[3] is True
    done = len(begun[0])
    rest = engine.generate(np.append(prompt, begun[0]), 1.0, 4, 24 - done, done)
    assert engine.loop.run_until_complete(rest)[0].tolist() == whole[done:].tolist()


def test_close_ends_a_wave_that_was_dropped(tmp_path, tokenizer):
    engine = make_engine(random_model(tmp_path), tokenizer)

    async def dropped():
        asyncio.ensure_future(engine.generate(np.array([1, 2], np.int32), 1.0, 0))
        for _ in range(3):  # not for a time: a fast machine would decode all of it
            await asyncio.sleep(0)

    engine.loop.run_until_complete(dropped())
    assert not engine.server.done()
    engine.close()
    assert engine.server.cancelled()
