"""The files of a store daemon in its memory directory, and the lock that keeps them its own.

    cenote-<node>.lock       locked while the daemon lives; names its pid, the node's uuid and its
                             SSD, and counts its starts
    cenote-<node>.pool       which pool it belongs to, and that pool's namespaces
    cenote-<node>.claims     what clients that write over shared memory are touching; they map it
    cenote-<node>-<i>.data   segment i, which clients map
    cenote-<node>-<i>.slots  its slot table, which only the daemon maps

The lock is the kernel's (flock), so it ends with the process, however that ends, and what the file
says is for people. Where the memory is hugetlbfs, only the data files lie there: its files can't be
written to, and a slot table grows by less than a huge page at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.runtime.file_lock import is_locked, lock_exclusively
from cenote.runtime.memory import available_bytes
from cenote.runtime.storage import mount_of

__all__ = [
    "NODE_NAME",
    "NodeFiles",
    "RunningNode",
    "StaleNode",
    "control_directory_for",
    "running_nodes",
    "stale_nodes",
]

NODE_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_PLAIN_MEMORY: Final = Path("/dev/shm")
_LOCK_BYTES_MAX: Final = 4096
_UUID_BYTES: Final = 16


@final
class NodeFiles:
    """The locked files of one node. `close` unlocks them."""

    def __init__(
        self, directory: Path, name: str, *, control_directory: Path | None = None, ssd: str = ""
    ) -> None:
        """Lock the node `name`, whose data files lie in `directory`, and whose SSD is `ssd`.

        Lock and slot tables lie in `control_directory`, by default the same. Raises
        ResourceUnavailable where another process has the name, naming its pid, or where a directory
        can't be used; InvalidArgument for a name that can't stand in a file name.
        """
        if not NODE_NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name!r} can't be a node's name",
                remedy="use 1 to 64 letters, digits, dots, dashes and underscores",
            )
        self.directory = directory
        self.control_directory = directory if control_directory is None else control_directory
        self.name = name
        self._ssd = ssd
        self.lock_path = self.control_directory / f"cenote-{name}.lock"
        self.claims_path = self.control_directory / f"cenote-{name}.claims"
        self.pool_path = self.control_directory / f"cenote-{name}.pool"
        self._lock_fd = _lock(self.lock_path, name)
        known = _read_lock(self._lock_fd)
        self.start_number = _number(known.get("starts", "")) + 1
        """Rises with each start, as far as this file is there: see `announce`."""
        with contextlib.suppress(ValueError):
            uuid = bytes.fromhex(known.get("node_uuid", ""))
            if len(uuid) == _UUID_BYTES:
                self.node_uuid = uuid
                return
        self.node_uuid = secrets.token_bytes(_UUID_BYTES)

    def announce(self, node_uuid: bytes, starts_before: int = 0) -> None:
        """Write the pid, the node's uuid and `start_number` into the lock file, before anybody
        hears of them. `starts_before`: what else is known of earlier starts. Raises
        ResourceUnavailable."""
        self.node_uuid = node_uuid
        self.start_number = max(self.start_number, starts_before + 1)
        known = {
            "pid": os.getpid(),
            "node_uuid": node_uuid.hex(),
            "starts": self.start_number,
            "ssd": self._ssd,
        }
        text = json.dumps(known) + "\n"
        try:
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, text.encode(), 0)
        except OSError as error:  # not even a page is left in a full tmpfs
            raise ResourceUnavailable(
                f"can't write {self.lock_path}: {error.strerror}",
                remedy="make room in that file system, or choose another one (--dram-dir)",
            ) from error

    def available_bytes(self) -> tuple[int, int | None]:
        """Memory that data files could get, and tables where that is other memory, else None.

        Raises ResourceUnavailable where the directory can't be opened.
        """
        try:
            fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(self.directory, error) from error
        try:
            apart = self.control_directory != self.directory
            return available_bytes(fd), available_bytes(self._lock_fd) if apart else None
        finally:
            os.close(fd)

    def data_path(self, index: int) -> Path:
        """Where segment `index` lies."""
        return self.directory / f"cenote-{self.name}-{index}.data"

    def table_path(self, index: int) -> Path:
        """Where the slot table of segment `index` lies."""
        return self.control_directory / f"cenote-{self.name}-{index}.slots"

    def indexes(self) -> list[int]:
        """Segments of which there is any file."""
        found = _segment_files(self.directory, self.control_directory, self.name)
        return sorted({index for _, index in found})

    def remove(self, index: int) -> None:
        """Remove the files of segment `index`, as far as they are there."""
        self.data_path(index).unlink(missing_ok=True)
        self.table_path(index).unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove everything of this node, the lock file last. Nothing more may be made after it."""
        for index in self.indexes():
            self.remove(index)
        self.claims_path.unlink(missing_ok=True)
        self.pool_path.unlink(missing_ok=True)
        # Still locked: whoever opened it before sees that it is not the file of that name any more.
        self.lock_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock. Harmless when done twice."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


