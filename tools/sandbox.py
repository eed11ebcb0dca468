"""Runs Python that a model wrote, so that it can neither outlive, exhaust, reach nor read what it should not.

`run_python` starts this file as a supervisor. It gives the program an environment without the trainer's variables,
limits on CPU time, memory, files and processes, a filter that refuses sockets and other calls, a user of its own where
the trainer is root, and, where Linux allows it, namespaces: there the program sees no process but its own, and no files
but Python, the system's libraries and an empty folder; and nothing that it starts survives it.

The variable SANDBOX says how: `namespaces`, and nothing less; `plain`, without them; or a command such as "bwrap ..."
that gets the program's as its last words, and contains it in place of namespaces and filter. Without it namespaces are
tried, and then, with a warning, `plain`. There Landlock keeps a program to the same files, if the kernel has it; if
not, it can read what everyone on the machine can read. It can fill the disk in any case, and where the trainer is not
root, change the modes of the trainer's files. Nowhere is it kept from measuring time or using bugs of the kernel.
"""
import ctypes
import errno
import functools
import os
import resource
import selectors
import shlex
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress

NEW_NAMESPACES = 0x20000000 | 0x40000000 | 0x08000000 | 0x00020000      # of processes, network, IPC and mounts
NEW_USER, ANY_NEW = 0x10000000, 0x7E020000
DEATH_SIGNAL, DUMPABLE, FILTER, NO_NEW_PRIVILEGES, SUBREAPER = 1, 4, 22, 38, 36     # for prctl
READ_ONLY, NO_SUID, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18     # for mount
SEEN = ("/bin", "/lib", "/lib64", "/usr/bin", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom",
        sys.base_prefix)        # what a program sees of this machine's files
FIRST_USER = 2**20              # programs get user numbers from here on, where the trainer is root
MEMORY, FILE, PROCESSES, FILES = 2**30, 2**24, 32, 64       # bytes, bytes, and counts: what a program may have
OUTPUT = 2**16                                              # bytes of output that are read; then it is ended
GRACE = 5.0                                                 # seconds to end a program in
NAMESPACES, PLAIN = ["namespaces"], ["plain"]
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}      # which number of REFUSED, and the kernel's name
REFUSED = {     # system calls that a program is not allowed: for network, shared memory, keys, other processes, mounts
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425), "shmget": (29, 194),
    "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "memfd_create": (319, 279), "add_key": (248, 217),
    "memfd_secret": (447, 447), "request_key": (249, 218), "keyctl": (250, 219), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "chroot": (161, 51), "pivot_root": (155, 41), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "syslog": (103, 116)}
CLONE, CLONE3 = (56, 220), 435
libc = ctypes.CDLL(None, use_errno=True)


def run_python(code: str, timeout_s: float = 5.0, stdin: str = "") -> str:
    """What a program prints, standard error included, cut off at 64 kB; how it ended, if that was not by itself.

    Raises OSError where no program can run at all, rather than to call every program wrong.
    """
    return run(code, timeout_s, stdin, way(os.environ.get("SANDBOX", "")))


@functools.cache
def way(asked: str) -> list[str]:
    """How programs run: what SANDBOX asks for, or the first of NAMESPACES and PLAIN in which one gets through."""
    for words in [shlex.split(asked)] if asked else [NAMESPACES, PLAIN]:
        said = run("print(6 * 7)", 60.0, "", words)
        if said == "42\n":
            if words == PLAIN and not asked:
                warnings.warn(f"{__file__}: no namespaces on this machine; its first lines say what that leaves open")
            return words
    raise OSError(f"no program can run in the sandbox: {said.strip()}")


