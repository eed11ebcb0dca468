"""Tests of SGLangEngine with the stand-in of fake_sglang.py: its calls in their order, and its answers."""

import asyncio
import inspect
import json
import math
import os
import weakref
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from tests import fake_sglang
from tests.conftest import SGLANG_CPU, TINY, Config, needs_sglang, run
from tests.fake_sglang import FakeEngine, SchedulerDied

CALLS = (  # of sglang.Engine by train.py
    "flush_cache release_memory_occupation resume_memory_occupation begin_weight_update "
    "update_weights_from_tensor end_weight_update async_generate shutdown"
).split()


@pytest.fixture
def environment():
    """What a test changes in os.environ is undone, whoever does it."""
    before = dict(os.environ)
    yield os.environ
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def modules(monkeypatch):
    """Stand-ins for sglang's modules."""
    return fake_sglang.install(monkeypatch)


@pytest.fixture
def sglang_engine(monkeypatch, tokenizer, environment, modules):
    """A function that makes the SGLangEngine of a rank of two; `waits` notes what the rank does besides."""
    waits = []

    def gather(payloads, mine, group):
        waits.append("gather")
        payloads[:] = [mine, "of rank 1"]

    monkeypatch.setattr(train.dist, "all_gather_object", gather)
    monkeypatch.setattr(train.dist, "all_reduce", lambda *args, **options: waits.append("barrier"))
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: waits.append(name))

    def make(rank=0, **flags):
        group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
        tp = {"tp": SimpleNamespace(get_group=lambda: group)}
        options = {"dtype": "float32", "device": "cpu", "sglang_args": '{"log_level": "info"}'}
        engine = train.SGLangEngine(str(TINY), tokenizer, tp, Config(**options | flags))
        waits.clear()
        engine.waits = waits
        return engine

    sharing = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_descriptor")
    yield make
    torch.multiprocessing.set_sharing_strategy(sharing)


BUCKETS = [[("a", torch.ones(2))], [("b", torch.zeros(1)), ("c", torch.ones(1, 1))]]


def some_buckets():
    """What Actor.whole_weights would yield."""
    return (deepcopy(bucket) for bucket in BUCKETS)


def values(payload: dict) -> dict[str, list]:
    """The weights in a payload."""
    bucket = fake_sglang.FlattenedTensorBucket(**payload)
    return {name: tensor.tolist() for name, tensor in bucket.reconstruct_tensors()}


def test_sglang_gets_each_push_in_this_order(sglang_engine):
    engine = sglang_engine()
    options = engine.engine.options
    assert (options["model_path"], options["dtype"], options["device"]) == (str(TINY), "float32", "cpu")
    assert options["tp_size"] == 2 and options["skip_tokenizer_init"] and options["log_level"] == "info"
    assert engine.loop is engine.engine.loop and engine.vocab_size == 512
    assert engine.local_prompts([5, 6, 7]) == [5, 6, 7]  # of the tensor-parallel group's
    engine.sleep()
    engine.push(some_buckets())
    calls = engine.engine.calls
    assert engine.engine.busy == -1 and engine.version == 1
    assert [call[0] for call in calls] == [
        "flush_cache", "flush_cache", "flush_cache",  # twice it was busy
        "release_memory_occupation", "resume_memory_occupation", "begin_weight_update",
        "update_weights_from_tensor", "update_weights_from_tensor", "end_weight_update",
        "resume_memory_occupation",
    ]  # fmt: skip
    calls = calls[3:]
    assert calls[1][1] == ["weights"] and calls[6][1] == ["kv_cache", "cuda_graph"]
    first, second = calls[3], calls[4]
    assert first[2:] == ("flattened_bucket", False) and first[1][1] == "of rank 1"  # a payload per rank
    assert values(first[1][0]) == {"a": [1, 1]}
    assert values(second[1][0]) == {"b": [0], "c": [[1]]}
    engine.close()
    assert engine.engine.calls[-1] == ("shutdown",)


