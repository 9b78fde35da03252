"""Programs that keep more on disk than is allowed, where 16 MB are, and one that keeps less.

In mode "namespace" the file system of the program is full. In mode "seccomp" the supervisor counts.
"""

from __future__ import annotations

_WRITE = "import os, time\ndef write(file): file.write(bytes(4 << 20)); file.flush(); return file\n"
_WAIT = "time.sleep(1)\ndef f(x): return 2"
_PROGRAMS = {
    "deleted but open": (
        "held = []\nfor n in range(12):\n    held.append(write(open(f'f{n}', 'wb', 0)))\n    os.unlink(f'f{n}')\n"
    ),
    "without a name": "held = [write(open(os.open('.', os.O_TMPFILE | os.O_RDWR), 'wb', 0)) for _ in range(12)]\n",
    "deleted but mapped": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "for n in range(12):\n    file = write(open(f'f{n}', 'w+b', 0))\n    os.unlink(f'f{n}')\n"
        "    libc.mmap(None, 4096, 1, 1, file.fileno(), ctypes.c_long(0))\n    file.close()\n"
    ),
    "deleted, in another process": (
        "for n in range(12):\n    file = write(open('f', 'wb', 0))\n    os.unlink('f')\n"
        "    if os.fork() == 0: time.sleep(30)\n    file.close()\n"
    ),
    "deleted, of a process that hides": (
        "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n"
        "held = []\nfor n in range(12):\n    held.append(write(open(f'f{n}', 'wb', 0)))\n    os.unlink(f'f{n}')\n"
    ),
    "in deep folders": (
        "for _ in range(40): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
        "for n in range(12): write(open(f'f{n}', 'wb', 0))\n"
    ),
    "in very deep folders": (
        "for _ in range(2500): os.mkdir('d'); os.chdir('d')\nfor n in range(12): write(open(f'f{n}', 'wb', 0))\n"
    ),
    "in a folder that cannot be listed": (
        "os.mkdir('d', 0o300)\nfor n in range(12): write(open(f'd/f{n}', 'wb', 0))\n"
    ),
}
_LITTLE = (
    "held = [open(os.open('.', os.O_TMPFILE | os.O_RDWR), 'wb', 0)]\nheld[0].write(bytes(4 << 20))\n"
    "os.makedirs('a/b/c')\nopen('a/b/c/f', 'wb').write(bytes(4 << 20))\n"
)

DISK = {name: _WRITE + code + _WAIT for name, code in _PROGRAMS.items()}
ALLOWED = _WRITE + _LITTLE + _WAIT.replace("1", "0.3", 1)
