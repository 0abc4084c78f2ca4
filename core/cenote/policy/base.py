"""What a cache keeps: the border between a policy, which chooses, and its caller, which evicts.

A policy sees one column of stamps (uint64, one a row of the caller's table) and, of those that come
and go, their keys; nothing else of an object. It writes stamps when objects are stored or used, and
orders rows by them when room is needed. The master's state, its shadow caches and the offline
simulator drive the same policies; none of them does I/O, reads a clock or rolls dice.

All policies share one layout of stamps, so that one policy can take over from another at any moment
without a look at a single object:

    bits 7 to 63   tick: when it was used last (LRU, ARC), or took its place in a queue (S3-FIFO)
    bit 2          MAIN: used again since it was stored (ARC: in T2; S3-FIFO: in the main queue)
    bits 3 to 6    counts puts behind it in its chain: a stamp that was looked at is out of date
    bits 0 and 1   uses counted in the present queue, at most 3 (S3-FIFO)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FREQUENCY",
    "MAIN",
    "PUT",
    "PUTS",
    "STEP",
    "EvictionPolicy",
    "Keys",
    "Links",
    "Mask",
    "Positions",
    "Stamps",
    "key_words",
]

Stamps: TypeAlias = NDArray[np.uint64]
Positions: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]
Keys: TypeAlias = NDArray[np.uint64]
"""Evenly spread words, one an object: uint64[n], or digests as uint64[n, 2], whose first counts."""

STEP: Final = 128
"""Between two stamps."""
MAIN: Final = 4
FREQUENCY: Final = 3
PUTS: Final = 0x78
PUT: Final = 8


def key_words(keys: Keys) -> Keys:
    """uint64[n] of either shape."""
    return keys if keys.ndim == 1 else keys[:, 0]


@dataclass(frozen=True, slots=True)
class Links:
    """Which object stands before which in a prefix chain, as far as that is known; by row."""

    keys: Keys
    """Of the rows, uint64[rows]."""
    parents: NDArray[np.uint32]
    """Of each LIVE row `parent_mark` of the key before it in its chain, 0 where none is known.
    0 for all rows that are not LIVE."""


class EvictionPolicy(Protocol):
    """Decides in which order objects go.

    `chain` says of objects that they are blocks of one prefix chain in order: its root gets the
    newest stamp, so that of blocks used alike tails go first.
    """

    @property
    def name(self) -> str:
        """For configuration and status."""
        ...

    @property
    def clock(self) -> int:
        """The next stamp; never falls. Stamps of the same age differ by less than STEP."""
        ...

    @property
    def remembers(self) -> bool:
        """Whether it wants to hear of evictions (`evicted`)."""
        ...

    @property
    def chained(self) -> bool:
        """Whether `victims` needs links."""
        ...

    @property
    def by_age(self) -> bool:
        """Whether the oldest stamps go first, and nothing else counts."""
        ...

    @property
    def victims_at_once(self) -> int:
        """How many victims it is good to ask for at once in a small cache."""
        ...

    def admit_one(self, key: int) -> int:
        """The stamp of an object that is stored now."""
        ...

    def admit(self, keys: Keys, chain: bool) -> Stamps:
        """Stamps, uint64[n], for objects that are stored now, in their order."""
        ...

    def restored(self, count: int) -> Stamps:
        """Stamps for objects that were stored before, oldest first: a table is rebuilt."""
        ...

    def touch_one(self, words: memoryview, row: int) -> None:
        """The object in this row is used now. `words`: the column of stamps."""
        ...

    def touch(self, stamps: Stamps, rows: Positions, chain: bool) -> None:
        """The objects in these rows are used now, in this order."""
        ...

    def order(self, stamps: Stamps, rows: Positions) -> None:
        """These rows are one chain, root first, some of it stored just now. Not a use."""
        ...

    def evicted(self, keys: Keys, stamps: Stamps) -> None:
        """These were evicted for want of room. Called only where it `remembers`."""
        ...

    def victims(
        self, stamps: Stamps, evictable: Mask, count: int, links: Links | None = None
    ) -> Positions:
        """About `count` positions into `stamps`, those to go first in front; each at most once.

        Only positions with a true `evictable` are chosen. Returns fewer when there are fewer, and
        at least min(count, evictable ones). It is assumed that as many objects will be stored as
        are evicted. May rewrite stamps of rows that it passes over. `links` where it is `chained`.
        """
        ...

    def coldest(self, stamps: Stamps, positions: Positions, count: int) -> Positions:
        """About `count` of these positions, all where there are fewer: what will go first, in about
        that order, as far as can be told now. Nothing changes by it."""
        ...

    def memory_bytes(self) -> int:
        """Of what it keeps beside the stamps."""
        ...
