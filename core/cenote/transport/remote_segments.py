"""Segments of a daemon on this host that can't be mapped: on its SSD.

Their bytes come through the daemon's staging memory, which is mapped here (`staged`): the daemon
reads into it, this channel copies from it. Where it can't be mapped, the daemon sends them.
"""

from __future__ import annotations

from time import monotonic
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import StaleLocation
from cenote.api.rows import EXTENT
from cenote.v1 import store_pb2

from .base import ExtentArray, SessionIdentity, U8Array, U64Array
from .mapping import Mapping
from .opening import close_all, connect, greet
from .pool import ConnectionPool, hello_for
from .staged import StagedReader
from .tcp import TcpChannel

__all__ = ["RemoteSegments"]

CONNECTIONS: Final = 4


@final
class RemoteSegments:
    """Read over connections of their own to the daemon's Unix socket, made when first needed."""

    def __init__(
        self,
        path: str,
        name: str,
        node_id: int,
        identity: SessionIdentity,
        epoch: int,
        spin_s: float,
    ) -> None:
        hello = hello_for(identity, epoch, writer=False)
        self._pool = ConnectionPool(path, name, hello, CONNECTIONS, spin_s, access=identity.access)
        self._channel = TcpChannel(self._pool, node_id, epoch)
        self._staged: StagedReader | None = None
        self._path = path
        self._asking = hello_for(
            identity, epoch, writer=False, want_descriptors=True, has_head=True, wants_staging=True
        )
        self.ids: frozenset[int] = frozenset()

    @property
    def has_staging(self) -> bool:
        """Whether the daemon's staging memory is mapped."""
        return self._staged is not None

    def learn(self, response: store_pb2.DataHelloResponse, descriptors: list[int]) -> list[Mapping]:
        """What the daemon says that it has; its staging memory, where that was mapped now (its
        descriptor, the last one, is taken and closed). Raises ResourceUnavailable."""
        self.ids = frozenset(segment.segment_id for segment in response.disk_segments)
        if not response.staging_id:
            return []
        descriptor = descriptors.pop()
        try:
            size = response.staging_bytes
            mapping = Mapping(descriptor, size, size, b"", writable=False)
        finally:
            close_all([descriptor])
        self._staged = StagedReader(self._pool, mapping, response.staging_id)
        return [mapping]

    def has(self, segments: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of these are among them."""
        return np.isin(segments, np.array(sorted(self.ids), np.uint32))

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        """As `Channel.read_one`."""
        extents = np.array([(segment, 0, offset, length)], EXTENT)
        sums = np.zeros(1, np.uint64) if checksum else None
        addresses = np.array([address], np.uint64)
        statuses = self._read(extents, addresses, monotonic() + deadline_s, sums)
        return int(statuses[0]), 0 if sums is None else int(sums[0])

    def read(
        self,
        which: NDArray[np.bool_],
        extents: ExtentArray,
        addresses: U64Array,
        deadline: float,
        checksums: U64Array | None,
        statuses: U8Array,
    ) -> None:
        """The items at `which`; as `Channel.read`, into `checksums` and `statuses`."""
        sums = None if checksums is None else np.zeros(int(np.count_nonzero(which)), np.uint64)
        statuses[which] = self._read(extents[which], addresses[which], deadline, sums)
        if checksums is not None and sums is not None:
            checksums[which] = sums

    def _read(
        self, extents: ExtentArray, addresses: U64Array, deadline: float, sums: U64Array | None
    ) -> U8Array:
        staged = self._staged
        if staged is not None:
            try:
                return staged.read(extents, addresses, max(0.001, deadline - monotonic()), sums)
            except StaleLocation:  # of the process that was there before; sent by this one
                self._staged = None
                self._map_again(deadline)
        return self._channel.read(extents, addresses, max(0.001, deadline - monotonic()), sums)

    def _map_again(self, deadline: float) -> None:
        """Map the memory of the daemon's present process, for the next reads. Raises a hello's
        errors."""
        connection = connect(self._path, self._pool.name, deadline)
        try:
            response, descriptors = greet(connection, self._asking)
            try:
                self.learn(response, descriptors)
            finally:
                close_all(descriptors)
        finally:
            connection.close()

    def close(self) -> None:
        """Interrupts reads."""
        self._pool.close()
        self._staged = None
