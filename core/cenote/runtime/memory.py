"""Memory from the operating system: addresses, allocation that fails early, and pre-touching.

Everything that may take long (fallocate, madvise) is called without the GIL, so that a daemon can
make gigabytes ready in some threads while it serves in others.

How much can be had is asked before it is taken: a tmpfs file larger than the memory (or than the
container's limit) is not refused by the kernel with an error, it ends in the out-of-memory killer.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cenote.api.errors import InvalidBuffer, ResourceUnavailable

from .units import format_size

if TYPE_CHECKING:
    from typing_extensions import Buffer

    # NumPy's stubs call an array a Buffer from Python 3.12 on only.
    BufferLike = Buffer | np.ndarray[Any, Any]

__all__ = [
    "PAGE_BYTES",
    "address_of",
    "allocate_file",
    "available_bytes",
    "create_memfd",
    "populate",
]

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
_POPULATE_STEP_BYTES: Final = 64 << 20  # between steps a thread can see that it is to end

_TMPFS_MAGIC: Final = 0x01021994
_HUGETLBFS_MAGIC: Final = 0x958458F6
_KEEP_FREE_SHARE: Final = 64  # 1/64 of the memory is left to the rest of the machine

_libc: Final = ctypes.CDLL(None, use_errno=True)
_madvise: Final = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int
_fstatfs: Final = _libc.fstatfs
_fstatfs.argtypes = (ctypes.c_int, ctypes.c_char_p)
_fstatfs.restype = ctypes.c_int

_from_buffer: Final[Callable[[Any], ctypes.c_char]] = ctypes.c_char.from_buffer
_addressof: Final = ctypes.addressof


def address_of(buffer: BufferLike) -> int:
    """The address of the first byte of `buffer`; 0 where it is empty.

    The address is good for as long as the caller keeps the buffer and doesn't resize it. About
    0.2 µs for writable buffers, 1.5 µs for read-only ones. Raises InvalidBuffer for what has no
    buffer protocol or is not C-contiguous.
    """
    try:
        return _addressof(_from_buffer(buffer))
    except (TypeError, ValueError):
        return _address_of_other(buffer)


def _address_of_other(buffer: Any) -> int:
    """What ctypes refuses: read-only, empty, or no buffer at all."""
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise InvalidBuffer(
            f"{type(buffer).__name__} has no buffer protocol",
            remedy="pass bytes, bytearray, memoryview, mmap or a NumPy array",
        ) from error
    if not view.c_contiguous:
        raise InvalidBuffer(
            "the buffer is not C-contiguous",
            remedy="pass a contiguous copy, or its pieces one by one",
        )
    if not view.nbytes:
        return 0
    address, _read_only = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"]
    return int(address)


def populate(address: int, size_bytes: int, *, write: bool) -> bool:
    """Give the pages of a mapping their memory and page table entries ahead of use.

    With `write=True` as a write would, else as a read would; contents stay as they are. `address`
    lies on a page border. Returns False where the kernel can't do it (before Linux 5.14), which
    costs only time later. Raises ResourceUnavailable where a page can't be had: what would have
    been SIGBUS at the first touch.
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    for offset in range(0, size_bytes, _POPULATE_STEP_BYTES):
        step_bytes = min(_POPULATE_STEP_BYTES, size_bytes - offset)
        while _madvise(address + offset, step_bytes, advice):
            error = ctypes.get_errno()
            if error in (errno.EINTR, errno.EAGAIN):
                continue
            if error == errno.EINVAL and address % PAGE_BYTES == 0:
                return False
            raise ResourceUnavailable(
                f"can't populate {format_size(step_bytes)} of mapped memory: {os.strerror(error)}"
            )
    return True


def create_memfd(name: str, size_bytes: int) -> int:
    """An anonymous file in memory with all of its `size_bytes` allocated; the caller closes the fd.

    Raises ResourceUnavailable naming the size that could be had.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        allocate_file(fd, 0, size_bytes, name=name)
    except BaseException:
        os.close(fd)
        raise
    return fd


def allocate_file(fd: int, offset_bytes: int, size_bytes: int, *, name: str) -> None:
    """Give the range of the file its memory or disk blocks, extending the file where needed.

    Afterwards no write to the range can fail for lack of space (on tmpfs: no SIGBUS). `name` is for
    the error. Raises ResourceUnavailable naming the size that could be had.
    """
    if not size_bytes:
        return
    available = available_bytes(fd)
    if size_bytes > available:
        raise _too_little(name, size_bytes, available, "not enough is free")
    try:
        os.posix_fallocate(fd, offset_bytes, size_bytes)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise _too_little(name, size_bytes, available_bytes(fd), reason) from error


def _too_little(name: str, size_bytes: int, available: int, reason: str) -> ResourceUnavailable:
    return ResourceUnavailable(
        f"can't get {format_size(size_bytes)} for {name}: {reason};"
        f" {format_size(available)} ({available} bytes) could be had",
        remedy="ask for less, or give the machine, container or file system more",
    )


def available_bytes(fd: int) -> int:
    """How many bytes more a file on this file system could get now, at most.

    For files in memory that is bounded by the file system's size, by the machine's available memory
    (less 1/64 of it all) and by the memory limits of the control groups that this process is in.
    """
    magic = _file_system_magic(fd)
    stats = os.fstatvfs(fd)
    bounds = [stats.f_bavail * stats.f_frsize]
    if magic in (_TMPFS_MAGIC, _HUGETLBFS_MAGIC) and not stats.f_blocks:
        bounds = []  # mounted without a limit
    if magic == _TMPFS_MAGIC:
        bounds += [_machine_room_bytes(), *_control_group_rooms_bytes()]
    elif magic == _HUGETLBFS_MAGIC:
        bounds.append(_huge_page_room_bytes(stats.f_bsize))
    return max(0, min(bounds))


def _file_system_magic(fd: int) -> int:
    raw = ctypes.create_string_buffer(256)
    if _fstatfs(fd, raw):
        error = ctypes.get_errno()
        raise ResourceUnavailable(f"can't examine the file system: {os.strerror(error)}")
    return int(struct.unpack_from("@l", raw)[0]) & 0xFFFFFFFF


def _machine_room_bytes() -> int:
    sizes = _read_table(Path("/proc/meminfo"))
    return (sizes["MemAvailable:"] - sizes["MemTotal:"] // _KEEP_FREE_SHARE) * 1024


def _huge_page_room_bytes(page_bytes: int) -> int:
    folder = Path(f"/sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB")
    free = int((folder / "free_hugepages").read_text())
    return (free - int((folder / "resv_hugepages").read_text())) * page_bytes


def _control_group_rooms_bytes() -> Iterator[int]:
    """What each control group above this process still allows; file cache counts as free."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be that of the host: then its own group is the mount's root.
        group = root / path.lstrip("/")
        for folder in [group, *group.parents]:
            room = _room_in(folder, *names)
            if room is not None:
                yield room
            if folder == root:
                break


def _room_in(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / usage_name).read_text())
        cache = _read_table(folder / "memory.stat").get(cache_name, 0)
    except FileNotFoundError:
        return None  # the root group has no limit, and a container may not see its parents
    return int(limit) - usage + cache


def _read_table(path: Path) -> dict[str, int]:
    """Lines of a name and a number, as in /proc/meminfo."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2}
