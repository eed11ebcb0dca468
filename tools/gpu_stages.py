"""The stages of tools.check_gpu: what each one measures, and what it requires.

    python -m tools.gpu_stages STAGE FOLDER      # run by tools.check_gpu, in a process of its own

A stage notes numbers and problems; a problem's text is what CAUSES in tools/check_gpu.py recognizes. Its last
line of output is RESULT and these, as JSON. Without a GPU the same stages run on the CPU, with smaller models
and without what only CUDA has.
"""

import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, pairwise, permutations, product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

import train
from bench import memory
from bench.cost import make_trainer
from bench.measure import ASSETS, ROOT
from extras.checkpoint import checkpoints
from extras.checks import GPU_FILE, brief
from extras.gate import PROMPTS, Gate
from extras.monitor import forward_flops, peak_flops
from extras.sglang_cpu import ARGUMENTS
from extras.shared_prompts import SharedBatch
from tools import plan
from train import BOUND, Batch, Config, Sample, Trainer

TINY = str(ASSETS / "tiny")
DRIVERS = {"13": 580, "12": 525}  # CUDA's major version: the oldest branch of drivers
CARD = "name driver_version memory.total memory.free compute_cap compute_mode clocks.sm clocks.max.sm".split()
ROUNDING = {torch.bfloat16: 0.02, torch.float16: 0.004}  # largest relative error of attention, chosen
GRADIENTS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}  # the same of a tiny model's gradients
STEPS = 3
ASLEEP = 2.5e9  # bytes that a sleeping SGLang may keep; tools.plan reserves 1.5e9 for its context
ABORT = (0.3, 800)  # seconds after which requests are aborted, and the tokens that they may have
GRACE = 20.0  # seconds for SGLang to end
RESULT = "RESULT "
ON_PURPOSE = "Killed on purpose."  # so says the output after a kill that belongs to a stage


@dataclass
class Stage:
    """What a stage has found so far."""

    folder: Path = Path()
    measured: dict = field(default_factory=dict)
    details: dict = field(default_factory=dict)  # for check_gpu.json only
    problems: list[str] = field(default_factory=list)

    def require(self, condition: bool, problem: str):
        if not condition:
            self.problems.append(problem)

    def worst(self, name: str, number: float):
        """Notes the largest of several numbers."""
        self.measured[name] = max(number, self.measured.get(name, 0.0))


def cards() -> int:
    """How many cards torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device() -> str:
    return "cuda" if cards() else "cpu"


def used() -> int:
    """Bytes in use on this process's card, by all processes; without a GPU, of this process."""
    if not cards():
        return psutil.Process().memory_info().rss
    free, total = torch.cuda.mem_get_info()
    return total - free


