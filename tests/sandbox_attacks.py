"""Programs that attack the code judger, as a table, and a driver that judges them as the user that runs it.

Run as `python sandbox_attacks.py MODE FOLDER`: prints a line of JSON, the verdict of each row by its name. All attacks
are bounded in time and size, and are aimed only at the driver, its folder and what it has started.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk_attacks import ALLOWED, DISK
from forgers import FORGERS, FORMS, HONEST

SECRET = "hunter2"  # in the driver's environment, in a file of its folder, and in its memory
HELD = ["assert attack() == 'held'"]

_ANSWERING = """
import os
def f(x):
    for fd in range(3, 64):
        try:
            os.set_blocking(fd, False)
            left = {said}
            while left: left = left[os.write(fd, left):]
        except OSError: pass
    os._exit(0)
"""
_SAID = {
    "a ratio of 0 to 0": 'bytes([0, 0, 0, 29]) + b\'["v", {"r": ["0x0", "0x0"]}]   \'',
    "an endless answer": "bytes([255] * 4) + bytes(1000)",
    "no JSON": "bytes([0, 0, 0, 9]) + bytes([255] * 9)",
}

CALLS = (
    "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def call(*values):\n    result = libc.syscall(*[ctypes.c_long(v) if isinstance(v, int) else v for v in values])\n"
    "    return result if result >= 0 else -ctypes.get_errno()\n"
)


def attack(body: str) -> str:
    """A program whose attack() is "held" if the body raises OSError, which is what a sandbox is for."""
    lines = body.replace("\n", "\n        ")
    tried = f"    try:\n        {lines}\n    except OSError: return 'held'\n"
    return f"{CALLS}def attack():\n{tried}    return 'got through'"


@dataclass(frozen=True, slots=True)
class Row:
    """A program, its tests, and the share of them that pass."""

    name: str
    program: str
    tests: list[Any]
    share: float


def forging_rows() -> list[Row]:
    rows = [Row(f"forge: {name}", code, FORMS, HONEST.get(name, 0) / len(FORMS)) for name, code in FORGERS.items()]
    rows += [Row(f"answer: {name}", _ANSWERING.format(said=said), FORMS[:4], 0.0) for name, said in _SAID.items()]
    right = "class Two(int): pass\ndef f(x): return Two(x + 1)"
    return [*rows, Row("control: a right program", right, [FORMS[0], FORMS[1], FORMS[9], FORMS[10], FORMS[21]], 1.0)]


def refused_calls(own_namespaces: bool) -> str:
    """A program that tries every system call that is refused, without arguments that could do harm."""
    from headrace.judge import seccomp

    calls = seccomp._ALWAYS if own_namespaces else seccomp._ALWAYS | seccomp._WITHOUT_NAMESPACES
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = {name: both[column] for name, both in calls.items() if both[column] is not None}
    return (
        f"{CALLS}def attack():\n    numbers = {numbers!r}\n"
        "    open_ones = [name for name, n in numbers.items() if call(n, -1, 0, 0, 0, 0, 0) != -1]\n"
        "    return ' '.join(open_ones) or 'held'"
    )


def escape_rows(mode: str, places: dict[str, Any]) -> list[Row]:
    """Reading, killing, reaching out. `places`: the driver's process, its files, a port on which it listens."""
    driver, secret, port = places["pid"], places["secret"], places["port"]
    number = {"x86_64": (56, 435, 310, 311, 41), "aarch64": (220, 435, 270, 271, 198)}[os.uname().machine]
    clone, clone3, read_memory, write_memory, _ = number
    vector = (
        "import struct\nspot = ctypes.create_string_buffer(b'overwritten')\n"
        f"here, there = (struct.pack('QQ', at, 8) for at in (ctypes.addressof(spot), {places['address']}))\n"
    )
    memory = f"file = open('/proc/{driver}/mem', 'r+b', 0)\nfile.seek({places['address']})\nfile.write(b'overwrit')"
    attacks = {
        "read the environment of the driver": f"print(open('/proc/{driver}/environ').read())",
        "read the environment of its parent": "print(open(f'/proc/{os.getppid()}/environ').read()[0])",
        "read the environment of any process": (
            f"import glob\nown = [p for p in glob.glob('/proc/[0-9]*/environ') if '/{driver}/' in p]\n"
            f"if not any({SECRET!r} in open(path).read() for path in own): raise OSError"
        ),
        "read the memory of the driver": f"open('/proc/{driver}/mem', 'rb').seek({places['address']})",
        "write the memory of the driver": memory,
        "process_vm_readv": vector + f"if call({read_memory}, {driver}, here, 1, there, 1, 0) < 0: raise OSError",
        "process_vm_writev": vector + f"if call({write_memory}, {driver}, here, 1, there, 1, 0) < 0: raise OSError",
        "ptrace": f"if libc.ptrace(16, {driver}, 0, 0) != 0: raise OSError",
        "read a private file": f"open({secret!r}).read()",
        "list the folder of the driver": f"os.listdir({str(Path(secret).parent)!r})",
        "write into the folder of the driver": f"open({secret + '.planted'!r}, 'w').write('x')",
        "truncate a file of the driver": f"os.truncate({secret!r}, 0)",
        "remove a file of the driver": f"os.unlink({secret!r})",
        "rename a file of the driver": f"os.rename({secret!r}, {secret + '.moved'!r})",
        "link a file of the driver": f"os.link({secret!r}, 'mine')\nopen('mine').read()",
        "follow a link to a file of the driver": f"os.symlink({secret!r}, 'there')\nopen('there').read()",
        "change the mode of a file of the driver": f"os.chmod({secret!r}, 0)",
        "change the times of a file of the driver": f"os.utime({secret!r}, (0, 0))",
        "an attribute of a file of the driver": f"os.setxattr({secret!r}, 'user.mark', b'x')",
        "leave a file in /var/tmp": f"open('/var/tmp/{places['mark']}', 'w').write('x')",
        "leave a file in /dev/shm": f"open('/dev/shm/{places['mark']}', 'w').write('x')",
        "read a password file": "open('/etc/passwd').read()",
        "kill the driver": f"os.kill({driver}, 9)",
        "stop the driver": f"os.kill({driver}, 19)",
        "kill the driver by descriptor": f"import signal\nsignal.pidfd_send_signal(os.pidfd_open({driver}), 9)",
        "renice the driver": f"os.setpriority(os.PRIO_PROCESS, {driver}, 19)",
        "pin the driver": f"os.sched_setaffinity({driver}, [0])",
        "limit the driver": f"import resource\nresource.prlimit({driver}, resource.RLIMIT_NOFILE, (8, 8))",
        "signal the driver by a pipe": (
            f"import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, {driver})\nfcntl.fcntl(r, 10, 9)\n"
            "fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC)\nos.write(w, b'x')"
        ),
        "a socket to the driver": f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)",
        "an abstract socket": f"import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{places['mark']}')",
        "a vsock": "import socket\nsocket.socket(40, socket.SOCK_STREAM)",
        "a netlink socket": "import socket\nsocket.socket(16, socket.SOCK_RAW)",
        "a packet socket": "import socket\nsocket.socket(17, socket.SOCK_RAW)",
        "a new user namespace": f"if call({clone}, 0x10000011, 0, 0, 0, 0) < 0: raise OSError\nos._exit(0)",
        "a new namespace by clone3": f"if call({clone3}, 0, 0) < 0: raise OSError",
        "run a program of the driver": f"os.execv({places['script']!r}, ['x'])",
        "gain by setuid": "os.setuid(0)",
    }
    if mode == "namespace":  # no one else is there: these reach only processes of the program itself, or nobody
        del attacks["read the environment of its parent"]
        for name in ("renice the driver", "pin the driver", "limit the driver", "signal the driver by a pipe"):
            attacks[name] = attacks[name].replace(str(driver), "99999")
    rows = [Row(f"escape: {name}", attack(body), HELD, 1.0) for name, body in attacks.items()]
    calls = Row("escape: refused system calls", refused_calls(mode == "namespace"), HELD, 1.0)
    clean = (
        "import os\ndef attack():\n    known = {'PATH', 'LANG', 'OMP_NUM_THREADS', 'HOME', 'TMPDIR'}\n"
        "    return ' '.join(set(os.environ) - known) or 'held'"
    )
    return [*rows, calls, Row("escape: the environment is clean", clean, HELD, 1.0)]


