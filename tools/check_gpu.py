"""The first thing to run on a machine with GPUs: what works there, what does not, why, and what to change.

    python -m tools.check_gpu [--only STAGE,STAGE] [--output check_gpu.json] [--list]

Stages run one after another, from the smallest up, each in processes of its own with a time limit: the
machine; the actor alone; SGLang alone; both. Skipped is a stage that needs more cards than there are, or one
whose foundation failed. Without a GPU the same stages run on the CPU, with the real SGLang if installed.
Each prints a line, and after a failure its probable cause and what to change; at the end there is a table.
check_gpu.json is for bug reports: versions, driver, topology and numbers, but no paths of home folders, no
names of users or hosts, no keys. The exit code is 1 if a stage failed.

No GPU has run this. tools/gpu_stages.py has the stages themselves.
"""

import argparse
import ctypes
import getpass
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
RESULT = "RESULT "  # begins the last line of a stage, as in tools/gpu_stages.py
SHOWN = 2  # problems of the same cause that are printed
ON_PURPOSE = "Killed on purpose."  # as there: what stands above says nothing
GRACE = 10.0  # seconds that a stage's helper processes have to end after it
PR_SET_CHILD_SUBREAPER = 36  # of Linux's prctl: orphans become children of this process
CPU = {  # the environment of SGLang and of torch without a GPU
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Stage:
    """What the runner has to know about a stage."""

    name: str  # of a function in tools/gpu_stages.py
    about: str
    limit: int  # seconds; SGLang compiles kernels at its first start
    cards: int = 1  # that it needs
    ranks: str = ""  # "all": a process per card, by torchrun
    needs_sglang: bool = False
    after: str = ""  # the stages without which it cannot work


STAGES = (
    Stage("machine", "the machine", 300),
    Stage("attention", "actor: attention in 16 bits", 300),
    Stage("logprobs", "actor: log-probs, gradients", 300),
    Stage("sharding", "actor: FSDP, tensor parallel", 600, 2, "all", after="logprobs"),
    Stage("update_memory", "actor: memory, MFU of a 0.5B", 600, after="logprobs"),
    Stage("sglang", "SGLang alone", 1800, needs_sglang=True, after="logprobs"),
    Stage("loop", "loop: tiny model", 1800, after="logprobs sglang"),
    Stage("loop_all", "loop: tiny model, all cards", 1800, 2, after="sharding loop"),
    Stage("loop_tp", "loop: tiny model, tp 2", 1800, 2, after="sharding loop"),
    Stage("loop_half", "loop: shaped like a 0.5B", 1800, after="loop"),
    Stage("server", "loop: SGLang as a server", 1800, 2, needs_sglang=True, after="logprobs sglang"),
    Stage("resume", "loop: kill -9 and --resume", 1800, after="loop"),
)

# What a problem's text, or the output of a stage that crashed, gives away: the first pattern that is found
# names the probable cause, and what to change. From the special to the general.
CAUSES = r"""
nvidia-smi failed|NVIDIA-SMI has failed|Failed to initialize NVML|Found no NVIDIA driver
  the driver is not loaded, or not passed into this container
  repair it until nvidia-smi lists the cards; in Docker: --gpus all
is a CPU build|not compiled with CUDA
  this torch was installed without CUDA
  in a new virtual environment: pip install -r requirements.txt
driver [\d.]+ is older|driver version is insufficient|driver on your system is too old|forward compat
  the driver is older than the CUDA of torch
  install driver 580 or newer (nvidia-smi shows the one in use), and reboot
torch cannot use the cards
  torch sees a driver but cannot start CUDA on it
  read torch's message; check CUDA_VISIBLE_DEVICES, and that /dev/nvidia* may be opened
no kernels for compute capability|no kernel image is available
  the wheels have no machine code for this card
  use a card of Ampere or newer (compute capability 8.0)
compute capability [\d.]+ is below 8|FlashAttention only supports Ampere
  the card has no bfloat16 and no FlashAttention
  use a card of Ampere or newer (compute capability 8.0), or --engine local --dtype float32
other processes take
  another program holds memory of this card
  end it (nvidia-smi shows its process), or choose other cards with CUDA_VISIBLE_DEVICES
compute mode \w+ admits|exclusive-process|CUDA-capable device\(s\) is/are busy
  SGLang and the trainer are two processes, which have to share a card
  sudo nvidia-smi -c DEFAULT
older than glibc|GLIBC_[\d.]+'? not found
  the operating system is too old for sglang's wheels
  use one with glibc 2.34 or newer (Ubuntu 22.04, Debian 12, RHEL 9), or a container of it
no sglang for Python
  sglang has wheels for Python 3.11 to 3.13 only
  make a virtual environment with one of these
/dev/shm has|No space left on device.*shm|unable to mmap .* bytes from file </torch|Bus error
  NCCL and torch exchange data through /dev/shm, and a container's default is 64 MB
  docker run --ipc=host, or --shm-size=16g
\d open files at most|Too many open files
  the limit of open files is too low
  ulimit -n 65536; in Docker: --ulimit nofile=65536
at this machine's own name|Unable to resolve hostname|Name or service not known
  this machine's own name does not lead to an address of it
  add its name to /etc/hosts, or export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
No module named '?sglang|sglang is not installed|SGLang is not installed
  sglang is not installed
  pip install -r requirements.txt
libcudart\.so\.\d+|memory saver cannot be preloaded
  the memory saver that SGLang preloads does not find CUDA's runtime
  export LD_LIBRARY_PATH to the folder of libcudart.so.13, for example site-packages/nvidia/cu13/lib
nvcc was not found|Could not find CUDA|CUDA_HOME environment variable is not set|nvcc: not found
  SGLang compiles kernels at its first start, and there is no CUDA compiler
  install the CUDA 13 toolkit and set CUDA_HOME; docs/engines.md, Installation
nvcc has CUDA|unsupported GNU version|Unsupported gpu architecture
  the CUDA toolkit does not match torch, or the compiler does not match the toolkit
  install the CUDA 13 toolkit, and set CUDA_HOME to its folder
lib64/libcudart\.so does not exist|cannot find -lcudart
  this CUDA_HOME (pip's, for example) lacks the file that SGLang links with
  make the two symbolic links of docs/engines.md, Installation
g\+\+ was not found|ninja was not found|ninja: not found
  SGLang compiles kernels at its first start, and a compiler or build tool is missing
  install g++ and ninja (apt install g++ ninja-build)
Cannot pause|Cannot resume|is not active
  SGLang was told to release memory twice, or to resume memory in use, and its memory saver exits then
  a defect of SGLangEngine in train.py: file a bug with check_gpu.json
asleep still holds|asleep grows
  SGLang does not give its memory back: the memory saver does not see all of it
  unset PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, leave --sglang_args at its default; else file a bug
Not enough memory\. Please try to increase --mem-fraction-static|Loading the model needs
  SGLang's share of the card is too small for its weights and cache
  raise the share: --sglang_args '{"mem_fraction_static": 0.7}'
[Oo]ut of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation
  the card's memory is exhausted
  end what else runs on it; lower --tokens_per_micro_batch, then mem_fraction_static; or --offload True
exit code -9\b|exitcode *: -9|Signal 9|SIGKILL
  the kernel killed a process, as it does when the machine's own memory runs out (see dmesg)
  give the machine or container more memory, or start fewer processes per machine
pidfd_getfd|cudaIpcOpenMemHandle|invalid resource handle
  a process cannot open the other's GPU memory, which carries a push
  unset PYTORCH_ALLOC_CONF (expandable segments); in Docker: --ipc=host --cap-add=SYS_PTRACE
changed weights changed nothing|from the actor's, changed weights|(stale|base) weights:
  the push does not reach the engine, or only in part: it answers with old weights
  do not train like this: install the version of sglang in requirements.txt; else file a bug
unchanged weights changed the answers|from the actor's, after|from the actor's, the first|damaged weights:
  a push or a wake damages weights, cache or CUDA graphs
  try --sglang_args '{"disable_cuda_graph": true}'; if that cures it, file a bug that says so
from the actor's, at the start|engine and actor (disagree|differ)
  SGLang computes other log-probs than the actor with the same weights: another kernel, or setting
  compare attention backends: --sglang_args '{"attention_backend": "triton"}'; file a bug
left \d+ process|left behind
  a process outlived the stage, and may hold memory of a card
  it was ended now; if nvidia-smi still shows one, kill it; file a bug
an abort ends in
  this sglang answers aborted requests differently
  use the version in requirements.txt
Address already in use|EADDRINUSE|errno: 98
  two programs drew the same port
  run it again; if it happens often, end what listens on ports from 22000 to 30000
Watchdog caught collective|ncclSystemError|ncclUnhandledCudaError|ncclRemoteError|NCCL error|ncclInvalid
  NCCL cannot connect the cards
  NCCL_DEBUG=INFO tells where; try NCCL_P2P_DISABLE=1, then NCCL_IB_DISABLE=1; check /dev/shm
illegal memory access|device-side assert|CUBLAS_STATUS|\bXid\b|uncorrectable ECC
  a kernel failed, or the card is faulty
  run it again with CUDA_LAUNCH_BLOCKING=1; if dmesg shows Xid errors, use another card
attention: .* is off
  the attention kernel is wrong on this card, or with this version of torch
  use the versions in requirements.txt; --dtype float32 takes another kernel; file a bug
gradients, .* cards.* off by
  sharding changes the gradients: a collective or DTensor is at fault
  try one card, then NCCL_P2P_DISABLE=1, and --tp_size 1; file a bug
(log-probs|gradients), float32.* off by
  float32 products are rounded to TF32; or, if they are off by more than 1e-2, a kernel is wrong
  unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and NVIDIA_TF32_OVERRIDE; else file a bug
(log-probs|gradients), .* off by
  16-bit kernels of this card or version are less precise than on other machines, or wrong
  see the stage `attention`; use the versions in requirements.txt; file a bug
memory of .*planned
  tools.plan expects too little on this machine; its reserves are assumptions
  leave that much more room: a smaller mem_fraction_static or --tokens_per_micro_batch; file a bug
MFU [\d.]+:
  the card is slowed down (power, heat, another process), or a slow kernel was chosen
  nvidia-smi -q -d PERFORMANCE,CLOCK while it runs; see the numbers of the stage `machine`
the log has the steps|gradient of the loop
  the loop ran, but its log is not what it should be
  file a bug with check_gpu.json
exit code: 127|exit code 127
  a library that is preloaded was not found
  see the stage `machine`; export LD_LIBRARY_PATH to the folder of libcudart.so.13
Rank \d+ scheduler died|SGLang died|SGLang's server ended
  a process of SGLang crashed, or was killed (by the kernel, if the machine's own memory ran out: dmesg)
  read "log" in check_gpu.json; start train.py with --sglang_args '{"log_level": "info"}'; docs/engines.md
no end after [\d.]+ s|SGLang.* took over|was silent for
  a process waits for one that is gone or stuck; or kernels were still being compiled
  run this stage once more with --only (compiled kernels are kept); then NCCL_DEBUG=INFO, and py-spy dump
"""
UNKNOWN = ("not known to this tool", 'read "log" in check_gpu.json; file a bug with that file')
ERROR = r"^(train\.py: .*|\w*(\.\w+)*(Error|Exception|Interrupt)\b.*|.*\berror: .*)"  # lines that say most


def explain(text: str) -> dict[str, str]:
    """The line of a text that says most, its probable cause, and what to change."""
    for pattern, cause, change in re.findall(r"^(\S.*)\n +(.*)\n +(.*)$", CAUSES, re.MULTILINE):
        found = re.search(pattern, text)
        if found:
            begin = text.rfind("\n", 0, found.start()) + 1
            line = text[begin:].partition("\n")[0]
            return {"problem": shorten(line, found.start() - begin), "cause": cause, "change": change}
    lines = [found[0] for found in re.finditer(ERROR, text, re.MULTILINE)] or text.strip().split("\n")
    return {"problem": shorten(lines[-1]), "cause": UNKNOWN[0], "change": UNKNOWN[1]}


def shorten(line: str, place: int = 0) -> str:
    """At most 300 characters of a line, around a place in it."""
    begin = max(0, min(place - 60, len(line) - 300))
    return line[begin : begin + 300].strip() + " ..." * (len(line) > begin + 300)


# ---- Running a stage -------------------------------------------------------------------------------------
def become_subreaper():
    """Makes orphans of the stages children of this process, which so can find and end them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """The processes that this one started, directly or not."""
    return psutil.Process().children(recursive=True)


def end_processes(older: list[psutil.Process]) -> list[str]:
    """Kills what a stage left running. Returns the names; helpers have a moment to end by themselves."""
    processes = [one for one in descendants() if one not in older]
    _, left = psutil.wait_procs(processes, GRACE)
    names = []
    for process in left:
        with suppress(psutil.NoSuchProcess):
            names.append(process.name())
            process.kill()
    psutil.wait_procs(left, GRACE)
    return names


def run_stage(command: list[str], limit: float, log: Path, environment: dict[str, str]) -> dict:
    """Runs a stage in a session of its own. Returns its state, seconds, numbers and explained problems."""
    start = time.perf_counter()
    older = descendants()
    options = {"env": os.environ | environment, "cwd": ROOT, "start_new_session": True}
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
    ending = ""
    try:
        code = process.wait(limit)
        if code:
            ending = f"exit code {code}"
    except subprocess.TimeoutExpired:
        ending = f"no end after {limit:g} s"
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
    seconds = time.perf_counter() - start
    left = end_processes(older)
    output = log.read_text(errors="replace")
    before, mark, rest = output.rpartition(f"\n{RESULT}")
    result, _, after = rest.partition("\n")
    found = {"measured": {}, "details": {}, "problems": []}
    if mark:
        found = json.loads(result)
    else:
        before, after = output, ""
    problems = [explain(text) for text in found["problems"]]
    if ending or not mark:
        evidence = f"{before}\n{after}".rpartition(ON_PURPOSE)[2][-20000:]
        crash = explain(f"{evidence}\n{ending or 'it ended without a result'}")
        crash["problem"] += f" ({ending})" if ending and ending not in crash["problem"] else ""
        problems.append(crash)
    elif left:
        problems.append(explain(f"left {len(left)} processes behind: {' '.join(left)}"))
    state = "FAILED" if problems else "ok"
    facts = {"state": state, "seconds": round(seconds, 1), "problems": problems}
    facts |= {"measured": found["measured"], "details": found["details"]}
    return facts | {"log": output[-20000:] if problems else ""}


def command_of(stage: Stage, folder: str, cards: int) -> list[str]:
    """The command line of a stage, with torchrun if it has several ranks."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={cards or 2}"]
    return [sys.executable, *(torchrun if stage.ranks else []), "-m", "tools.gpu_stages", stage.name, folder]


