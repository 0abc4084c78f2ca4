"""Batches of objects that are all alike: present, in one piece each, on one node, one buffer each.

Nearly all batches that engines read are. What `fetches` finds out row by row for any batch is told
here by a few comparisons of whole columns; where one of them fails, that is the way to go.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import BufferInUse, ClientClosed
from cenote.api.rows import ObjectStatus

from .budgets import attempt_budget_s, node_failed
from .device_rows import Devices
from .fetches import Located
from .pieces import Pieces
from .state import Call
from .steps import Checksum, Part

__all__ = ["CACHED_BYTES_MAX", "Alike"]

CACHED_BYTES_MAX: Final = 512 << 10
"""Larger objects' locations are not kept where a lease proves reads: there asking the master costs
less than hashing."""

_LEASED: Final = np.uint64(1 | 1 << 16 | ObjectStatus.LEASED << 24)
"""One extent, one replica, leased: the upper half of an OBJECT row's last word."""
_UPPER: Final = np.uint64(32)
_LOWER_HALF: Final = np.uint64(0xFFFF_FFFF)
count_nonzero: Final = np.count_nonzero


@final
class Alike:
    """Such a batch, found under a lease."""

    __slots__ = ("_addresses", "_checksums", "_located", "_until_s", "node", "sizes")

    def __init__(
        self,
        located: Located,
        node: int,
        addresses: NDArray[np.uint64],
        sizes: NDArray[np.uint64],
        checksums: NDArray[np.uint64],
    ) -> None:
        self._located = located
        self._addresses = addresses
        self._checksums = checksums
        self.node = node
        self.sizes = sizes

    @classmethod
    def of(cls, call: Call, located: Located, pieces: Pieces | None) -> Alike | None:
        """None where it is not such a batch."""
        objects, extents = located.objects, located.extents
        count = len(objects)
        if (
            pieces is None
            or pieces.starts is not None
            or located.hold is None
            or not len(pieces) == len(extents) == count
        ):
            return None
        words = objects.view(np.uint64).reshape(count, 4)
        places = extents.view(np.uint64).reshape(count, 3)
        sizes = words[:, 0]
        segments = places[:, 0] & _LOWER_HALF
        segment = int(segments[0])
        if (
            count_nonzero(words[:, 3] >> _UPPER != _LEASED)
            or count_nonzero(segments != segments[0])
            or count_nonzero(places[:, 2] != sizes)
            or count_nonzero(pieces.lengths < sizes)
        ):
            return None
        node = call.state.peers.node_by_segment.get(segment)
        if node is None:
            return None
        return cls(located, node, pieces.addresses, sizes, words[:, 1])

    def part(self, call: Call, verify: str, direct: Devices | None = None) -> Part:
        """The transfer of all of them; `direct`: to GPUs."""
        size_bytes = int(self.sizes.sum())
        hold = self._located.hold
        assert hold is not None
        mode = Checksum.ALWAYS if verify == "checksum" else Checksum.UNLESS_LEASED
        budget_s = attempt_budget_s(
            call.remaining_s(),
            size_bytes,
            alternatives=False,
            last=self.node in call.last_tries,
        )
        self._until_s = call.now() + budget_s
        return Part(
            self.node,
            self._located.extents,
            self._addresses,
            budget_s=budget_s,
            size_bytes=size_bytes,
            checksum=mode,
            lease_id=hold.lease_id,
            direct=direct,
        )

    def arrived(self, call: Call, part: Part) -> bool:
        """Whether all of it came, and is what was put. Raises BufferInUse and ClientClosed."""
        error = part.error
        if error is not None:
            if isinstance(error, BufferInUse | ClientClosed):
                raise error
            if node_failed(error):
                call.node_failed(self.node, error, alone=True, until_s=self._until_s)
            return False
        if part.statuses is None or count_nonzero(part.statuses):
            return False
        if part.checksums is None:
            hold = self._located.hold
            return hold is not None and call.now() <= hold.end_s
        return not count_nonzero(part.checksums != self._checksums)

    def is_cacheable(self, call: Call) -> bool:
        """Whether they will be read from there again without asking."""
        if self.node not in call.state.lease_proven:
            return True
        return int(self.sizes.max()) <= CACHED_BYTES_MAX
