"""Rehearse an update and a push on any number of GPUs, without one.

    python -m tools.rehearse [flags of train.py] --processes N [--gpu_gb 80]
    python -m tools.rehearse --model Qwen/Qwen2.5-7B-Instruct --processes 8 --gpu_gb 80
    python -m tools.rehearse --processes 4 --groups 2 --prompt_length 1000 --max_new_tokens 500

The real Actor, loss, optimizer step and push of train.py run as the first of N ranks, on tensors without data
(FakeTensorMode) and with a process group that sends nothing ("fake"), from config.json alone: no weights, no
GPU, a few minutes and about 2 GB of memory for any model. Every allocation, collective and wait of the host
for the GPU is recorded on the way. What this cannot show: NCCL, CUDA graphs, SGLang's own processes,
numerics.

It prints peaks of live memory beside those of tools.plan, collectives with their bytes, host synchronizations
with file and line, FLOPs, and the host's own time per micro-batch (measured with a model of the same depth
but tiny widths on real tensors). The exit code is 1 if the run does not fit.
"""

import logging
import math
import statistics
import sys
import time
import traceback
import weakref
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import train
from extras import head, hybrid, offload, variants
from extras.compile import compile_layers
from extras.shared_prompts import SharedBatch
from recipes import lora
from tools import plan
from tools.plan import PlanConfig
from train import Actor, Sample, SGLangEngine, Trainer, UserError, flag

HERE = Path(train.__file__).parent
LENGTH = 1024  # tokens of a rehearsed sample
PROMPT = 128  # of these, tokens of the prompt
WARM_UP = 2  # passes that are not timed; the first one compiles
ROUNDING = 512  # bytes that CUDA's caching allocator rounds up to
COMMUNICATION = ("c10d", "_c10d_functional")
MESH_METHODS = (  # these compute with real tensors
    "__init__ size ndim shape get_rank get_coordinate get_local_rank get_group get_all_groups __getitem__ "
    "_get_slice_mesh_layout _flatten __hash__ __eq__ mesh"
).split()


# ---- What is recorded ------------------------------------------------------------------------------------
class Recorder(TorchDispatchMode):
    """Live bytes, collectives, FLOPs and host synchronizations of everything that runs under it."""

    def __init__(self):
        super().__init__()
        self.sizes = {}  # bytes of each live storage
        self.now = 0
        self.peak = 0
        self.flops = 0
        self.collectives = defaultdict(lambda: [0, 0])  # name -> count, bytes
        self.syncs = Counter()  # "file:line code" -> count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its operations on local tensors come back here
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count_wait()
            return 1.0 if args[0].is_floating_point() else True if args[0].dtype == torch.bool else 1
        out = func(*args, **kwargs)
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                self.add(tensor.untyped_storage())
        if func._overloadpacket in flop_registry:
            self.flops += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        if func.namespace in COMMUNICATION:
            self.count_collective(func, args, out)
        return out

    def count_wait(self):
        """Notes where the host waits for the GPU."""
        line, function = innermost_line()
        if function != "reduce_over":  # its numbers are on the CPU
            self.syncs[line] += 1

    def count_collective(self, func, args: tuple, out):
        """Adds the largest tensor that takes part, which is the whole one of a gather or scatter."""
        tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
        if tensors and "wait" not in func.__name__:
            entry = self.collectives[func.__name__.split(".")[0].strip("_")]
            entry[0] += 1
            entry[1] += max(tensor.nbytes for tensor in tensors)

    def add(self, storage):
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = 0
            weakref.finalize(storage, self.drop, key)
            self.resize(key, storage.nbytes())

    def drop(self, key: int):
        self.now -= self.sizes.pop(key)

    def resize(self, key: int, size: int):
        size = math.ceil(size / ROUNDING) * ROUNDING
        self.now += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def phase(self) -> dict:
        """What was recorded since the last call."""
        found = {"peak": self.peak, "end": self.now, "flops": self.flops, "syncs": dict(self.syncs)}
        found["collectives"] = {name: tuple(entry) for name, entry in self.collectives.items()}
        self.peak = self.now
        self.flops = 0
        self.collectives.clear()
        self.syncs.clear()
        return found


