"""A stand-in for sglang.Engine 0.5.23, no more lenient than the real one on a GPU.

What the real one does not know is a TypeError or an AttributeError here, too; what it refuses, this one
refuses; and what would end its scheduler (torch_memory_saver exits when told to release what is not active or
to resume what is not paused) raises SchedulerDied, after which nothing works. test_sglang.py compares the
signatures with those of the real one.
"""

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import torch

TAGS = ("kv_cache", "weights", "cuda_graph")
OPTIONS = (  # those of sglang's ServerArgs that train.py and its tests pass
    "model_path dtype device log_level tp_size skip_tokenizer_init base_gpu_id enable_memory_saver "
    "disable_prefill_cuda_graph mem_fraction_static"
).split()
SAMPLING = "temperature sampling_seed stop_token_ids max_new_tokens".split()  # of sglang's SamplingParams


class SchedulerDied(Exception):
    """SGLang's scheduler would have exited, and with it the run."""


class FakeEngine:
    """Notes its calls, and follows what the real engine's memory and weights go through."""

    def __init__(self, **options):
        unknown = options.keys() - set(OPTIONS)
        if unknown:
            raise TypeError(f"unknown arguments of sglang.Engine: {unknown}")
        self.options = options
        self.loop = asyncio.new_event_loop()
        self.calls = []  # (name, arguments...)
        self.answers = {}  # name of a method: what it returns instead of success
        self.alive = True
        self.busy = 2  # calls of flush_cache that it answers with no
        self.paused = set()
        self.has_weights = True
        self.is_updating = False

    def note(self, name: str, *arguments):
        if not self.alive:
            raise SchedulerDied(f"{name}: SGLang is gone")
        self.calls.append((name, *arguments))

    def require(self, condition: bool, message: str):
        if not condition:
            self.alive = False
            raise SchedulerDied(message)

    def session(self, name: str, is_allowed: bool) -> tuple[bool, str]:
        """The answer of a call that opens, uses or closes a weight update."""
        return self.answers.get(name) or (is_allowed, "Success" if is_allowed else "wrong order")

    # ---- The calls that train.py makes -----------------------------------------------------------------
    def flush_cache(self):
        self.note("flush_cache")
        self.busy -= 1
        return SimpleNamespace(success=self.busy < 0, message="")

    def release_memory_occupation(self, tags: list[str] | None = None):
        self.note("release_memory_occupation", tags)
        self.require(self.busy < 0, "release_memory_occupation should be called only when server is idle.")
        for tag in tags or TAGS:
            self.require(tag in TAGS and tag not in self.paused, f"Cannot pause {tag}: it is not active")
            self.paused.add(tag)
        self.has_weights = self.has_weights and "weights" not in self.paused

    def resume_memory_occupation(self, tags: list[str] | None = None):
        self.note("resume_memory_occupation", tags)
        for tag in tags or TAGS:
            self.require(tag in self.paused, f"Cannot resume {tag}: it is not paused")
            self.paused.remove(tag)

    def begin_weight_update(self, selector: str = "all"):
        self.note("begin_weight_update")
        self.require("weights" not in self.paused, "an update of weights whose memory is released")
        answer = self.session("begin_weight_update", not self.is_updating)
        self.is_updating = True
        return answer

    def update_weights_from_tensor(self, named_tensors, load_format: str | None = None, flush_cache=True):
        self.note("update_weights_from_tensor", named_tensors, load_format, flush_cache)
        self.require("weights" not in self.paused, "an update of weights whose memory is released")
        self.require(load_format == "flattened_bucket", f"Unknown load_format={load_format}")
        self.require(len(named_tensors) == self.options["tp_size"], "one payload for each rank")
        if self.is_updating:
            self.load(named_tensors[0])
            self.has_weights = True
        return self.session("update_weights_from_tensor", self.is_updating)

    def load(self, payload: dict):
        """Takes the weights of the first rank's payload."""

    def end_weight_update(self):
        self.note("end_weight_update")
        answer = self.session("end_weight_update", self.is_updating)
        self.is_updating = False
        return answer

    async def async_generate(self, *, input_ids=None, sampling_params=None, return_logprob=False):
        self.note("async_generate", input_ids, sampling_params, return_logprob)
        self.require(not self.paused, "a completion while memory is released")
        self.require(self.has_weights, "a completion without weights")
        assert sampling_params.keys() <= set(SAMPLING) and return_logprob
        assert all(type(i) is int for i in input_ids)
        return {"meta_info": await self.complete(input_ids, **sampling_params)}

    async def complete(self, input_ids, **sampling) -> dict:
        """The meta_info of a completion."""
        return self.answers["async_generate"]

    def shutdown(self):
        self.note("shutdown")
        self.alive = False


class FlattenedTensorBucket:
    """Named tensors as one tensor of bytes, and back."""

    def __init__(self, named_tensors: list | None = None, flattened_tensor=None, metadata=None):
        if named_tensors is not None:
            flattened_tensor = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named_tensors])
            metadata = [(name, tensor.shape, tensor.dtype) for name, tensor in named_tensors]
        self.flattened_tensor = flattened_tensor
        self.metadata = metadata

    def get_flattened_tensor(self) -> torch.Tensor:
        return self.flattened_tensor

    def get_metadata(self) -> list:
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        found = []
        start = 0
        for name, shape, dtype in self.metadata:
            end = start + shape.numel() * dtype.itemsize
            found.append((name, self.flattened_tensor[start:end].view(dtype).reshape(shape)))
            start = end
        return found


def install(monkeypatch, engine_class: type = FakeEngine) -> dict[str, ModuleType]:
    """Makes `import sglang` find stand-ins. Returns the modules by the last part of their names."""
    names = "sglang sglang.srt sglang.srt.utils sglang.srt.utils.patch_torch sglang.srt.weight_sync".split()
    modules = {}
    for name in [*names, "sglang.srt.weight_sync.tensor_bucket"]:
        module = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, module)
        modules[name.split(".")[-1]] = module
    modules["sglang"].Engine = engine_class
    modules["utils"].MultiprocessingSerializer = SimpleNamespace(serialize=lambda content: content)
    modules["patch_torch"].monkey_patch_torch_reductions = lambda: None
    modules["tensor_bucket"].FlattenedTensorBucket = FlattenedTensorBucket
    return modules
