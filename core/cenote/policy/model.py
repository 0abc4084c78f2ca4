"""A cache without bytes: what a policy would keep of a stream of requests.

Shadow caches of the master and the offline simulator are such models, over the same policy classes
that the master's object table is evicted by. Blocks are small whole numbers, given by the caller;
all columns are packed, and an access costs a few calls for each request, not for each block.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .base import EvictionPolicy, Keys, Links, Positions
from .chains import parent_mark

__all__ = ["CacheModel", "spread"]

_PIECE_MAX: Final = 96
_QUEUE_SHARE: Final = 64


def spread(numbers: NDArray[np.integer]) -> Keys:
    """Evenly spread keys, uint64, of whole numbers: different ones for different numbers."""
    words = numbers.astype(np.uint64) + np.uint64(0x9E37_79B9_7F4A_7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))


@final
class CacheModel:
    """Keeps at most `capacity` blocks (all alike) as `policy` would.

    `keys`: of each block, by its number; the array may be changed between accesses, as long as a
    block's key does not change while it is kept or remembered.
    """

    def __init__(
        self, policy: EvictionPolicy, capacity: int, keys: Keys, *, linked: bool = False
    ) -> None:
        """`linked`: a policy that is `chained` may take over later."""
        self.policy = policy
        self.capacity = max(1, capacity)
        self.evicted_blocks = 0
        self._keys = keys
        self._row_of = np.zeros(len(keys), np.int32)
        """Of each block; 0 = not kept."""
        rows = self.capacity + 1
        self._block_of = np.zeros(rows, np.int64)
        self._stamps = np.zeros(rows, np.uint64)
        self._live = np.zeros(rows, np.bool_)
        self._parents = np.zeros(rows if policy.chained or linked else 0, np.uint32)
        self._free = np.arange(rows - 1, 0, -1)
        self._free_count = self.capacity
        self._queue: Positions = self._free[:0]
        self._queue_stamps = self._stamps[:0]
        self._queue_at = 0

    def __len__(self) -> int:
        return self.capacity - self._free_count

    def memory_bytes(self) -> int:
        columns = (
            self._row_of,
            self._block_of,
            self._stamps,
            self._live,
            self._parents,
            self._free,
        )
        return sum(int(column.nbytes) for column in columns) + self.policy.memory_bytes()

    def is_kept(self, blocks: Positions) -> NDArray[np.bool_]:
        """Which blocks are in the cache now."""
        kept: NDArray[np.bool_] = self._row_of[blocks] != 0
        return kept

    def access(self, blocks: Positions) -> int:
        """One request for a prefix chain, root first, of distinct blocks; how many it hits.

        As a pool's client does: what is there from the root on without a gap is used, the rest is
        put; what is there behind a gap is used by the put.
        """
        rows = self._row_of[blocks]
        present = rows != 0
        n = len(blocks)
        hits = n if present.all() else int(present.argmin())
        if hits:
            self.policy.touch(self._stamps, rows[:hits].astype(np.int64), True)
        if hits < n:
            piece = max(1, min(_PIECE_MAX, self.capacity >> 3))
            for first in range(hits, n, piece):
                self._put(blocks[first : first + piece])
                rows = self._row_of[blocks[: first + piece]]
                # Of a chain longer than the cache some may be gone again.
                self.policy.order(self._stamps, rows[rows != 0].astype(np.int64))
                if len(self._parents):
                    self._link(blocks[: first + piece])
        elif len(self._parents):
            self._link(blocks)
        return hits

    def reference(self, blocks: Positions, parents: Positions) -> None:
        """Distinct blocks are used, one after the other: what is not there is put.

        `parents`: of each the block before it in its chain, -1 where that is not known.
        """
        self._put(blocks, chain=False)
        if len(self._parents):
            linked = (self._row_of[blocks] != 0) & (parents >= 0)
            rows = self._row_of[blocks[linked]]
            self._parents[rows] = parent_mark(self._keys[parents[linked]])

    def follow(self, policy: EvictionPolicy) -> None:
        """Go on under another policy, whose clock has not fallen behind."""
        self.policy = policy
        self._queue_at = len(self._queue)

    def _link(self, blocks: Positions) -> None:
        rows = self._row_of[blocks[1:]]
        kept = rows != 0
        self._parents[rows[kept]] = parent_mark(self._keys[blocks[:-1][kept]])

    def _put(self, blocks: Positions, chain: bool = True) -> None:
        rows = self._row_of[blocks]
        present = rows != 0
        if present.any():
            self.policy.touch(self._stamps, rows[present].astype(np.int64), chain)
            blocks = blocks[~present]
        n = len(blocks)
        if not n:
            return
        if n > self._free_count:
            self._evict(n - self._free_count)
            if n > self._free_count:
                blocks = blocks[: self._free_count]
                n = len(blocks)
        left = self._free_count = self._free_count - n
        fresh = self._free[left : left + n].copy()
        self._row_of[blocks] = fresh
        self._block_of[fresh] = blocks
        self._live[fresh] = True
        self._stamps[fresh] = self.policy.admit(self._keys[blocks], chain)

    def forget(self, blocks: Positions) -> None:
        """These are removed: no eviction, so that a policy does not hear of it."""
        rows = self._row_of[blocks].astype(np.int64)
        self._drop(rows[rows != 0])

    def _drop(self, rows: Positions) -> None:
        self._live[rows] = False
        if len(self._parents):
            self._parents[rows] = 0
        self._row_of[self._block_of[rows]] = 0
        end = self._free_count + len(rows)
        self._free[self._free_count : end] = rows
        self._free_count = end

    def _evict(self, count: int) -> None:
        while count > 0:
            if self._queue_at == len(self._queue):
                self._fill()
                if not len(self._queue):
                    return
            rows = self._queue[self._queue_at : self._queue_at + count]
            stamps = self._queue_stamps[self._queue_at : self._queue_at + count]
            self._queue_at += len(rows)
            rows = rows[(self._stamps[rows] == stamps) & self._live[rows]]
            if not len(rows):
                continue
            count -= len(rows)
            self.evicted_blocks += len(rows)
            if self.policy.remembers:
                self.policy.evicted(self._keys[self._block_of[rows]], self._stamps[rows])
            self._drop(rows)

    def _fill(self) -> None:
        """Choose victims ahead, as the master does."""
        count = max(1, min(self.policy.victims_at_once, len(self) >> 3), len(self) // _QUEUE_SHARE)
        links = None
        if self.policy.chained:
            links = Links(self._keys[self._block_of], self._parents)
        self._queue = self.policy.victims(self._stamps, self._live, count, links)
        self._queue_stamps = self._stamps[self._queue]
        self._queue_at = 0
