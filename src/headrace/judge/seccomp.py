"""The filter of system calls of the sandbox, as a program for the kernel's filter machine (classic BPF).

Refused calls fail with EPERM. `clone3` fails with ENOSYS, so that libraries take `clone`, whose flags can be read.
Calls of another architecture kill the process.
"""

from __future__ import annotations

import platform
import struct

# name: number on x86-64, on 64-bit ARM; None where there is no such call
_ALWAYS: dict[str, tuple[int | None, int | None]] = {
    # other processes' memory and descriptors
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    # large pieces of the kernel that no solution needs
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "lookup_dcookie": (212, 18),
    # memory that no limit of a process counts
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semop": (65, 193),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "mq_open": (240, 180),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
}

# Where the program is not in namespaces of its own: what could reach processes and files of the same user.
_WITHOUT_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    # Landlock does not cover what changes a file without opening it
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "setxattrat": (463, 463),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
    "inotify_add_watch": (254, 27),
    # an open file in a message is in no process: it would not be counted
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
}

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {"x86_64": (56, 435, 41, 72, 16, 302), "aarch64": (220, 435, 198, 25, 29, 261)}
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEWNS, CGROUP, UTS, IPC, USER, PID, NET, TIME
_SOCKET_FAMILIES = (1, 2, 10)  # unix, IPv4, IPv6: the families that a network namespace holds
_OWNER_COMMANDS = (8, 10, 15)  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX send signals to any process of the user
_IOCTLS = (0x5412, 0x541C, 0x8901, 0x8902)  # TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP

_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Row = tuple[int, int, int, int]


def _load(offset: int) -> Row:
    return (0x20, 0, 0, offset)


def _end(result: int) -> Row:
    return (0x06, 0, 0, result)


def _unless(jump: int, value: int, rows: list[Row]) -> list[Row]:
    """Rows that are done only if the comparison holds."""
    return [(jump, 0, len(rows), value), *rows]


def _if_equal(value: int, rows: list[Row]) -> list[Row]:
    return _unless(0x15, value, rows)


def _with_argument(call: int, argument: int, rows: list[Row]) -> list[Row]:
    """Rows on the low half of an argument of a call, which end with allowing it."""
    return _if_equal(call, [_load(_ARGUMENTS + 8 * argument), *rows, _end(_ALLOW)])


def call_filter(own_namespaces: bool, machine: str | None = None) -> bytes:
    """The filter's instructions for this machine; KeyError for one whose calls are not known."""
    machine = machine or platform.machine()
    clone, clone3, socket, fcntl, ioctl, prlimit = _CALLS[machine]
    rows = [_load(_ARCHITECTURE), (0x15, 1, 0, _AUDIT[machine]), _end(_KILL), _load(_NUMBER)]
    if machine == "x86_64":  # numbers of the x32 interface
        rows += _unless(0x35, 0x40000000, [_end(_KILL)])
    refused = _ALWAYS if own_namespaces else _ALWAYS | _WITHOUT_NAMESPACES
    for numbers in refused.values():
        number = numbers[0 if machine == "x86_64" else 1]
        if number is not None:
            rows += _if_equal(number, [_end(_EPERM)])
    rows += _if_equal(clone3, [_end(_ENOSYS)])
    rows += _with_argument(clone, 0, _unless(0x45, _NEW_NAMESPACES, [_end(_EPERM)]))
    rows += _with_argument(ioctl, 1, [row for code in _IOCTLS for row in _if_equal(code, [_end(_EPERM)])])
    if own_namespaces:
        allowed = [row for family in _SOCKET_FAMILIES for row in _if_equal(family, [_end(_ALLOW)])]
        rows += _if_equal(socket, [_load(_ARGUMENTS), *allowed, _end(_EPERM)])
    else:
        rows += _if_equal(socket, [_end(_EPERM)])
        rows += _with_argument(fcntl, 1, [row for code in _OWNER_COMMANDS for row in _if_equal(code, [_end(_EPERM)])])
        rows += _if_equal(prlimit, [_load(_ARGUMENTS), (0x15, 1, 0, 0), _end(_EPERM), _end(_ALLOW)])
    rows.append(_end(_ALLOW))
    return b"".join(struct.pack("HBBI", *row) for row in rows)
