"""Do two machines learn what one learns? Two hosts within one: they share a wire, and no writable folder.

    python -m bench.two_hosts [--steps 30] [--processes 1] [--dp_replicate 2] [--output FILE] [other flags]
    python -m bench.two_hosts --fault kill     # or cut: what the first host does when the second is gone

Other flags are those of train.py. Needs Linux, root, `ip` and `unshare`; uses no GPU. A host is a set of
namespaces. It has an address (10.77.0.1 and .2), a name that nobody can look up, processes of its own and a
folder of its own, /mnt; the rest of the disk is read-only. Whatever relies on a shared folder, on hostnames
or on the loopback device therefore fails here. Both run the README's command for two machines; then one host
runs as many processes. Prints what they learn, the largest differences over all steps, whether the same texts
were sampled and the same model exported, and what the run left on the second host. With --fault the second
host goes after step 3, with its connections closed (kill) or without a word (cut): how long does the first
one wait for it, and what does it say?
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from bench.measure import ASSETS, show, write
from tools.curve import read

TWO = (
    "GLOO_SOCKET_IFNAME=eth0 {torchrun} --nnodes 2 --node_rank {rank} --nproc_per_node {processes} "
    "--master_addr 10.77.0.1 train.py {flags}"
)
ONE = "{torchrun} --standalone --local_addr localhost --nproc_per_node {both} train.py {flags}"
HOST = """
hostname {name}
mount --bind {folder} /mnt
mount --bind /tmp /tmp
mount -o remount,bind,ro /tmp
mount -o remount,bind,ro /
mount -t tmpfs tmpfs /dev/shm
export HOME=/mnt TMPDIR=/mnt OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
exec env {command} --output_dir /mnt/run --wandb disabled
"""
COMPARED = ("reward", "eval_score", "loss", "grad_norm", "entropy", "logprob_diff")


def ip(*words: str):
    """One call of `ip`."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def hosts():
    """Names of three network namespaces, two with a wire between them and one alone; removed at the end."""
    names = [f"host-{place}-{os.getpid()}" for place in ("0", "1", "alone")]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for rank in (0, 1):
            ip("-n", names[rank], "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", names[rank], "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


@contextmanager
def running(name: str, folder: Path, command: str):
    """A run on a host with its own folder, which also gets its output; killed at the end if necessary.

    Its first process is the first one of a namespace of processes, and takes the others along.
    """
    folder.mkdir()
    script = HOST.format(name=name, folder=folder, command=command)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--mount",
                "--uts",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-ec",
                script,
            ],
            cwd=Path(__file__).parent.parent,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait(runs: dict[Path, subprocess.Popen], until=lambda: False):
    """Waits for the end of all runs, or until a condition holds. A run that fails is the end of all."""
    while not until() and any(process.poll() is None for process in runs.values()):
        for folder, process in runs.items():
            if process.poll():
                sys.exit(f"a run failed: {last_words(folder)}\n{(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.1)


def last_words(folder: Path) -> str:
    """What a run that failed says of it: its one line, or the error below its traceback."""
    lines = (folder / "log").read_text().splitlines()
    return next((line for line in lines if line.startswith("train.py: ") or "Error: " in line), "nothing")


def fault(how: str, names: list[str], runs: dict[Path, subprocess.Popen]):
    """Lets the second host go after step 3, and waits for the first one's end."""
    (folder, first), (_, second) = runs.items()
    metrics = folder / "run" / "metrics.jsonl"
    wait(runs, until=lambda: metrics.exists() and '"step": 3,' in metrics.read_text())
    start = time.perf_counter()
    if how == "kill":
        second.kill()
    else:
        ip("-n", names[1], "link", "set", "eth0", "down")
    first.wait()
    print(
        f"second host gone ({how}); {time.perf_counter() - start:.0f} s later the first one ended with "
        f"code {first.returncode} and said:\n{last_words(folder)}"
    )


def exported(run: Path) -> dict:
    """The weights of the model that a run has left, by name."""
    try:
        weights = [load_file(file) for file in (run / "model").glob("*.safetensors")]
    except SafetensorError as error:
        sys.exit(f"the model that a run has left is broken: {error}")
    return {name: value for part in weights for name, value in part.items()}


def compare(two: Path, one: Path) -> dict:
    """Prints two runs beside each other; returns the numbers."""
    histories = [read(two), read(one)]
    show(
        [
            {"step": a["step"]}
            | {
                f"{name}, {where}": record.get(name, "")
                for name in ("reward", "eval_score")
                for where, record in (("two hosts", a), ("one host", b))
            }
            for a, b in zip(*histories)
            if "eval_score" in a or a["step"] == 1
        ]
    )
    worst = {name: max(abs(a[name] - b[name]) for a, b in zip(*histories) if name in a) for name in COMPARED}
    print("largest differences: " + ", ".join(f"{name} {gap:.1e}" for name, gap in worst.items()))
    ids = [[json.loads(line)["text"] for line in (run / "samples.jsonl").open()] for run in (two, one)]
    same = sum(a == b for a, b in zip(*ids))
    ours, theirs = exported(two), exported(one)
    if {name: value.shape for name, value in ours.items()} != {
        name: value.shape for name, value in theirs.items()
    }:
        sys.exit("two hosts have exported other tensors than one")
    gap = max((ours[name] - value).abs().max().item() for name, value in theirs.items())
    print(
        f"samples with the same text: {same} of {len(ids[1])}; largest difference of weights: {gap:.1e}, "
        f"in {len(ours)} tensors"
    )
    return dict(
        two_hosts=histories[0],
        one_host=histories[1],
        differences=worst | {"weights": gap},
        samples=len(ids[1]),
        same=same,
    )


def main():
    """Runs, compares, cleans up."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1, help="on each of the two hosts")
    parser.add_argument("--dp_replicate", type=int, default=2)
    parser.add_argument("--fault", choices=("kill", "cut"), help="how the second host goes, after step 3")
    parser.add_argument("--output", type=Path, default=ASSETS / "two_hosts.json", help="where the numbers go")
    options, others = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up, as Ctrl-C does
    flags = f"--steps {options.steps} --dp_replicate {options.dp_replicate} {' '.join(others)}"
    words = dict(
        torchrun=f"{sys.executable} -m torch.distributed.run",
        processes=options.processes,
        both=2 * options.processes,
        flags=flags,
    )
    scratch = Path(tempfile.mkdtemp())
    first, second, alone = (scratch / name for name in ("first", "second", "alone"))
    try:
        with hosts() as names:
            with (
                running(names[0], first, TWO.format(rank=0, **words)) as process,
                running(names[1], second, TWO.format(rank=1, **words)) as other,
            ):
                if options.fault:
                    return fault(options.fault, names, {first: process, second: other})
                wait({first: process, second: other})
            with running(names[2], alone, ONE.format(**words)) as process:
                wait({alone: process})
        left = [path.name for path in (second / "run").rglob("*")]
        print(f"the run left on the second host: {', '.join(left) or 'nothing'}")
        numbers = compare(first / "run", alone / "run")
        write(options.output, flags=flags, processes=options.processes, **numbers)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()
