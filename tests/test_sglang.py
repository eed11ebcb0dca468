"""Tests of SGLangEngine with a stand-in for sglang.Engine: its calls in their order, and its answers."""

import asyncio
import math
import os
import sys
import weakref
from copy import deepcopy
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import train
from tests.conftest import TINY
from train import Config


class FakeEngine:
    """Notes what is asked of it, as sglang.Engine."""

    def __init__(self, **options):
        self.options = options
        self.loop = asyncio.new_event_loop()
        self.calls = []
        self.answers = {}
        self.busy = 2

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, *args, *options.values()))
            return self.answers.get(name)

        return call

    def flush_cache(self):
        self.busy -= 1
        return SimpleNamespace(success=self.busy < 0)

    async def async_generate(self, **request):
        self.calls.append(request)
        return {"meta_info": self.answers["generate"]}


@pytest.fixture
def sglang_engine(monkeypatch, tokenizer):
    """A function that makes the SGLangEngine of a rank of two, with a stub for sglang."""
    names = [
        "sglang",
        "sglang.srt",
        "sglang.srt.utils",
        "sglang.srt.utils.patch_torch",
        "sglang.srt.weight_sync",
    ]
    modules = {name: ModuleType(name) for name in [*names, "sglang.srt.weight_sync.tensor_bucket"]}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    serializer = SimpleNamespace(serialize=lambda content: content)
    modules["sglang"].Engine = FakeEngine
    modules["sglang.srt.utils"].MultiprocessingSerializer = serializer
    modules["sglang.srt.utils.patch_torch"].monkey_patch_torch_reductions = lambda: None
    modules["sglang.srt.weight_sync.tensor_bucket"].FlattenedTensorBucket = lambda named_tensors: (
        SimpleNamespace(
            get_flattened_tensor=lambda: torch.cat([tensor.flatten() for _, tensor in named_tensors]),
            get_metadata=lambda: [name for name, _ in named_tensors],
        )
    )
    waits = []
    monkeypatch.setattr(train.dist, "all_reduce", lambda *args, **options: waits.append("barrier"))

    def gather(payloads, mine, group):
        waits.append("gather")
        payloads[:] = [mine, "of rank 1"]

    monkeypatch.setattr(train.dist, "all_gather_object", gather)

    def make(rank=0, **flags):
        group = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
        tp = {"tp": SimpleNamespace(get_group=lambda: group)}
        config = Config(
            **{"dtype": "float32", "device": "cpu", "sglang_args": '{"log_level": "info"}'} | flags
        )
        engine = train.SGLangEngine(str(TINY), tokenizer, tp, config)
        engine.waits = waits
        return engine

    sharing = torch.multiprocessing.get_sharing_strategy()
    yield make
    torch.multiprocessing.set_sharing_strategy(sharing)


BUCKETS = [[("a", torch.ones(2))], [("b", torch.zeros(1)), ("c", torch.ones(1, 1))]]


def test_sglang_gets_each_push_in_this_order(sglang_engine):
    engine = sglang_engine()
    options = engine.engine.options
    assert (options["model_path"], options["dtype"], options["device"]) == (str(TINY), "float32", "cpu")
    assert options["tp_size"] == 2 and options["skip_tokenizer_init"] and options["log_level"] == "info"
    assert engine.loop is engine.engine.loop and engine.vocab_size == 512 and not engine.exact
    assert list(range(6))[engine.share] == list(range(6))  # of the tensor-parallel group's prompts
    engine.sleep()
    engine.push(deepcopy(bucket) for bucket in BUCKETS)
    calls = engine.engine.calls
    assert engine.engine.busy == -1 and engine.version == 1
    assert [call[0] for call in calls] == [
        "release_memory_occupation", "resume_memory_occupation", "begin_weight_update",
        "update_weights_from_tensor", "update_weights_from_tensor", "end_weight_update",
        "resume_memory_occupation",
    ]  # fmt: skip
    assert calls[1][1] == ["weights"] and calls[6][1] == ["kv_cache", "cuda_graph"]
    first, second = calls[3], calls[4]
    assert first[2:] == ("flattened_bucket", False) and first[1][1] == "of rank 1"  # a payload per rank
    assert first[1][0]["metadata"] == ["a"] and first[1][0]["flattened_tensor"].tolist() == [1, 1]
    assert second[1][0]["metadata"] == ["b", "c"] and second[1][0]["flattened_tensor"].tolist() == [0, 1]
    engine.close()
    assert calls[-1] == ("shutdown",)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_goes_on_before_sglang_has_measured_its_memory(sglang_engine, monkeypatch, rank):
    order = []
    start = sys.modules["sglang"].Engine
    monkeypatch.setattr(sys.modules["sglang"], "Engine", lambda **options: order.append("start") or start())
    monkeypatch.setattr(train.SGLangEngine, "barrier", lambda engine: order.append("barrier"))
    sglang_engine(rank)
    assert order == ["start", "barrier"][rank:]