def count_cards() -> int:
    """How many cards torch can use, asked in another process: this one must not hold a card."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    done = subprocess.run(words, capture_output=True, text=True)
    return int(done.stdout.strip() or 0)


def reason_to_skip(stage: Stage, cards: int, states: dict[str, str]) -> str:
    """Why a stage cannot run, or ""."""
    if cards and cards < stage.cards:
        return f"needs {stage.cards} cards, and there is {cards}"
    if not cards and stage.needs_sglang and not find_spec("sglang"):
        return "sglang is not installed"
    needed = stage.after.split() if cards else ["machine", *stage.after.split()]  # its cards cannot be used
    broken = [name for name in needed if states.get(name) == "FAILED"]
    return f"first repair {', '.join(broken)}" if broken else ""


# ---- The report ------------------------------------------------------------------------------------------
def scrub(text: str) -> str:
    """The text without home folders, this folder, names of user and host, and values that look secret."""
    replaced = {str(ROOT): ".", str(Path.home()): "~", tempfile.gettempdir(): "TMP"}
    for name, value in os.environ.items():
        if re.search("KEY|TOKEN|SECRET|PASSWORD", name, re.IGNORECASE) and len(value) >= 6:
            replaced[value] = "SECRET"
    for value in sorted(replaced, key=len, reverse=True):
        if len(value) > 1:
            text = text.replace(value, replaced[value])
    for value, name in ((socket.gethostname(), "HOST"), (getpass.getuser(), "USER")):
        if value not in ("root", "localhost"):
            text = re.sub(rf"\b{re.escape(value)}\b", name, text)
    text = re.sub(r"/(home|Users)/[^/\s\"']+", "~", text)
    return re.sub(r"\b(hf_|sk-|ghp_)\w{8,}", "SECRET", text)


def show(stage: Stage, facts: dict):
    """A stage's line; for each problem, its cause and what to change."""
    measured = []
    for name, value in facts["measured"].items():
        measured.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
    line = facts.get("reason") or ", ".join(measured)
    print(scrub(f"{stage.name:13} {facts['state']:8}{facts['seconds']:7.1f} s  {line}"), flush=True)
    by_cause = {}
    for problem in facts["problems"]:
        by_cause.setdefault((problem["cause"], problem["change"]), []).append(problem["problem"])
    for (cause, change), problems in by_cause.items():
        lines = [f"  problem: {problem}" for problem in problems[:SHOWN]]
        if len(problems) > SHOWN:
            lines.append(f"           and {len(problems) - SHOWN} more of this cause")
        print(scrub("\n".join([*lines, f"    cause: {cause}", f"   change: {change}"])), flush=True)


