"""What this daemon keeps of the pool that it belongs to, so that a lost master can be rebuilt.

One small file beside the slot tables, written anew with each change:

    magic "CENOTEPC" (8), XXH3-64 of the rest (u64), a PoolCopy message

A copy that can't be read counts as none: it is no more than what the master tells again.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from struct import Struct
from typing import Final, final

from google.protobuf.message import DecodeError
from xxhash import xxh3_64_intdigest

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.v1 import master_pb2 as pb

__all__ = ["PoolCopyFile"]

_MAGIC: Final = b"CENOTEPC"
_HEAD: Final = Struct("<8sQ")
_FILE_BYTES_MAX: Final = 1 << 30
_log = get_logger(__name__)


@final
class PoolCopyFile:
    """The copy in a file, or without a path in memory alone. Safe from several threads."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._copy = pb.PoolCopy()
        self._generations: dict[int, int] = {}
        self._names: dict[int, str] = {}
        if path is not None:
            self._use(_read(path))

    def _use(self, copy: pb.PoolCopy) -> None:
        self._copy = copy
        self._generations = {one.namespace_id: one.generation for one in copy.namespaces}
        self._names = {one.namespace_id: one.name for one in copy.namespaces}

    @property
    def pool_id(self) -> bytes:
        """Empty where the daemon belongs to no pool yet."""
        return self._copy.pool_id

    def knows(self, namespace_id: int, generation: int) -> bool:
        """Whether the namespace is in it, at this generation or a later one; always where no master
        has told of a pool."""
        return not self._copy.pool_id or self._generations.get(namespace_id, 0) >= generation

    def name_of(self, namespace_id: int) -> str:
        """Of a namespace; "" where it is not known here."""
        return self._names.get(namespace_id, "")

    def told(self, *, namespaces: bool) -> pb.PoolCopy:
        """What a master is told of it."""
        with self._lock:
            told = pb.PoolCopy(pool_id=self._copy.pool_id, ancestors=self._copy.ancestors)
            if namespaces:
                told.namespaces.extend(self._copy.namespaces)
            return told

    def keep(self, told: pb.PoolCopy) -> None:
        """Keep what the master tells: of the same pool, or of one that was rebuilt from it, beside
        what is known, else instead of it.

        Raises ResourceUnavailable where it can't be written.
        """
        with self._lock:
            known = {}
            if self._copy.pool_id in (told.pool_id, *told.ancestors):
                known = {copy.namespace_id: copy for copy in self._copy.namespaces}
            for copy in told.namespaces:
                held = known.get(copy.namespace_id)
                if held is None or held.generation <= copy.generation:
                    known[copy.namespace_id] = copy
            merged = pb.PoolCopy(
                pool_id=told.pool_id, ancestors=told.ancestors, namespaces=known.values()
            )
            if merged == self._copy:
                return
            if self._path is not None:
                _write(self._path, merged)
            self._use(merged)


def _read(path: Path) -> pb.PoolCopy:
    try:
        with path.open("rb") as file:
            data = file.read(_FILE_BYTES_MAX)
    except FileNotFoundError:
        return pb.PoolCopy()
    except OSError as error:
        raise ResourceUnavailable(f"can't read {path}: {error.strerror}") from error
    body = data[_HEAD.size :]
    try:
        magic, checksum = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
        if magic == _MAGIC and checksum == xxh3_64_intdigest(body):
            return pb.PoolCopy.FromString(body)
    except DecodeError:
        pass
    _log.warning("the copy of the pool's namespaces is damaged and does not count", file=str(path))
    return pb.PoolCopy()


def _write(path: Path, copy: pb.PoolCopy) -> None:
    """Whole or not at all. The memory file system forgets it with what is stored there."""
    body = copy.SerializeToString()
    new = path.with_suffix(".pool.tmp")
    try:
        new.write_bytes(_HEAD.pack(_MAGIC, xxh3_64_intdigest(body)) + body)
        os.replace(new, path)
    except OSError as error:
        raise ResourceUnavailable(
            f"can't write {path}: {error.strerror}",
            remedy=f"make room on the file system of {path.parent}",
        ) from error
