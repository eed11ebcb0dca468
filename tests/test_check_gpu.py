"""Tests of tools/check_gpu.py: what each sabotage makes it print, on fakes; and the real command."""

import ctypes
import json
import re
import resource
import shlex
import socket
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

import train
from bench import memory
from extras.local_engine import LocalEngine
from tests.conftest import HERE, TINY, needs_sglang, run
from tools import check_gpu, gpu_stages
from tools.gpu_stages import Stage


def explained(problems: list[str]) -> list[dict]:
    return [check_gpu.explain(problem) for problem in problems]


# ---- The machine -------------------------------------------------------------------------------------------
CARD = "NVIDIA H100 80GB HBM3, 580.65.06, 81559, 81000, 9.0, Default, 1980, 1980"


class Machine:
    """A machine with two cards, as programs and torch describe it. What it has is in `has`."""

    def __init__(self, monkeypatch, folder: Path):
        self.has = {"card": CARD, "nvidia-smi": 0, "driver works": True, "kernels": ["sm_80", "sm_90"]}
        self.has |= {"cuda": "13.0", "libc": "glibc 2.35", "shm": 64e9, "files": 65536, "python": (3, 12, 1)}
        self.has |= {"nvcc": "Cuda compilation tools, release 13.0, V13.0.48", "preload": (0, "")}
        self.has |= {"name": "127.0.0.1", "programs": ("g++", "ninja", "nvcc"), "linkable": True}
        (folder / "lib64").mkdir()
        (folder / "lib64/libcudart.so").touch()
        self.folder = folder
        saver = ModuleType("torch_memory_saver.utils")
        saver.get_binary_path_from_package = lambda name: folder / f"{name}.so"
        monkeypatch.setitem(sys.modules, "torch_memory_saver", ModuleType("torch_memory_saver"))
        monkeypatch.setitem(sys.modules, "torch_memory_saver.utils", saver)
        monkeypatch.setattr(gpu_stages, "find_spec", lambda name: name)
        monkeypatch.setattr(gpu_stages, "program", self.program)
        monkeypatch.setattr(gpu_stages, "GPU_FILE", folder)
        monkeypatch.setenv("CUDA_HOME", str(folder))
        self.patch = monkeypatch.setattr

    def program(self, *words, **environment):
        code, out, error = 0, "", ""
        if "--query-gpu" in words[-2]:
            code, out = self.has["nvidia-smi"], f"{self.has['card']}\n" * 2
            error = "NVIDIA-SMI has failed because it couldn't communicate with the driver" if code else ""
            out = "" if code else out
        elif words[:3] == ("nvidia-smi", "topo", "-m"):
            out = "        GPU0    GPU1\nGPU0     X      NV18\nGPU1    NV18     X\n"
        elif words[0].endswith("nvcc"):
            code, out = (0, self.has["nvcc"]) if self.has["nvcc"] else (127, "")
        elif "LD_PRELOAD" in environment:
            assert environment["LD_LIBRARY_PATH"].endswith("nvidia/cu13/lib")
            code, error = self.has["preload"]
        return subprocess.CompletedProcess(words, code, out, error)

    def check(self) -> Stage:
        has, patch = self.has, self.patch
        (self.folder / "lib64/libcudart.so").unlink() if not has["linkable"] else None
        works = has["driver works"]

        def init():
            raise RuntimeError("No CUDA GPUs are available")

        patch(torch.version, "cuda", has["cuda"])
        patch(torch.cuda, "is_available", lambda: works)
        patch(torch.cuda, "device_count", lambda: 2)
        patch(torch.cuda, "init", init)
        patch(torch.cuda, "get_arch_list", lambda: has["kernels"])
        patch(torch.cuda, "can_device_access_peer", lambda one, other: True)
        patch(gpu_stages.os, "confstr", lambda name: has["libc"])
        patch(psutil, "disk_usage", lambda path: SimpleNamespace(total=has["shm"]))
        patch(resource, "getrlimit", lambda kind: (1024, has["files"]))
        patch(gpu_stages.shutil, "which", lambda name: f"/bin/{name}" if name in has["programs"] else None)
        patch(socket, "gethostbyname", lambda name: has["name"])
        version = namedtuple("Version", "major minor micro")(*has["python"])
        patch(gpu_stages.sys, "version_info", version)
        stage = Stage()
        gpu_stages.machine(stage)
        return stage


