"""What a path lies on: the file system, and the block device below it, as the kernel tells."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["MEMORY_KINDS", "BlockDevice", "Mount", "block_device_of", "is_memory", "mount_of"]

MEMORY_KINDS: Final = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
"""File systems whose files are memory."""
_MEMORY_DEVICES: Final = ("ram", "zram")
_MOUNTS: Final = Path("/proc/self/mountinfo")
_SYS: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of the table of mounts."""

    point: str
    kind: str
    """As mount names it: ext4, tmpfs, overlay ..."""
    source: str
    """A device's path, for file systems that have one."""


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A whole disk, or what stands for one."""

    name: str
    """nvme0n1, dm-3 ..."""
    rotational: bool | None
    """Whether it says of itself that it spins; None where it is not told. Virtual disks do."""
    scheduler: str
    """The one in use; "" where it is not told."""
    users: tuple[str, ...] = ()
    """Devices that lie on it or on a part of it: RAID, volume managers, encryption."""

    @property
    def in_memory(self) -> bool:
        """Whether it is a RAM disk."""
        return self.name.rstrip("0123456789") in _MEMORY_DEVICES


def mount_of(path: Path, table: Path = _MOUNTS) -> Mount | None:
    """The file system that `path` lies on, or would where it is not there yet; None if unknown."""
    real = os.path.realpath(path)
    best: Mount | None = None
    for mount in read_mounts(table):
        inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
        # Of several on one point the last one shows.
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def read_mounts(table: Path = _MOUNTS) -> list[Mount]:
    """All that this process sees, in the order in which they were made; none where it is not
    told."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if len(fields) > 4 and len(rest) > 1:
            found.append(Mount(_unescaped(fields[4]), rest[0], _unescaped(rest[1])))
    return found


def _unescaped(text: str) -> str:
    """Spaces and the like are octal there; other bytes stand for themselves."""
    for escape, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escape, sign)
    return text


def block_device_of(path: Path, root: Path = _SYS) -> BlockDevice | None:
    """The disk that `path` is, is a part of, or lies on; None where the kernel does not tell, as of
    a network's or a container's file systems."""
    try:
        found = path.stat()
    except OSError:
        return None
    if stat.S_ISBLK(found.st_mode):
        return read_block_device(found.st_rdev, root)
    device = read_block_device(found.st_dev, root)
    if device is None and (mount := mount_of(path)) is not None:
        source = Path(mount.source)  # btrfs and others count devices by themselves
        if source.is_absolute() and source.is_block_device():
            return read_block_device(source.stat().st_rdev, root)
    return device


def read_block_device(number: int, root: Path = _SYS) -> BlockDevice | None:
    """Of a device number; the whole disk where it is a part of one."""
    link = root / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}"
    try:
        part = link.resolve(strict=True)
    except OSError:
        return None
    disk = part.parent if (part / "partition").exists() else part
    rotational = _read(disk / "queue" / "rotational")
    chosen = _read(disk / "queue" / "scheduler")
    if "[" in chosen:
        chosen = chosen.partition("[")[2].partition("]")[0]
    holders = part / "holders"
    users = tuple(sorted(os.listdir(holders))) if holders.is_dir() else ()
    return BlockDevice(disk.name, rotational == "1" if rotational else None, chosen, users)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def is_memory(path: Path) -> bool:
    """Whether a file at `path`, or the device that it is, is memory: gone at the next boot."""
    if path.is_block_device():
        device = block_device_of(path)
        return device is not None and device.in_memory
    mount = mount_of(path)
    return mount is not None and mount.kind in MEMORY_KINDS
