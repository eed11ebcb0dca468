"""Run Python programs that a model wrote, isolated from the trainer and its machine.

`run_python(code, timeout_s)` starts this file as a supervisor process, which runs the program with

- an environment without the trainer's variables,
- limits on CPU time, memory, file size and the number of processes and open files,
- a seccomp filter that refuses sockets and other system calls,
- a user ID of its own if the trainer runs as root,
- and, where Linux permits it, new namespaces: the program then sees no processes except its own, and no files
  except Python, the system's libraries and an empty folder.

No process that the program starts survives it.

The environment variable SANDBOX selects the mode:

- `namespaces`: all of the above; OSError if namespaces are not available.
- `plain`: without namespaces. If the kernel has Landlock, it limits the program to the same files; otherwise
  the program can read what every user can read. In both cases it can fill the disk and, unless the trainer
  runs as root, change the modes of the trainer's files.
- unset: `namespaces` if they are available, otherwise `plain` with a warning.

No mode prevents a program from measuring time or from exploiting bugs in the kernel.
"""

import ctypes
import errno
import functools
import os
import resource
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress

# The limits of a program
MEMORY = 2**30  # bytes, per process and for all of its processes together
FILE_SIZE = 2**24  # bytes
MAX_PROCESSES = 32
MAX_OPEN_FILES = 64
MAX_OUTPUT = 2**16  # bytes; a program that prints more is killed

GRACE_SECONDS = 5.0  # for killing a program and everything that it started
FIRST_USER = 2**20  # programs get user IDs from here on if the trainer runs as root
SYSTEM_PATHS = "/bin /lib /lib64 /usr/bin /usr/lib /usr/lib64 /etc/ld.so.cache /dev/null /dev/urandom"
VISIBLE_PATHS = (*SYSTEM_PATHS.split(), sys.base_prefix)
NAMESPACES = "namespaces"
PLAIN = "plain"

# Options of prctl(2)
DEATH_SIGNAL = 1
DUMPABLE = 4
SECCOMP = 22
SUBREAPER = 36
NO_NEW_PRIVILEGES = 38

# Flags of clone(2) and unshare(2)
NEW_USER = 0x10000000
NEW_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000  # of mounts, IPC, process IDs, network
ANY_NAMESPACE = 0x7E020000

# Flags of mount(2)
READ_ONLY = 1
NO_SUID = 2
REMOUNT = 32
BIND = 4096
RECURSIVE = 16384
PRIVATE = 1 << 18

# Names of refused system calls, each with its numbers on x86_64 and on aarch64
REFUSED_CALLS = """
    socket 41 198             connect 42 203            bind 49 200               io_uring_setup 425 425
    shmget 29 194             semget 64 190             msgget 68 186             mq_open 240 180
    memfd_create 319 279      memfd_secret 447 447      add_key 248 217           request_key 249 218
    keyctl 250 219            ptrace 101 117            process_vm_readv 310 270  process_vm_writev 311 271
    pidfd_getfd 438 438       unshare 272 97            setns 308 268             mount 165 40
    chroot 161 51             pivot_root 155 41         open_tree 428 428         move_mount 429 429
    fsopen 430 430            bpf 321 280               perf_event_open 298 241   userfaultfd 323 282
    syslog 103 116
"""
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # which of the two numbers, AUDIT_ARCH
CLONE = (56, 220)
CLONE3 = 435
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446

libc = ctypes.CDLL(None, use_errno=True)


# ---------------------------------------------- in the trainer's process ------------------------------------
def run_python(code: str, timeout_s: float = 5.0, stdin: str = "") -> str:
    """Run a program and return its output (stdout and stderr, at most 64 kB).

    If the program was killed, or exited with a code other than 0 or 1, the last line says so in brackets.
    Raises OSError if the sandbox cannot run any program.
    """
    return run_program(code, timeout_s, stdin, choose_mode(os.environ.get("SANDBOX", "")))


