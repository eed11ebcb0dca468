"""Runs hostile programs, assets/hostile_programs.txt, in tools/sandbox.py. What do they get, and what do they leave?

    python -m bench.hostile_programs [--ways namespaces plain "bwrap ..."] [--only "fork bomb"]

A way is what the variable SANDBOX may say. Prints a Markdown table: for each program what stops it, and whether it was
stopped in each way. Below, what was left behind: processes, files, shared memory, mounts, changes of the repository;
and calls that took longer than they may. Run it as root and as somebody else; it needs only Python and Linux.
"""
import argparse
import ctypes
import json
import os
import platform
import re
import secrets
import socket
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))
from tools import sandbox

SECONDS, SLACK, AT_ONCE = 20.0, 15.0, 6         # a program's time; how much later its call may return; programs


def read_corpus(path: Path) -> dict[str, tuple[str, str, float, str]]:
    """{name: (what stops it, what it prints, seconds, the program with the prelude before it)}."""
    blocks = re.split(r"^### ", path.read_text(), flags=re.MULTILINE)[1:]
    prelude, *programs = [block.partition("\n")[::2] for block in blocks]
    found = {}
    for header, code in programs:
        name, stopped_by, rest = header.split(" | ", 2)
        printed, _, seconds = re.fullmatch(r"(.*?)( \| (\d+))?", rest).groups()
        if platform.machine() == "x86_64" or not re.search("libc.syscall|mmap", code):     # numbers of that machine
            found[name] = stopped_by, printed, float(seconds or SECONDS), prelude[1] + code
    return found


class Trainer:
    """What programs would like to get: a checkpoint, sockets, an environment, the repository; and what they left."""

    def __init__(self, folder: Path):
        self.mark, self.secret = secrets.token_hex(8), secrets.token_hex(16)
        os.environ["WANDB_API_KEY"] = self.secret
        ctypes.CDLL(None).prctl(sandbox.SUBREAPER, 1, 0, 0, 0)      # what outlives its sandbox becomes a child of ours
        self.checkpoint, self.sandboxes = folder / "checkpoint", folder / "sandboxes"
        for made in (self.checkpoint, self.sandboxes):
            made.mkdir()
        (self.checkpoint / "model.safetensors").write_text(self.secret)
        tempfile.tempdir = str(self.sandboxes)
        self.tcp, *self.unix = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM)
        for place, address in zip(self.unix, (str(self.checkpoint / "socket"), "\0" + self.mark)):
            place.bind(address)
        self.unix[0].listen()
        self.before = self.state()

    def fill_in(self, code: str) -> str:
        """A program with the places and numbers of this trainer."""
        words = {"TRAINER": os.getpid(), "PORT": self.tcp.getsockname()[1], "CHECKPOINT": self.checkpoint,
                 "REPOSITORY": REPOSITORY, "MARK": self.mark}
        return re.sub("|".join(words), lambda found: str(words[found[0]]), code)

    def state(self) -> dict[str, str]:
        """What programs must not change, as {name: how it is}; other users of the machine may change the rest."""
        found = {"processes": str(sandbox.descendants(os.getpid())), "sandboxes": str(os.listdir(self.sandboxes))}
        watched = [path for path in REPOSITORY.rglob("*") if not {".git", "__pycache__"} & set(path.parts)]
        standard = Path(os.__file__).parent
        for path in [*watched, self.checkpoint, *self.checkpoint.iterdir(), *standard.glob("*.py"), standard]:
            status = path.stat()
            found[str(path)] = f"{status.st_size} {status.st_mode:o} {status.st_uid} {status.st_mtime_ns}"
        for folder in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock", "/home", "/etc"):
            if os.path.isdir(folder):
                found[folder] = str([name for name in os.listdir(folder) if self.mark in name])
        for kind in ("shm", "sem", "msg"):
            rows = Path("/proc/sysvipc", kind).read_text().splitlines()
            found[kind] = str([row for row in rows if row.split()[0] == str(int(self.mark[:6], 16))])
        mounts = Path("/proc/mounts").read_text().splitlines()
        found["mounts"] = str([row for row in mounts if str(self.sandboxes) in row])
        return found

    def left(self) -> list[str]:
        """How the state differs from the start, once the kernel has had a moment."""
        time.sleep(0.5)
        after = self.state()
        return [f"{name}: {self.before.get(name)} -> {after.get(name)}" for name in sorted({*self.before, *after})
                if self.before.get(name) != after.get(name)]


def judge(trainer: Trainer, way: str, row: tuple) -> tuple[str, float]:
    """Runs a program: "yes" if it was contained, else what went wrong, and by how much its call overran."""
    _, printed, seconds, code = row
    start = time.monotonic()
    output = sandbox.run(trainer.fill_in(code), seconds, "", sandbox.way(way))
    late = time.monotonic() - start - seconds
    if re.search("^ESCAPED", output, re.MULTILINE) or trainer.secret in output:
        return "**no**", late
    return "yes" if re.search(printed, output) else f"unclear: {output[-300:]!r}", late


def run_all(way: str, corpus: dict) -> tuple[dict[str, str], list[str], list[str]]:
    """({name: verdict}, what was left, calls that came back late) of all programs in one way."""
    with tempfile.TemporaryDirectory(prefix="hostile-", dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        before = tempfile.tempdir
        trainer = Trainer(Path(folder))
        with ThreadPoolExecutor(AT_ONCE) as pool:
            verdicts = dict(zip(corpus, pool.map(lambda row: judge(trainer, way, row), corpus.values())))
        tempfile.tempdir = before
        late = [f"{name}: {over:.1f} s" for name, (_, over) in verdicts.items() if over > SLACK]
        return {name: verdict for name, (verdict, _) in verdicts.items()}, trainer.left(), late


def main():
    """Runs all programs in each way and prints what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=["namespaces", "plain"])
    parser.add_argument("--only", default="", help="only programs whose names have this")
    parser.add_argument("--output", type=Path, help="a file for the verdicts, as JSON")
    flags = parser.parse_args()
    corpus = read_corpus(REPOSITORY / "assets/hostile_programs.txt")
    corpus = {name: row for name, row in corpus.items() if flags.only in name}
    table, notes, results = defaultdict(list), [], {}
    for way in flags.ways:
        sandbox.way(way)                # raises where this way cannot be had
        start = time.monotonic()
        verdicts, left, late = run_all(way, corpus)
        results[way] = {"verdicts": verdicts, "left": left, "late": late}
        took = f"{time.monotonic() - start:.0f} s"
        notes.append(f"{way}: {took}; left behind: {left or 'nothing'}; late: {late or 'none'}")
        for name, verdict in verdicts.items():
            table[name].append(verdict)
    columns = [way.split()[0] for way in flags.ways]
    print(f"| program | stopped by | {' | '.join(columns)} |\n|---|---|{'---|' * len(flags.ways)}")
    for name, verdicts in table.items():
        print(f"| {name} | {corpus[name][0]} | {' | '.join(verdicts)} |")
    print("", f"As {'root' if os.getuid() == 0 else 'an ordinary user'}.", *notes, sep="\n")
    if flags.output:
        flags.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
