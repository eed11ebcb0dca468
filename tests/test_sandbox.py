"""Tests of extras/sandbox.py: honest programs run, hostile ones get nothing and leave nothing."""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from extras import sandbox

ROOT = Path(__file__).parent.parent
STRANGER = 64999  # a user ID that nobody has
FILES = ("extras/sandbox.py", "bench/hostile.py", "assets/hostile_programs.txt", "rewards.py")
FILL_THE_DISK = {"many files", "many empty files"}  # contained by namespaces only


class Copy:
    """A copy of the sandbox that other users can read, too. Calling it runs Python in its folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.chmod(0o755)
        for name in FILES:
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        self.stranger = {"user": STRANGER, "group": STRANGER, "extra_groups": []} if os.getuid() == 0 else {}
        self.python = self.find_python()

    def find_python(self) -> str:
        """Return a Python that the stranger can run; one in root's home is out of its reach."""
        for python in (sys.executable, "/usr/bin/python3"):
            with suppress(OSError):
                subprocess.run([python, "-c", ""], check=True, **self.stranger)
                return python
        pytest.skip("no Python that other users can run")

    def run(self, program: str, as_stranger: bool = False, prefix=()) -> subprocess.CompletedProcess:
        for path in (self.folder, *self.folder.rglob("*")) if as_stranger else ():
            os.chown(path, self.stranger.get("user", -1), self.stranger.get("group", -1))
        options = {"cwd": self.folder} | (self.stranger if as_stranger else {})
        command = [*prefix, self.python, "-B", "-c", program]
        return subprocess.run(command, capture_output=True, text=True, **options)

    def run_hostile_programs(self, mode: str, only=("",), as_stranger: bool = False) -> dict:
        """Return what bench.hostile finds in one mode. Skips the test if it is not available."""
        if mode == "plain" and sandbox.libc.syscall(sandbox.LANDLOCK_CREATE_RULESET, None, 0, 1) < 6:
            pytest.skip("Landlock of this kernel does not restrict signals: `plain` is not tight")
        found = f"hostile.run_programs({mode!r}, {list(only)!r})"
        run = self.run(f"import json; from bench import hostile; print(json.dumps({found}))", as_stranger)
        if run.returncode and mode == "namespaces" and "OSError: no program can run" in run.stderr:
            pytest.skip("no namespaces here")
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)


@pytest.fixture
def copy(monkeypatch):
    monkeypatch.delenv("SANDBOX", raising=False)
    folder = tempfile.mkdtemp(prefix="everyones-")  # pytest's own folders are closed to other users
    yield Copy(Path(folder))
    shutil.rmtree(folder)


# ---------------------------------------------- hostile programs --------------------------------------------
ESSENTIAL = [  # at least one program per kind of protection
    "fork bomb that sheds its parents",
    "memory bomb of several processes",
    "memory that no process holds",
    "endless errors",
    "a large file",
    "deaf to signals",
    "a grandchild that holds the output open",
    "kills",
    "reads its environment",
    "reads everyone's environment",
    "reads the checkpoint",
    "TCP",
    "sockets through 32-bit calls",
    "links that whoever removes its folder might follow",
    "folders nested too deep to remove",
    "becomes root",
    "namespaces of its own",
]


@pytest.mark.parametrize(
    "mode, as_stranger, only",
    [("namespaces", False, ESSENTIAL), ("plain", True, ESSENTIAL)]
    + [
        pytest.param(mode, as_stranger, [""], marks=pytest.mark.slow)
        for mode in ("namespaces", "plain")
        for as_stranger in (False, True)
    ],
)
def test_hostile_programs_get_nothing_and_leave_nothing(copy, mode, as_stranger, only):
    found = copy.run_hostile_programs(mode, only, as_stranger)
    verdicts = found["verdicts"]
    assert all(any(part in name for name in verdicts) for part in only)
    assert only == ESSENTIAL or len(verdicts) == (83 if platform.machine() == "x86_64" else 78)
    allowed = FILL_THE_DISK if mode == "plain" else set()
    wrong = {name: verdict for name, verdict in verdicts.items() if verdict != "yes" and name not in allowed}
    assert (wrong, found["left"], found["late"]) == ({}, [], [])


