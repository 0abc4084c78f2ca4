"""What a cache keeps: the border between a policy, which chooses, and its caller, which evicts.

A policy sees one column of stamps (uint64, one a row of the caller's table) and nothing else of an
object. It writes stamps when objects are touched and orders rows by them when room is needed. The
master's state and the offline simulator drive the same policies; none of them does I/O, reads a
clock or rolls dice.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["EvictionPolicy", "Mask", "Positions", "Stamps"]

Stamps: TypeAlias = NDArray[np.uint64]
Positions: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]


class EvictionPolicy(Protocol):
    """Decides in which order objects go. A higher stamp means: keep longer."""

    @property
    def name(self) -> str:
        """For configuration and status."""
        ...

    @property
    def clock(self) -> int:
        """The next stamp; never falls. Age in stamps is `clock - stamp`."""
        ...

    def take(self, count: int) -> int:
        """Reserve `count` (>= 1) consecutive stamps that were never given; returns the first."""
        ...

    def fresh(self, count: int, chain: bool) -> Stamps:
        """Stamps, uint64[count], for objects stored or touched now, in their order.

        With `chain` the objects are blocks of one prefix chain in order: its root gets the newest
        stamp, so that tails go first and no suffix is left without what stands before it.
        """
        ...

    def victims(self, stamps: Stamps, evictable: Mask, count: int) -> Positions:
        """About `count` positions into `stamps`, those to go first in front.

        Only positions with a true `evictable` are chosen. Returns fewer when there are fewer, and
        at least min(count, evictable ones).
        """
        ...
