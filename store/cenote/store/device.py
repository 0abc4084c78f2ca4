"""A file or block device that is read and written past the page cache, at aligned places.

Memory is named by raw addresses, as everywhere on the data path. Whatever goes wrong is an OSError,
a read or write that ends short included: that is what a truncated file gives. `Device` is also the
seam at which tests let it fail.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, final

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.runtime.file_lock import lock_exclusively
from cenote.runtime.log import get_logger
from cenote.runtime.memory import address_of
from cenote.runtime.storage import is_memory
from cenote.runtime.units import format_size
from cenote.transport.memory_access import MEMORY

from .slot_format import HEADER_COPY_BYTES, HEADER_MAGIC

__all__ = [
    "BLOCK_BYTES",
    "PARTS_MAX",
    "Contents",
    "Device",
    "FileDevice",
    "Part",
    "contents_of",
    "memory_align",
    "open_device",
    "wipe_command",
]

BLOCK_BYTES: Final = 4096
"""Addresses, offsets and lengths are multiples of it: no device asks for more."""
PARTS_MAX: Final = 1024
"""IOV_MAX."""
SECTOR_BYTES: Final = 512
"""Many devices ask of addresses no more than this."""
_LOOKED_AT_BYTES: Final = 256 << 10
"""From the beginning: every partition table, file system and volume manager has left something in
there, and most files have."""

Part = tuple[int, int]
"""(address, length) in memory."""
Contents = Literal["none", "ours", "other"]
"""Nothing but zeros; what a store daemon left; or what would be lost."""

_log = get_logger(__name__)


class Device(Protocol):
    """Safe from several threads. All methods but `close` raise OSError."""

    @property
    def name(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def memory_align(self) -> int:
        """Memory that is read into, or written from, begins at a multiple of it."""
        ...

    def read(self, address: int, length: int, offset: int) -> None:
        """Fill memory from the device; all of it, or it is an error."""
        ...

    def write(self, parts: Sequence[Part], offset: int) -> None:
        """Write these (address, length), at most PARTS_MAX, one behind the other."""
        ...

    def flush(self) -> None:
        """What was written before survives a power cut when this returns."""
        ...

    def close(self) -> None: ...


@final
class FileDevice:
    """See `Device`."""

    def __init__(self, path: Path, fd: int, size_bytes: int) -> None:
        self.path = path
        self.memory_align = memory_align(fd)
        self.name = str(path)
        self.size_bytes = size_bytes
        self._fd = fd

    def read(self, address: int, length: int, offset: int) -> None:
        got = os.preadv(self._fd, [MEMORY[address : address + length]], offset)
        if got != length:
            raise OSError(errno.EIO, f"{got} bytes of {length} could be read at {offset}")

    def write(self, parts: Sequence[Part], offset: int) -> None:
        length = sum(length for _, length in parts)
        views = [MEMORY[address : address + size] for address, size in parts]
        done = os.pwritev(self._fd, views, offset)
        if done != length:
            raise OSError(errno.ENOSPC, f"{done} bytes of {length} could be written at {offset}")

    def flush(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Unlocks it, too. Harmless when done twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_device(path: Path, size_bytes: int) -> FileDevice:
    """Open the block device, or the file, which is made where there is none.

    `size_bytes` of it are used, of a block device all of it where that is 0. A file gets its space
    now: a full disk is an error here and not when something is written. Raises ResourceUnavailable
    (no space, no such place, another daemon has it, or a mounted file system), InvalidArgument (a
    file without a size; what holds something else than objects of ours, which would be lost).
    """
    try:
        fd = _open_direct(path)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise ResourceUnavailable(
                f"{path} is in use: a file system on it is mounted, or another process has it",
                remedy="unmount it, stop that process, or name another device (--ssd)",
            ) from error
        raise ResourceUnavailable(
            f"can't open {path}: {error.strerror}",
            remedy="name a file in an existing directory, or a block device, that this user may"
            " write to (--ssd)",
        ) from error
    try:
        _lock(fd, path)
        _check_contents(fd, path)
        if is_memory(path):
            _log.warning(
                "--ssd is in memory: what is kept there takes memory that --dram could have, and is"
                " lost with a reboot; name a file on a disk, or a block device",
                path=str(path),
            )
        return FileDevice(path, fd, _sized(fd, path, size_bytes))
    except BaseException:
        os.close(fd)
        raise


def _open_direct(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if path.is_block_device():
        # Exclusively: refused while a file system on it is mounted.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_EXCL
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    fd = os.open(path, flags, 0o600)
    if not is_memory(path):  # of which more is said
        _log.warning(
            "this file system has no direct I/O: what is kept on it takes memory a second time",
            path=str(path),
        )
    return fd


def memory_align(fd: int) -> int:
    """What direct I/O asks of addresses: tried, since not every kernel tells."""
    page = mmap.mmap(-1, 2 * BLOCK_BYTES)
    start = address_of(page) + SECTOR_BYTES
    try:
        os.preadv(fd, [MEMORY[start : start + BLOCK_BYTES]], 0)
    except OSError:  # also where the device fails: whoever uses it will see
        return BLOCK_BYTES
    return SECTOR_BYTES


def _lock(fd: int, path: Path) -> None:
    try:
        ours = lock_exclusively(fd)
    except OSError as error:
        raise ResourceUnavailable(
            f"{path} can't be locked: {error.strerror}",
            remedy="name a file on another file system, or a block device (--ssd)",
        ) from error
    if not ours:
        raise ResourceUnavailable(
            f"another process has {path}",
            remedy="stop that store daemon, or give this one another file (--ssd)",
        )


def contents_of(fd: int) -> Contents:
    """What the beginning of a file or device holds. Raises OSError."""
    begin = mmap.mmap(-1, _LOOKED_AT_BYTES)
    start = address_of(begin)
    got = os.preadv(fd, [MEMORY[start : start + _LOOKED_AT_BYTES]], 0)
    data = begin[:got]
    if any(data[at : at + len(HEADER_MAGIC)] == HEADER_MAGIC for at in (0, HEADER_COPY_BYTES)):
        return "ours"
    return "other" if data.strip(b"\0") else "none"


def wipe_command(path: Path) -> str:
    """What makes a file or device one that a store daemon takes, whatever it holds."""
    return f"dd if=/dev/zero of={path} bs=1M count=1" if path.is_block_device() else f"rm {path}"


def _check_contents(fd: int, path: Path) -> None:
    """Raises InvalidArgument where there is something else than what a store daemon left."""
    try:
        contents = contents_of(fd)
    except OSError:  # whoever reads the headers says so
        return
    if contents == "other":
        raise InvalidArgument(
            f"{path} holds something that no store daemon wrote, and that would be lost",
            remedy="name another file or device (--ssd), or, if it may go: " + wipe_command(path),
        )


def _sized(fd: int, path: Path, size_bytes: int) -> int:
    found = os.fstat(fd)
    if stat.S_ISBLK(found.st_mode):
        whole = os.lseek(fd, 0, os.SEEK_END)
        if size_bytes > whole:
            raise ResourceUnavailable(
                f"{path} has {format_size(whole)}, {format_size(size_bytes)} were asked for",
                remedy="ask for less with --ssd-size, or leave it out for all of the device",
            )
        return (size_bytes or whole) // BLOCK_BYTES * BLOCK_BYTES
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{path} is neither a file nor a block device")
    size_bytes = size_bytes // BLOCK_BYTES * BLOCK_BYTES
    if not size_bytes:
        raise InvalidArgument(
            f"how large {path} is to be is not said", remedy="say it with --ssd-size"
        )
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        room = os.statvfs(path)
        available = room.f_bavail * room.f_frsize
        if not found.st_size:
            path.unlink(missing_ok=True)  # it was made just now, and half of it is of no use
        raise ResourceUnavailable(
            f"can't get {format_size(size_bytes)} for {path}: {error.strerror};"
            f" {format_size(available)} are free there",
            remedy="ask for less with --ssd-size, or make room on that disk",
        ) from error
    return size_bytes