@pytest.fixture
def fake_machine(monkeypatch, tmp_path):
    return Machine(monkeypatch, tmp_path)


def test_a_machine_that_has_everything_has_no_problems(fake_machine):
    stage = fake_machine.check()
    assert stage.problems == []
    expected = {
        "driver": "580.65.06",
        "CUDA": "13.0",
        "nvcc": "13.0",
        "memory saver": "loads",
        "NVLink": True,
    }
    assert stage.measured.items() >= (expected | {"peer access": "2 of 2 pairs"}).items()
    assert stage.measured["cards"] == "2 x NVIDIA H100 80GB HBM3"
    assert stage.measured["card 1 (GB)"] == pytest.approx(85.5, abs=0.1)


def test_a_card_that_does_not_tell_everything_and_others_that_are_hidden(fake_machine, monkeypatch):
    fake_machine.has["card"] = CARD.replace("81559, 81000", "[N/A], [N/A]").replace("1980", "[N/A]")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    asked = []

    def program(*words, **environment):
        asked.append(words)
        return fake_machine.program(*words, **environment)

    monkeypatch.setattr(gpu_stages, "program", program)
    assert fake_machine.check().problems == [] and asked[0][:3] == ("nvidia-smi", "-i", "2,3")


def with_card(old: str, new: str) -> dict:
    assert old in CARD
    return {"card": CARD.replace(old, new)}


LIBCUDART = "python: error while loading shared libraries: libcudart.so.13: cannot open shared object file"
MACHINES = {  # what is wrong: (what such a machine has, the cause)
    "no driver": ({"nvidia-smi": 9}, "the driver is not loaded"),
    "CPU build of torch": ({"cuda": None}, "this torch was installed without CUDA"),
    "old driver": (with_card("580.65.06", "550.54.15"), "the driver is older than the CUDA of torch"),
    "CUDA does not start": ({"driver works": False}, "torch sees a driver but cannot start CUDA"),
    "card too new": (with_card("9.0", "12.0"), "the wheels have no machine code for this card"),
    "card too old": ({"card": CARD.replace("9.0", "7.5"), "kernels": ["sm_75"]}, "the card has no bfloat16"),
    "card taken": (with_card("81000", "20000"), "another program holds memory of this card"),
    "exclusive": (with_card("Default", "Exclusive_Process"), "SGLang and the trainer are two processes"),
    "old glibc": ({"libc": "glibc 2.31"}, "the operating system is too old"),
    "new Python": ({"python": (3, 14, 0)}, "sglang has wheels for Python 3.11 to 3.13 only"),
    "small /dev/shm": ({"shm": 67e6}, "NCCL and torch exchange data through /dev/shm"),
    "few files": ({"files": 1024}, "the limit of open files is too low"),
    "own name": ({"name": "203.0.113.7"}, "this machine's own name does not lead to an address of it"),
    "memory saver": ({"preload": (127, LIBCUDART)}, "the memory saver that SGLang preloads does not find"),
    "no nvcc": ({"nvcc": ""}, "SGLang compiles kernels at its first start, and there is no CUDA compiler"),
    "nvcc of CUDA 12": ({"nvcc": "release 12.4, V12.4.1"}, "the CUDA toolkit does not match torch"),
    "pip's CUDA_HOME": ({"linkable": False}, "this CUDA_HOME (pip's, for example) lacks the file"),
    "no ninja": ({"programs": ("g++",)}, "SGLang compiles kernels at its first start, and a compiler or"),
}


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_lacks_something(fake_machine, name):
    changes, cause = MACHINES[name]
    fake_machine.has |= changes
    problems = fake_machine.check().problems
    assert problems and all(one["cause"].startswith(cause) for one in explained(problems)), explained(
        problems
    )


# ---- The actor alone -------------------------------------------------------------------------------------
def test_the_actor_s_stages_find_nothing_here():
    stage = Stage()
    gpu_stages.attention(stage)
    assert (
        stage.problems == [] and 0 < stage.measured["error in float16"] < stage.measured["error in bfloat16"]
    )


ATTENTION = train.packed_attention


def in_16_bits(kernel):
    """The kernel for 16 bits, and the right one for what it is compared with."""
    return lambda module, query, *rest, **options: (ATTENTION if query.dtype == torch.float64 else kernel)(
        module, query, *rest, **options
    )


