"""Runs Python that a model wrote, so that it can neither outlive, exhaust, reach nor read what it should not.

`run_python` starts this file as a supervisor. It gives the program an environment without the trainer's variables,
limits on CPU time, memory, files and processes, a user of its own where the trainer is root, and, where Linux allows
it, namespaces: there the program sees no network, no process but its own, and no files but Python, the system's
libraries and an empty folder; and nothing that it starts survives it.

What it does not do: the program can measure time and use bugs of the kernel. Where the kernel refuses namespaces (some
containers do), it has the network and can read what everyone on the machine can read; `contained()` says which it is.
"""
import ctypes
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time

NEW_NAMESPACES = 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000      # of processes, network, IPC and mounts
NEW_USER = 0x10000000
DEATH_SIGNAL, NO_NEW_PRIVILEGES, SUBREAPER = 1, 38, 36      # for prctl
READ_ONLY, NO_SUID, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18     # for mount
SEEN = ("/bin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom",
        sys.base_prefix)        # what a program sees of this machine's files
FIRST_USER = 2**20              # programs get user numbers from here on, where the trainer is root
MEMORY, FILE, PROCESSES, FILES = 2**30, 2**24, 32, 64       # bytes, bytes, and counts: what a program may have
OUTPUT = 2**16                                              # bytes of output that are read; then it is ended
libc = ctypes.CDLL(None, use_errno=True)


def run_python(code: str, timeout_s: float = 5.0, stdin: str = "") -> str:
    """What a program prints, standard error included, cut off at 64 kB; how it ended, if that was not by itself."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        os.chmod(folder, 0o777)
        with open(f"{folder}/program.py", "w", encoding="utf-8", errors="replace") as file:
            file.write(code)
        with open(f"{folder}/stdin", "w", encoding="utf-8", errors="replace") as file:
            file.write(stdin)
        with open(f"{folder}/stdin", "rb") as given:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, folder, str(timeout_s)], stdin=given, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, cwd=folder, env=environment | {"HOME": folder}, start_new_session=True)
        try:
            output, ending = read(process, timeout_s)
        finally:
            kill(process)
    text = output.decode("utf-8", errors="replace")
    return text + (f"\n[{ending}]" if ending else "")


def read(process: subprocess.Popen, timeout_s: float) -> tuple[bytes, str]:
    """The output until its end, the deadline or the limit, and how it ended."""
    deadline, output = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) < OUTPUT:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return output, f"ended after {timeout_s:g} s"
            part = os.read(process.stdout.fileno(), OUTPUT - len(output))
            if not part:
                break
            output += part
        else:
            return output, f"ended after {OUTPUT} bytes of output"
    try:
        code = process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return output, f"ended after {timeout_s:g} s"
    return output, "" if code in (0, 1) else f"ended with code {code}"


def kill(process: subprocess.Popen):
    """Ends the supervisor and with it everything that the program has started."""
    process.send_signal(signal.SIGTERM)         # it kills what is left, and ends
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


# ------------------------------------------------ in a process of its own: the supervisor ----------------------------
def supervise(folder: str, timeout_s: float):
    """Starts the program as a child, waits for it, and leaves nothing of it behind."""
    libc.prctl(SUBREAPER, 1, 0, 0, 0)           # whoever loses its parent becomes a child of ours
    signal.signal(signal.SIGTERM, lambda *_: finish(0))
    user = FIRST_USER + os.getpid() if os.getuid() == 0 else None       # its processes are counted apart from others'
    hidden = enter_namespaces()
    program = os.fork()
    if program == 0:
        become_program(folder, timeout_s, user, hidden)
    _, status = os.waitpid(program, 0)
    finish(os.waitstatus_to_exitcode(status) % 256)


def enter_namespaces() -> bool:
    """New namespaces for the children of this process. Whether the kernel gave them."""
    if libc.unshare(NEW_NAMESPACES) == 0:
        return True
    user, group = os.getuid(), os.getgid()
    if libc.unshare(NEW_NAMESPACES | NEW_USER):
        return False
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    return True


def contained() -> bool:
    """Whether programs have namespaces of their own on this machine."""
    process = os.fork()
    if process == 0:
        os._exit(not enter_namespaces())
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def become_program(folder: str, timeout_s: float, user: int | None, hidden: bool):
    """Gives up what a program does not need, and becomes it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hidden:
        change_root(folder)
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    limits = {resource.RLIMIT_CPU: int(timeout_s) + 1, resource.RLIMIT_AS: MEMORY, resource.RLIMIT_FSIZE: FILE,
              resource.RLIMIT_NPROC: PROCESSES, resource.RLIMIT_NOFILE: FILES, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    python = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    os.execv(python, [python, "-I", "-B", "program.py"])


def change_root(folder: str):
    """Leaves of all files only those of SEEN, read-only, and a folder with a copy of the program, in memory."""
    root = f"{folder}/root"
    os.mkdir(root)
    mount(None, "/", None, PRIVATE | RECURSIVE)         # what follows stays in this namespace
    mount("none", root, "tmpfs", NO_SUID, f"size={MEMORY // 4},mode=755")
    for path in SEEN:
        place = root + path
        if os.path.islink(path):
            os.makedirs(os.path.dirname(place), exist_ok=True)
            os.symlink(os.readlink(path), place)
        elif os.path.exists(path):
            os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
            if not os.path.isdir(path):
                open(place, "w").close()
            mount(path, place, None, BIND | RECURSIVE)
            mount(None, place, None, BIND | REMOUNT | READ_ONLY * (not path.startswith("/dev")) | NO_SUID)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", NO_SUID)
    os.mkdir(f"{root}/tmp")
    os.chmod(f"{root}/tmp", 0o777)
    with open(f"{folder}/program.py", "rb") as program, open(f"{root}/tmp/program.py", "wb") as copy:
        copy.write(program.read())
    os.chroot(root)
    os.chdir("/tmp")
    os.environ["HOME"] = "/tmp"


def mount(source, place, kind, flags, options=None):
    """mount(2). Raises OSError."""
    arguments = [text and text.encode() for text in (source, place, kind, options)]
    if libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]):
        raise OSError(ctypes.get_errno(), f"cannot mount {place}")


def finish(code: int):
    """Kills all descendants, again and again until there are none, and ends."""
    for _ in range(1000):
        children = descendants(os.getpid())
        if not children:
            break
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.001)
    os._exit(code)


def descendants(ancestor: int) -> list[int]:
    """All processes below one, zombies too: of this namespace and of those inside it."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            pass
    found = [ancestor]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


if __name__ == "__main__":
    supervise(sys.argv[1], float(sys.argv[2]))
