"""What starts a program in the sandbox. Run as a script, with nothing of Headrace imported: `launch.py SPEC`.

SPEC is marshalled, in hexadecimal (see `Sandbox._spec`). In mode "namespace" the process makes namespaces of its own
(mounts, processes, network) and a root folder that holds the interpreter and nothing else; three processes stand in a
row: this one, the first process of the new process namespace (when it ends, the kernel kills all others in it), and
the program. In the other modes this process stays as supervisor of the program: it adopts whatever the program starts,
watches its folder, and kills all of it when the program or Headrace ends. In mode "seccomp" the program is under
Landlock.

The pipe `status` gets "+" right before the program starts, and why, if it cannot be started; the program has no end of
it. In both modes the program is under a filter of system calls (`seccomp.py`), whose instructions are in SPEC.
"""

from __future__ import annotations

import ctypes
import marshal
import os
import resource
import select
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any
else:  # and neither json nor platform: importing takes most of the time of a launch
    import _signal as signal

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVS = 1, 4, 22, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NOBODY = 65534
_WORK = "/work"

_SET_SUBREAPER, _SET_KEEPCAPS, _AMBIENT, _AMBIENT_RAISE, _READ_SEARCH = 36, 8, 47, 2, 2
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # Landlock, on every architecture
_READ, _FILE_WRITE = 0b1101, 0x4002  # execute, read files and folders; write and truncate a file
_WATCH_S = 0.05

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if value is None else value.encode() for value in (source, target, kind, options)]
    _checked(_libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _die_with(parent: int) -> None:
    """SIGKILL when the parent ends, however it ends."""
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _is_hung_up(pipe: int) -> bool:
    """Whether no one holds the other end any more."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


def _bind(path: str, root: str) -> None:
    """The same path under the new root, read-only."""
    target = root + path
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    _mount(path, target, None, _BIND | _REC)
    device = path.startswith("/dev/")
    # the flags that the mount has already must stay, or the kernel refuses
    kept = os.statvfs(target).f_flag & (_NOSUID | _NODEV | 8 | 1024 | 2048)
    _mount("none", target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | kept | (0 if device else _NODEV))


def _new_root(root: str, paths: list[str], megabytes: int) -> None:
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, f"size={megabytes}m,nr_inodes=10000,mode=755")
    for path in paths:
        _bind(path, root)
    os.makedirs(root + _WORK, exist_ok=True)  # the interpreter may be installed under it, or under /tmp
    os.chmod(root + _WORK, 0o777)
    if not os.path.lexists(f"{root}/tmp"):
        os.symlink(_WORK, f"{root}/tmp")
    os.mkdir(f"{root}/proc")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | 8)
    os.chdir(root)
    number = _PIVOT_ROOT[os.uname().machine]
    _checked(_libc.syscall(ctypes.c_long(number), b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", 2), "umount of the old root")
    os.chdir(_WORK)


def _make_namespaces(as_root: bool) -> None:
    user, group = os.getuid(), os.getgid()
    flags = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    _checked(_libc.unshare(flags if as_root else flags | _NEWUSER), "unshare")
    if not as_root:  # not 0 inside: the program loses every capability when it is started
        for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(_NOBODY, _NOBODY, _NOBODY)
    os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _limit(limits: dict[str, int]) -> None:
    for name, most in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(number, (most, most))


def _filter_calls(instructions: bytes) -> None:
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions) // 8, ctypes.addressof(buffer)))
    _checked(_libc.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def _landlock_version() -> int:
    """0 without Landlock."""
    return max(_libc.syscall(ctypes.c_long(_CREATE_RULESET), None, ctypes.c_size_t(0), 1), 0)


def _new_ruleset(version: int, readable: list[str], folder: str) -> int:
    """Read the interpreter and the system's libraries, write in the folder, and nothing else; no signals to others."""
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # by version: files only; with TCP; with abstract unix sockets and signals
    attributes = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    number = ctypes.c_long(_CREATE_RULESET)
    ruleset = _libc.syscall(number, attributes, ctypes.c_size_t(len(attributes)), 0)
    _checked(min(ruleset, 0), "Landlock")
    for path in [*readable, folder]:
        access = files if path == folder else _READ if os.path.isdir(path) else (_READ & ~8) | _FILE_WRITE
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & files, opened)
        _checked(_libc.syscall(ctypes.c_long(_ADD_RULE), ruleset, 1, rule, 0), f"Landlock rule for {path}")
        os.close(opened)
    return ruleset


def _readable_by_all(path: str) -> bool:
    while os.stat(path).st_mode & 0o001:
        if path == "/":
            return True
        path = os.path.dirname(path)
    return False


def _drop_root(spec: dict[str, Any], restricted: bool) -> None:
    """Become nobody. An interpreter in a private folder (of root) stays readable, which takes a capability.

    Landlock holds for that, too: nothing else becomes readable by it.
    """
    if all(_readable_by_all(path) for path in (spec["command"][0], *spec["paths"])):
        _become_nobody()
        return
    if not restricted:
        raise PermissionError(f"user {_NOBODY} may not read {spec['command'][0]}, and there is no Landlock")
    _prctl(_SET_KEEPCAPS, 1)
    _become_nobody()
    kept = struct.pack("6I", *[1 << _READ_SEARCH] * 3, 0, 0, 0)
    _checked(_libc.capset(struct.pack("Ii", 0x20080522, 0), kept), "capset")
    _checked(_libc.prctl(_AMBIENT, _AMBIENT_RAISE, ctypes.c_ulong(_READ_SEARCH), 0, 0), "ambient capability")