def without_shared_keys(module, *arguments, keys, key_bounds, bounds, **options):
    """As if the prompt of a group were seen by its first completion only."""
    return ATTENTION(module, *arguments, keys=slice(None), key_bounds=bounds, bounds=bounds, **options)


def other_scale(module, *arguments, scaling, **options):
    return ATTENTION(module, *arguments, scaling=1.02 * scaling, **options)


def not_finite(module, *arguments, **options):
    output, _ = ATTENTION(module, *arguments, **options)
    return output * torch.nan, None


@pytest.mark.parametrize(
    "kernel", [without_shared_keys, other_scale, not_finite], ids=lambda one: one.__name__
)
def test_a_wrong_attention_kernel(monkeypatch, kernel):
    monkeypatch.setattr(train, "packed_attention", in_16_bits(kernel))
    monkeypatch.setattr(gpu_stages, "ROUNDING", {torch.float16: gpu_stages.ROUNDING[torch.float16]})
    stage = Stage()
    gpu_stages.attention(stage)
    plain = [problem for problem in stage.problems if ", plain," in problem]
    assert stage.problems and bool(plain) == (kernel is not without_shared_keys)
    assert {one["cause"][:30] for one in explained(stage.problems)} == {"the attention kernel is wrong "}


@pytest.fixture
def tiny(monkeypatch, mesh):
    """The stages' own model, on this process's mesh."""
    monkeypatch.setattr(train, "init_distributed", lambda config: mesh)


def test_log_probs_and_gradients_that_are_not_those_of_float32(tiny, monkeypatch):
    def damaged(*arguments):
        actor = make_actor(*arguments)
        with torch.no_grad():
            actor.parameters["model.layers.1.mlp.up_proj.weight"].to_local().mul_(1.5)
        return actor

    make_actor = memory.make_actor
    samples = gpu_stages.made_up_samples(2)
    monkeypatch.setattr(gpu_stages, "made_up_samples", lambda: samples)
    monkeypatch.setattr(gpu_stages, "GRADIENTS", {"float32": 1e-3, "bfloat16": 0.1})
    right, wrong = Stage(), Stage()
    gpu_stages.logprobs(right)
    monkeypatch.setattr(memory, "make_actor", damaged)
    gpu_stages.logprobs(wrong)
    assert right.problems == []
    found = explained(wrong.problems)
    assert any("gradients" in one["problem"] for one in found)
    assert {one["cause"][:14] for one in found} == {"float32 produc", "16-bit kernels"}


def test_gradients_that_depend_on_the_layout():
    expected = {"a": torch.ones(3), "b": torch.ones(2)}
    stage = Stage()
    gpu_stages.compare_update(stage, "float32, 2 cards, tp 1", expected, expected, 1e-3)
    assert stage.problems == []
    gpu_stages.compare_update(
        stage, "float32, 2 cards, tp 1", expected | {"b": torch.zeros(2)}, expected, 1e-3
    )
    (found,) = explained(stage.problems)
    assert found["cause"].startswith("sharding changes the gradients") and "most of all b" in found["problem"]