def innermost_line() -> tuple[str, str]:
    """The innermost line of this project on the stack, outside this file, and its function."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(HERE) and path != Path(__file__) and "site-packages" not in path.parts:
            return f"{path.relative_to(HERE)}:{frame.lineno} {frame.line}", frame.name
    return "outside of this project", ""


# ---- A machine that is not there -------------------------------------------------------------------------
@contextmanager
def fake_processes(config: PlanConfig, model_config):
    """Makes this process the first rank of many; the others exist in name only.

    Yields the mesh, and the config for a CPU, where fake tensors stand for a GPU's, with a folder as --model.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.processes)
    try:
        with TemporaryDirectory() as folder, patch.object(dist, "init_process_group"):  # that of train.py
            model_config.save_pretrained(folder)
            on_cpu = replace(config, model=folder, device="cpu")
            yield train.init_distributed(on_cpu), on_cpu
    finally:
        dist.destroy_process_group()


class FakeKernels(torch.autograd.Function):
    """Convolution and delta rule of a linear layer, as extras/hybrid.py has them of fla-core 0.6.0.

    Nothing is computed; what these keep for their backward pass is kept (its code has it so).
    """

    @staticmethod
    def forward(ctx, qkv, decay, beta, weight, layer):
        heads, tokens = layer.num_v_heads, qkv.shape[1]
        numbers = heads * (2 * layer.head_k_dim + layer.head_v_dim + 64)  # q, k, v; inverses of chunks
        ctx.save_for_backward(qkv, decay, beta, weight, qkv.new_empty(tokens, numbers))
        return qkv.new_empty(1, tokens, heads, layer.head_v_dim)

    @staticmethod
    def backward(ctx, gradient):
        return *map(torch.empty_like, ctx.saved_tensors[:4]), None


def fake_kernels(layer, qkv, decay, beta, bounds, longest) -> torch.Tensor:
    """In place of PackedDeltaNet.by_rows."""
    return FakeKernels.apply(qkv, decay, beta, hybrid.local(layer.conv1d.weight), layer)


@contextmanager
def fake_machine(recorder: Recorder, mode: FakeTensorMode):
    """Runs train.py's code for GPUs on fake tensors."""

    def on_gpu(function):
        def branch_for_gpus(*args, **options):
            with patch.object(FakeTensor, "is_cuda", True):
                return function(*args, **options)

        return branch_for_gpus

    def quiet(propagator, *args, **options):  # DTensor computes shapes with whole tensors of its own
        kept = vars(recorder).copy()
        recorder.sizes = defaultdict(int)
        try:
            return propagate(propagator, *args, **options)
        finally:
            vars(recorder).update(kept)

    def forget(parameter):  # FSDP keeps the old data of a parameter moved to "meta", unlike to "cpu"
        reset(parameter)
        local = parameter.sharded_param.to_local()
        if local.is_meta:
            parameter._sharded_param_data = local.view(-1)

    def resized(storage, size):  # FSDP frees storages and fills them again
        out = resize(storage, size)
        if storage._cdata in recorder.sizes:
            recorder.resize(storage._cdata, storage.nbytes())
        return out

    def wait_once(tensor):
        recorder.count_wait()
        return np.ones(tuple(tensor.shape), int if tensor.dtype == torch.int32 else float).tolist()

    outside_of_fake = unset_fake_temporarily()  # decorates what computes with real tensors all the same
    model_class = train.AutoModelForCausalLM
    propagator = torch.distributed.tensor._sharding_prop.ShardingPropagator
    propagate = propagator._propagate_tensor_meta_non_cached
    reset = FSDPParam.reset_sharded_param
    resize = torch.UntypedStorage.resize_
    with ExitStack() as stack:
        for name in MESH_METHODS:
            method = getattr(DeviceMesh, name, None)
            if isinstance(method, property):
                stack.enter_context(patch.object(DeviceMesh, name, property(outside_of_fake(method.fget))))
            elif method:
                stack.enter_context(patch.object(DeviceMesh, name, outside_of_fake(method)))
        for owner, name, substitute in (
            (train, "packed_attention", on_gpu(train.packed_attention)),
            (head, "fp32_product", on_gpu(head.fp32_product)),
            (hybrid.PackedDeltaNet, "by_rows", fake_kernels),
            (model_class, "from_config", outside_of_fake(model_class.from_config)),
            (lora, "add_adapters", outside_of_fake(lora.add_adapters)),
            (train.dcp, "load", lambda *args, **options: None),  # there are no weights
            (propagator, "_propagate_tensor_meta_non_cached", quiet),
            (dist, "all_gather_object", lambda parts, one, group=None: None),
            (offload, "AWAY", "meta"),  # because "cpu" stands for the GPU
            (FSDPParam, "reset_sharded_param", forget),
            (FakeTensor, "tolist", wait_once),
            (torch.UntypedStorage, "resize_", resized),
        ):
            stack.enter_context(patch.object(owner, name, substitute))
        stack.enter_context(mode)
        stack.enter_context(recorder)
        yield