@dataclass(frozen=True, slots=True)
class StaleNode:
    """Files of a node without a daemon."""

    name: str
    pid: int
    """Of its last daemon; 0 where unknown."""
    size_bytes: int
    """Memory that its files hold."""
    remove_command: str


def stale_nodes(files: NodeFiles) -> list[StaleNode]:
    """Other nodes whose files lie in the same directories and whose daemons are dead."""
    found = []
    for lock_path in sorted(files.control_directory.glob("cenote-*.lock")):
        name = lock_path.name.removeprefix("cenote-").removesuffix(".lock")
        theirs = [p for p, _ in _segment_files(files.directory, files.control_directory, name)]
        if name == files.name or not theirs:
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's: not stale
            fd = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if is_locked(fd):
                    continue
                size_bytes = sum(path.stat().st_blocks * 512 for path in theirs)
                pid = _number(_read_lock(fd).get("pid", ""))
            finally:
                os.close(fd)
            others = [lock_path.with_suffix(suffix) for suffix in (".claims", ".pool")]
            rest = [str(path) for path in (*others, lock_path) if path.exists()]
            command = shlex.join(["rm", *map(str, sorted(theirs)), *rest])
            found.append(StaleNode(name, pid, size_bytes, command))
    return found


@dataclass(frozen=True, slots=True)
class RunningNode:
    """What a daemon that lives tells in its lock file."""

    name: str
    pid: int
    ssd: str
    """The file or block device that it was given; "" for none."""


def running_nodes(directory: Path) -> list[RunningNode]:
    """Nodes whose data files lie in `directory` and whose daemons live, as far as this user may
    know."""
    found = []
    for lock_path in sorted(control_directory_for(directory).glob("cenote-*.lock")):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            fd = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if is_locked(fd):
                    known = _read_lock(fd)
                    name = lock_path.name.removeprefix("cenote-").removesuffix(".lock")
                    pid = _number(known.get("pid", ""))
                    found.append(RunningNode(name, pid, known.get("ssd", "")))
            finally:
                os.close(fd)
    return found


def control_directory_for(directory: Path) -> Path:
    """Where lock and slot tables of data files in `directory` go: elsewhere for hugetlbfs."""
    mount = mount_of(directory)
    return _PLAIN_MEMORY if mount is not None and mount.kind == "hugetlbfs" else directory


def _segment_files(data: Path, control: Path, name: str) -> Iterator[tuple[Path, int]]:
    """Data files and tables of a node, with their indexes."""
    pattern = re.compile(rf"cenote-{re.escape(name)}-(\d{{1,4}})\.(data|slots)")
    for directory in {data, control}:
        for entry in os.listdir(directory):
            match = pattern.fullmatch(entry)
            if match:
                yield directory / entry, int(match[1])


def _unusable(path: Path, error: OSError) -> ResourceUnavailable:
    return ResourceUnavailable(
        f"can't open {path}: {error.strerror}",
        remedy="choose a directory in memory that this user may write to (--dram-dir)",
    )


def _lock(path: Path, name: str) -> int:
    """The locked descriptor of the file that `path` names when this returns."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unusable(path, error) from error
        if not lock_exclusively(fd):
            pid = _read_lock(fd).get("pid", "unknown")
            os.close(fd)
            raise ResourceUnavailable(
                f"another store daemon has the name {name!r}: pid {pid} holds {path}",
                remedy="stop it, or give this one another --name",
            )
        # Somebody may have removed the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


def _read_lock(fd: int) -> dict[str, str]:
    """What a lock file says; nothing where it is empty or damaged."""
    try:
        known = json.loads(os.pread(fd, _LOCK_BYTES_MAX, 0))
    except (OSError, ValueError):
        return {}
    return {key: str(value) for key, value in known.items()} if isinstance(known, dict) else {}


def _number(text: str) -> int:
    """0 for what is none."""
    return int(text) if text.isdecimal() else 0