def test_an_update_that_is_larger_than_planned_or_slow(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(memory.SHAPES, "small Qwen3", (512, 64, 128, 2, 4, 2, True))
    monkeypatch.setattr(memory, "planned_update", lambda config, shape: 1e6)
    monkeypatch.setattr(gpu_stages, "peak_flops", lambda name: 1e15)
    stage = Stage(tmp_path)
    gpu_stages.update_memory(stage)
    causes = [one["cause"][:20] for one in explained(stage.problems)]
    assert causes == ["tools.plan expects t", "the card is slowed d"]


# ---- SGLang alone ------------------------------------------------------------------------------------------
class OtherEngine(LocalEngine):
    """The local engine as SGLang: with a scheduler to abort, and with faults."""

    fault = ""
    eos_token_id = 2

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.engine = SimpleNamespace(tokenizer_manager=self)
        self.is_aborting = False
        if self.fault == "process":
            subprocess.Popen(["sleep", "60"])

    def abort_request(self, abort_all: bool):
        self.is_aborting = True

    async def generate(self, *arguments):
        answer = await super().generate(*arguments)
        if self.is_aborting:
            self.is_aborting = False
            raise RuntimeError("connection lost" if self.fault == "abort" else "SGLang aborted a request")
        return answer

    def push(self, buckets):
        if self.fault == "damage" and self.version == 3:
            buckets = [[(name, tensor * 1.5) for name, tensor in bucket] for bucket in buckets]
        if self.fault == "stale" and self.version > 0:
            self.version += 1
            return
        super().push(buckets)

    def close(self):
        """Ends nothing."""


SGLANG = {  # fault: what the causes begin with
    "": set(),
    "stale": {"the push does not reach "},
    "damage": {"a push or a wake damages"},
    "abort": {"this sglang answers abor"},
    "process": {"a process outlived the s"},
    "memory": {"SGLang does not give its"},
}


@pytest.mark.parametrize("fault", SGLANG)
def test_sglang_alone(tiny, monkeypatch, whole, tmp_path, fault):
    def make_trainer(folder, **flags):
        monkeypatch.setattr(OtherEngine, "fault", fault)
        monkeypatch.setattr("extras.local_engine.Engine", OtherEngine)
        trainer = whole()
        trainer.publish()
        return trainer

    monkeypatch.setattr(gpu_stages, "make_trainer", make_trainer)
    monkeypatch.setattr(gpu_stages, "GRACE", 0.1)
    monkeypatch.setattr(gpu_stages, "ABORT", (0.0, 8))
    if fault == "memory":
        sizes = iter(range(10**9, 10**11, 5 * 10**8))  # it grows, and is never released
        monkeypatch.setattr(gpu_stages, "cards", lambda: 1)
        monkeypatch.setattr(gpu_stages, "device", lambda: "cpu")
        monkeypatch.setattr(gpu_stages, "used", lambda: next(sizes))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    stage = Stage(tmp_path)
    gpu_stages.sglang(stage)
    for child in psutil.Process().children():
        if child.name() == "sleep":
            child.kill()
            child.wait()
    assert {one["cause"][:24] for one in explained(stage.problems)} == SGLANG[fault]


def answers(*tokens) -> np.ndarray:
    """A completion of (id, log-prob)."""
    found = np.zeros(len(tokens), train.TOKEN)
    found["id"], found["logprob"] = zip(*tokens)
    return found


def test_answers_are_compared_up_to_the_first_token_that_rounding_has_chosen():
    past = [answers((1, -0.1), (2, -0.7), (3, -0.2)), answers((4, -0.3))]
    tie = [answers((1, -0.1), (9, -0.7), (3, -5.0)), answers((4, -0.3))]
    moved = [answers((1, -0.2), (2, -0.8), (3, -0.3)), answers((4, -0.4))]
    others = [answers((7, -0.1), (2, -0.7), (3, -0.2)), answers((8, -0.3))]
    for now, changed, is_right in (
        *((past, False, True), (tie, False, True), (moved, False, False), (others, False, False)),
        *((past, True, False), (tie, True, False), (moved, True, True), (others, True, True)),
    ):
        stage = Stage()
        gpu_stages.check_moved(stage, now, past, 0.05, changed)
        assert (stage.problems == []) == is_right, (now, changed)


# ---- The loop ----------------------------------------------------------------------------------------------
def logged(folder: Path, steps, **more) -> dict:
    """Writes a run's log of these steps. Returns the run's flags."""
    row = {"logprob_diff": 0.01, "grad_norm": 0.3, "time_rollout": 1.0, "time_update": 2.0, "time_push": 0.1}
    row |= {"gb_rollout": 47.0, "gb_update": 3.0, "gb_push": 47.0} | more
    rows = [{"step": step} | (row if step else {}) for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {"model": TINY, "output_dir": folder, "steps": 3, "device": "cuda", "dtype": "bfloat16"}
    return flags | {"engine": "sglang"}


LOGS = {  # what is wrong with a log: (its steps, its numbers, the causes)
    "nothing": (range(4), {}, []),
    "a step twice": ([0, 1, 2, 2, 3], {}, ["the loop ran, but its log"]),
    "no gradient": (range(4), {"grad_norm": None}, ["the loop ran, but its log"]),
    "memory": (range(4), {"gb_update": 79.0}, ["tools.plan expects too li"]),
}


@pytest.mark.parametrize("name", LOGS)
def test_what_the_log_of_a_run_says(monkeypatch, tmp_path, name):
    steps, numbers, causes = LOGS[name]
    monkeypatch.setattr(gpu_stages, "cards", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=80e9))
    stage = Stage(tmp_path)
    gpu_stages.read_loop(stage, logged(tmp_path, steps, **numbers), 1)
    assert [one["cause"][:25] for one in explained(stage.problems)] == causes
    assert stage.measured["logprob_diff"] == 0.01 and stage.measured["update (s)"] == 2.0
    assert stage.measured["rollout (GB, planned)"].startswith("47.0 (48")  # half of the card, and 5 GB


# ---- Stages that crash -------------------------------------------------------------------------------------
@pytest.fixture
def orphans():
    """Orphans become children of this process, as in the real command."""
    check_gpu.become_subreaper()
    yield
    ctypes.CDLL(None).prctl(check_gpu.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def run_shell(monkeypatch, folder: Path, script: str, limit: float = 30) -> dict:
    """What the runner finds of a stage that is a shell script."""
    monkeypatch.setattr(check_gpu, "GRACE", 0.2)
    return check_gpu.run_stage(["sh", "-c", script], limit, folder / "log", {})


def crash(text: str, code: int = 1) -> str:
    return f"echo Loading; echo {shlex.quote(text)} >&2; exit {code}"


SCHEDULER = "RuntimeError: Rank 0 scheduler died during initialization (exit code: {})."
TOO_SMALL = "Not enough memory. Please try to increase --mem-fraction-static."
WATCHDOG = "[rank1]:[E] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
PIDFD = "RuntimeError: pidfd_getfd: Operation not permitted"
CRASHES = {  # what a stage ends with: (script, the cause)
    "libcudart": (crash(f"{LIBCUDART}\n{SCHEDULER.format(127)}", 1), "the memory saver that SGLang preloads"),
    "127": (crash(SCHEDULER.format(127)), "a library that is preloaded was not found"),
    "scheduler": (crash(SCHEDULER.format(1)), "a process of SGLang crashed"),
    "pause": (crash("Cannot pause allocation that is not active"), "SGLang was told to release memory twice"),
    "small share": (crash(f"RuntimeError: {TOO_SMALL}"), "SGLang's share of the card is too small"),
    "GPU memory": (crash("torch.OutOfMemoryError: CUDA out of memory."), "the card's memory is exhausted"),
    "killed": ("kill -9 $$", "the kernel killed a process"),
    "killed rank": (crash("  exitcode  : -9 (pid: 7)"), "the kernel killed a process"),
    "IPC": (crash(PIDFD), "a process cannot open the other's GPU memory"),
    "port": (crash("OSError: [Errno 98] Address already in use"), "two programs drew the same port"),
    "NCCL": (crash(WATCHDOG), "NCCL cannot connect the cards"),
    "NCCL too": (crash("DistBackendError: NCCL error in: ncclUnhandledCudaError"), "NCCL cannot connect the"),
    "access": (
        crash("AcceleratorError: CUDA error: an illegal memory access"),
        "a kernel failed, or the card",
    ),
    "nvcc": (crash("RuntimeError: Could not find CUDA installation"), "SGLang compiles kernels at its first"),
    "linker": (crash("/usr/bin/ld: cannot find -lcudart: No such file"), "this CUDA_HOME (pip's, for"),
    "no sglang": (crash("ModuleNotFoundError: No module named 'sglang'"), "sglang is not installed"),
    "shm": (crash("unable to mmap 64 bytes from file </torch_1_2>"), "NCCL and torch exchange data"),
    "gate": (
        crash("train.py: --gate: engine and actor disagree by 2e-01"),
        "SGLang computes other log-probs",
    ),
    "gate, too": (crash("engine and actor disagree. Likely cause: stale weights: ..."), "the push does not"),
    "SGLang died": (crash("train.py: SGLang died: one of its processes crashed"), "a process of SGLang"),
    "SGLang hangs": (
        crash("train.py: SGLang: sleep took over 600 s"),
        "a process waits for one that is gone",
    ),
    "hang": ("sleep 60", "a process waits for one that is gone or stuck"),
    "left": (f"sleep 60 & echo; echo '{gpu_stages.RESULT}{{}}'", "a process outlived the stage"),
    "no result": ("exit 0", "not known to this tool"),
    "a defect": (crash("Traceback:\nKeyError: 'x'\nbye"), "not known to this tool"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_stage_that_crashes(monkeypatch, orphans, tmp_path, name):
    script, cause = CRASHES[name]
    if name == "left":
        empty = json.dumps({"measured": {}, "details": {}, "problems": []})
        script = script.replace("{}", empty)
    older = check_gpu.descendants()  # of earlier tests
    start = time.perf_counter()
    facts = run_shell(monkeypatch, tmp_path, script, 0.5 if name == "hang" else 30)
    (found,) = facts["problems"]
    assert facts["state"] == "FAILED" and found["cause"].startswith(cause), found
    assert time.perf_counter() - start < 20 and check_gpu.descendants() == older
    shown = {"killed": "exit code -9", "left": "sleep", "a defect": "KeyError: 'x' (exit code 1)"}
    assert shown.get(name, "") in found["problem"]


def test_what_precedes_a_kill_on_purpose_is_no_evidence(monkeypatch, tmp_path):
    script = f"echo exitcode : -9; echo {gpu_stages.ON_PURPOSE}; {crash(WATCHDOG)}"
    (found,) = run_shell(monkeypatch, tmp_path, script)["problems"]
    assert found["cause"].startswith("NCCL") and "-9" not in found["problem"]


def test_what_a_stage_found_before_it_crashed_is_kept(monkeypatch, tmp_path):
    found = {"measured": {"a": 1}, "details": {}, "problems": ["MFU 0.01: this card computes far below"]}
    script = f"echo; echo {shlex.quote(gpu_stages.RESULT + json.dumps(found))}; {crash(WATCHDOG)}"
    facts = run_shell(monkeypatch, tmp_path, script)
    first, second = facts["problems"]
    assert first["cause"].startswith("the card is slowed") and second["cause"].startswith("NCCL cannot")
    assert facts["measured"] == {"a": 1}


def test_every_cause_that_the_tool_knows_is_produced_above():
    listed = [cause for _, cause in (*MACHINES.values(), *CRASHES.values())]
    listed += [cause for causes in SGLANG.values() for cause in causes]
    listed += [cause for _, _, causes in LOGS.values() for cause in causes]
    listed += [
        "the attention kernel is wrong",
        "float32 produc",
        "16-bit kernels",
        "sharding changes the grad",
    ]
    listed += ["the card is slowed d"]
    causes = re.findall(r"^\S.*\n +(.*)\n +.*$", check_gpu.CAUSES, re.MULTILINE)
    assert len(causes) > 40
    assert [cause for cause in causes if not cause.startswith(tuple(listed))] == []


# ---- The command -------------------------------------------------------------------------------------------
def test_the_report_shows_what_failed_and_holds_no_names(monkeypatch, capsys, tmp_path):
    result = {"measured": {"seconds": 1.23456}, "details": {"path": "/home/alice/x"}, "problems": []}
    taken = [f"card {i}: other processes take 60.1 GB of its memory" for i in range(8)]
    broken = result | {"problems": [*taken, "/dev/shm has 0.07 GB"]}
    scripts = {"machine": broken, "attention": result, "logprobs": result, "resume": result}
    monkeypatch.setattr(check_gpu, "STAGES", [one for one in check_gpu.STAGES if one.name in scripts])
    monkeypatch.setattr(check_gpu, "become_subreaper", lambda: None)
    monkeypatch.setattr(check_gpu, "count_cards", lambda: 1)
    monkeypatch.setattr(check_gpu, "GRACE", 0.2)
    monkeypatch.setattr(socket, "gethostname", lambda: "box17")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def command_of(stage, folder, cards):
        text = f"{HERE} box17 0123456789abcdef\n{gpu_stages.RESULT}{json.dumps(scripts[stage.name])}"
        fails = {"logprobs": 1}.get(stage.name, 0)
        return ["sh", "-c", f"echo {shlex.quote(text)}; exit {fails}"]

    monkeypatch.setattr(check_gpu, "command_of", command_of)
    output = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["check_gpu", "--output", str(output)])
    with pytest.raises(SystemExit) as end:
        check_gpu.main()
    assert end.value.code == 1
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[1].startswith("machine") and "FAILED" in lines[1] and "seconds 1.23" in lines[1]
    assert "card 0" in lines[2] and "card 1" in lines[3] and "and 6 more of this cause" in lines[4]
    assert "another program" in lines[5] and "CUDA_VISIBLE_DEVICES" in lines[6]
    assert "/dev/shm" in lines[7] and "--ipc=host" in lines[9] and lines[10].startswith("attention")
    assert "2 of 4 stages failed" in lines[-1]
    text = output.read_text()
    stages = json.loads(text)["stages"]
    assert stages["attention"]["state"] == "ok" and stages["logprobs"]["log"].startswith(". HOST SECRET")
    assert not re.search("alice|box17|0123456789|/home", text)


@pytest.mark.parametrize(
    "name, cards, states, reason",
    [
        ("sharding", 1, {}, "needs 2 cards, and there is 1"),
        ("sharding", 0, {}, ""),  # on a CPU it runs in two processes
        ("sharding", 8, {"logprobs": "FAILED"}, "first repair logprobs"),
        ("attention", 2, {"machine": "FAILED"}, ""),  # for example because a card is in use
        ("attention", 0, {"machine": "FAILED"}, "first repair machine"),  # not on the CPU instead
        ("loop", 8, {"logprobs": "ok", "sglang": "skipped"}, ""),
        ("loop_all", 8, {"sharding": "FAILED", "loop": "FAILED"}, "first repair sharding, loop"),
        ("server", 1, {}, "needs 2 cards, and there is 1"),
    ],
)
def test_stages_that_cannot_run_are_skipped_with_a_reason(name, cards, states, reason):
    (stage,) = [one for one in check_gpu.STAGES if one.name == name]
    assert check_gpu.reason_to_skip(stage, cards, states) == reason


def test_without_sglang_its_stages_are_skipped_on_a_cpu_and_fail_on_a_gpu(monkeypatch):
    monkeypatch.setattr(check_gpu, "find_spec", lambda name: None)
    (stage,) = [one for one in check_gpu.STAGES if one.name == "sglang"]
    assert check_gpu.reason_to_skip(stage, 0, {}) == "sglang is not installed"
    assert check_gpu.reason_to_skip(stage, 1, {}) == ""


def test_each_stage_has_its_function_and_later_ones_build_on_earlier_ones():
    names = [stage.name for stage in check_gpu.STAGES]
    assert names == list(gpu_stages.STAGES)
    for i, stage in enumerate(check_gpu.STAGES):
        assert set(stage.after.split()) <= set(names[:i])
    assert (check_gpu.RESULT, check_gpu.ON_PURPOSE) == (gpu_stages.RESULT, gpu_stages.ON_PURPOSE)


def test_stages_are_listed_and_unknown_ones_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_gpu", "--list"])
    check_gpu.main()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(gpu_stages.STAGES)
    monkeypatch.setattr(sys, "argv", ["check_gpu", "--only", "sglang,gpu"])
    with pytest.raises(SystemExit):
        check_gpu.main()
    assert "no stage is called gpu; --list shows them" in capsys.readouterr().err


def run_command(tmp_path, *arguments, **environment) -> tuple[str, dict]:
    """The real command: what it prints, and its file."""
    output = tmp_path / "check_gpu.json"
    done = run("-m", "tools.check_gpu", "--output", output, *arguments, timeout=3000, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(output.read_text())["stages"]


@pytest.mark.slow
def test_the_real_command_on_a_machine_without_a_gpu(tmp_path):
    printed, stages = run_command(tmp_path)
    states = {name: facts["state"] for name, facts in stages.items()}
    has_sglang = gpu_stages.find_spec("sglang") is not None
    skipped = set() if has_sglang else {"sglang", "server"}
    assert {name for name, state in states.items() if state == "skipped"} == skipped
    assert [row["step"] for row in stages["resume"]["details"]["metrics"]] == list(range(7))
    assert "0 of 12 stages failed" in printed and str(Path.home()) not in json.dumps(stages)


@needs_sglang
def test_the_real_command_with_the_real_sglang(tmp_path):
    _, stages = run_command(tmp_path, "--only", "sglang,loop_tp,server")
    assert {facts["state"] for facts in stages.values()} == {"ok"} and len(stages) == 3
    assert stages["sglang"]["measured"]["aborted"].endswith("of 64")
    assert stages["loop_tp"]["measured"]["logprob_diff"] < 1e-4