@functools.cache
def choose_mode(requested: str) -> str:
    """Return the requested mode, or by default the first of NAMESPACES and PLAIN in which a program runs.

    Raises OSError if no program runs in the requested mode, or in any.
    """
    if requested not in ("", NAMESPACES, PLAIN):
        raise OSError(f"SANDBOX must be {NAMESPACES} or {PLAIN}, not {requested}")
    for mode in [requested] if requested else [NAMESPACES, PLAIN]:
        output = run_program("print(6 * 7)", 60.0, "", mode)
        if output == "42\n":
            if mode == PLAIN and not requested:
                warnings.warn(f"no namespaces are available; {__file__} says what `plain` does not prevent")
            return mode
    raise OSError(f"no program can run in the sandbox: {output.strip()}")


def run_program(code: str, timeout_s: float, stdin: str, mode: str) -> str:
    """Do what run_python does, in the given mode."""
    with tempfile.TemporaryDirectory(prefix="sandbox-") as outer:
        # The program may write to `folder`, but not to `outer`: it cannot replace `folder` by a link.
        folder = f"{outer}/folder"
        os.mkdir(folder)
        os.chmod(outer, 0o711)
        write_text(f"{folder}/program.py", code)
        write_text(f"{outer}/stdin", stdin)
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "LANG": "C.UTF-8"}
        environment |= {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}
        with open(f"{outer}/stdin", "rb") as input_file:
            supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, folder, str(timeout_s), mode],
                stdin=input_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )
        try:
            output, ending = read_output(supervisor, timeout_s)
        finally:
            stop(supervisor)
            if mode != NAMESPACES:
                remove(folder)
    text = output.decode("utf-8", errors="replace")
    return f"{text}\n[{ending}]" if ending else text


def write_text(path: str, text: str):
    with open(path, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)


def read_output(supervisor: subprocess.Popen, timeout_s: float) -> tuple[bytes, str]:
    """Read until the program ends, times out or reaches MAX_OUTPUT. Returns the output and how it ended."""
    deadline = time.monotonic() + timeout_s
    timed_out = f"ended after {timeout_s:g} s"
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(supervisor.stdout, selectors.EVENT_READ)
        while True:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or not selector.select(seconds_left):
                return output, timed_out
            chunk = os.read(supervisor.stdout.fileno(), MAX_OUTPUT - len(output))
            if not chunk:
                break
            output += chunk
            if len(output) == MAX_OUTPUT:
                return output, f"ended after {MAX_OUTPUT} bytes of output"
    try:
        code = supervisor.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return output, timed_out
    return output, "" if code in (0, 1) else f"ended with code {code}"


def stop(supervisor: subprocess.Popen):
    """End the supervisor, which kills whatever the program has started."""
    supervisor.send_signal(signal.SIGTERM)
    try:
        supervisor.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
    supervisor.stdout.close()


def remove(folder: str):
    """Remove a folder whatever a program left in it. (shutil.rmtree fails if folders nest too deeply.)"""
    for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)


# ---------------------------------------------- in the supervisor -------------------------------------------
def supervise(folder: str, timeout_s: float, mode: str):
    """Run the program as a child process, kill everything that it started, and exit with its code."""
    libc.prctl(SUBREAPER, 1, 0, 0, 0)  # a process whose parent dies becomes a child of the supervisor
    user = FIRST_USER + os.getpid() if os.getuid() == 0 else None  # MAX_PROCESSES is counted per user

    def finish(code: int):
        kill_everything(None if mode == NAMESPACES else user)
        os._exit(code)

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, lambda *_: finish(0))
    signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_SECONDS)  # in case the trainer has been killed
    os.umask(0o022)
    if user:
        os.chown(folder, user, user)
        os.chown(f"{folder}/program.py", user, user)
    if mode == NAMESPACES:
        enter_namespaces(user)
    program = os.fork()
    if program == 0:
        become_program(folder, timeout_s, user, mode)
    while True:
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            finish(os.waitstatus_to_exitcode(status) % 256)
        processes = descendants(os.getpid())
        # The kernel limits the memory of each process; the supervisor limits that of all of them together.
        if len(processes) > 1 and sum(memory_of(pid) for pid in processes) > MEMORY:
            finish(128 + signal.SIGKILL)
        time.sleep(0.02)