def run(code: str, timeout_s: float, stdin: str, words: list[str]) -> str:
    """run_python in one of the ways."""
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="sandbox-") as outer:
        folder = f"{outer}/folder"              # the program's; it cannot put a link in its place, as outer is not
        os.mkdir(folder)
        os.chmod(outer, 0o711)
        for path, text in ((f"{folder}/program.py", code), (f"{outer}/stdin", stdin)):
            with open(path, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        with open(f"{outer}/stdin", "rb") as given:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, folder, str(timeout_s), *words], stdin=given, cwd=folder,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment | {"HOME": folder},
                start_new_session=True)
        try:
            output, ending = read(process, timeout_s)
        finally:
            kill(process)
            if words != NAMESPACES:
                remove(folder)
    text = output.decode("utf-8", errors="replace")
    return text + (f"\n[{ending}]" if ending else "")


def read(process: subprocess.Popen, timeout_s: float) -> tuple[bytes, str]:
    """The output until its end, the deadline or the limit, and how it ended."""
    deadline, output = time.monotonic() + timeout_s, b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) < OUTPUT:
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
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
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def remove(folder: str):
    """Removes a folder, whatever a program left in it: Python's own way ends where folders are nested too deep."""
    for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
        subprocess.run([*command, folder], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)


# ------------------------------------------------ in a process of its own: the supervisor ----------------------------
def supervise(folder: str, timeout_s: float, words: list[str]):
    """Starts the program as a child, waits for it, and leaves nothing of it behind."""
    libc.prctl(SUBREAPER, 1, 0, 0, 0)           # whoever loses its parent becomes a child of ours
    user = FIRST_USER + os.getpid() if os.getuid() == 0 else None       # its processes are counted apart from others'
    finish = functools.partial(end, None if words == NAMESPACES else user)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: finish(0))
    signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE)     # for a trainer that was killed
    os.umask(0o022)
    if user:
        for path in (folder, f"{folder}/program.py"):
            os.chown(path, user, user)
    if words == NAMESPACES:
        enter_namespaces(user)
    program = os.fork()
    if program == 0:
        become_program(folder, timeout_s, user, words)
    while True:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            finish(os.waitstatus_to_exitcode(status) % 256)
        running = descendants(os.getpid())
        if len(running) > 1 and sum(map(memory, running)) > MEMORY:     # one has its limit; this is for all together
            finish(128 + signal.SIGKILL)
        time.sleep(0.02)


def enter_namespaces(user: int | None):
    """New namespaces for the children of this process. Raises OSError where the kernel has none for us."""
    if libc.unshare(NEW_NAMESPACES) == 0:
        return
    if user:                    # root in a container: as another user it can have namespaces below one of its own
        become_user(user)
    user, group = os.getuid(), os.getgid()
    check(libc.unshare(NEW_NAMESPACES | NEW_USER), "unshare")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def become_user(user: int):
    """Gives up being root, for good."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    libc.prctl(DUMPABLE, 1, 0, 0, 0)            # or /proc/self would still be root's


def check(result: int, name: str):
    """Raises OSError if a call of the system has failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), name)


