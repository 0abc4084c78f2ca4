"""What the data server needs of a segment, whatever it lies on (DRAM or SSD)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import StaleLocation, Unavailable

from .disk_io import DiskIo


class Segment(Protocol):
    """A range of memory that this daemon contributes.

    `view` is the data area (writable, `size_bytes` long; only `[0, ready_bytes)` is backed so far);
    the slot table is elsewhere and never reachable through it. `fd` is the data file's descriptor,
    to be passed to clients on this host, or -1.
    """

    @property
    def segment_id(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def tier(self) -> int: ...
    @property
    def incarnation(self) -> bytes: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def ready_bytes(self) -> int: ...
    @property
    def view(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def disk(self) -> DiskIo | None:
        """How its bytes are read where they are not in memory (then `address` is only a number)."""
        ...

    def seal(
        self,
        epoch: int,
        namespace_id: int,
        generation: int,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """Write slots for `rows.SEAL` rows that all lie in this segment.

        `key_starts[i]` is where the key of row i begins in `keys`. Returns uint8[n]: 0 sealed, else
        an error's wire code (StaleLocation: the slot already holds a higher version; Unavailable:
        the slot number is beyond the table yet, try again; InvalidArgument: out of range).
        """
        ...

    def record(self, slot: int, epoch: int, seq: int) -> bytes | None:
        """The record of a slot that is sealed with just this version, else None."""
        ...

    def namespace_at(self, slot: int) -> int:
        """Whose this slot is, 0: nobody's."""
        ...


class SegmentSet(Protocol):
    """All segments of this daemon and the tenure it follows."""

    @property
    def epoch(self) -> int:
        """Epoch of the leader that this daemon is attached to; 0 before the first attach."""
        ...

    @property
    def node_id(self) -> int: ...

    @property
    def disk(self) -> DiskIo | None:
        """Of the SSD, where this daemon has one."""
        ...

    @property
    def first_grant_id(self) -> int:
        """Nothing may be written under an older grant."""
        ...

    @property
    def ticket_key(self) -> bytes:
        """By which the master knows tickets of this process; see `proofs`."""
        ...

    def by_id(self, segment_id: int) -> Segment | None: ...

    def knows(self, namespace_id: int, generation: int) -> bool:
        """Whether a namespace would be known here if its master lost its metadata: what is sealed
        before would be lost then."""
        ...

    def namespace_name(self, namespace_id: int) -> str:
        """ "" where that was not told here."""
        ...

    def all(self) -> Sequence[Segment]: ...


def seal_rows(
    segments: SegmentSet,
    head: tuple[int, int, int],
    rows: NDArray[np.void],
    keys: memoryview,
    key_starts: NDArray[np.int64],
) -> NDArray[np.uint8]:
    """`Segment.seal` for rows of any segments; `head`: epoch, namespace and generation."""
    ids = rows["segment"]
    found = set(ids.tolist())
    if not segments.knows(*head[1:]):
        return np.full(len(rows), Unavailable.code, np.uint8)  # its master will tell it soon
    if len(found) == 1:
        segment = segments.by_id(found.pop())
        if segment is not None:
            return segment.seal(*head, rows, keys, key_starts)
    statuses = np.full(len(rows), StaleLocation.code, np.uint8)
    for segment_id in found:
        segment = segments.by_id(segment_id)
        if segment is not None:
            mine = ids == segment_id
            statuses[mine] = segment.seal(*head, rows[mine], keys, key_starts[mine])
    return statuses
