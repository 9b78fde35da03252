"""What starts a program in the sandbox. Run as a script, with nothing of Headrace imported: `launch.py SPEC`.

SPEC is JSON (see `Sandbox._spec`). In mode "namespace" the process makes namespaces of its own (mounts, processes,
network) and a root folder that holds the interpreter and nothing else; three processes stand in a row: this one,
the first process of the new process namespace (when it ends, the kernel kills all others in it), and the program.
In mode "seccomp" this process becomes the program, under a filter of system calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from typing import Any

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _NO_NEW_PRIVS = 1, 4, 22, 38
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_NOBODY = 65534
_WORK = "/work"

# architecture: audit number, and the calls that are refused
_REFUSED = {
    "x86_64": (
        0xC000003E,
        # socket, kill, ptrace, setpgid, setsid, rt_sigqueueinfo, tkill, tgkill, rt_tgsigqueueinfo, prlimit64,
        # process_vm_readv, process_vm_writev, pidfd_send_signal, io_uring_setup, pidfd_open
        (41, 62, 101, 109, 112, 129, 200, 234, 297, 302, 310, 311, 424, 425, 434),
    ),
    "aarch64": (0xC00000B7, (198, 129, 117, 154, 157, 138, 130, 131, 240, 261, 270, 271, 424, 425, 434)),
}

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
    os.mkdir(root + _WORK)
    os.chmod(root + _WORK, 0o777)
    os.symlink(_WORK, f"{root}/tmp")
    os.mkdir(f"{root}/proc")
    _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | 8)
    os.chdir(root)
    number = _PIVOT_ROOT[platform.machine()]
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


def _filter_calls() -> None:
    """A seccomp filter: refused calls fail with EPERM, those of another architecture kill the process."""
    audit, refused = _REFUSED[platform.machine()]
    rows = [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, 0x80000000), (0x20, 0, 0, 0)]
    if platform.machine() == "x86_64":  # numbers of the x32 interface
        rows += [(0x35, 0, 1, 0x40000000), (0x06, 0, 0, 0x80000000)]
    for number in refused:
        rows += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    rows.append((0x06, 0, 0, 0x7FFF0000))
    code = b"".join(struct.pack("HBBI", *row) for row in rows)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(buffer)))
    _checked(_libc.prctl(_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "seccomp")


def _become(spec: dict[str, Any]) -> None:
    """The program, under its limits."""
    _limit(spec["limits"])
    _prctl(_NO_NEW_PRIVS, 1)
    if spec["mode"] == "seccomp":
        _filter_calls()
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def _first_process(spec: dict[str, Any], as_root: bool) -> int:
    """In the new process namespace: starts the program, waits for it, and ends; the kernel kills what is left."""
    _new_root(spec["root"], spec["paths"], spec["disk_mb"])
    program = os.fork()
    if program == 0:
        if as_root:
            _become_nobody()
            _libc.unshare(_NEWUSER)  # for a count of processes of its own; the limits hold without it, too
        _become(spec)
    while True:
        ended, status = os.wait()
        if ended == program:
            return os.waitstatus_to_exitcode(status) & 0xFF


def main() -> None:
    """Start what the specification says; status 125 says that the sandbox itself could not be made."""
    spec = json.loads(sys.argv[1])
    try:
        _die_with(spec["parent"])
        as_root = os.geteuid() == 0
        if spec["mode"] == "seccomp":
            if as_root:
                _become_nobody()
                _die_with(spec["parent"])  # forgotten when the user changes
            _become(spec)
        elif spec["mode"] == "none":
            _become(spec)
        _make_namespaces(as_root)
        _die_with(spec["parent"])  # forgotten in a new user namespace, too
        alive, held = os.pipe()
        first = os.fork()
        if first == 0:
            os.close(held)
            _prctl(_SET_PDEATHSIG, signal.SIGKILL)
            if _is_hung_up(alive):  # ended before that; the new namespace does not know its number
                os._exit(1)
            _prctl(_SET_DUMPABLE, 0)
            os._exit(_first_process(spec, as_root))
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    except BaseException as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(125)


if __name__ == "__main__":
    main()