def become_program(folder: str, timeout_s: float, user: int | None, words: list[str]):
    """Gives up what a program does not need, and becomes it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")                      # the first to go where the machine runs out of memory
    if words == NAMESPACES:
        change_root(folder)
    if user and os.getuid() == 0:
        become_user(user)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if words == PLAIN:
        keep_to(folder)
    limits = {resource.RLIMIT_CPU: int(timeout_s) + 1, resource.RLIMIT_AS: MEMORY, resource.RLIMIT_FSIZE: FILE,
              resource.RLIMIT_NPROC: PROCESSES, resource.RLIMIT_NOFILE: FILES, resource.RLIMIT_CORE: 0}
    for limit, value in limits.items():
        highest = resource.getrlimit(limit)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(limit, (value, value))
    python = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    command = [python, "-I", "-B", "program.py"]
    if words in (NAMESPACES, PLAIN):
        refuse_calls()
        os.execv(python, command)
    os.execvp(words[0], words + command)


def change_root(folder: str):
    """Leaves of all files only those of SEEN, read-only, and a folder with a copy of the program, in memory."""
    root = f"{folder}/root"
    os.mkdir(root)
    mount(None, "/", None, PRIVATE | RECURSIVE)         # what follows stays in this namespace
    mount("none", root, "tmpfs", NO_SUID, f"size={MEMORY // 4},nr_inodes=10000,mode=755")
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
            kept = os.statvfs(place).f_flag & 0xF       # read-only, no set-user-ID, no devices, no programs
            mount(None, place, None, BIND | REMOUNT | READ_ONLY * (not path.startswith("/dev")) | NO_SUID | kept)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", NO_SUID)
    for path in ("/tmp", "/dev/shm"):
        os.mkdir(root + path)
        os.chmod(root + path, 0o777)
    with open(f"{folder}/program.py", "rb") as program, open(f"{root}/tmp/program.py", "wb") as copy:
        copy.write(program.read())
    os.chroot(root)
    os.chdir("/tmp")
    os.environ["HOME"] = "/tmp"


def mount(source, place, kind, flags, options=None):
    """mount(2). Raises OSError."""
    arguments = [text and text.encode() for text in (source, place, kind, options)]
    check(libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]), f"mount {place}")


def keep_to(folder: str):
    """Landlock, where the kernel has it: opens nothing but SEEN, to read, and the folder; signals nobody outside."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    anything = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1         # rights that this version knows
    tcp, scopes = 3 * (version >= 4), 3 * (version >= 6)        # no ports; no abstract sockets and signals outside
    ruleset = libc.syscall(444, struct.pack("QQQ", anything, tcp, scopes), ctypes.c_size_t(24), 0)
    check(ruleset, "landlock_create_ruleset")
    read_directory, read_file, write_file, execute = 8, 4, 2, 1
    for path in filter(os.path.exists, (*SEEN, folder)):
        rights = write_file | read_file if path.startswith("/dev") else read_file | execute
        if os.path.isdir(path):
            rights = anything if path == folder else rights | read_directory
        file = os.open(path, os.O_PATH)
        check(libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, file), 0), "landlock_add_rule")
        os.close(file)
    check(libc.syscall(446, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def refuse_calls():
    """A filter in the kernel (seccomp) that answers the calls of REFUSED, and any for namespaces, with an error."""
    if os.uname().machine not in MACHINES:
        return
    column, machine = MACHINES[os.uname().machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    steps = [(load, 0, 0, 4), (equal, 1, 0, machine), (answer, 0, 0, refuse),   # other machines' calls: 32 bits
             (load, 0, 0, 0), (at_least, 0, 1, 1 << 30), (answer, 0, 0, refuse)]        # x32, which has other numbers
    for numbers in REFUSED.values():
        steps += [(equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    steps += [(equal, 0, 1, CLONE3), (answer, 0, 0, unknown)]       # its flags are out of sight; libc then takes clone
    steps += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (any_bit, 0, 1, ANY_NEW), (answer, 0, 0, refuse)]
    steps += [(answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    check(libc.prctl(FILTER, 2, program, 0, 0), "seccomp")


def end(user: int | None, code: int):
    """Kills all processes of a user, and all descendants, again and again until there are none, and ends."""
    if user:
        killer = os.fork()
        if killer == 0:
            try:
                os.setuid(user)
                os.kill(-1, signal.SIGKILL)     # all at once: a fork bomb is never quicker
            finally:
                os._exit(0)
        os.waitpid(killer, 0)
    while True:
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:               # none is left
            os._exit(code)
        time.sleep(0.001)


def descendants(ancestor: int) -> list[int]:
    """The processes below one, zombies too: of this namespace and of those inside it."""
    found = [ancestor]
    for pid in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    found += map(int, file.read().split())
    return found[1:]


def memory(pid: int) -> int:
    """Bytes of memory of a process; what it shares with others counts in parts."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    return 0


if __name__ == "__main__":
    supervise(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