def test_memory_is_released_and_resumed_once(sglang_engine):
    """Twice would end SGLang, whose memory saver exits then; so would a push into memory that is in use."""
    engine = sglang_engine()
    for action in (engine.sleep, engine.sleep, lambda: engine.push(some_buckets())) * 2:
        action()
    engine.push(some_buckets())  # without a sleep before it
    names = [call[0] for call in engine.engine.calls]
    assert names.count("release_memory_occupation") == 3
    assert names.count("resume_memory_occupation") == 6 and not engine.engine.paused
    assert engine.version == 3


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_goes_on_before_sglang_has_measured_or_released_its_memory(
    sglang_engine, modules, monkeypatch, rank
):
    order = []
    start = modules["sglang"].Engine
    modules["sglang"].Engine = lambda **options: order.append("start") or start(**options)
    monkeypatch.setattr(train.SGLangEngine, "barrier", lambda engine: order.append("barrier"))
    monkeypatch.setattr(FakeEngine, "note", lambda engine, name, *arguments: order.append(name))
    assert torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # which only relatives can open
    sglang_engine(rank).sleep()
    assert torch.multiprocessing.get_sharing_strategy() == "file_system"
    released = ["flush_cache"] * 3 + ["release_memory_occupation"]
    assert order == (["start", "barrier", *released, "barrier"] if rank == 0 else ["barrier"] * 2)