FORKS = (
    "import os, sys, time\nfor _ in range(3):\n    if os.fork() == 0:\n"
    "        try: os.setsid()\n        except OSError: pass\n"
    "        os.execv(sys.executable, ['{mark}', '-c', 'import time; time.sleep(60)'])\ntime.sleep(0.2)\n"
)


def disk_rows() -> list[Row]:
    two = ["assert f(1) == 2"]
    rows = [Row(f"disk: {name}", code, two, 0.0) for name, code in DISK.items()]
    return [*rows, Row("disk: less than is allowed", ALLOWED, two, 1.0)]


def bomb_rows(places: dict[str, Any]) -> list[Row]:
    """Too much of everything, each within what a machine survives without a sandbox, too."""
    mark = places["mark"]
    two, prints_two = ["assert f(1) == 2"], [{"input": "", "output": "2"}]
    programs: dict[str, str] = {
        "forks": "import os, time\nfor _ in range(500):\n    if os.fork() == 0: time.sleep(30)\ndef f(x): return 2",
        "forks of forks": "import os\nfor _ in range(9): os.fork()\nimport time\ntime.sleep(30)",
        "memory": "x = bytearray(2 * 10 ** 9)\ndef f(x): return 2",
        "a large file": "open('f', 'wb').write(b'x' * 10 ** 8)\ndef f(x): return 2",
        "many files": (
            "import time\nfor n in range(200):\n    with open(f'f{n}', 'wb') as file: file.write(bytes(10 ** 6))\n"
            "time.sleep(1)\ndef f(x): return 2"
        ),
        "open files": "files = [open('/dev/null') for _ in range(1000)]\ndef f(x): return 2",
        "an endless loop": "def f(x):\n    while True: pass",
        "sleep": "import time\ndef f(x): time.sleep(60); return 2",
        "deep folders": "import os\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')\ndef f(x): return 7",
        "folders without permissions": "import os\nos.makedirs('a/b/c', 0o000)\nos.mkdir('z', 0)\ndef f(x): return 7",
        "status of the launcher": (
            "import os\nfor fd in range(2, 64):\n    try: os.write(fd, b'sandbox: no')\n"
            "    except OSError: pass\nos._exit(125)"
        ),
        "closed descriptors": "import os\nos.closerange(0, 64)\ndef f(x): return 2",
        "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(x): return f(x)",
        "a fault": "import ctypes\ndef f(x): ctypes.string_at(0)",
        "a deep value": "def f(x):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
        "a value that holds itself": "def f(x):\n    x = []\n    x.append(x)\n    return x",
        "a large value": "def f(x): return list(range(10 ** 6))",
        "a large number": "def f(x): return 1 << 10 ** 7",
        "an endless generator": "def f(x):\n    while True: yield 2",
    }
    rows = [Row(f"bomb: {name}", program, two, 0.0) for name, program in programs.items()]
    floods = {
        "output": "while True: print('x' * 1000000)",
        "errors": "import sys\nwhile True: print('x' * 1000000, file=sys.stderr)",
        "descriptors": (
            "import os\nwhile True:\n    for fd in range(64):\n        try: os.write(fd, b'x' * 99999)\n"
            "        except OSError: pass"
        ),
    }
    rows += [Row(f"flood: {name}", program, [*two, *prints_two], 0.0) for name, program in floods.items()]
    left = FORKS.format(mark=mark)
    rows.append(Row("persist: processes in sessions of their own", left + "def f(x): return 2", two, 1.0))
    rows.append(Row("persist: processes after printing", left + "print(2)", prints_two, 1.0))
    return rows


