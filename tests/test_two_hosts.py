"""Two machines within one: namespaces with names that nobody can look up, a wire, and no folder to share.

Each host has an address, processes and a writable folder of its own, /mnt; the rest of the disk is read-only.
So whatever relies on a shared folder, on host names or on the loopback device fails here.
"""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conftest import HERE, run
from tests.runs import EQUAL, count_lines, differences, read_metrics, wait_for

READY = os.geteuid() == 0 and shutil.which("ip") and shutil.which("unshare")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not READY, reason="needs root, ip and unshare")]
FLAGS = "--dp_replicate 2 --prompts_per_step 8 --group_size 4 --max_new_tokens 32 --eval_every 2 "
FLAGS += "--eval_data assets/countdown/test.jsonl:train[:8] "
FLAGS += "--token_groups 8"  # samples with details stay: only ranks of one machine share others
COMMANDS = re.findall(r"^(GLOO.*) --dp_replicate 2$", (HERE / "docs/operations.md").read_text(), re.MULTILINE)
HOST = """
hostname {name}
mount --bind {folder} /mnt
mount --bind /tmp /tmp
mount -o remount,bind,ro /tmp
mount -o remount,bind,ro /
mount -t tmpfs tmpfs /dev/shm
export HOME=/mnt TMPDIR=/mnt OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
exec env {command} --output_dir /mnt/run
"""


def ip(*words: str):
    """One call of `ip`. A container may forbid it."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"ip {' '.join(words)}: {done.stderr}")


@pytest.fixture
def names():
    """Names of two network namespaces with a wire between them."""
    names = [f"host-{rank}-{os.getpid()}" for rank in (0, 1)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        peer = ["peer", "name", "eth0", "netns", names[1]]
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", *peer)
        for rank, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


@contextmanager
def running(name: str, folder: Path, command: str):
    """A run on a host, with its folder and output; its namespace of processes ends with the first of them."""
    folder.mkdir()
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
    script = HOST.format(name=name, folder=folder, command=command.replace("per_node 4", "per_node 1"))
    namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = ["ip", "netns", "exec", name, *namespaces, "sh", "-ec", script]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(words, cwd=HERE, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def both(names: list[str], scratch: Path, flags: str):
    """The commands of docs/operations.md for two machines, a process each."""
    one, other = (f"{command} {flags}" for command in COMMANDS)
    with running(names[0], scratch / "first", one) as first:
        with running(names[1], scratch / "second", other) as second:
            yield first, second


def test_two_hosts_learn_what_one_does(names, tmp_path):
    flags = f"{FLAGS} --steps 4"
    with both(names, tmp_path, flags) as processes:
        codes = [process.wait(timeout=300) for process in processes]
    assert codes == [0, 0], (tmp_path / "first/log").read_text()[-3000:]
    done = run("train.py", *flags.split(), "--output_dir", tmp_path / "alone", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert differences(tmp_path / "first/run", tmp_path / "alone") == EQUAL
    assert len(read_metrics(tmp_path / "alone")) == 5
    assert not (tmp_path / "second/run").exists()


def test_a_host_that_goes_ends_the_other_one(names, tmp_path):
    metrics = tmp_path / "first/run/metrics.jsonl"
    with both(names, tmp_path, f"{FLAGS} --steps 400") as (first, second):
        wait_for(lambda: count_lines(metrics) > 2, first)
        second.kill()
        assert first.wait(timeout=60) == 1
    said = (tmp_path / "first/log").read_text()
    assert said.count("train.py: another rank ended") == 1, said[-3000:]