def fake_batch(batch, mode: FakeTensorMode):
    """A micro-batch without data; sizes and lengths stay."""

    def fake(values: dict) -> dict:
        return {
            name: mode.from_tensor(value) if torch.is_tensor(value) else value
            for name, value in values.items()
        }

    return SimpleNamespace(**fake(vars(batch)) | {"layout": fake(batch.layout)})


@dataclass
class RehearsalConfig(PlanConfig):
    """The flags of tools.plan, and what is rehearsed."""

    groups: int = flag(0, "groups of --group_size long completions; 0: two passes of single completions")


def make_samples(config: RehearsalConfig, vocab_size: int) -> list[Sample]:
    """The samples of one rank: --groups, or as many of LENGTH tokens as fill two micro-batches."""
    number, size = 2 * max(1, config.tokens_per_micro_batch // LENGTH), 1
    prompt, completion = PROMPT, LENGTH - PROMPT
    if config.groups:
        number, size = config.groups, config.group_size
        prompt, completion = config.prompt_length, plan.completion_length(config)
    samples = []
    for i, j in product(range(number), range(size)):
        sample = Sample([], {}, key=(i, j))
        sample.append([i % vocab_size] * prompt)
        sample.append([i % vocab_size] * completion, mask=1, advantage=1.0, logprob=-1.0)
        samples.append(sample)
    return samples


def make_trainer(config: PlanConfig, mesh, vocab_size: int) -> Trainer:
    """A Trainer with an actor and, with --kl_coef, a reference, but no data, engine or log."""
    trainer_class, actor_class = (lora.LoRATrainer, lora.LoRAActor) if config.lora_rank else (Trainer, Actor)
    trainer = object.__new__(offload.extend(variants.extend(head.extend(trainer_class))))
    engine = SimpleNamespace(vocab_size=vocab_size)
    vars(trainer).update(config=config, mesh=mesh, path=config.model, engine=engine)
    if config.share_prompts:
        trainer.batch_class = SharedBatch
    trainer.actor = actor_class(trainer.load_policy(), mesh, config)
    trainer.reference = trainer.load_policy() if config.kl_coef else None
    return trainer


def flat_bucket(named_tensors: list) -> SimpleNamespace:
    """A stand-in for sglang's FlattenedTensorBucket: the same flat copy."""
    flat = torch.cat([tensor.flatten().view(torch.uint8) for _, tensor in named_tensors])
    return SimpleNamespace(get_flattened_tensor=lambda: flat, get_metadata=list)


def push(actor: Actor, mesh):
    """SGLangEngine.push, as a rank that does not talk to SGLang itself sees it."""
    engine = object.__new__(SGLangEngine)
    group = mesh["tp"].get_group()
    vars(engine).update(config=actor.config, engine=None, awake=False, version=0, group=group)
    names = ("", ".utils", ".utils.patch_torch", ".weight_sync", ".weight_sync.tensor_bucket")
    modules = {f"sglang.srt{name}": ModuleType(name) for name in names} | {"sglang": ModuleType("sglang")}
    modules["sglang.srt.utils"].MultiprocessingSerializer = SimpleNamespace(serialize=lambda content: b"")
    modules["sglang.srt.utils.patch_torch"].monkey_patch_torch_reductions = lambda: None
    modules["sglang.srt.weight_sync.tensor_bucket"].FlattenedTensorBucket = flat_bucket
    with patch.dict(sys.modules, modules):  # which push imports
        engine.push(actor.whole_weights())


# ---- The rehearsal ---------------------------------------------------------------------------------------
def rehearse(config: PlanConfig, model_config) -> dict[str, dict]:
    """Executes the build, two updates and a push. Returns what Recorder.phase tells of each."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder()
    found = {}
    with fake_processes(config, model_config) as (mesh, on_cpu):
        samples = make_samples(config, model_config.vocab_size)
        with fake_machine(recorder, mode):
            trainer = make_trainer(on_cpu, mesh, model_config.vocab_size)
            found["build"] = recorder.phase()
            for name in ("first update", "update"):  # Adam's state exists from the second one on
                with unset_fake_temporarily(), patch.object(trainer, "reference", None):  # it is fake
                    batches = [fake_batch(batch, mode) for batch in trainer.micro_batches(samples)]
                sizes = [batch.ids.numel() for batch in batches]
                trainer.move_others(offload.AWAY)
                trainer.move_actors(offload.AWAY)
                found[f"{name}: rollout"] = recorder.phase()
                trainer.move_actors(on_cpu.device)
                trainer.move_others(on_cpu.device)
                if trainer.reference:
                    with torch.no_grad():
                        for batch in batches:
                            batch.ref_logprobs, _ = trainer.reference.logprobs(batch)
                            trainer.reference.reshard()
                trainer.actor.backward(batches, trainer.forward)
                found[name] = recorder.phase() | {"tokens": sizes}
                trainer.actor.optimizer_step()
                found[f"{name}: step"] = recorder.phase()
                del batches
            trainer.move_others(offload.AWAY)
            trainer.move_actors(on_cpu.device)
            recorder.phase()
            push(trainer.actor, mesh)
            found["push"] = recorder.phase()
    return found


def host_seconds(config: PlanConfig, model_config, repeats: int = 5) -> float:
    """Median seconds of a forward and backward pass of a model as deep as this one, but with tiny widths.

    What is left is Python, autograd and dispatch: the host's share, which a GPU waits for if it is faster.
    """
    heads = config.tp_size * 2
    tiny = {"hidden_size": 8 * heads, "intermediate_size": 8 * heads, "vocab_size": 64 * heads}
    tiny |= {"num_attention_heads": heads, "num_key_value_heads": config.tp_size, "head_dim": 8}
    if plan.is_hybrid(model_config):
        tiny |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads}
        tiny |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    small = type(model_config)(**model_config.to_dict() | tiny)
    sample = make_samples(replace(config, tokens_per_micro_batch=0, groups=0), small.vocab_size)[0]
    sample.tokens = sample.tokens[PROMPT - 2 : PROMPT + 6]
    times = []
    with fake_processes(config, small) as (mesh, on_cpu):
        with patch.object(train.dcp, "load"):
            trainer = make_trainer(on_cpu, mesh, small.vocab_size)
        for parameter in trainer.actor.parameters.values():
            torch.nn.init.normal_(parameter.to_local(), std=0.02)
        if config.compile:
            compile_layers(trainer.actor.model)
        batch = train.Batch([sample], "cpu")
        for _ in range(WARM_UP + repeats):
            start = time.perf_counter()
            loss, _ = trainer.forward(batch)
            loss.backward()
            times.append(time.perf_counter() - start)
            trainer.actor.optimizer.zero_grad()
    return statistics.median(times[WARM_UP:])


# ---- The command -----------------------------------------------------------------------------------------
def planned(config: PlanConfig, model_config, is_whole: bool = False) -> dict[str, float]:
    """Bytes of the update and of the push by tools.plan; `is_whole`: with the engine's and the reserve."""
    left_out = () if is_whole else ("engine", "reserve")
    trained = 1 - PROMPT / LENGTH
    if config.groups:
        trained = plan.completion_length(config) / plan.longest(config) * plan.keys_per_token(config)
    else:  # each sample has a prompt of its own
        config = replace(config, share_prompts=False)
    phases = plan.plan(config, model_config, config.processes, trained)
    peaks = {"update": 0, "push": 0}
    for phase, parts in phases.items():
        name = "push" if phase == "push" else "update"
        if phase != "rollout":
            peaks[name] = max(peaks[name], sum(parts[part] for part in parts if part not in left_out))
    return peaks


def report(config: PlanConfig, model_config, found: dict, seconds: float):
    """Prints what was found."""
    whole = planned(config, model_config, is_whole=True)
    own = planned(config, model_config)
    print(
        f"{config.model} as one of {config.processes} ranks, tp {config.tp_size}, {config.dtype}, "
        f"{config.tokens_per_micro_batch} tokens per pass; rehearsed in {seconds:.0f} s\n"
    )
    print("peak of live memory     rehearsed    planned   with SGLang and reserves")
    for name in own:
        sizes = [found[name]["peak"] / 1e9, own[name] / 1e9, whole[name] / 1e9]
        print("{:22}{:8.2f} GB{:8.2f} GB{:12.2f} GB".format(name, *sizes))
    sizes = found["update"]["tokens"]
    for name, times in (("update", f"{len(sizes)} micro-batches"), ("push", "1 time")):
        print(f"\ncollectives of the {name} ({times}):")
        for kind, (count, size) in sorted(found[name]["collectives"].items()):
            print(f"  {kind:24}{count:7} calls {size / 1e9:10.2f} GB")
    print(f"\nthe host waits for the GPU ({len(sizes)} micro-batches, one optimizer step):")
    for line, count in (found["update"]["syncs"] | found["update: step"]["syncs"]).items():
        print(f"  {count:4} x {line}")
    print(f"\n{sum(sizes)} tokens in {len(sizes)} micro-batches: {found['update']['flops']:.3g} FLOPs")
    print(f"host per micro-batch: {1e3 * host_seconds(config, model_config):.0f} ms, measured here")


def read_flags(arguments: list[str]) -> RehearsalConfig:
    """Flags to a config, as on a machine with GPUs. Raises UserError for what cannot be rehearsed."""
    config = plan.read_flags(["--gpu_gb=80", *arguments], RehearsalConfig)
    if config.dtype == "float32":
        raise UserError("--dtype must be bfloat16 or float16: packed attention on GPUs supports only 16 bits")
    return config


def main():
    """Rehearses, and prints what was found."""
    logging.disable(logging.WARNING)  # torch's hints about DTensor
    try:
        config = read_flags(sys.argv[1:])
        model_config = plan.find_config(config.model)
        plan.check_sizes(config, model_config, config.processes)
    except UserError as error:
        print(f"tools.rehearse: {error}", file=sys.stderr)
        sys.exit(2)
    torch.set_num_threads(1)
    start = time.perf_counter()
    found = rehearse(config, model_config)
    report(config, model_config, found, time.perf_counter() - start)
    if not plan.fits(config, model_config):
        way = plan.ways_out(config, model_config)[0]
        print(f"\nIt does not fit into {config.gpu_gb:g} GB. It would with {way}")
        sys.exit(1)


if __name__ == "__main__":
    main()
