"""How much memory this process may pin, and what to say where that is too little.

RDMA pins what it registers. The kernel lets a process pin as much as its RLIMIT_MEMLOCK says,
counted in /proc/self/status as VmPin, or anything where it has CAP_IPC_LOCK. A capability inside a
user namespace of its own (rootless containers) does not count.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cenote.api.errors import CenoteError, InvalidBuffer, ResourceUnavailable

from .units import format_size

__all__ = ["REMEDY", "MemlockFacts", "pinning_error", "pinning_refusal", "read_memlock"]

REMEDY: Final = (
    "raise the limit of locked memory: `ulimit -l unlimited` or memlock in"
    " /etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 or"
    " --cap-add IPC_LOCK for a container"
)
_CAP_IPC_LOCK: Final = 14
_ALL_USERS: Final = 4_294_967_295


@dataclass(frozen=True, slots=True)
class MemlockFacts:
    """What the kernel will go by. Bytes; None: no limit."""

    soft_bytes: int | None
    hard_bytes: int | None
    exempt: bool
    """The limit does not hold: this process has CAP_IPC_LOCK, and that counts."""
    pinned_bytes: int = 0
    """By this process, so far."""
    user_namespace: bool = False
    """This is a user namespace of its own, where a capability does not count."""

    @property
    def left_bytes(self) -> int | None:
        """How much more can be pinned; None: as much as there is."""
        if self.exempt or self.soft_bytes is None:
            return None
        return max(0, self.soft_bytes - self.pinned_bytes)


def read_memlock(proc: Path = Path("/proc")) -> MemlockFacts:
    """Of this process, now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = _status(proc / "self" / "status")
    namespace = _in_user_namespace(proc / "self" / "uid_map")
    capabilities = 0
    with contextlib.suppress(ValueError):
        capabilities = int(status.get("CapEff", "0"), 16)
    pinned_kib = status.get("VmPin", "0").split()[0]
    return MemlockFacts(
        soft_bytes=None if soft == resource.RLIM_INFINITY else soft,
        hard_bytes=None if hard == resource.RLIM_INFINITY else hard,
        exempt=bool(capabilities >> _CAP_IPC_LOCK & 1) and not namespace,
        pinned_bytes=1024 * int(pinned_kib) if pinned_kib.isdigit() else 0,
        user_namespace=namespace,
    )


def pinning_refusal(facts: MemlockFacts, size_bytes: int, what: str) -> ResourceUnavailable | None:
    """The error for what can't be pinned; None where the limit allows it.

    `what`: for the message, such as "segment 0". Nothing is pinned by asking.
    """
    left = facts.left_bytes
    if left is None or size_bytes <= left:
        return None
    assert facts.soft_bytes is not None
    limit = f"{format_size(facts.soft_bytes)} ({facts.soft_bytes} bytes)"
    used = f", {format_size(facts.pinned_bytes)} of them in use" if facts.pinned_bytes else ""
    note = "; CAP_IPC_LOCK of a user namespace does not count" if facts.user_namespace else ""
    return ResourceUnavailable(
        f"can't pin {format_size(size_bytes)} for {what}: the limit of locked memory"
        f" (RLIMIT_MEMLOCK, `ulimit -l`) is {limit}{used}{note}",
        remedy=REMEDY,
    )


def pinning_error(
    number: int, size_bytes: int, what: str, facts: MemlockFacts | None = None
) -> CenoteError:
    """The typed error for a registration that the kernel refused with this errno.

    `facts` are those of this process, where None.
    """
    if number in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        refusal = pinning_refusal(facts or read_memlock(), size_bytes, what)
        if refusal is not None:
            return refusal
    text = f"can't register {format_size(size_bytes)} for {what}: {os.strerror(number)}"
    if number == errno.EFAULT:
        return InvalidBuffer(text, remedy="the memory must be mapped, and writable to be read into")
    remedy = "see the kernel's log; the device may be out of memory regions"
    if number == errno.ENOMEM:
        remedy = "the limit of locked memory is not the cause: there is no memory left to pin"
    return ResourceUnavailable(text, remedy=remedy)


def _status(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: value.strip() for name, colon, value in pairs if colon and value.strip()}


def _in_user_namespace(uid_map: Path) -> bool:
    try:
        return [int(word) for word in uid_map.read_text().split()] != [0, 0, _ALL_USERS]
    except (OSError, ValueError):
        return False  # a kernel without user namespaces
