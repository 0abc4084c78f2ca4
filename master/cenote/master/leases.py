"""Leases: which rows each covers, and when it ends.

A lease is a number to its holder. It covers each of its rows once; the rows' own counters (a column
of the object table) are the caller's to keep. Deadlines are sorted into a wheel of 50 ms buckets,
so that giving, renewing and ending a lease cost a dict entry each, whatever their number.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lease", "LeaseTable"]

_BUCKETS_PER_S = 20
_FOREVER_S = float("inf")


class Lease:
    """`rows`: an int, or int64[n] of distinct rows. `deadline_s` is infinite for a hold."""

    __slots__ = ("deadline_s", "lease_id", "rows", "session_id")

    def __init__(
        self, lease_id: int, rows: int | NDArray[np.int64], deadline_s: float, session_id: bytes
    ) -> None:
        self.lease_id = lease_id
        self.rows = rows
        self.deadline_s = deadline_s
        self.session_id = session_id

    @property
    def is_hold(self) -> bool:
        return self.deadline_s == _FOREVER_S


class LeaseTable:
    """`first_id` has the epoch in its high bits: no id of one tenure names one of another."""

    __slots__ = ("_buckets", "_heap", "_next_id", "by_id")

    def __init__(self, first_id: int) -> None:
        self.by_id: dict[int, Lease] = {}
        self._next_id = first_id
        self._buckets: dict[int, array[int]] = {}
        self._heap: list[int] = []

    def __len__(self) -> int:
        return len(self.by_id)

    def give(self, rows: int | NDArray[np.int64], deadline_s: float, session_id: bytes) -> Lease:
        """`deadline_s` is infinite for a hold, a lease that no time ends."""
        lease_id = self._next_id
        self._next_id = lease_id + 1
        lease = self.by_id[lease_id] = Lease(lease_id, rows, deadline_s, session_id)
        if deadline_s != _FOREVER_S:
            self._file(lease_id, deadline_s)
        return lease

    def renew(self, lease_id: int, deadline_s: float) -> bool:
        """False when there is no such lease (any more)."""
        lease = self.by_id.get(lease_id)
        if lease is None:
            return False
        # The wheel still has the old deadline: when that comes, the lease is filed again.
        lease.deadline_s = max(lease.deadline_s, deadline_s)
        return True

    def due(self, now_s: float, limit: int) -> list[Lease]:
        """Take out up to `limit` leases whose deadline has passed."""
        ended: list[Lease] = []
        heap = self._heap
        while heap and heap[0] < now_s * _BUCKETS_PER_S and len(ended) < limit:
            bucket = self._buckets[heap[0]]
            while bucket and len(ended) < limit:
                lease_id = bucket.pop()
                lease = self.by_id.get(lease_id)
                if lease is None:
                    continue
                if lease.deadline_s <= now_s:
                    del self.by_id[lease_id]
                    ended.append(lease)
                else:
                    self._file(lease_id, lease.deadline_s)
            if not bucket:
                del self._buckets[heappop(heap)]
        return ended

    def _file(self, lease_id: int, deadline_s: float) -> None:
        # Rounded up: a bucket is opened only when all its deadlines have passed.
        number = int(deadline_s * _BUCKETS_PER_S) + 1
        bucket = self._buckets.get(number)
        if bucket is None:
            # Packed: ids of released leases stay here until their deadline would have come.
            self._buckets[number] = array("Q", (lease_id,))
            heappush(self._heap, number)
        else:
            bucket.append(lease_id)