# ---- The machine -----------------------------------------------------------------------------------------
def program(*words, **environment) -> subprocess.CompletedProcess:
    """Runs a program for a minute at most; one that does not exist ends like a shell's, with 127."""
    options = {"env": os.environ | environment, "timeout": 60, "capture_output": True, "text": True}
    try:
        return subprocess.run(words, **options)
    except FileNotFoundError:
        return subprocess.CompletedProcess(words, 127, "", f"{words[0]}: not found")


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a version, to compare: "2.34" -> (2, 34)."""
    return tuple(map(int, re.findall(r"\d+", text)))


def machine(stage: Stage):
    """Versions, cards, compilers, the memory saver, limits of the system."""
    check_system(stage)
    check_cards(stage)
    if GPU_FILE.exists() or cards():
        check_compilers(stage)
        check_preload(stage)


def check_system(stage: Stage):
    """The system's libraries and limits."""
    libc = os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    packages = ("torch", "sglang", "transformers", "torch_memory_saver", "nvidia-nccl-cu13", "fla-core")
    for name in packages:
        try:
            stage.details[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            stage.details[name] = None
    stage.details |= {"platform": f"{platform.system()} {platform.release()}", "libc": libc}
    stage.measured |= {"python": platform.python_version(), "torch": torch.__version__, "libc": libc}
    stage.measured |= {"CUDA": torch.version.cuda, "cores": os.cpu_count()}
    stage.require(numbers(libc) >= (2, 34), f"{libc} is older than glibc 2.34, which sglang's wheels need")
    python = sys.version_info[:2]
    stage.require((3, 11) <= python <= (3, 13), "no sglang for Python {}.{}".format(*python))
    shared = psutil.disk_usage("/dev/shm").total
    stage.require(shared >= 1e9, f"/dev/shm has {shared / 1e9:.2f} GB")
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    stage.require(files == resource.RLIM_INFINITY or files >= 4096, f"{files} open files at most")
    stage.measured |= {"shm (GB)": shared / 1e9, "RAM (GB)": psutil.virtual_memory().total / 1e9}
    try:
        for address in ("127.0.0.1", socket.gethostbyname(socket.gethostname())):
            with socket.socket() as test:
                test.bind((address, 0))
    except OSError as error:
        stage.problems.append(f"no port can be bound at this machine's own name: {error}")


def check_cards(stage: Stage):
    """The driver against torch's CUDA, and what each card is and has left."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    only = ["-i", visible] if visible else []
    found = program("nvidia-smi", *only, f"--query-gpu={','.join(CARD)}", "--format=csv,noheader,nounits")
    rows = [dict(zip(CARD, map(str.strip, line.split(",")))) for line in found.stdout.splitlines()]
    stage.details["cards"] = rows
    if found.returncode:
        stage.require(not GPU_FILE.exists() and not cards(), f"nvidia-smi failed: {brief(found.stderr)}")
        stage.measured["cards"] = 0
        return
    driver = rows[0]["driver_version"]
    stage.measured |= {"cards": f"{len(rows)} x {rows[0]['name']}", "driver": driver}
    cuda = torch.version.cuda or "13.0"  # or what requirements.txt would install
    oldest = DRIVERS.get(cuda.split(".")[0], 0)
    is_new = numbers(driver)[0] >= oldest
    stage.require(is_new, f"driver {driver} is older than {oldest}, which CUDA {cuda} needs")
    if not torch.version.cuda:
        stage.problems.append(f"torch {torch.__version__} is a CPU build, and nvidia-smi lists cards")
        return
    if not cards():
        try:
            torch.cuda.init()
        except RuntimeError as error:
            stage.problems.append(f"torch cannot use the cards: {brief(error)}")
        return
    kernels = [
        divmod(int(name), 10) for name in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))
    ]
    for i, row in enumerate(rows):
        check_card(stage, f"card {i}", row, kernels)
    taken = program("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader")
    stage.details |= {"processes": taken.stdout, "topology": program("nvidia-smi", "topo", "-m").stdout}
    pairs = [torch.cuda.can_device_access_peer(*pair) for pair in permutations(range(cards()), 2)]
    if pairs:
        stage.measured["peer access"] = f"{sum(pairs)} of {len(pairs)} pairs"
        stage.measured["NVLink"] = bool(re.search(r"\bNV\d+\b", stage.details["topology"]))


def check_card(stage: Stage, name: str, row: dict[str, str], kernels: list[tuple[int, int]]):
    """One card, as nvidia-smi has it; kernels are the compute capabilities that torch was built for."""
    capability = numbers(row["compute_cap"])
    has_kernels = any(major == capability[0] and minor <= capability[1] for major, minor in kernels)
    stage.require(has_kernels, f"{name}: torch has no kernels for compute capability {row['compute_cap']}")
    too_old = f"{name}: compute capability {row['compute_cap']} is below 8.0"
    stage.require(capability >= (8, 0), too_old)
    free, total = (float((numbers(row[key]) or [math.nan])[0]) for key in ("memory.free", "memory.total"))
    free, total = 1.048576e-3 * free, 1.048576e-3 * total  # MiB -> GB; not a number if a card does not tell
    is_taken = free < 0.9 * total
    stage.require(not is_taken, f"{name}: other processes take {total - free:.1f} GB of its memory")
    mode = row["compute_mode"]
    stage.require(mode == "Default", f"{name}: compute mode {mode} admits one process, or none")
    stage.measured |= {
        f"{name} (GB)": total,
        f"{name} (MHz)": f"{row['clocks.sm']} of {row['clocks.max.sm']}",
    }


def check_compilers(stage: Stage):
    """What SGLang compiles its kernels with at its first start; it looks for CUDA in the same places."""
    for name in ("g++", "ninja"):
        stage.require(bool(shutil.which(name)), f"{name} was not found")
    nvcc = shutil.which("nvcc")
    inherited = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    home = Path(inherited or (nvcc and Path(nvcc).parents[1]) or "/usr/local/cuda")
    found = program(str(home / "bin/nvcc"), "--version")
    if found.returncode:
        stage.problems.append(f"nvcc was not found in CUDA_HOME, CUDA_PATH, PATH, or {home}")
        return
    release = re.search(r"release (\d+)\.(\d+)", found.stdout)
    stage.measured["nvcc"] = release[0].removeprefix("release ")
    expected = (torch.version.cuda or "13").split(".")[0]
    stage.require(release[1] == expected, f"nvcc has CUDA {release[1]}, and torch has CUDA {expected}")
    stage.require((home / "lib64/libcudart.so").exists(), f"{home}/lib64/libcudart.so does not exist")


def check_preload(stage: Stage):
    """Starts Python as SGLang starts its scheduler: with the memory saver in LD_PRELOAD."""
    if not find_spec("torch_memory_saver"):
        stage.measured["memory saver"] = "not installed"
        return
    from torch_memory_saver.utils import get_binary_path_from_package

    library = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
    runtime = Path(torch.__file__).parents[1] / "nvidia/cu13/lib"  # as SGLangEngine does
    folders = [*filter(None, [os.environ.get("LD_LIBRARY_PATH")]), str(runtime)]
    environment = {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": ":".join(folders)}
    done = program(sys.executable, "-c", "1", **environment)
    stage.measured["memory saver"] = "loads" if not done.returncode else "does not load"
    message = f"the memory saver cannot be preloaded, exit code {done.returncode}: {brief(done.stderr)}"
    stage.require(done.returncode == 0, message)


# ---- The actor alone -------------------------------------------------------------------------------------
def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference, relative to what is expected."""
    expected = expected.double().cpu()
    return ((found.detach().double().cpu() - expected).norm() / expected.norm()).item()


def attention(stage: Stage):
    """Packed attention in 16 bits, forward and backward, against float64 on the CPU."""
    torch.manual_seed(0)
    longer = 8 if cards() else 1  # a CPU is slow in 16 bits
    bounds = [longer * bound for bound in (0, 1, 24, 31, 60)]  # unequal lengths
    own = [torch.arange(*pair) for pair in pairwise(bounds)]
    prompt = torch.arange(bounds[1], bounds[1] + 15 * longer)  # of the second sample, and seen by later ones
    shared = own[:2] + [torch.cat([prompt, part]) for part in own[2:]]
    for dtype, width, keys in product(ROUNDING, (64, 128, 256), (own, shared)):
        lengths = [len(part) for part in keys]
        key_bounds = [0, *accumulate(lengths)]
        tensors = [torch.randn(1, heads, bounds[-1], width).to(dtype) for heads in (6, 2, 2)]  # q, k, v
        weights = torch.randn(1, bounds[-1], 6, width)
        results = []
        for where, kind in (("cpu", torch.float64), (device(), dtype)):
            layout = {"keys": torch.cat(keys).to(where), "longest": max(lengths)}
            for name, values in (("bounds", bounds), ("key_bounds", key_bounds)):
                layout[name] = torch.tensor(values, dtype=torch.int32, device=where)
            parts = [tensor.to(where, kind).requires_grad_() for tensor in tensors]
            output, _ = train.packed_attention(None, *parts, mask=None, scaling=width**-0.5, **layout)
            output.backward(weights.to(output))
            results.append([output, *(part.grad for part in parts)])
        layout = "shared prompts" if keys is shared else "plain"
        for name, expected, found in zip(("output", "dq", "dk", "dv"), *results):
            error = relative(found, expected)
            stage.worst(f"error in {str(dtype)[6:]}", error)
            is_right = error <= ROUNDING[dtype]  # false for NaN, too
            message = f"{name} is off by {error:.1e} (head size {width}, {layout}, {dtype})"
            stage.require(is_right, f"attention: {message}")


def made_up_samples(groups: int = 8, size: int = 2) -> list[Sample]:
    """Groups of unequal lengths with made-up advantages."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for i in range(groups * size):
        prompt = torch.randint(3, 500, (20,), generator=torch.Generator().manual_seed(i // size))
        sample = Sample([], {}, key=(i // size, i % size))
        sample.append(prompt.numpy())
        completion = torch.randint(3, 500, (5 + 9 * i,), generator=generator).numpy()
        sample.append(completion, mask=1, advantage=(-1) ** i * (1 + i % 3), logprob=-1.0)
        samples.append(sample)
    train.set_weights(samples, len(samples))
    return samples


def plain_update(samples: list[Sample]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs [N] of all samples, and gradients of the tiny model, in float32 on the CPU, the plain way."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    logprobs = []
    for sample in samples:
        tokens = {name: torch.from_numpy(sample.tokens[name].copy()) for name in sample.tokens.dtype.names}
        ids = tokens["id"].long()
        scores = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        logprobs.append(scores[tokens["mask"][1:] == 1].detach())
        (-scores * tokens["weight"][1:] * tokens["advantage"][1:]).sum().backward()
    return torch.cat(logprobs), {name: value.grad for name, value in model.named_parameters()}


def update(samples: list[Sample], dtype: str, batch_class: type, **flags) -> tuple:
    """This rank's log-probs, and whole gradients, of the actor on all ranks."""
    config = Config(model=TINY, device=device(), dtype=dtype, **flags)
    mesh = train.init_distributed(config)
    mine = samples[mesh["dp"].get_local_rank() :: mesh["dp"].size()]
    actor = memory.make_actor(config, mesh, AutoConfig.from_pretrained(TINY).vocab_size)
    batch = batch_class(mine, config.device)
    memory.backward(actor, [batch])
    with torch.no_grad():
        logprobs, _ = actor.model.logprobs(batch)
    return logprobs, {name: value.grad.full_tensor() for name, value in actor.parameters.items()}


def compare_update(stage: Stage, name: str, found: dict, expected: dict, bound: float):
    """Notes how far gradients are off, and requires a bound."""
    errors = {key: relative(found[key], expected[key]) for key in expected}
    worst = max(errors, key=errors.get)
    whole = relative(
        *(torch.cat([part[key].cpu().flatten() for key in expected]) for part in (found, expected))
    )
    stage.worst(f"gradients, {name.split(', ')[0]}", whole)
    stage.require(whole <= bound, f"gradients, {name}: off by {whole:.1e}, most of all {worst}")


def logprobs(stage: Stage):
    """The tiny model's log-probs and gradients in each dtype, on one card, against float32 on the CPU."""
    samples = made_up_samples()
    expected, gradients = plain_update(samples)
    with only_one_process_group():
        for dtype, batch_class in ((dtype, kind) for dtype in GRADIENTS for kind in (Batch, SharedBatch)):
            found, own = update(samples, dtype, batch_class)
            gap = (found.cpu() - expected).abs().mean().item()
            name = f"{dtype}, {batch_class.__name__}"
            stage.worst(f"log-probs, {dtype}", gap)
            bound = BOUND["float32" if dtype == "float32" else "bfloat16"]
            stage.require(gap <= bound, f"log-probs, {name}: off by {gap:.1e} nats per token")
            compare_update(stage, name, own, gradients, GRADIENTS[dtype])


def only_one_process_group():
    """init_distributed makes a mesh in each call, but joins the process group in its first one only."""
    initialize = dist.init_process_group

    def once(*arguments, **options):
        if not dist.is_initialized():
            initialize(*arguments, **options)

    return patch.object(dist, "init_process_group", once)


def sharding(stage: Stage):
    """FSDP2 and tensor parallelism over all cards against one process; the speed of an all-reduce."""
    samples = made_up_samples()
    expected, gradients = plain_update(samples)
    with only_one_process_group():
        size = int(os.environ["WORLD_SIZE"])
        layouts = [(1, 1)] + [(2, 1)] * (size % 2 == 0) + [(1, 2)] * (size % 2 == 0)
        for (tp, copies), dtype in (
            (layout, dtype) for layout in layouts for dtype in ("float32", "bfloat16")
        ):
            flags = {"tp_size": tp, "dp_replicate": copies}
            _, own = update(samples, dtype, SharedBatch, **flags)
            name = f"{dtype}, {size} cards, tp {tp}, {copies} copies"
            compare_update(stage, name, own, gradients, GRADIENTS[dtype])
    values = torch.ones(2**26 if cards() else 2**20, device=device())  # 256 MB
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        dist.all_reduce(values)
        values[0].item()  # waits for it
        seconds.append(time.perf_counter() - start)
    stage.measured["all-reduce (GB/s)"] = values.nbytes / min(seconds) / 1e9


def update_memory(stage: Stage):
    """Memory of a 0.5B-shaped update on one card against tools.plan; MFU."""
    on_gpu = {"shape": "Qwen2.5-0.5B", "tokens": 8192, "dtype": "bfloat16"}
    case = memory.BASE | (on_gpu if cards() else {"shape": "small Qwen3"})
    shape = memory.shape_config(case["shape"])
    case["model"] = memory.make_model(str(stage.folder), shape)
    config = memory.config_of(case)
    mesh = train.init_distributed(config)
    actor = memory.make_actor(config, mesh, shape.vocab_size)
    batches = [memory.full_batch(64, config.device), memory.full_batch(case["tokens"], config.device)]
    memory.update(actor, batches[:1])  # creates Adam's state
    peak = memory.peak(lambda: memory.update(actor, batches)) + memory.tensor_bytes(actor)
    planned = memory.planned_update(config, shape)
    stage.measured |= {"update (GB)": peak / 1e9, "planned (GB)": planned / 1e9}
    is_known = peak <= planned * (1 + memory.TOLERANCE / 100)
    stage.require(is_known, f"memory of an update: {peak / 1e9:.2f} GB, planned {planned / 1e9:.2f} GB")
    if cards():
        stage.measured["gaps"] = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated() - 1
        stage.measured["context (GB)"] = (used() - torch.cuda.memory_reserved()) / 1e9
    start = time.perf_counter()
    memory.update(actor, batches[1:])
    seconds = time.perf_counter() - start
    stage.measured["tokens per s"] = case["tokens"] / seconds
    best = peak_flops(torch.cuda.get_device_name() if cards() else "")
    if best:
        lengths = [1024] * (case["tokens"] // 1024)
        mfu = 3 * forward_flops(shape, lengths, int(memory.TRAINED * case["tokens"])) / seconds / best
        stage.measured["MFU"] = mfu
        stage.require(mfu > 0.1, f"MFU {mfu:.2f}: this card computes far below its peak")


# ---- SGLang alone ----------------------------------------------------------------------------------------
def sglang(stage: Stage):
    """Start, sample, sleep, wake, push, CUDA graphs, abort, end."""
    older = psutil.Process().children(recursive=True)
    with only_one_process_group():
        train.init_distributed(Config(engine="sglang", device=device()))
        before = used()  # by other processes, and by this one's context
        start = time.perf_counter()
        machine = {"engine": "sglang", "device": device(), "dtype": Config.dtype, "gate": "off"}
        trainer = make_trainer(str(stage.folder), **machine)  # it sleeps and pushes once
    engine = trainer.engine
    gate = Gate(trainer, None)
    stage.measured["start (s)"] = time.perf_counter() - start

    def probe(name: str):
        """Greedy tokens' log-probs, which must be those of the actor."""
        samples = gate.play(range(PROMPTS), 0.0)
        failures = [sample.failure for sample in samples if sample.failure]
        if failures:
            raise RuntimeError(f"SGLang does not sample, {name}: {failures[0]}")
        scores = gate.score(samples, 1.0)
        stage.worst("logprob_diff", scores.gap)
        is_right = scores.gap <= gate.bound
        stage.require(is_right, f"SGLang's log-probs are {scores.gap:.1e} from the actor's, {name}")
        return [sample.tokens[sample.tokens["mask"] == 1] for sample in samples]

    def held() -> int:
        """Bytes of SGLang on the card, with what NCCL and libraries have taken in this process."""
        return used() - before - torch.cuda.memory_reserved() if cards() else 0

    def push():
        """Seconds of a sleep, and of the push that wakes SGLang up; notes the memory in between."""
        start = time.perf_counter()
        engine.sleep()
        middle = time.perf_counter()
        asleep.append(held())
        trainer.publish()
        stage.measured |= {"sleep (s)": middle - start, "push (s)": time.perf_counter() - middle}

    asleep = []
    first = probe("at the start")
    awake = held()
    for _ in range(3):  # with CUDA graphs that were released and resumed
        push()
    check_moved(stage, probe("after 3 sleeps"), first, gate.bound, changed=False)
    if cards():
        stage.measured |= {"awake (GB)": awake / 1e9, "asleep (GB)": asleep[-1] / 1e9}
        stage.require(asleep[-1] <= ASLEEP, f"SGLang asleep still holds {asleep[-1] / 1e9:.1f} GB")
        growth = asleep[-1] - asleep[0]
        stage.require(growth <= 2e8, f"SGLang asleep grows by {growth / 2e9:.2f} GB per push")
    weights = [value.to_local() for value in trainer.actor.parameters.values()]
    kept = [value.clone() for value in weights]
    with torch.no_grad():
        for value in weights:  # in every tensor: one that does not arrive shows
            value.mul_(1 + 0.1 * torch.rand_like(value))
        push()
        check_moved(stage, probe("changed weights"), first, gate.bound, changed=True)
        for value, old in zip(weights, kept):
            value.copy_(old)
        push()
    check_moved(stage, probe("the first weights again"), first, gate.bound, changed=False)
    check_abort(stage, trainer)
    probe("after an abort")
    engine.sleep()
    processes = [one for one in psutil.Process().children(recursive=True) if one not in older]
    engine.close()
    _, left = psutil.wait_procs(processes, GRACE)
    stage.require(not left, f"SGLang left {len(left)} processes behind")


def check_moved(stage: Stage, now: list, past: list, bound: float, changed: bool):
    """Whether the engine's greedy answers (tokens of samples) changed as its weights did.

    Log-probs are compared up to the first token that differs: where two tokens are about as likely, rounding
    decides, and it depends on the batch.
    """
    gaps = []
    for one, other in zip(now, past):
        length = min(len(one), len(other))
        differs = np.append(one["id"][:length] != other["id"][:length], True)
        same = slice(differs.argmax())
        gaps.extend(abs(one["logprob"][same] - other["logprob"][same]))
    share = len(gaps) / sum(map(len, past))
    moved = math.fsum(gaps) / max(len(gaps), 1)
    message = f"{share:.0%} equal tokens, {moved:.1e} nats"
    if changed:
        has_moved = moved > bound / 10 or share < 0.5
        stage.require(has_moved, f"a push of changed weights changed nothing: {message}")
    else:
        has_stayed = moved <= bound and share >= 0.5
        stage.require(has_stayed, f"a push of unchanged weights changed the answers: {message}")


def check_abort(stage: Stage, trainer):
    """Aborts long requests in flight; their samples fail, and say why."""
    engine = trainer.engine
    manager = engine.engine.tokenizer_manager
    seconds, trainer.config.max_new_tokens = ABORT
    engine.loop.call_later(seconds, lambda: manager.abort_request(abort_all=True))
    samples = trainer.sample(trainer.data, [(i, i) for i in range(PROMPTS)], 8, 5.0)  # hardly ever an eos
    failures = [sample.failure.strip().split("\n")[-1] for sample in samples if sample.failure]
    stage.measured["aborted"] = f"{len(failures)} of {len(samples)}"
    others = [failure for failure in failures if "abort" not in failure]
    stage.require(failures and not others, f"an abort ends in {others[:1] or 'nothing'}")


# ---- Both ------------------------------------------------------------------------------------------------
def reward_fn(sample: Sample) -> float:
    """A made-up reward: whatever a model writes, groups carry a signal."""
    return float(sample.tokens["id"].sum() % 7)


class PhaseTrainer(Trainer):
    """The trainer of train.py; a thread notes the largest memory of each phase on rank 0's card."""

    def __init__(self, *arguments):
        self.phase = "start"
        self.peaks = Counter()
        super().__init__(*arguments)
        if train.RANK == 0:  # a thread of another rank would take memory of this card
            threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        while True:
            self.peaks[self.phase] = max(self.peaks[self.phase], used())
            time.sleep(0.02)

    def rollout(self):
        self.phase = "rollout"
        return super().rollout()

    def learn(self, samples):
        self.phase = "update"
        return super().learn(samples)

    def publish(self):
        self.phase = "push"
        super().publish()

    def step(self):
        metrics, samples = super().step()
        return metrics | {f"gb_{phase}": peak / 1e9 for phase, peak in self.peaks.items()}, samples


def engine_name() -> str:
    return "sglang" if find_spec("sglang") else "local"


def flags_of_loop(stage: Stage, **changes) -> dict:
    """Flags of a short run with the tiny model."""
    flags = {"model": TINY, "data": f"{ASSETS}/countdown/train.jsonl", "eval_every": 0, "steps": STEPS}
    flags |= {"eval_data": "", "prompts_per_step": 8, "group_size": 4, "max_new_tokens": 32}
    flags |= {"device": device(), "dtype": Config.dtype, "engine": engine_name(), "lr": 1e-5}
    flags |= {"engine_timeout": 600}
    return flags | {"output_dir": str(stage.folder / "run")} | changes


def start_loop(flags: dict, processes: int) -> subprocess.Popen:
    """Starts the loop in processes of its own; their output is this stage's."""
    words = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words += ["-m", "tools.gpu_stages", "loop"]
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return subprocess.Popen([sys.executable, *words], cwd=ROOT)


def run_loop(stage: Stage, processes: int, **changes):
    """Runs the loop with the tiny model or another one, and notes its numbers."""
    flags = flags_of_loop(stage, **changes)
    code = start_loop(flags, processes).wait()
    if code:
        raise RuntimeError(f"the loop ended with exit code {code}")
    read_loop(stage, flags, processes)


def read_loop(stage: Stage, flags: dict, processes: int):
    """What the log of a run says: its steps, the engine's log-probs, seconds and memory by phase."""
    lines = (Path(flags["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row["step"] for row in rows]
    stage.require(steps == list(range(flags["steps"] + 1)), f"the log has the steps {steps}")
    last = rows[-1]
    stage.measured["logprob_diff"] = max(row["logprob_diff"] for row in rows[1:])
    finite = all(row["grad_norm"] for row in rows[1:])  # None: not finite
    stage.require(finite, "a gradient of the loop is 0 or not finite")
    for phase in ("rollout", "update", "push"):
        stage.measured[f"{phase} (s)"] = last[f"time_{phase}"]
    if cards():
        compare_plan(stage, flags, processes, last)
    stage.details["metrics"] = rows


def compare_plan(stage: Stage, flags: dict, processes: int, row: dict[str, float]):
    """The largest memory of each phase against tools.plan."""
    flags = {name: value for name, value in flags.items() if name != "output_dir"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    config = plan.read_flags([*words, "--processes", str(processes)])
    planned = Counter()
    for phase, parts in plan.plan(config, plan.find_config(config.model), processes).items():
        name = phase if phase in ("rollout", "push") else "update"
        planned[name] = max(planned[name], sum(parts.values()) / 1e9)
    for phase, expected in planned.items():
        found = row[f"gb_{phase}"]
        stage.measured[f"{phase} (GB, planned)"] = f"{found:.1f} ({expected:.1f})"
        message = f"memory of the {phase}: {found:.1f} GB, planned {expected:.1f} GB"
        stage.require(found <= 1.1 * expected, message)


def loop_half(stage: Stage):
    """The loop with a model of random weights, shaped like a 0.5B; without a GPU, like a small one."""
    name = "Qwen2.5-0.5B" if cards() else "small Qwen3"
    shape = memory.shape_config(name)
    model = memory.make_model(str(stage.folder / "model"), shape, getattr(torch, Config.dtype))
    longer = {"max_new_tokens": 512, "prompts_per_step": 32, "group_size": 8} if cards() else {}
    run_loop(stage, 1, model=model, **longer)


def server(stage: Stage):
    """The loop with SGLang as a server on the last card."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ["--model-path", TINY, "--port", address.rpartition(":")[2], "--dtype", Config.dtype]
    options = {"base_gpu_id": cards() - 1, "mem_fraction_static": 0.5} if cards() else ARGUMENTS
    for name, value in ({"device": device(), "skip_tokenizer_init": True} | options).items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    command = [sys.executable, "-m", "sglang.launch_server", *words]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        while not answers(f"{address}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"SGLang's server ended with exit code {process.returncode}")
            time.sleep(1)
        run_loop(stage, 1, engine=address)
    finally:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        process.wait()


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def resume(stage: Stage):
    """Kills the loop after its first checkpoint, and resumes it."""
    flags = flags_of_loop(stage, steps=6, save_every=1)
    folder = Path(flags["output_dir"])
    process = start_loop(flags, 1)
    while process.poll() is None and not (folder.exists() and checkpoints(folder)):
        time.sleep(0.02)
    if process.poll() is not None:
        raise RuntimeError(f"the loop ended with exit code {process.returncode} before its first checkpoint")
    for rank in psutil.Process(process.pid).children():
        rank.kill()
    process.wait()
    print(ON_PURPOSE, flush=True)
    code = start_loop(flags | {"resume": "auto"}, 1).wait()
    if code:
        raise RuntimeError(f"the resumed loop ended with exit code {code}")
    read_loop(stage, flags, 1)


STAGES = {
    "machine": machine,
    "attention": attention,
    "logprobs": logprobs,
    "sharding": sharding,
    "update_memory": update_memory,
    "sglang": sglang,
    "loop": partial(run_loop, processes=1),
    "loop_all": lambda stage: run_loop(stage, cards() or 2),
    "loop_tp": partial(run_loop, processes=2, tp_size=2),
    "loop_half": loop_half,
    "server": server,
    "resume": resume,
}


def main():
    """Runs a stage, or as a rank of one the loop."""
    if sys.argv[1] == "loop" and sys.argv[2].startswith("--"):
        del sys.argv[1]
        return train.main(reward_fn=reward_fn, trainer=PhaseTrainer)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    stage = Stage(Path(sys.argv[2]))
    try:
        STAGES[sys.argv[1]](stage)
    finally:  # after an error, too: what was found before it
        if train.RANK == 0:
            found = {"measured": stage.measured, "details": stage.details, "problems": stage.problems}
            print(f"\n{RESULT}{json.dumps(found, default=str)}", flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":  # SGLang's processes import this file again
    main()