def rows(mode: str, places: dict[str, Any]) -> list[Row]:
    return [*forging_rows(), *escape_rows(mode, places), *disk_rows(), *bomb_rows(places)]


def together(some: list[Row]) -> Row:
    """Several rows of one function each, as one program: starting a process takes longest."""
    parts = [row.program.replace("def attack():", f"def attack{number}():") for number, row in enumerate(some)]
    tests = [f"assert attack{number}() == 'held'" for number in range(len(some))]
    return Row("together", "\n".join(parts), tests, 1.0)


async def judge_all(mode: Any, places: dict[str, Any]) -> dict[str, Any]:
    """The verdict of each row: the share of its tests that passed, or what judging failed with."""
    from fakes import step
    from headrace.data.episode import Episode, Trajectory
    from headrace.data.task import Task
    from headrace.judge.code import CodeJudger

    judger = CodeJudger(False, timeout_s=2.0, memory_mb=256, disk_mb=16, processes=32, sandbox=mode, workers=6)

    async def verdict(row: Row) -> Any:
        episode = Episode("t", (Trajectory((step([1], [2], text=f"```python\n{row.program}\n```"),)),))
        try:
            task = Task("t", instruction="?", metadata={"tests": row.tests})
            return (await judger.judge(task, episode)).metrics["tests_passed"]
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    async def verdicts(some: list[Row]) -> list[Any]:
        if len(some) > 1 and await verdict(together(some)) == 1.0:
            return [1.0] * len(some)
        return list(await asyncio.gather(*(verdict(row) for row in some)))

    escapes = escape_rows(mode, places)
    others = [*forging_rows(), *disk_rows(), *bomb_rows(places)]
    batches = [escapes[start : start + 10] for start in range(0, len(escapes), 10)] + [[row] for row in others]
    # those that start processes themselves come after the fork bombs: the limit may be one for all of a user's
    at_once = [batch for batch in batches if not batch[0].name.startswith("persist")]
    batches = at_once + [batch for batch in batches if batch not in at_once]
    found = list(await asyncio.gather(*(verdicts(batch) for batch in at_once)))
    found += [await verdicts(batch) for batch in batches[len(at_once) :]]
    return {
        row.name: share
        for batch, shares in zip(batches, found, strict=True)
        for row, share in zip(batch, shares, strict=True)
    }


