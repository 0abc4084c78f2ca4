"""The file or block device that a store daemon has, or is to have, as its SSD. Nothing that is
there is written to: what has to be tried is tried on a file without a name beside it."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from cenote.runtime.file_lock import is_locked
from cenote.runtime.storage import (
    MEMORY_KINDS,
    BlockDevice,
    Mount,
    block_device_of,
    mount_of,
    read_mounts,
)
from cenote.runtime.units import format_size
from cenote.store.device import BLOCK_BYTES, Contents, contents_of, memory_align, wipe_command

from .findings import Check, Finding, Verdict
from .ssd_speed import SsdSpeed, judge_speed, measure

__all__ = [
    "SsdFacts",
    "judge_device",
    "judge_direct",
    "judge_place",
    "judge_room",
    "judge_use",
    "read_ssd",
    "ssd_checks",
]

_NETWORK_KINDS: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs"})
_COPY_ON_WRITE_KINDS: Final = frozenset({"btrfs", "zfs", "bcachefs"})
_SLOW_SCHEDULERS: Final = frozenset({"bfq", "cfq"})
_SPINNING_S: Final = 0.002
"""A disk that spins takes longer for a page that it has not cached."""
_TRIED_BYTES_MAX: Final = 256 << 20
_TRIED_BYTES_MIN: Final = 16 << 20
_LOCKS: Final = Path("/proc/locks")
_NAME_ANOTHER: Final = "name another file or device (--ssd)"


@dataclass(frozen=True, slots=True)
class SsdFacts:
    """What there is at a path, and below it."""

    path: str
    trouble: str = ""
    """Why a store daemon couldn't open it, or why it can't be looked at."""
    is_block: bool = False
    exists: bool = False
    mount: Mount | None = None
    """What a file lies on."""
    device: BlockDevice | None = None
    direct: bool | None = None
    """Whether direct I/O works; None where that could not be tried."""
    memory_align: int = BLOCK_BYTES
    size_bytes: int = 0
    """Of a block device."""
    had_bytes: int = 0
    """Room that the file has already."""
    free_bytes: int = 0
    """Of the file system, less what is reserved."""
    contents: Contents = "none"
    holder: str = ""
    """Who has it locked, as a daemon does: "cenote-store, pid 12"; "" where nobody has."""
    mounted_at: str = ""
    """Where a file system on the device is mounted."""
    is_busy: bool = False
    """Whether the kernel gives the device to nobody, since a part of it is in use."""
    wipe: str = field(default="", compare=False)


def ssd_checks(path: Path, wanted_bytes: int, node: str = "") -> list[Check]:
    """`wanted_bytes`: what a daemon is to use of it; 0: all of a device, or not said yet. `node`:
    whose it is, where it is one's that runs.

    One check, since two would measure against each other.
    """
    name = f"ssd {node}" if node else "ssd"

    def look(deadline_s: float) -> list[Finding]:
        found = look_at(deadline_s)
        return [replace(each, check=each.check.replace("ssd", name, 1)) for each in found]

    def look_at(deadline_s: float) -> list[Finding]:
        facts = read_ssd(path)
        found = [judge_place(facts)]
        if facts.trouble:
            return found
        found += [judge_use(facts), judge_room(facts, wanted_bytes), judge_direct(facts)]
        speed = _measured(facts, deadline_s)
        device = judge_device(facts, speed if isinstance(speed, SsdSpeed) else None)
        return [*found, device, judge_speed(speed)]

    return [Check(name, look)]


# ---- facts -------------------------------------------------------------------------------------


def read_ssd(path: Path, locks: Path = _LOCKS) -> SsdFacts:
    """Look at it, and at nothing else."""
    name = str(path)
    if not path.is_absolute():
        return SsdFacts(name, f"{name} is no absolute path")
    if not path.exists() and not path.parent.is_dir():
        return SsdFacts(name, f"there is no directory {path.parent}")
    try:
        if path.is_block_device():
            return _read_block(path, locks)
        if path.exists() and not path.is_file():
            return SsdFacts(name, f"{name} is neither a file nor a block device")
        return _read_file(path, locks)
    except OSError as error:
        return SsdFacts(name, f"{name}: {error.strerror or error}")


def _read_block(path: Path, locks: Path) -> SsdFacts:
    if not os.access(path, os.R_OK | os.W_OK):
        return SsdFacts(str(path), f"{path} can't be written to by this user")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size_bytes = os.lseek(fd, 0, os.SEEK_END)
        contents = contents_of(fd)
        holder = _holder(fd, locks)
    finally:
        os.close(fd)
    direct = _try_direct(lambda: os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    return SsdFacts(
        str(path),
        is_block=True,
        exists=True,
        device=block_device_of(path),
        direct=direct is not None,
        memory_align=direct or BLOCK_BYTES,
        size_bytes=size_bytes,
        contents=contents,
        holder=holder,
        mounted_at=_mounted_at(path.stat().st_rdev),
        is_busy=not holder and _is_busy(path),
        wipe=wipe_command(path),
    )


def _read_file(path: Path, locks: Path) -> SsdFacts:
    exists, holder, had_bytes = path.exists(), "", 0
    contents: Contents = "none"
    if exists:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            contents, holder = contents_of(fd), _holder(fd, locks)
            had_bytes = os.fstat(fd).st_blocks * 512
        finally:
            os.close(fd)
    if not os.access(path if exists else path.parent, os.W_OK):
        return SsdFacts(str(path), f"{path} can't be written to by this user")
    room = os.statvfs(path.parent)
    direct = _try_direct(lambda: open_beside(path))
    return SsdFacts(
        str(path),
        exists=exists,
        mount=mount_of(path),
        device=block_device_of(path if exists else path.parent),
        direct=direct is not None,
        memory_align=direct or BLOCK_BYTES,
        had_bytes=had_bytes,
        free_bytes=room.f_bavail * room.f_frsize,
        contents=contents,
        holder=holder,
        wipe=wipe_command(path),
    )


def open_beside(path: Path) -> int:
    """A new file on the same file system, open for direct I/O, that has no name. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=".cenote-doctor-", dir=path.parent)
    try:
        return os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    finally:
        os.unlink(name)
        os.close(handle)