def test_sglang_on_gpus_can_release_all_its_memory(sglang_engine, monkeypatch):
    for name in ("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"):
        monkeypatch.setenv(name, "unset")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(train, "LOCAL_RANK", 2)
    options = sglang_engine(device="cuda", dtype="bfloat16").engine.options
    assert options["enable_memory_saver"] and options["disable_prefill_cuda_graph"]
    assert (options["base_gpu_id"], options["device"], options["dtype"]) == (2, "cuda", "bfloat16")
    assert os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"  # CUDA graphs are released, too
    assert os.environ["SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"] == "0"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ


def test_gpus_travel_by_uuid_and_caches_are_freed_before_each_wait(sglang_engine, monkeypatch):
    engine = sglang_engine()
    order = engine.waits
    order.clear()
    patched = sys.modules["sglang.srt.utils.patch_torch"]
    monkeypatch.setattr(patched, "monkey_patch_torch_reductions", lambda: order.append("uuid"))
    for name in ("ipc_collect", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: order.append(name))
    monkeypatch.setattr(train, "GPU", True)
    engine.push(deepcopy(bucket) for bucket in BUCKETS)
    wait = ["ipc_collect", "empty_cache", "barrier"]
    assert order == [*wait, "uuid", "gather", *wait, "uuid", "gather", *wait, *wait]


def test_a_bucket_lives_until_the_next_one_was_sent(sglang_engine, monkeypatch):
    engine = sglang_engine()
    sent, alive = [], []
    refer = SimpleNamespace(serialize=lambda content: sent.append(weakref.ref(content["flattened_tensor"])))
    monkeypatch.setattr(sys.modules["sglang.srt.utils"], "MultiprocessingSerializer", refer)

    def update(*args, **options):
        alive.append([tensor() is not None for tensor in sent])

    engine.engine.update_weights_from_tensor = update
    engine.engine.resume_memory_occupation = update
    engine.push(deepcopy(bucket) for bucket in [*BUCKETS, BUCKETS[0]])
    weights, *updates, cache = alive
    assert updates == [[True], [True, True], [False, True, True]]
    assert weights == [] and cache == [False, False, False]  # freed before the cache takes its memory


def test_other_ranks_wait_for_the_one_that_talks_to_sglang(sglang_engine):
    waits = []
    for rank in (0, 1):
        engine = sglang_engine(rank)
        engine.sleep()
        engine.push(deepcopy(bucket) for bucket in BUCKETS)
        engine.close()
        waits.append(list(engine.waits))
        engine.waits.clear()
    assert waits[0] == waits[1] and waits[0].count("gather") == 2
    assert engine.engine is None and list(range(6))[engine.share] == [] and engine.version == 1


@pytest.mark.parametrize(
    "answer", [(False, "too large"), SimpleNamespace(success=False, message="too large")]
)
@pytest.mark.parametrize("method", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"])
def test_failures_that_sglang_only_returns_raise(sglang_engine, method, answer):
    engine = sglang_engine()
    engine.engine.answers[method] = answer
    with pytest.raises(RuntimeError, match=f"sglang: {method} failed: .*too large"):
        engine.push(deepcopy(bucket) for bucket in BUCKETS)
    engine.engine.answers[method] = (True, "fine")
    engine.push(deepcopy(bucket) for bucket in BUCKETS)


def test_a_completion_of_sglang(sglang_engine):
    engine = sglang_engine(max_new_tokens=9)
    engine.version = 3
    answer = {
        "output_token_logprobs": [(-0.5, 7, None), (None, 8, None)],
        "finish_reason": {"type": "length"},
        "completion_tokens": 2,
    }
    engine.engine.answers["generate"] = answer
    ids, logprobs, version, truncated = asyncio.run(engine.generate(np.array([1, 2]), 0.7, 11))
    assert list(ids) == [7, 8] and (version, truncated) == (3, True)
    assert logprobs[0] == -0.5 and math.isnan(logprobs[1])
    request = engine.engine.calls[-1]
    assert request["input_ids"] == [1, 2] and request["return_logprob"]
    sampling = {"temperature": 0.7, "sampling_seed": 11, "stop_token_ids": [2], "max_new_tokens": 9}
    assert request["sampling_params"] == sampling
    answer["finish_reason"] = {"type": "stop"}
    assert not asyncio.run(engine.generate(np.array([1, 2]), 0.7, 11, 4))[3]
    assert engine.engine.calls[-1]["sampling_params"]["max_new_tokens"] == 4
    with pytest.raises(ValueError, match="2 of 3 log-probs"):
        engine.engine.answers["generate"] = answer | {"completion_tokens": 3}
        asyncio.run(engine.generate(np.array([1, 2]), 0.7, 11))
    engine.engine.answers["generate"] = answer
    answer["finish_reason"] = {"type": "abort", "message": "full"}
    with pytest.raises(RuntimeError, match="SGLang aborted a request: .*full"):
        asyncio.run(engine.generate(np.array([1, 2]), 0.7, 11))