def _be_killed_first() -> None:
    """When memory runs out, the kernel kills this process before any of the run."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # no reason not to run it
        pass


def _start(spec: dict[str, Any]) -> None:
    """Become the program, under its limits."""
    _limit(spec["limits"])
    _prctl(_NO_NEW_PRIVS, 1)
    if spec["filter"]:
        _filter_calls(bytes.fromhex(spec["filter"]))
    os.write(spec["status"], b"+")
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def _start_without_namespaces(spec: dict[str, Any], as_root: bool) -> None:
    """Become the program, without namespaces of its own."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _prctl(_SET_PDEATHSIG, signal.SIGKILL)
    _be_killed_first()
    if spec["mode"] == "seccomp":
        version = _landlock_version()
        if not version and spec["needs_landlock"]:
            raise OSError("Landlock is not available (it takes Linux 5.13 or later, with it enabled)")
        ruleset = _new_ruleset(version, spec["paths"], spec["root"]) if version else None
        if as_root:
            _drop_root(spec, ruleset is not None)
            _prctl(_SET_PDEATHSIG, signal.SIGKILL)  # forgotten when the user changes
        if ruleset is not None:
            _prctl(_NO_NEW_PRIVS, 1)
            _checked(_libc.syscall(ctypes.c_long(_RESTRICT_SELF), ruleset, 0), "Landlock")
            os.close(ruleset)
    _start(spec)


def _kill_children() -> None:
    """Whatever the program has started was adopted by this process; new ones come for as long as an old one lives."""
    for _ in range(5000):
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            for child in file.read().split():
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return
    os.killpg(0, signal.SIGKILL)


def _supervise(spec: dict[str, Any], as_root: bool) -> int:
    """Start the program, wait for it, and leave nothing of it behind."""
    sys.path.append(os.path.dirname(__file__))  # the last one: this folder has modules named as Python's own
    from disk_watch import DiskWatch  # type: ignore[import-not-found]

    _prctl(_SET_SUBREAPER, 1)
    signals = (signal.SIGCHLD, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    running, held = os.pipe()  # closed in the program when it starts
    program = os.fork()
    if program == 0:
        _start_without_namespaces(spec, as_root)
    os.close(spec["status"])
    os.close(held)
    user = _NOBODY if as_root and spec["mode"] == "seccomp" else os.geteuid()
    disk = DiskWatch(spec["root"], spec["disk_mb"] << 20, user)
    _prctl(_SET_DUMPABLE, 0)
    _prctl(_SET_PDEATHSIG, signal.SIGTERM)  # a signal that can be waited for, not one that ends this process
    status = -signal.SIGKILL
    while os.getppid() == spec["parent"]:
        got = signal.sigtimedwait(signals, _WATCH_S)
        if got is not None and got.si_signo == signal.SIGTERM:
            break
        ended, how = os.waitpid(-1, os.WNOHANG)
        while ended not in (0, program):
            ended, how = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            status = os.waitstatus_to_exitcode(how)
            break
        if _is_hung_up(running) and disk.is_over():
            break
    _kill_children()
    return status & 0xFF


def _first_process(spec: dict[str, Any], as_root: bool) -> int:
    """In the new process namespace: starts the program, waits for it, and ends; the kernel kills what is left."""
    _new_root(spec["root"], spec["paths"], spec["disk_mb"])
    program = os.fork()
    if program == 0:
        if as_root:
            _become_nobody()
            _libc.unshare(_NEWUSER)  # for a count of processes of its own; the limits hold without it, too
        _start(spec)
    os.close(spec["status"])
    while True:
        ended, status = os.wait()
        if ended == program:
            return os.waitstatus_to_exitcode(status) & 0xFF


def _in_namespaces(spec: dict[str, Any], as_root: bool) -> int:
    _be_killed_first()
    _make_namespaces(as_root)
    _die_with(spec["parent"])  # forgotten in a new user namespace
    alive, held = os.pipe()
    first = os.fork()
    if first == 0:
        os.close(held)
        _prctl(_SET_PDEATHSIG, signal.SIGKILL)
        if _is_hung_up(alive):  # ended before that; the new namespace does not know its number
            os._exit(1)
        _prctl(_SET_DUMPABLE, 0)
        os._exit(_first_process(spec, as_root))
    os.close(spec["status"])
    return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF


def main() -> None:
    """Start what the specification says."""
    spec = marshal.loads(bytes.fromhex(sys.argv[1]))
    os.set_inheritable(spec["status"], False)
    try:
        _die_with(spec["parent"])
        for group in spec["cgroups"]:
            with open(f"{group}/cgroup.procs", "w") as file:
                file.write("0")
        run = _in_namespaces if spec["mode"] == "namespace" else _supervise
        os._exit(run(spec, os.geteuid() == 0))
    except BaseException as error:
        os.write(spec["status"], f"{error}"[:500].encode())
        os._exit(125)


if __name__ == "__main__":
    main()
