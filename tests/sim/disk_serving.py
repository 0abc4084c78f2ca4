"""What a daemon's connection does with a read of what lies on its SSD: the production code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cenote.api.errors import DeadlineExceeded, InvalidArgument, StaleLocation, Unavailable
from cenote.store.disk_reads import send_items
from cenote.transport.base import ExtentArray
from cenote.transport.memory_access import MEMORY

if TYPE_CHECKING:
    from sim.data_connection import DataConnection
    from sim.stores import StoreProcess

__all__ = ["disk_ids", "serve"]

STALL_S: Final = 10.0


class _Outlet:
    """Takes what would go to a socket."""

    def __init__(self) -> None:
        self.data = bytearray()

    def send(self, address: int, length: int) -> None:
        self.data += MEMORY[address : address + length]

    def send_views(self, views: list[memoryview]) -> None:
        for view in views:
            self.data += view


def disk_ids(store: StoreProcess) -> list[int]:
    """Segments of a daemon that are on its SSD."""
    return [segment.segment_id for segment in store.segments.ssd()]


def serve(connection: DataConnection, extents: ExtentArray, reply: Callable[[Any], None]) -> None:
    """Answer a read, some of which is on the SSD, with (statuses, bytes); takes its time."""
    store = connection.store

    def read() -> None:
        statuses = np.zeros(len(extents), np.uint8)
        addresses: list[int] = []
        lengths: list[int] = []
        disk = store.segments.disk
        for i, (segment_id, _, offset, length) in enumerate(extents.tolist()):
            segment = store.segments.by_id(segment_id)
            if segment is None or disk is None:
                statuses[i] = StaleLocation.code
            elif not length or offset + length > segment.ready_bytes:
                statuses[i] = InvalidArgument.code
            else:
                addresses.append(segment.address + offset)
                lengths.append(length)
        outlet = _Outlet()
        if addresses:
            assert disk is not None
            try:
                send_items(disk, outlet, addresses, lengths, STALL_S)
            except DeadlineExceeded:
                connection._close(Unavailable("the SSD did not get on"))
                return
        if not connection.closed:
            reply((statuses, outlet.data))

    store.world.loop.spawn(store.party, "read", read)