def enter_namespaces(user: int | None):
    """Create namespaces for this process's future children. OSError if Linux refuses."""
    if libc.unshare(NEW_NAMESPACES) == 0:
        return
    if user:  # root in a container: another user can create namespaces inside a user namespace of its own
        become_user(user)
    maps = {"uid_map": os.getuid(), "gid_map": os.getgid()}  # as they are outside
    check(libc.unshare(NEW_NAMESPACES | NEW_USER), "unshare")
    write_text("/proc/self/setgroups", "deny")
    for name, number in maps.items():
        write_text(f"/proc/self/{name}", f"{number} {number} 1")


def become_user(user: int):
    """Drop root's privileges irrevocably."""
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    libc.prctl(DUMPABLE, 1, 0, 0, 0)  # otherwise /proc/self would still belong to root


def check(result: int, name: str):
    """Raise OSError if a system call has failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), name)


def kill_everything(user: int | None):
    """Kill all processes of `user` and all descendants of this process, until none is left."""
    if user:
        killer = os.fork()
        if killer == 0:
            try:
                os.setuid(user)
                os.kill(-1, signal.SIGKILL)  # all at once, so that a fork bomb cannot be faster
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
        except ChildProcessError:  # no child is left
            return
        time.sleep(0.001)


def descendants(ancestor: int) -> list[int]:
    """Return the process IDs of all descendants, including zombies and those in inner PID namespaces."""
    found = [ancestor]
    for pid in found:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    found += [int(child) for child in file.read().split()]
    return found[1:]


def memory_of(pid: int) -> int:
    """Return the bytes of memory of a process; shared memory is divided among those that share it."""
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


# ---------------------------------------------- in the program's process ------------------------------------
def become_program(folder: str, timeout_s: float, user: int | None, mode: str):
    """Give up everything that the program must not have, then execute it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    write_text("/proc/self/oom_score_adj", "1000")  # the first to be killed if the machine runs out of memory
    if mode == NAMESPACES:
        change_root(folder)
    if user and os.getuid() == 0:
        become_user(user)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    libc.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # die with the supervisor
    if mode == PLAIN:
        restrict_files(folder)
    set_limits(timeout_s)
    refuse_calls()
    python = os.path.join(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    os.execv(python, [python, "-I", "-B", "program.py"])


def set_limits(timeout_s: float):
    limits = {
        resource.RLIMIT_CPU: int(timeout_s) + 1,
        resource.RLIMIT_AS: MEMORY,
        resource.RLIMIT_FSIZE: FILE_SIZE,
        resource.RLIMIT_NPROC: MAX_PROCESSES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        hard_limit = resource.getrlimit(limit)[1]
        if hard_limit != resource.RLIM_INFINITY:
            value = min(value, hard_limit)
        resource.setrlimit(limit, (value, value))


def change_root(folder: str):
    """Enter an in-memory file system with VISIBLE_PATHS, read-only, and a copy of the program in /tmp."""
    root = f"{folder}/root"
    os.mkdir(root)
    mount(None, "/", None, PRIVATE | RECURSIVE)  # the mounts below stay inside this namespace
    mount("none", root, "tmpfs", NO_SUID, f"size={MEMORY // 4},nr_inodes=10000,mode=755")
    for path in VISIBLE_PATHS:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.symlink(os.readlink(path), root + path)
        elif os.path.exists(path):
            show_path(path, root)
    os.mkdir(f"{root}/proc")
    mount("proc", f"{root}/proc", "proc", NO_SUID)
    for path in ("/tmp", "/dev/shm"):
        os.mkdir(root + path)
        os.chmod(root + path, 0o777)
    shutil.copyfile(f"{folder}/program.py", f"{root}/tmp/program.py")
    os.chroot(root)
    os.chdir("/tmp")
    os.environ["HOME"] = "/tmp"


def show_path(path: str, root: str):
    """Bind-mount a file or folder under a new root, read-only unless it is a device."""
    place = root + path
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        open(place, "w").close()
    mount(path, place, None, BIND | RECURSIVE)
    flags = BIND | REMOUNT | NO_SUID
    flags |= os.statvfs(place).f_flag & 0xF  # the original's read-only, nosuid, nodev and noexec must stay
    if not path.startswith("/dev"):
        flags |= READ_ONLY
    mount(None, place, None, flags)


def mount(source: str | None, place: str, kind: str | None, flags: int, options: str | None = None):
    """Call mount(2). Raises OSError."""
    source, target, kind, options = [text and text.encode() for text in (source, place, kind, options)]
    check(libc.mount(source, target, kind, ctypes.c_ulong(flags), options), f"mount {place}")


def restrict_files(folder: str):
    """Limit the program to VISIBLE_PATHS and its folder with Landlock, if the kernel has it.

    Newer versions of Landlock also refuse TCP, abstract Unix sockets, and signals to processes outside.
    """
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights_by_version = {1: 13, 2: 14, 3: 15, 4: 15}  # number of access rights; later versions have 16
    all_rights = (1 << rights_by_version.get(version, 16)) - 1
    tcp = 3 if version >= 4 else 0
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("QQQ", all_rights, tcp, scopes)
    ruleset = libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    check(ruleset, "landlock_create_ruleset")
    execute, write_file, read_file, read_directory = 1, 2, 4, 8
    for path in filter(os.path.exists, (*VISIBLE_PATHS, folder)):
        rights = read_file | execute
        if path == folder:
            rights = all_rights
        elif path.startswith("/dev"):
            rights = read_file | write_file
        elif os.path.isdir(path):
            rights |= read_directory
        file = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", rights, file)
        check(libc.syscall(LANDLOCK_ADD_RULE, ruleset, 1, rule, 0), "landlock_add_rule")
        os.close(file)
    check(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def refuse_calls():
    """Install a seccomp filter: REFUSED_CALLS and calls that create namespaces fail with an error."""
    if os.uname().machine not in MACHINES:
        return
    column, architecture = MACHINES[os.uname().machine]
    # Each instruction: operation, how many instructions to skip if true, how many if false, operand
    load, if_equal, if_at_least, if_any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow = (answer, 0, 0, 0x7FFF0000)
    refuse = (answer, 0, 0, 0x50000 | errno.EPERM)
    not_implemented = (answer, 0, 0, 0x50000 | errno.ENOSYS)
    call_number, call_architecture, first_argument = 0, 4, 16  # offsets in struct seccomp_data

    steps = [(load, 0, 0, call_architecture), (if_equal, 1, 0, architecture), refuse]  # 32-bit calls
    steps += [(load, 0, 0, call_number), (if_at_least, 0, 1, 1 << 30), refuse]  # x32 has other numbers
    for number in REFUSED_CALLS.split()[1 + column :: 3]:
        steps += [(if_equal, 0, 1, int(number)), refuse]
    # A filter cannot see the flags of clone3. Told that it does not exist, libc uses clone instead.
    steps += [(if_equal, 0, 1, CLONE3), not_implemented]
    steps += [(if_equal, 0, 3, CLONE[column]), (load, 0, 0, first_argument)]
    steps += [(if_any_bit, 0, 1, ANY_NAMESPACE), refuse, allow]

    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    check(libc.prctl(SECCOMP, 2, program, 0, 0), "seccomp")


if __name__ == "__main__":
    supervise(sys.argv[1], float(sys.argv[2]), sys.argv[3])
