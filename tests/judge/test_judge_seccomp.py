"""The filter of system calls, run by a small machine of its own: also for the architecture that this one is not."""

from __future__ import annotations

import struct

import pytest

from headrace.judge import seccomp


def filtered(code: bytes, audit: int, number: int, *arguments: int) -> int:
    """What the kernel's filter machine comes to."""
    data = struct.pack("IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    rows, place, held = list(struct.iter_unpack("HBBI", code)), 0, 0
    while True:
        what, if_true, if_false, value = rows[place]
        if what == 0x06:
            return value
        if what == 0x20:
            (held,) = struct.unpack_from("I", data, value)
            place += 1
            continue
        holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[what]
        place += 1 + (if_true if holds else if_false)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("own", [True, False])
def test_the_filter_refuses_what_it_should_on_both_architectures(machine: str, own: bool) -> None:
    audit, column = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}[machine]
    clone, clone3, opened, socketed, fcntl, limit = {
        "x86_64": (56, 435, 0, 41, 72, 302),
        "aarch64": (220, 435, 63, 198, 25, 261),
    }[machine]
    code = seccomp.call_filter(own, machine)
    allow, refuse, missing, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    assert len(code) // 8 < 4096  # the kernel's limit
    for calls, result in ((seccomp._ALWAYS, refuse), (seccomp._WITHOUT_NAMESPACES, allow if own else refuse)):
        for number in (numbers[column] for numbers in calls.values()):
            assert number is None or filtered(code, audit, number) == result
    assert filtered(code, audit, opened) == allow and filtered(code, audit ^ 1, opened) == kill
    assert filtered(code, audit, clone, 0x11) == allow and filtered(code, audit, clone, 0x10000011) == refuse
    assert filtered(code, audit, clone3) == missing
    assert [filtered(code, audit, socketed, family) for family in (1, 2, 10)] == [allow if own else refuse] * 3
    assert [filtered(code, audit, socketed, family) for family in (16, 17, 38, 40)] == [refuse] * 4
    assert filtered(code, audit, fcntl, 5, 3) == allow
    assert filtered(code, audit, fcntl, 5, 8) == (allow if own else refuse)
    assert filtered(code, audit, limit, 0) == allow and filtered(code, audit, limit, 7) == (allow if own else refuse)
    if machine == "x86_64":
        assert filtered(code, audit, 0x40000000 + 1) == kill
