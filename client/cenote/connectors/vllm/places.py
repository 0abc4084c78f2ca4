"""Where in the pool blocks lie, seen from this host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import OBJECT
from cenote.api.types import AcquiredLease
from cenote.client import Namespace

from .groups import Block

__all__ = ["DISK", "MEMORY", "NOWHERE", "PEER", "PEER_DISK", "SOURCES", "HostView", "by_index"]

MEMORY: Final = 0
"""Of this host."""
PEER: Final = 1
"""Memory of another host."""
DISK: Final = 2
"""An SSD of this host."""
PEER_DISK: Final = 3
NOWHERE: Final = 4
SOURCES: Final = {"memory": (MEMORY,), "peer": (PEER,), "disk": (DISK, PEER_DISK)}
"""Names for metrics."""


@final
class HostView:
    """Tables of the pool's segments, made anew when its view changes. Of one thread."""

    def __init__(self) -> None:
        self._peers: object = None
        self._codes = np.zeros(0, np.uint8)

    def places(self, space: Namespace, lease: AcquiredLease, shards: int) -> NDArray[np.uint8]:
        """uint8[n]: for each block of `shards` keys the farthest of the places that they are read
        from, each at its nearest."""
        codes = self._table(space)
        counts = np.frombuffer(lease.objects, OBJECT)["extents"].astype(np.int64)
        of_keys = np.full(len(counts), NOWHERE, np.uint8)
        some = np.flatnonzero(lease.present & (counts > 0))
        if len(some):
            of_extents = codes.take(lease.extent_rows["segment"], mode="clip")
            starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
            of_keys[some] = np.minimum.reduceat(of_extents, starts[some])
        found: NDArray[np.uint8] = of_keys.reshape(-1, shards).max(axis=1)
        return found

    def _table(self, space: Namespace) -> NDArray[np.uint8]:
        """The place of each segment. The last entry stands for all that are not known."""
        session = space.calls.session
        peers = session.state.peers
        if peers is not self._peers:
            host = session.identity.boot_id
            here = {number for number, node in peers.nodes.items() if node.boot_id == host}
            codes = np.full(max(peers.node_by_segment, default=0) + 2, PEER, np.uint8)
            for segment, node in peers.node_by_segment.items():
                on_ssd = segment in peers.on_ssd
                if node in here:
                    codes[segment] = DISK if on_ssd else MEMORY
                elif on_ssd:
                    codes[segment] = PEER_DISK
            self._peers, self._codes = peers, codes
        return self._codes


def by_index(blocks: Sequence[Block], places: NDArray[np.uint8], number: int) -> NDArray[np.uint8]:
    """The places of the blocks of group `number`, at their indices in the prompt."""
    if blocks and blocks[0] == (number, 0) and blocks[-1] == (number, len(blocks) - 1):
        return places
    rows = [
        (index, place)
        for (group, index), place in zip(blocks, places.tolist(), strict=True)
        if group == number
    ]
    found = np.full(max((index for index, _ in rows), default=-1) + 1, NOWHERE, np.uint8)
    for index, place in rows:
        found[index] = place
    return found