@pytest.mark.parametrize(
    "line, weaker_line, program",
    [
        ("env=environment,", "env=os.environ | environment,", "reads its environment"),
        ("    refuse_calls()\n", "", "memory that no process holds"),
        ("        change_root(folder)\n", "        pass\n", "reads the checkpoint"),
        ("        resource.RLIMIT_FSIZE: FILE_SIZE,\n", "", "a large file"),
    ],
)
def test_a_weaker_sandbox_is_found_out(copy, line, weaker_line, program):
    path = copy.folder / "extras/sandbox.py"
    source = path.read_text()
    assert source.count(line) == 1
    path.write_text(source.replace(line, weaker_line))
    found = copy.run_hostile_programs("namespaces", [program])
    assert found["verdicts"] == {program: "no"}


# ---------------------------------------------- honest programs ---------------------------------------------
def test_honest_programs_run():
    assert sandbox.run_python("print(sum(map(int, input().split())))", 30, "2 3\n") == "5\n"
    assert sandbox.run_python(r"import sys; print('é\0', file=sys.stderr); sys.exit(1)", 30) == "é\0\n"
    assert sandbox.run_python("\0", 30).endswith("source code cannot contain null bytes\n")
    assert sandbox.run_python("\udcff = 1", 30).rstrip().endswith("SyntaxError: invalid syntax")
    program = (
        "import asyncio, os, subprocess, tempfile, multiprocessing.dummy as threads\n"
        "asyncio.run(asyncio.sleep(0)); tempfile.TemporaryFile()\n"
        "print(threads.Pool(4).map(abs, [-1, 2]), subprocess.run('echo 3', shell=True, stdout=1).returncode)"
    )
    old = os.umask(0o077)
    try:
        assert sandbox.run_python(program, 30) == "3\n[1, 2] 0\n"
    finally:
        os.umask(old)


def test_the_output_says_how_a_program_ended():
    assert sandbox.run_python("import time; time.sleep(60)", 1.5) == "\n[ended after 1.5 s]"
    assert sandbox.run_python("import os; os._exit(3)", 30) == "\n[ended with code 3]"
    output = sandbox.run_python("while True: print('x' * 99)", 30)
    assert output.endswith("\n[ended after 65536 bytes of output]") and len(output) < 65600


# ---------------------------------------------- modes -------------------------------------------------------
def test_a_mode_is_chosen_that_works(monkeypatch):
    choose = sandbox.choose_mode.__wrapped__  # without its cache
    monkeypatch.setattr(sandbox, "run_program", lambda *call: "42\n" if call[-1] == "plain" else "refused\n")
    with pytest.warns(UserWarning, match="no namespaces are available"):
        assert choose("") == "plain"
    with pytest.raises(OSError, match="no program can run in the sandbox: refused"):
        choose("namespaces")
    with pytest.raises(OSError, match="SANDBOX must be namespaces or plain, not firejail"):
        choose("firejail")
    monkeypatch.setenv("SANDBOX", "plain")
    assert sandbox.run_python("") == "42\n"


def test_root_in_a_container_gets_namespaces_as_another_user(copy):
    if os.getuid() or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    as_user = ["setpriv", "--reuid", str(STRANGER), "--clear-groups", "unshare", "-rn", "true"]
    if subprocess.run(as_user, capture_output=True).returncode:
        pytest.skip("users cannot create namespaces here")
    code = "from extras import sandbox; print(sandbox.run_python('import os; print(os.getuid())', 30))"
    run = copy.run(code, prefix=["env", "SANDBOX=namespaces", "setpriv", "--bounding-set=-sys_admin"])
    assert int(run.stdout) > sandbox.FIRST_USER, run.stderr


def test_a_program_ends_with_its_trainer(copy):
    call = (
        "from extras import sandbox; sandbox.choose_mode(''); print(flush=True)\n"
        "sandbox.run_python('import time; time.sleep(600)', 2)"
    )
    environment = os.environ | {"TMPDIR": str(copy.folder)}  # the folder of a killed trainer's program stays
    command = [sys.executable, "-c", call]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment) as trainer:
        trainer.stdout.readline()
        below = []
        while len(below) < 2:  # the supervisor and the program
            below = psutil.Process(trainer.pid).children(recursive=True)
            time.sleep(0.01)
        trainer.kill()
    assert psutil.wait_procs(below, 60)[1] == []
