"""What may be pinned: the limit, the capability, and what is said where it is too little."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cenote.api.errors import InvalidBuffer, ResourceUnavailable
from cenote.runtime.memlock import (
    MemlockFacts,
    pinning_error,
    pinning_refusal,
    read_memlock,
)

MIB = 1 << 20


def fake_proc(
    directory: Path, *, capabilities: str, pinned_kib: int = 0, users: str = "0 0 4294967295"
) -> Path:
    (directory / "self").mkdir()
    status = f"Name:\tx\nVmPin:\t{pinned_kib} kB\nCapEff:\t{capabilities}\n"
    (directory / "self" / "status").write_text(status)
    (directory / "self" / "uid_map").write_text(users + "\n")
    return directory


@pytest.mark.parametrize(
    ("capabilities", "users", "exempt"),
    [
        ("000001ffffffffff", "0 0 4294967295", True),
        ("0000000000004000", "0 0 4294967295", True),
        ("0000000000003fff", "0 0 4294967295", False),
        ("000001ffffffffff", "0 100000 65536", False),  # a rootless container
    ],
)
def test_whether_the_limit_holds(
    tmp_path: Path, capabilities: str, users: str, exempt: bool
) -> None:
    facts = read_memlock(
        fake_proc(tmp_path, capabilities=capabilities, users=users, pinned_kib=512)
    )
    assert facts.exempt is exempt
    assert facts.pinned_bytes == 512 << 10
    assert facts.user_namespace is (users != "0 0 4294967295")


def test_a_kernel_that_tells_nothing(tmp_path: Path) -> None:
    facts = read_memlock(tmp_path)
    assert (facts.exempt, facts.pinned_bytes, facts.user_namespace) == (False, 0, False)


@pytest.mark.parametrize(
    ("facts", "left"),
    [
        (MemlockFacts(8 * MIB, 8 * MIB, exempt=False), 8 * MIB),
        (MemlockFacts(8 * MIB, None, exempt=False, pinned_bytes=3 * MIB), 5 * MIB),
        (MemlockFacts(8 * MIB, 8 * MIB, exempt=False, pinned_bytes=9 * MIB), 0),
        (MemlockFacts(8 * MIB, 8 * MIB, exempt=True), None),
        (MemlockFacts(None, None, exempt=False), None),
    ],
)
def test_how_much_is_left(facts: MemlockFacts, left: int | None) -> None:
    assert facts.left_bytes == left
    assert pinning_refusal(facts, 5 * MIB, "x") is None or left == 0
    refused = pinning_refusal(facts, 8 * MIB + 1, "x")
    assert (refused is None) == (left is None)


def test_the_error_names_the_limit_and_the_remedy() -> None:
    facts = MemlockFacts(8 * MIB, 8 * MIB, exempt=False, pinned_bytes=MIB, user_namespace=True)
    error = pinning_refusal(facts, 64 * MIB, "segment 0")
    assert isinstance(error, ResourceUnavailable)
    for part in ("64 MiB", "segment 0", "RLIMIT_MEMLOCK", "8 MiB", "1 MiB of them", "namespace"):
        assert part in error.message
    for part in ("ulimit -l", "LimitMEMLOCK", "--ulimit memlock=-1", "limits.conf"):
        assert part in error.remedy


def test_what_a_refused_registration_is_called() -> None:
    tight = MemlockFacts(8 * MIB, 8 * MIB, exempt=False)
    free = MemlockFacts(None, None, exempt=False)
    assert "RLIMIT_MEMLOCK" in str(pinning_error(errno.ENOMEM, 9 * MIB, "x", tight))
    assert "RLIMIT_MEMLOCK" not in str(pinning_error(errno.ENOMEM, 9 * MIB, "x", free))
    assert "not the cause" in str(pinning_error(errno.ENOMEM, MIB, "x", tight))
    assert isinstance(pinning_error(errno.EFAULT, MIB, "x", tight), InvalidBuffer)
    assert isinstance(pinning_error(errno.EINVAL, MIB, "x", tight), ResourceUnavailable)


# As an ordinary user with a limit of 1 MiB: mlock goes by the same limit and the same capability.
PROGRAM = """
import ctypes, mmap, os, resource
from cenote.runtime.memlock import pinning_refusal, read_memlock
resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
os.setgroups([]); os.setgid(65534); os.setuid(65534)
libc = ctypes.CDLL(None, use_errno=True)
for size in (1 << 19, 2 << 20):
    memory = mmap.mmap(-1, size)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    refused = libc.mlock(address, ctypes.c_size_t(size)) != 0
    assert refused == (pinning_refusal(read_memlock(), size, "x") is not None), (size, refused)
    print(refused)
    libc.munlock(address, ctypes.c_size_t(size))
"""


def test_the_kernel_agrees() -> None:
    if os.geteuid():
        pytest.skip("needs root: it gives up its rights in a process of its own")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    if "Permission" in done.stderr:
        pytest.skip("another user can't read this installation")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "True"]
