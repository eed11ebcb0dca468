"""Run the hostile programs of assets/hostile_programs.txt in extras/sandbox.py: what do they reach or leave?

    python -m bench.hostile_programs [--modes namespaces plain "bwrap ..."] [--only "fork bomb" ...]

A mode is a value of the environment variable SANDBOX. Prints a Markdown table: what contains each program,
and whether it was contained in each mode. Below the table: what the programs left behind (processes, files,
shared memory, mounts, changes in the repository), and calls that returned late. Run it both as root and as an
ordinary user; it needs only Python and Linux.
"""

import argparse
import json
import os
import platform
import re
import secrets
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from extras import sandbox

REPOSITORY = Path(__file__).resolve().parent.parent
TIMEOUT = 20.0  # seconds, for programs whose header has none
SLACK = 15.0  # a call that returns this many seconds after the timeout is late
CONCURRENCY = 6  # programs that run at the same time


class Program(NamedTuple):
    contained_by: str
    expected: str  # regular expression for its output
    timeout_s: float
    code: str


def read_corpus(path: Path) -> dict[str, Program]:
    """Return the programs by name, each with the common prelude in front of its code."""
    blocks = re.split(r"^### ", path.read_text(), flags=re.MULTILINE)[1:]
    prelude = blocks[0].partition("\n")[2]
    programs = {}
    for block in blocks[1:]:
        header, _, code = block.partition("\n")
        name, contained_by, rest = header.split(" | ", 2)
        expected, _, seconds = re.fullmatch(r"(.*?)( \| (\d+))?", rest).groups()
        uses_call_numbers = re.search("libc.syscall|mmap", code)
        if platform.machine() == "x86_64" or not uses_call_numbers:
            programs[name] = Program(contained_by, expected, float(seconds or TIMEOUT), prelude + code)
    return programs


class Target:
    """What programs attack: this process, its environment and sockets, a checkpoint, the repository."""

    def __init__(self, folder: Path):
        self.mark = secrets.token_hex(8)  # programs put it into the names of what they create
        self.secret = secrets.token_hex(16)
        os.environ["WANDB_API_KEY"] = self.secret
        sandbox.libc.prctl(sandbox.SUBREAPER, 1, 0, 0, 0)  # adopt processes that outlive their sandbox
        self.checkpoint = folder / "checkpoint"
        self.checkpoint.mkdir()
        (self.checkpoint / "model.safetensors").write_text(self.secret)
        self.sandboxes = folder / "sandboxes"
        self.sandboxes.mkdir()
        tempfile.tempdir = str(self.sandboxes)
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix_stream = socket.socket(socket.AF_UNIX)
        self.unix_stream.bind(str(self.checkpoint / "socket"))
        self.unix_stream.listen()
        self.unix_datagram = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.unix_datagram.bind("\0" + self.mark)
        self.before = self.state()

    def fill_in(self, code: str) -> str:
        """Replace the placeholders in a program."""
        values = {
            "TRAINER": os.getpid(),
            "PORT": self.tcp.getsockname()[1],
            "CHECKPOINT": self.checkpoint,
            "REPOSITORY": REPOSITORY,
            "MARK": self.mark,
        }
        return re.sub("|".join(values), lambda match: str(values[match[0]]), code)

    def state(self) -> dict[str, str]:
        """Return what programs must not change, by name, except what other users of the machine change."""
        found = {
            "processes": str(sandbox.descendants(os.getpid())),
            "sandboxes": str(os.listdir(self.sandboxes)),
        }
        repository = [path for path in REPOSITORY.rglob("*") if not {".git", "__pycache__"} & set(path.parts)]
        library = Path(os.__file__).parent
        checkpoint = [self.checkpoint, *self.checkpoint.iterdir()]
        for path in [*repository, *checkpoint, *library.glob("*.py"), library]:
            status = path.stat()
            found[str(path)] = f"{status.st_size} {status.st_mode:o} {status.st_uid} {status.st_mtime_ns}"
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", "/home", "/etc"):
            if os.path.isdir(folder):
                found[folder] = str([name for name in os.listdir(folder) if self.mark in name])
        key = str(int(self.mark[:6], 16))
        for kind in ("shm", "sem", "msg"):
            rows = Path("/proc/sysvipc", kind).read_text().splitlines()
            found[kind] = str([row for row in rows if row.split()[0] == key])
        mounts = Path("/proc/mounts").read_text().splitlines()
        found["mounts"] = str([row for row in mounts if str(self.sandboxes) in row])
        return found

    def changes(self) -> list[str]:
        """Return the differences between the state at the start and now."""
        time.sleep(0.5)  # the kernel removes some things with a delay
        after = self.state()
        names = sorted({*self.before, *after})
        return [
            f"{name}: {self.before.get(name)} -> {after.get(name)}"
            for name in names
            if self.before.get(name) != after.get(name)
        ]


def judge(target: Target, mode: str, program: Program) -> tuple[str, float]:
    """Run a program. Returns "yes" if it was contained, otherwise what went wrong; and its overrun (s)."""
    start = time.monotonic()
    words = sandbox.choose_mode(mode)
    output = sandbox.run_program(target.fill_in(program.code), program.timeout_s, "", words)
    overrun = time.monotonic() - start - program.timeout_s
    if re.search("^ESCAPED", output, re.MULTILINE) or target.secret in output:
        return "**no**", overrun
    if not re.search(program.expected, output):
        return f"unclear: {output[-300:]!r}", overrun
    return "yes", overrun


def run_all(mode: str, corpus: dict[str, Program]) -> dict:
    """Run all programs in one mode. Returns their verdicts, what they left behind, and the late calls."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        usual_folder = tempfile.tempdir
        target = Target(Path(folder))
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            judged = list(pool.map(lambda program: judge(target, mode, program), corpus.values()))
        tempfile.tempdir = usual_folder
        verdicts = {name: verdict for name, (verdict, _) in zip(corpus, judged)}
        late = [f"{name}: {overrun:.1f} s" for name, (_, overrun) in zip(corpus, judged) if overrun > SLACK]
        return {"verdicts": verdicts, "left": target.changes(), "late": late}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", default=["namespaces", "plain"], help="values of SANDBOX")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run programs whose names contain one of these"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the verdicts")
    flags = parser.parse_args()
    corpus = {}
    for name, program in read_corpus(REPOSITORY / "assets/hostile_programs.txt").items():
        if any(part in name for part in flags.only):
            corpus[name] = program

    results = {}
    notes = []
    for mode in flags.modes:
        sandbox.choose_mode(mode)  # raises OSError if this mode is not available
        start = time.monotonic()
        result = run_all(mode, corpus)
        seconds = time.monotonic() - start
        results[mode] = result
        left = result["left"] or "nothing"
        late = result["late"] or "none"
        notes.append(f"{mode}: {seconds:.0f} s; left behind: {left}; late: {late}")

    columns = " | ".join(mode.split()[0] for mode in flags.modes)
    print(f"| program | contained by | {columns} |\n|---|---|{'---|' * len(flags.modes)}")
    for name, program in corpus.items():
        verdicts = " | ".join(results[mode]["verdicts"][name] for mode in flags.modes)
        print(f"| {name} | {program.contained_by} | {verdicts} |")
    print("", f"As {'root' if os.getuid() == 0 else 'an ordinary user'}.", *notes, sep="\n")
    if flags.output:
        flags.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