def drive(mode: str, folder: Path) -> None:
    """Judge all rows, with something to steal and to destroy around."""
    import ctypes

    mark = f"headrace-attack-{os.getpid()}"
    secret, script = folder / "secret", folder / "script"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    script.write_text("#!/bin/sh\nexit 0\n")
    script.chmod(0o755)
    memory = ctypes.create_string_buffer(SECRET.encode() + b"\0")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("\0" + mark)
        unix.listen()
        places = {"pid": os.getpid(), "secret": str(secret), "script": str(script), "port": server.getsockname()[1]}
        places |= {"address": ctypes.addressof(memory), "mark": mark}
        shares = asyncio.run(judge_all(mode, places))
    command = subprocess.run(["cat", "/dev/null"], check=True)  # the driver is as it was
    print(
        json.dumps(
            {
                "shares": shares,
                "expected": {row.name: row.share for row in rows(mode, places)},
                "user": os.getuid(),
                "intact": memory.value == SECRET.encode() and secret.read_text() == SECRET and command.returncode == 0,
                "mode": oct(secret.stat().st_mode),
                "files": sorted(path.name for path in folder.iterdir()),
                "left": [name for name in (f"/var/tmp/{mark}", f"/dev/shm/{mark}") if os.path.exists(name)],
                "processes": processes_marked(mark),
                "folders": sorted(path.name for path in Path(os.environ["TMPDIR"]).glob("headrace-sandbox-*")),
            }
        )
    )


def processes_marked(mark: str) -> int:
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes().startswith(mark.encode())
        except OSError:
            continue
    return found


if __name__ == "__main__":
    drive(sys.argv[1], Path(sys.argv[2]))