def _try_direct(open_it: Callable[[], int]) -> int | None:
    """What direct I/O asks of addresses in memory; None where there is none."""
    try:
        fd = open_it()
    except OSError:
        return None
    try:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            os.posix_fallocate(fd, 0, 2 * BLOCK_BYTES)
        return memory_align(fd)
    finally:
        os.close(fd)


def _holder(fd: int, locks: Path) -> str:
    if not is_locked(fd):
        return ""
    found = os.fstat(fd)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = [line.split() for line in locks.read_text().splitlines()]
    except OSError:
        lines = []
    for fields in lines:
        if "FLOCK" in fields and device in fields:
            pid = fields[fields.index(device) - 1]
            return f"{_program_of(pid)}, pid {pid}"
    return "another process"


def _program_of(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return "a process"
    # Of `python -m cenote.store` the module says what it is.
    names = [Path(word).name for word in words[:3]]
    return next((name for name in names if "cenote" in name), names[0] or "a process")


def _is_busy(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def _mounted_at(number: int) -> str:
    for mount in read_mounts():
        source = Path(mount.source)
        if source.is_absolute() and source.is_block_device() and source.stat().st_rdev == number:
            return mount.point
    return ""


def _measured(facts: SsdFacts, deadline_s: float) -> SsdSpeed | str:
    """How fast it is, or why that was not measured."""
    if facts.holder:
        return f"not measured, since it is in use ({facts.holder})"
    if _is_in_memory(facts):
        return "not measured: it is memory"
    if not facts.direct:
        return "not measured: without direct I/O it would be memory that is measured"
    path = Path(facts.path)
    try:
        if facts.is_block:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            return measure(path, fd, facts.size_bytes, deadline_s, may_write=False)
        room = min(facts.free_bytes // 4, _TRIED_BYTES_MAX) // BLOCK_BYTES * BLOCK_BYTES
        if room < _TRIED_BYTES_MIN:
            return f"not measured: {format_size(facts.free_bytes)} are too little to try it with"
        return measure(path, open_beside(path), room, deadline_s, may_write=True)
    except OSError as error:
        return f"not measured: {error.strerror or error}"


# ---- verdicts ----------------------------------------------------------------------------------


def judge_place(facts: SsdFacts) -> Finding:
    """What it lies on: whether that lasts, and is a disk."""
    check = "ssd"
    if facts.trouble:
        remedy = (
            "the absolute path of a file in an existing directory, or of a block device, that this"
            " user may write to (--ssd)"
        )
        return Finding(check, Verdict.FAIL, facts.trouble, remedy)
    what = facts.path if facts.exists else f"{facts.path} (not there yet)"
    twice = "what is kept there takes memory that --dram could have, and is lost with a reboot"
    disk = "name a file on a disk, or a block device (--ssd)"
    kind = "an unknown file system" if facts.mount is None else facts.mount.kind
    if _is_in_memory(facts):
        memory = "a RAM disk" if facts.is_block else f"in memory ({kind})"
        return Finding(check, Verdict.WARN, f"{what} is {memory}: {twice}", disk)
    if facts.is_block:
        name = facts.device.name if facts.device is not None else "unknown"
        text = f"{what}: block device {name}, {format_size(facts.size_bytes)}"
        return Finding(check, Verdict.OK, text)
    if kind == "overlay":
        return Finding(
            check,
            Verdict.WARN,
            f"{what} is in a container's own layer (overlay), and goes with the container",
            "mount a volume of the host's disk there, and name a file in it",
        )
    if kind in _NETWORK_KINDS or kind.startswith("fuse"):
        return Finding(
            check,
            Verdict.WARN,
            f"{what} is on {kind}: each read crosses a network or another process",
            "a disk of this host; with objects elsewhere, add store daemons there instead",
        )
    if kind in _COPY_ON_WRITE_KINDS:
        return Finding(
            check,
            Verdict.WARN,
            f"{what} is on {kind}: what is written anew goes to another place each time, room that"
            " was set aside or not, and pieces become small",
            "ext4 or xfs, or a block device; on btrfs chattr +C on the empty file",
        )
    where = "" if facts.mount is None else f" ({facts.mount.source}, at {facts.mount.point})"
    return Finding(check, Verdict.OK, f"{what}: a file on {kind}{where}")


def _is_in_memory(facts: SsdFacts) -> bool:
    if facts.is_block:
        return facts.device is not None and facts.device.in_memory
    return facts.mount is not None and facts.mount.kind in MEMORY_KINDS


def judge_use(facts: SsdFacts) -> Finding:
    """Whether somebody else has it, or has left something there."""
    check = "ssd use"
    if facts.mounted_at:
        text = f"a file system on it is mounted at {facts.mounted_at}"
        remedy = f"umount {facts.mounted_at}, or {_NAME_ANOTHER}"
        return Finding(check, Verdict.FAIL, text, remedy)
    users = facts.device.users if facts.is_block and facts.device is not None else ()
    if users:
        return Finding(
            check,
            Verdict.FAIL,
            f"it is a part of {', '.join(users)} (RAID, a volume, encryption)",
            f"name that instead: --ssd /dev/{users[0]}",
        )
    if facts.is_busy:
        text = "a part of it is in use: mounted, swap, or a part of another device"
        return Finding(check, Verdict.FAIL, text, f"lsblk {facts.path} says what; {_NAME_ANOTHER}")
    if facts.holder:
        if "cenote" in facts.holder:
            return Finding(check, Verdict.OK, f"a store daemon has it ({facts.holder})")
        return Finding(
            check, Verdict.FAIL, f"{facts.holder}, has it", f"end it, or {_NAME_ANOTHER}"
        )
    if facts.contents == "other":
        return Finding(
            check,
            Verdict.FAIL,
            "it holds something that no store daemon wrote, and none will write over it",
            f"{_NAME_ANOTHER}, or, if it may go: {facts.wipe}",
        )
    left = ", and holds what a store daemon left" if facts.contents == "ours" else ""
    return Finding(check, Verdict.OK, f"nobody has it{left}")


def judge_room(facts: SsdFacts, wanted_bytes: int) -> Finding:
    """Whether there is as much as is wanted."""
    check, asked = "ssd room", format_size(wanted_bytes)
    less = "ask for less (--ssd-size), or make room there"
    if facts.is_block:
        if wanted_bytes > facts.size_bytes:
            text = f"it has {format_size(facts.size_bytes)}, less than {asked}"
            return Finding(check, Verdict.FAIL, text, less)
        used = wanted_bytes or facts.size_bytes
        return Finding(check, Verdict.OK, f"{format_size(used)} of it would be used")
    had = f", the file has {format_size(facts.had_bytes)} already" if facts.had_bytes else ""
    free = f"{format_size(facts.free_bytes)} are free{had}"
    if not wanted_bytes:
        if facts.holder:
            return Finding(check, Verdict.OK, free)
        text = f"{free}; a store daemon wants to be told how much of it is its own"
        return Finding(check, Verdict.SKIPPED, text, "--ssd-size 1TiB, here and there")
    if wanted_bytes > facts.free_bytes + facts.had_bytes:
        return Finding(check, Verdict.FAIL, f"{free}, less than {asked}", less)
    left = facts.free_bytes + facts.had_bytes - wanted_bytes
    return Finding(check, Verdict.OK, f"{asked} can be had, {format_size(left)} are left to others")


def judge_direct(facts: SsdFacts) -> Finding:
    """Whether bytes go to and from the device past the page cache."""
    check = "ssd direct I/O"
    if not facts.direct:
        return Finding(
            check,
            Verdict.WARN,
            "it does not work: what is read and written takes memory a second time, in the page"
            " cache, and the processor time of a copy",
            "ext4 or xfs (without data=journal), or a block device",
        )
    text = f"it works, with memory from multiples of {facts.memory_align} bytes on"
    if facts.memory_align > 512:
        text += ": objects of other sizes are copied on their way"
    return Finding(check, Verdict.OK, text)


def _beside(facts: SsdFacts) -> str:
    """Where nothing is, on the same disk."""
    return str(Path(facts.path).with_name("try")) if not facts.is_block else "a file on it"


def judge_device(facts: SsdFacts, speed: SsdSpeed | None) -> Finding:
    """The disk below: whether it spins, and who orders its requests."""
    check, device = "ssd device", facts.device
    if _is_in_memory(facts):
        return Finding(check, Verdict.SKIPPED, "it is memory")
    if device is None:
        text = "the kernel tells of no disk below, as for network and container file systems"
        return Finding(check, Verdict.SKIPPED, text)
    found = device.name + (f", scheduler {device.scheduler}" if device.scheduler else "")
    if device.rotational and speed is None:
        return Finding(
            check,
            Verdict.SKIPPED,
            f"{found}: it says that it spins, as virtual disks do, too, and was not measured",
            f"--ssd with another path there: {_beside(facts)}",
        )
    if device.rotational and speed is not None and speed.page_read_s > _SPINNING_S:
        return Finding(
            check,
            Verdict.WARN,
            f"{found}: it spins, and each block would wait for its heads",
            "an SSD; computing a prefix anew is mostly faster than reading it from such a disk",
        )
    if device.scheduler in _SLOW_SCHEDULERS:
        return Finding(
            check,
            Verdict.WARN,
            f"{found}: it shares a disk fairly, and costs an SSD speed and processor time",
            f"echo none > /sys/block/{device.name}/queue/scheduler (with a udev rule, for good)",
        )
    if device.rotational:
        found += "; it says that it spins, as virtual disks do, and is too quick for that"
    return Finding(check, Verdict.OK, found)
