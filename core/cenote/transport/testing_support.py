"""What tests of the data path need again and again: payloads, guarded buffers, rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError
from cenote.api.rows import EXTENT, SEAL
from cenote.v1 import common_pb2

from .base import ExtentArray, SealBatch, SessionIdentity, Transport

__all__ = [
    "DEADLINE_S",
    "GRACE_S",
    "GUARD",
    "SHORT_S",
    "UNKNOWN_SEGMENT",
    "FarEnd",
    "LocalMemory",
    "batch",
    "payload",
    "raises",
    "seal_rows",
]

DEADLINE_S: Final = 20.0
"""Of calls that are to succeed: generous, since the machine may be busy."""
SHORT_S: Final = 0.3
GRACE_S: Final = 1.0
"""How much later than its deadline a call may end on a busy test machine; 0.1 s is the promise."""
GUARD: Final = 0xA5
UNKNOWN_SEGMENT: Final = 999_999

Error = TypeVar("Error", bound=CenoteError)


class FarEnd(Protocol):
    """A daemon with one segment, how to reach it, and what can be done to it."""

    @property
    def transport(self) -> Transport: ...
    @property
    def node(self) -> common_pb2.NodeView: ...
    @property
    def identity(self) -> SessionIdentity: ...
    @property
    def segment_id(self) -> int: ...

    @property
    def size_bytes(self) -> int:
        """Of the segment, all of it ready; at least 40 MiB."""
        ...

    @property
    def needs_peer(self) -> bool:
        """Whether reads and writes need the daemon's help (else only seals do)."""
        ...

    @property
    def outlives_peer(self) -> bool:
        """Whether reads go on when the daemon is dead (and writes are for the kernel to judge)."""
        ...

    @property
    def proven_by_lease(self) -> bool:
        """Whether reads are proven by their lease alone."""
        ...

    def peek(self, offset: int, length: int) -> bytes:
        """What is in the segment."""
        ...

    def poke(self, offset: int, data: bytes) -> None:
        """Put something into the segment."""
        ...

    def set_epoch(self, epoch: int) -> None:
        """The daemon follows this epoch from now on (1 at first)."""
        ...

    def cut(self, session_id: bytes) -> None:
        """The daemon cuts the session off."""
        ...

    def pause(self) -> None:
        """The daemon stands still (SIGSTOP)."""
        ...

    def resume(self) -> None: ...

    def stop(self) -> None:
        """The daemon is killed."""
        ...


@final
class LocalMemory:
    """A buffer filled with GUARD, named by addresses."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes: NDArray[np.uint8] = np.full(size_bytes, GUARD, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def untouched(self, first: int, last: int) -> bool:
        """Whether [first, last) holds nothing but GUARD."""
        return bool((self.bytes[first:last] == GUARD).all())


def payload(size_bytes: int, seed: int) -> bytes:
    """Bytes that differ everywhere from those of another seed."""
    return np.random.default_rng(seed).bytes(size_bytes)


@contextmanager
def raises(kind: type[Error]) -> Iterator[None]:
    """The block must raise this kind of error."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised")


def batch(pieces: list[tuple[int, int, int]]) -> ExtentArray:
    """EXTENT rows of (segment, offset, length)."""
    extents = np.zeros(len(pieces), EXTENT)
    for i, (segment, offset, length) in enumerate(pieces):
        extents[i] = (segment, 0, offset, length)
    return extents


def seal_rows(segment_ids: list[int], seq: int) -> SealBatch:
    """One slot in each of the segments, with keys of different lengths."""
    rows = np.zeros(len(segment_ids), SEAL)
    keys = [b"k" * (1 + i % 64) for i in range(len(segment_ids))]
    rows["segment"] = segment_ids
    rows["slot"] = np.arange(len(segment_ids))
    rows["seq"] = seq
    rows["length"] = rows["object_size"] = 64
    rows["offset"] = rows["slot"].astype(np.uint64) * np.uint64(64)
    rows["extent_count"] = 1
    rows["key_length"] = [len(key) for key in keys]
    return SealBatch(1, 1, 1, rows.tobytes(), b"".join(keys))
