"""Objects to look at again at a given time: those with a time to live, and pins that end.

An object is named by digest and seq, since its row may move meanwhile. Batches that are due within
the same 1/64 s lie in one bucket. What went before its time leaves its entry behind; `tidy` takes
such entries out, bucket by bucket, so that memory is bounded by the objects there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["ObjectTimers", "Timed"]

Keep: TypeAlias = Callable[[NDArray[np.uint64], NDArray[np.uint64], int], NDArray[np.bool_]]
_STEPS_PER_S = 64
_TIDY_MIN = 4096
"""Fewer objects than this are not worth looking through."""


class Timed(NamedTuple):
    at_s: float
    """Up to 1/64 s after what was asked for."""
    digests: NDArray[np.uint64]
    seqs: NDArray[np.uint64]
    tag: int
    """The caller's."""


@final
class ObjectTimers:
    __slots__ = ("_buckets", "_count", "_heap", "_kept", "_round")

    def __init__(self) -> None:
        self._buckets: dict[int, list[Timed]] = {}
        self._heap: list[int] = []
        """Keys of buckets; those of buckets that are gone, too."""
        self._count = 0
        self._kept = 0
        """Objects at the end of the last round of `tidy`."""
        self._round: list[int] = []
        """Buckets that this round has not come to yet."""

    def __len__(self) -> int:
        """Objects, those that are gone included until they are found out."""
        return self._count

    @property
    def entries(self) -> Iterator[Timed]:
        """All batches, by time."""
        for key in sorted(self._buckets):
            yield from self._buckets[key]

    def add(
        self, at_s: float, digests: NDArray[np.uint64], seqs: NDArray[np.uint64], tag: int = 0
    ) -> None:
        if not len(seqs):
            return
        key = math.ceil(at_s * _STEPS_PER_S)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = []
            heappush(self._heap, key)
        bucket.append(Timed(key / _STEPS_PER_S, digests, seqs, tag))
        self._count += len(seqs)

    def due(self, now_s: float) -> Timed | None:
        """Take out one batch whose time has come."""
        while self._heap:
            key = self._heap[0]
            bucket = self._buckets.get(key)
            if bucket is None:
                heappop(self._heap)
                continue
            if key / _STEPS_PER_S > now_s:
                return None
            timed = bucket.pop()
            if not bucket:
                del self._buckets[key]
            self._count -= len(timed.seqs)
            return timed
        return None

    def tidy(
        self,
        keep: Keep,
        objects_max: int,
    ) -> None:
        """Where much was added since this was last done: look through at least so many objects, or
        one bucket, and keep those of which `keep(digests, seqs, tag)` says so."""
        if not self._round:
            if self._count < max(_TIDY_MIN, 2 * self._kept):
                return
            self._round = sorted(self._buckets, reverse=True)
        looked_at = 0
        while self._round and looked_at < objects_max:
            key = self._round.pop()
            bucket = self._buckets.pop(key, None)
            if bucket is None:
                continue
            looked_at += sum(len(timed.seqs) for timed in bucket)
            kept = _kept(bucket, keep)
            if kept:
                self._buckets[key] = kept
            self._count += sum(len(t.seqs) for t in kept) - sum(len(t.seqs) for t in bucket)
        if not self._round:
            self._kept = self._count
            self._heap = sorted(self._buckets)


def _kept(bucket: list[Timed], keep: Keep) -> list[Timed]:
    """One batch for each tag."""
    kept: list[Timed] = []
    for tag in dict.fromkeys(timed.tag for timed in bucket):
        some = [timed for timed in bucket if timed.tag == tag]
        digests = np.concatenate([timed.digests for timed in some])
        seqs = np.concatenate([timed.seqs for timed in some])
        good = keep(digests, seqs, tag)
        if good.any():
            kept.append(Timed(some[0].at_s, digests[good], seqs[good], tag))
    return kept
