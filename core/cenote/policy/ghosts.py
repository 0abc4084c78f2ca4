"""Keys that were evicted lately: a bounded queue in packed arrays, with look-up by key.

    ring    uint64[capacity]      keys in the order they came; 0 where one was taken out again
    ways    uint64[buckets, 8]    for a key of the ring: 32 bits of it | its place in the ring << 32

A key may stand in either of two buckets, which follow from it; it is entered where more ways are
free. The ring is the truth: an entry of a bucket counts if its place holds that key still, so
nothing is ever deleted from a bucket. A queue that loses one key in a hundred is not good enough:
one block that is missing breaks the prefix chains that it is in. With two choices and half of the
ways in use none is lost in practice.

The ring has room for half as many keys more than are to be remembered. When keys that were taken
out fill that, a small ring is laid out anew, and a large one, where that would take too long at
once, forgets its oldest keys early.

At most 28 bytes for each key that can be remembered.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .base import Keys, Mask

__all__ = ["GhostQueue"]

_WAYS: Final = 8
_CAPACITY_MIN: Final = 256
_LAID_OUT_MAX: Final = 1 << 17
"""Keys that are entered anew at once: some 20 ms."""
_SECOND: Final = np.uint64(0x9E37_79B9_7F4A_7C15)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_HALF: Final = np.uint64(32)
_NO_KEY: Final = np.uint64(0)


@final
class GhostQueue:
    """First in, first out; a key that comes back is taken out. Keys are evenly spread uint64."""

    __slots__ = ("_capacity", "_head", "_live", "_ring", "_tail", "_ways", "_ways_max")

    def __init__(self) -> None:
        self._live = 0
        self._head = self._tail = 0
        """Keys ever added, and the first of these that is remembered."""
        self._allot(_CAPACITY_MIN)

    def _allot(self, capacity: int) -> None:
        self._capacity = capacity
        self._ring = np.zeros(capacity, np.uint64)
        self._ways_max = -(-capacity * 4 // (3 * _WAYS))
        self._ways = np.zeros((self._ways_max, _WAYS), np.uint64)

    def __len__(self) -> int:
        """Keys remembered."""
        return self._live

    def memory_bytes(self) -> int:
        return int(self._ring.nbytes + self._ways.nbytes)

    def clear(self) -> None:
        self._live, self._head, self._tail = 0, 0, 0
        self._allot(_CAPACITY_MIN)

    def add(self, keys: Keys, limit: int) -> None:
        """Remember distinct keys, and of all the newest `limit`."""
        n = len(keys)
        if n > limit:
            keys, n = keys[n - limit :], limit
        if self._live + n > limit:
            self.trim(limit - n)
        if not n:
            return
        if self._head - self._tail + n > self._capacity:
            self._make_room(n, limit)
        self._append(np.where(keys == _NO_KEY, np.uint64(1), keys))

    def _make_room(self, n: int, limit: int) -> None:
        """Places for `n` keys more: a larger ring, or the same without what was taken out."""
        wanted = max(_CAPACITY_MIN, limit + limit // 2 + 1)
        if self._live <= _LAID_OUT_MAX:
            kept = self._remembered()
            self._live, self._head, self._tail = 0, 0, 0
            self._allot(max(wanted, self._capacity))
            self._append(kept)
        elif self._capacity < limit:
            self._live, self._head, self._tail = 0, 0, 0
            self._allot(wanted)
        self._drop_to(self._head + n - self._capacity)

    def _remembered(self) -> Keys:
        ring = self._ring.take(np.arange(self._tail, self._head) % self._capacity)
        held: Keys = ring[ring != _NO_KEY]
        return held

    def _append(self, keys: Keys) -> None:
        n = len(keys)
        if not n:
            return
        places = np.arange(self._head, self._head + n) % self._capacity
        self._ring[places] = keys
        self._head += n
        self._live += n
        entries = (keys & _LOW) | (places.astype(np.uint64) << _HALF)
        while len(keys):
            ways, free = self._emptier(keys)
            # Of keys that share a bucket one is entered in each round.
            buckets, first = np.unique(ways, return_index=True)
            self._ways[buckets, free[first]] = entries[first]
            if len(first) == len(keys):
                break
            rest = np.ones(len(keys), np.bool_)
            rest[first] = False
            keys, entries = keys[rest], entries[rest]

    def _emptier(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(the bucket for each key, the way in it): one that is free, else that of the oldest."""
        both = np.stack(self._buckets_of(keys))
        ways = self._ways[both]
        at = (ways >> _HALF).astype(np.int64)
        free = ((self._ring[at] ^ ways) & _LOW) != _NO_KEY
        second = np.count_nonzero(free[1], axis=1) > np.count_nonzero(free[0], axis=1)
        which = (second.astype(np.int64), np.arange(len(keys)))
        ages = (self._head - 1 - at[which]) % self._capacity
        ages[free[which]] = self._capacity
        return both[which], ages.argmax(axis=1)

    def _buckets_of(self, keys: Keys) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        count = np.uint64(self._ways_max)
        first = ((keys >> _HALF) * count) >> _HALF
        second = (((keys * _SECOND) >> _HALF) * count) >> _HALF
        return first.astype(np.int64), second.astype(np.int64)

    def take(self, keys: Keys) -> Mask:
        """Which keys are remembered; these are not any more."""
        n = len(keys)
        if not self._live or not n:
            return np.zeros(n, np.bool_)
        keys = np.where(keys == _NO_KEY, np.uint64(1), keys)
        first_bucket, second_bucket = self._buckets_of(keys)
        ways = np.concatenate((self._ways[first_bucket], self._ways[second_bucket]), axis=1)
        places = (ways >> _HALF).astype(np.int64)
        same = (ways & _LOW) == (keys & _LOW)[:, None]
        at = np.flatnonzero(same.any(axis=1))
        found = np.zeros(n, np.bool_)
        if len(at):
            hits = same[at] & (self._ring[places[at]] == keys[at, None])
            found[at] = hits.any(axis=1)
            where = places[at][np.arange(len(at)), hits.argmax(axis=1)][found[at]]
            where, first = np.unique(where, return_index=True)
            if len(first) < np.count_nonzero(found):  # a key that comes twice is found once
                twice = np.flatnonzero(found)
                found[:] = False
                found[twice[first]] = True
            self._ring[where] = _NO_KEY
            self._live -= len(where)
        return found

    def take_one(self, key: int) -> bool:
        """`take` for one key."""
        if not self._live:
            return False
        key = key or 1
        first = ((key >> 32) * self._ways_max) >> 32
        mixed = (key * int(_SECOND)) & 0xFFFF_FFFF_FFFF_FFFF
        second = ((mixed >> 32) * self._ways_max) >> 32
        low = key & 0xFFFF_FFFF
        for entry in (*self._ways[first].tolist(), *self._ways[second].tolist()):
            if entry & 0xFFFF_FFFF == low and int(self._ring[entry >> 32]) == key:
                self._ring[entry >> 32] = 0
                self._live -= 1
                return True
        return False

    def adopt(self, other: GhostQueue) -> None:
        """Remember what another one does, too (at most the newest 131,072 keys)."""
        keys = other._remembered()[-_LAID_OUT_MAX:]
        self.take(keys)
        self.add(keys, max(len(self) + len(keys), 1))

    def trim(self, limit: int) -> None:
        """Forget all but the newest `limit` keys."""
        limit = max(0, limit)
        excess = self._live - limit
        if excess <= 0:
            return
        look = 4 * excess + 64
        while True:
            end = min(self._tail + look, self._head)
            held = np.cumsum(self._ring[np.arange(self._tail, end) % self._capacity] != _NO_KEY)
            if held[-1] >= excess:
                break
            look *= 4
        self._drop_to(self._tail + int(np.searchsorted(held, excess)) + 1)

    def _drop_to(self, tail: int) -> None:
        """What came before is forgotten."""
        if tail <= self._tail:
            return
        places = np.arange(self._tail, tail) % self._capacity
        self._live -= int(np.count_nonzero(self._ring[places]))
        self._ring[places] = _NO_KEY
        self._tail = tail