def test_sglang_on_gpus_can_release_all_its_memory(sglang_engine, environment, monkeypatch):
    names = "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "TMS_RETAIN_CPU_BACKUP"
    for name in names:
        environment[name] = "unset"
    environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    monkeypatch.setattr(train, "LOCAL_RANK", 2)
    options = sglang_engine(device="cuda", dtype="bfloat16").engine.options
    assert options["enable_memory_saver"] and options["disable_prefill_cuda_graph"]
    assert (options["base_gpu_id"], options["device"], options["dtype"]) == (2, "cuda", "bfloat16")
    assert environment["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"  # CUDA graphs are released, too
    assert environment["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] == "0"
    assert environment["TMS_RETAIN_CPU_BACKUP"] == "1"  # or each step pins and frees the graphs' backup
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment


CUDA = f"{Path(torch.__file__).parent.parent}/nvidia/cu13/lib"  # of pip


@pytest.mark.parametrize(
    "device, given, expected",
    [
        ("cuda", None, CUDA),
        ("cuda", "", CUDA),  # an empty part would be the working folder
        ("cuda", "/opt/lib:/opt/other", f"/opt/lib:/opt/other:{CUDA}"),
        ("cpu", "/opt/lib", "/opt/lib"),
    ],
)
def test_the_memory_saver_finds_cuda(sglang_engine, environment, modules, device, given, expected):
    """SGLang starts its scheduler with LD_PRELOAD, which the loader resolves before there is any Python."""
    environment.pop("LD_LIBRARY_PATH", None)
    environment |= {} if given is None else {"LD_LIBRARY_PATH": given}
    start, seen = modules["sglang"].Engine, []

    def start_noted(**options):
        seen.append(environment.get("LD_LIBRARY_PATH"))
        return start(**options)

    modules["sglang"].Engine = start_noted
    sglang_engine(device=device)
    assert seen == [expected]


def test_gpus_travel_by_uuid_and_caches_are_freed_before_each_wait(sglang_engine, modules):
    engine = sglang_engine(device="cuda")
    engine.sleep()
    order = engine.waits
    order.clear()
    modules["patch_torch"].monkey_patch_torch_reductions = lambda: order.append("uuid")
    engine.push(some_buckets())
    wait = ["ipc_collect", "empty_cache", "barrier"]
    assert order == ["uuid", *wait, "gather", *wait, "gather", *wait, *wait]


def test_weights_of_a_cpu_have_no_gpu_to_name(sglang_engine, modules, monkeypatch):
    """--device cpu on a machine with GPUs: SGLang's patch would look for the GPU of a CPU tensor."""
    monkeypatch.setattr(train, "GPU", True)
    engine = sglang_engine()
    modules["patch_torch"].monkey_patch_torch_reductions = lambda: 1 / 0
    engine.push(some_buckets())
    assert "empty_cache" not in engine.waits and engine.waits.count("gather") == 2


def test_a_bucket_lives_until_the_next_one_was_sent(sglang_engine, modules, monkeypatch):
    engine = sglang_engine()
    sent, alive = [], []

    def serialize(content):
        sent.append(weakref.ref(content["flattened_tensor"]))

    modules["utils"].MultiprocessingSerializer = SimpleNamespace(serialize=serialize)
    monkeypatch.setattr(FakeEngine, "note", lambda *arguments: None)  # its notes would keep the payloads

    def noted(method):
        def call(*arguments, **options):
            alive.append([tensor() is not None for tensor in sent])
            return method(*arguments, **options)

        return call

    for name in ("update_weights_from_tensor", "resume_memory_occupation"):
        monkeypatch.setattr(engine.engine, name, noted(getattr(engine.engine, name)))
    engine.sleep()
    engine.push(deepcopy(bucket) for bucket in [*BUCKETS, BUCKETS[0]])
    weights, *updates, cache = alive
    assert updates == [[True], [True, True], [False, True, True]]
    assert weights == [] and cache == [False, False, False]  # freed before the cache takes its memory


def test_other_ranks_wait_for_the_one_that_talks_to_sglang(sglang_engine):
    waits = []
    for rank in (0, 1):
        engine = sglang_engine(rank)
        for _ in range(2):
            engine.sleep()
            engine.push(some_buckets())
        engine.close()
        waits.append(list(engine.waits))
    assert waits[0] == waits[1] and waits[0].count("gather") == 4
    assert engine.engine is None and engine.local_prompts([5, 6, 7]) == [] and engine.version == 2


@pytest.mark.parametrize("method", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"])
def test_failures_that_sglang_only_returns_raise(sglang_engine, method):
    refusals = [(False, "too large"), SimpleNamespace(success=False, message="too large")]
    for answer in [*refusals, (True, "fine")]:
        engine = sglang_engine()
        engine.sleep()
        engine.engine.answers[method] = answer
        if answer in refusals:
            with pytest.raises(RuntimeError, match=f"sglang: {method} failed: .*too large"):
                engine.push(some_buckets())
        else:
            engine.push(some_buckets())


ANSWER = {
    "output_token_logprobs": [(-0.5, 7, None), (None, 8, None)],
    "finish_reason": {"type": "length"},
    "completion_tokens": 2,
}


def complete(engine, answer: dict, temperature: float = 0.7, max_new_tokens: int = 16):
    """What the engine makes of SGLang's answer."""
    engine.engine.answers["async_generate"] = answer
    return asyncio.run(engine.generate(np.array([1, 2]), temperature, 11, max_new_tokens))


def test_a_completion_of_sglang(sglang_engine):
    engine = sglang_engine(temperature=0.6)
    engine.version = 3
    ids, logprobs, version, truncated = complete(engine, ANSWER)
    assert list(ids) == [7, 8] and (version, truncated) == (3, True)
    assert logprobs[0] == -0.5 and math.isnan(logprobs[1])
    assert not complete(engine, ANSWER | {"finish_reason": {"type": "stop"}})[3]
    for temperature, longest in ((0.0, 4), (0.3, 9), (1.0, 16)):  # 0 is greedy, not a temperature left out
        complete(engine, ANSWER, temperature, longest)
        name, input_ids, sampling, return_logprob = engine.engine.calls[-1]
        assert input_ids == [1, 2] and return_logprob
        expected = {"temperature": temperature, "max_new_tokens": longest}
        assert sampling == expected | {"sampling_seed": 11, "stop_token_ids": [2]}
    with pytest.raises(ValueError, match="2 of 3 log-probs"):
        complete(engine, ANSWER | {"completion_tokens": 3})
    with pytest.raises(RuntimeError, match="SGLang aborted a request: .*full"):
        complete(engine, ANSWER | {"finish_reason": {"type": "abort", "message": "full"}})


# ---- The stand-in itself -----------------------------------------------------------------------------------
PAYLOAD = {"named_tensors": [{}], "load_format": "flattened_bucket"}
PROMPT = {"input_ids": [1], "sampling_params": {}, "return_logprob": True}
ACTIONS = {
    "flush": lambda engine, tags: engine.flush_cache(),
    "release": lambda engine, tags: engine.release_memory_occupation(tags),
    "resume": lambda engine, tags: engine.resume_memory_occupation(tags),
    "begin": lambda engine, tags: engine.begin_weight_update(),
    "update": lambda engine, tags: engine.update_weights_from_tensor(**PAYLOAD),
    "update nothing": lambda engine, tags: engine.update_weights_from_tensor([], "flattened_bucket"),
    "generate": lambda engine, tags: asyncio.run(engine.async_generate(**PROMPT)),
}
FATAL = {  # message: the actions, with tags, of which the last one ends the scheduler
    "it is not active": ["flush", "release", "release"],
    "weights: it is not paused": ["resume: weights"],
    "only when server is idle": ["release"],
    "Cannot pause experts": ["flush", "release: experts"],
    "weights whose memory is released": ["flush", "release", "update"],
    "an update of weights": ["flush", "release: weights", "begin"],
    "a completion while memory is released": ["flush", "release", "resume: weights kv_cache", "generate"],
    "a completion without weights": ["flush", "release", "resume", "generate"],
    "one payload for each rank": ["update nothing"],
}


@pytest.mark.parametrize("message", FATAL)
def test_the_stand_in_dies_where_sglang_does(message):
    engine = FakeEngine(tp_size=1)
    engine.busy = 0  # until its cache is flushed

    def act(text: str):
        action, _, tags = text.partition(": ")
        ACTIONS[action](engine, tags.split() or None)

    *before, last = FATAL[message]
    for action in before:
        act(action)
    with pytest.raises(SchedulerDied, match=message):
        act(last)
    with pytest.raises(SchedulerDied, match="SGLang is gone"):
        engine.flush_cache()


def test_the_stand_in_refuses_other_options_and_updates_outside_a_session():
    with pytest.raises(TypeError):
        FakeEngine(tp_size=1, mem_fraction=0.5)
    engine = FakeEngine(tp_size=1)
    assert not engine.update_weights_from_tensor(**PAYLOAD)[0] and not engine.end_weight_update()[0]
    assert engine.begin_weight_update()[0] and not engine.begin_weight_update()[0]
    assert engine.update_weights_from_tensor(**PAYLOAD)[0] and engine.end_weight_update()[0]


SIGNATURES = """
import inspect, json, sys
import sglang
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

found = {}
for name in sys.argv[1:]:
    parameters = inspect.signature(getattr(sglang.Engine, name)).parameters.values()
    found[name] = {one.name: repr(one.default) for one in parameters}
options = list(ServerArgs.__struct_fields__)
sampling = list(SamplingParams.__struct_fields__)
print(json.dumps({"calls": found, "options": options, "sampling": sampling}))
"""


@needs_sglang
def test_the_stand_in_has_the_signatures_of_the_real_sglang(tmp_path):
    script = tmp_path / "signatures.py"
    script.write_text(SIGNATURES)
    done = run(script, *CALLS, **SGLANG_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    real = json.loads(done.stdout.splitlines()[-1])
    for name in CALLS:
        parameters = inspect.signature(getattr(FakeEngine, name)).parameters
        for place, (parameter, found) in enumerate(parameters.items()):
            assert repr(found.default) == real["calls"][name][parameter], (name, parameter)
            is_free = found.kind is found.KEYWORD_ONLY
            assert is_free or list(real["calls"][name])[place] == parameter, (name, parameter)
    assert set(fake_sglang.OPTIONS) <= set(real["options"])
    assert set(fake_sglang.SAMPLING) <= set(real["sampling"])