def summary(results: dict[str, dict]) -> str:
    """The table at the end."""
    lines = []
    for stage in STAGES:
        if stage.name in results:
            facts = results[stage.name]
            first = [problem["cause"] for problem in facts["problems"][:1]] or [facts.get("reason", "")]
            lines.append(f"{stage.about:30} {facts['state']:8}{facts['seconds']:7.1f} s  {first[0]}")
    return scrub("\n".join(lines))


def read_flags() -> argparse.Namespace:
    """The command line. Ends the process for stages that do not exist."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--only", default="", help="stages to run, separated by commas; empty: all")
    parser.add_argument("--output", type=Path, default=Path("check_gpu.json"), help="file for the results")
    parser.add_argument("--list", action="store_true", help="print the stages, and run none")
    flags = parser.parse_args()
    flags.only = list(filter(None, flags.only.split(",")))
    unknown = set(flags.only) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"--only: no stage is called {', '.join(sorted(unknown))}; --list shows them")
    return flags


def main():
    """Runs the stages; prints a line for each, and the table; writes the file."""
    flags = read_flags()
    if flags.list:
        print("\n".join(f"{stage.name:14} {stage.about}, {stage.limit} s at most" for stage in STAGES))
        return
    become_subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    cards = count_cards()
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not cards:
        paths = [str(ROOT / ".ci/sglang_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= CPU | {"PYTHONPATH": os.pathsep.join(paths)}
    print(f"GPUs: {cards}" if cards else "No GPU that torch can use: the stages run on the CPU.", flush=True)
    results = {}
    try:
        for stage in STAGES:
            if flags.only and stage.name not in flags.only:
                continue
            states = {name: facts["state"] for name, facts in results.items()}
            reason = reason_to_skip(stage, cards, states)
            facts = {"state": "skipped", "seconds": 0.0, "measured": {}, "problems": [], "reason": reason}
            if not reason:
                with tempfile.TemporaryDirectory() as folder:
                    command = command_of(stage, folder, cards)
                    facts = run_stage(command, stage.limit, Path(folder) / "log", environment)
            results[stage.name] = facts
            show(stage, facts)
    finally:
        end_processes([])
        flags.output.write_text(scrub(json.dumps({"cards": cards, "stages": results}, indent=1)) + "\n")
    failed = [name for name, facts in results.items() if facts["state"] == "FAILED"]
    print(f"\n{summary(results)}\n\n{len(failed)} of {len(results)} stages failed; see {flags.output}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
