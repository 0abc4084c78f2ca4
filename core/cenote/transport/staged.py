"""Reads from a daemon's SSD through its staging memory, which is mapped here.

The daemon reads into it and tells where the bytes lie; they are copied from there, once, straight
to where they are wanted, and it is told so. See `wire` (STAGED).
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Final, final

import numpy as np
import xxhash

from cenote.api.errors import ProtocolError

from . import wire
from .base import ExtentArray, U8Array, U64Array
from .connection import DataConnection
from .mapping import Mapping
from .memory_access import HASH_STEP_BYTES, MEMORY, checksum_at, copy
from .pool import ConnectionPool

__all__ = ["Landing", "StagedReader"]

REQUEST_ITEMS: Final = 4_096
"""What more a batch has is asked for once these have come."""
_COPIED: Final = b"\x01"


@final
class Landing:
    """Where a stream of bytes goes: items of memory, in order. XXH3-64 of each in `sums`, where
    they are `hashed`."""

    __slots__ = ("_addresses", "_at", "_done", "_hashed", "_hasher", "_lengths", "sums")

    def __init__(self, addresses: Sequence[int], lengths: Sequence[int], *, hashed: bool) -> None:
        self._addresses = addresses
        self._lengths = lengths
        self._hashed = hashed
        self._hasher = xxhash.xxh3_64()
        self._at = 0
        self._done = 0
        """Bytes of the item that is begun."""
        self.sums = [0] * len(addresses) if hashed else []

    @property
    def is_full(self) -> bool:
        """Whether all items have come."""
        return self._at == len(self._addresses)

    def take(self, source: int, length: int) -> None:
        """Copy the next bytes of the stream. Raises ProtocolError where there are too many."""
        while length:
            if self.is_full:
                raise ProtocolError("the daemon told of more bytes than were asked for")
            size = self._lengths[self._at]
            step = min(length, size - self._done, HASH_STEP_BYTES)
            target = self._addresses[self._at] + self._done
            copy(target, source, step)
            if self._hashed:
                self._hash(target, step, size)
            self._done += step
            if self._done == size:
                self._at += 1
                self._done = 0
            source += step
            length -= step

    def _hash(self, target: int, step: int, size: int) -> None:
        if step == size:
            self.sums[self._at] = checksum_at(target, step)
            return
        if not self._done:
            self._hasher.reset()
        self._hasher.update(MEMORY[target : target + step])
        if self._done + step == size:
            self.sums[self._at] = self._hasher.intdigest()


@final
class StagedReader:
    """For any thread. `staging_id` is what the daemon calls the memory that is mapped."""

    def __init__(self, pool: ConnectionPool, staging: Mapping, staging_id: int) -> None:
        self._pool = pool
        self._staging = staging
        self._staging_id = staging_id

    def read(
        self,
        extents: ExtentArray,
        addresses: U64Array,
        deadline_s: float,
        checksums: U64Array | None = None,
    ) -> U8Array:
        """As `Channel.read`. Raises StaleLocation where the memory is of an earlier process."""
        now = monotonic()
        statuses = np.zeros(len(extents), np.uint8)
        connection = self._pool.take(now + deadline_s, now)
        try:
            for first in range(0, len(extents), REQUEST_ITEMS):
                some = slice(first, first + REQUEST_ITEMS)
                part = None if checksums is None else checksums[some]
                statuses[some] = self._read(connection, extents[some], addresses[some], part)
        except BaseException:  # whatever it was, groups may still be on their way
            self._pool.discard(connection)
            raise
        self._pool.give_back(connection)
        return statuses

    def _read(
        self,
        connection: DataConnection,
        extents: ExtentArray,
        addresses: U64Array,
        checksums: U64Array | None,
    ) -> U8Array:
        count = len(extents)
        call_id = connection.call_id = connection.call_id + 1 & 0xFFFF_FFFF
        rows = np.ascontiguousarray(extents).view(np.uint8).data
        head = wire.REQUEST.pack(
            wire.OP_STAGED, 0, 0, count, call_id, 0, self._staging_id, len(rows)
        )
        connection.send_views([head, rows])
        body, raw = connection.receive_reply(wire.OP_STAGED, call_id, count)
        statuses = np.frombuffer(raw, np.uint8)
        good = statuses == 0
        lengths = extents["length"][good]
        left = int(lengths.sum())
        if body != left:
            raise ProtocolError(f"{connection.name} told of {body} bytes of {left}")
        hashed = checksums is not None
        landing = Landing(addresses[good].tolist(), lengths.tolist(), hashed=hashed)
        group = memoryview(bytearray(wire.STAGED_GROUP.size))
        while not landing.is_full:
            self._take_group(connection, group, landing)
        if checksums is not None:
            checksums[good] = landing.sums
        return statuses

    def _take_group(self, connection: DataConnection, group: memoryview, landing: Landing) -> None:
        connection.receive_view(group)
        count, _, start, length = wire.STAGED_GROUP.unpack(group)
        if not 0 < count <= wire.STAGED_RUNS_MAX:
            raise ProtocolError(f"{connection.name} told of a group of {count} runs")
        runs = [(start, length)]
        if count > 1:
            rest = bytearray((count - 1) * wire.STAGED_RUN.size)
            connection.receive_view(memoryview(rest))
            runs += wire.STAGED_RUN.iter_unpack(rest)
        size, base = self._staging.ready_bytes, self._staging.address
        for start, length in runs:
            if not 0 < length <= size or start > size - length:
                raise ProtocolError(f"{connection.name} told of bytes outside its staging memory")
            landing.take(base + start, length)
            connection.look_at_clock()
        connection.send_views([_COPIED])
