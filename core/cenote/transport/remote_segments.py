"""Segments of a daemon on this host that can't be mapped: on its SSD. It sends their bytes."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.v1 import store_pb2

from .base import ExtentArray, SessionIdentity, U8Array, U64Array
from .pool import ConnectionPool, hello_for
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
        pool = ConnectionPool(path, name, hello, CONNECTIONS, spin_s, access=identity.access)
        self._channel = TcpChannel(pool, node_id, epoch)
        self.ids: frozenset[int] = frozenset()
        self.read_one = self._channel.read_one

    def learn(self, segments: Iterable[store_pb2.SharedSegment]) -> None:
        """What the daemon says that it has."""
        self.ids = frozenset(segment.segment_id for segment in segments)

    def has(self, segments: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Which of these are among them."""
        return np.isin(segments, np.array(sorted(self.ids), np.uint32))

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
        left_s = max(0.001, deadline - monotonic())
        statuses[which] = self._channel.read(extents[which], addresses[which], left_s, sums)
        if checksums is not None and sums is not None:
            checksums[which] = sums

    def close(self) -> None:
        """Interrupts reads."""
        self._channel.close()
