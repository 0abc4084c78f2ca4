"""Eviction policies in the plainest way: one object at a time, ordered dictionaries, no shortcuts.

Written from the papers that `cenote.policy` names, to hold its packed and batched policies against.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["ArcReference", "LruReference", "ReferenceCache", "S3FifoReference", "hit_rate"]


class ReferenceCache(Protocol):
    def __contains__(self, block: int) -> bool: ...

    def access(self, block: int) -> None: ...


class LruReference:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kept: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.kept

    def access(self, block: int) -> None:
        if block not in self.kept and len(self.kept) == self.capacity:
            self.kept.popitem(last=False)
        self.kept[block] = None
        self.kept.move_to_end(block)


class ArcReference:
    """Megiddo and Modha, FAST 2003, figure 4."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.p = 0.0
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.t1 or block in self.t2

    def _replace(self, in_b2: bool) -> None:
        if self.t1 and (len(self.t1) > self.p or (in_b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def access(self, block: int) -> None:
        c = self.capacity
        if block in self:
            self.t1.pop(block, None)
            self.t2[block] = None
            self.t2.move_to_end(block)
        elif block in self.b1:
            self.p = min(c, self.p + max(1.0, len(self.b2) / len(self.b1)))
            self._replace(False)
            del self.b1[block]
            self.t2[block] = None
        elif block in self.b2:
            self.p = max(0, self.p - max(1.0, len(self.b1) / len(self.b2)))
            self._replace(True)
            del self.b2[block]
            self.t2[block] = None
        else:
            first = len(self.t1) + len(self.b1)
            everything = first + len(self.t2) + len(self.b2)
            if first == c:
                if len(self.t1) < c:
                    self.b1.popitem(last=False)
                    self._replace(False)
                else:
                    self.t1.popitem(last=False)
            elif everything >= c:
                if everything == 2 * c:
                    self.b2.popitem(last=False)
                self._replace(False)
            self.t1[block] = None


class S3FifoReference:
    """Yang et al., SOSP 2023, algorithm 1: S 10 %, G as large as M, 2 uses move a block to M."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small_max = max(1, capacity // 10)
        self.small: OrderedDict[int, int] = OrderedDict()
        self.main: OrderedDict[int, int] = OrderedDict()
        self.ghost: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self.small or block in self.main

    def _evict(self) -> None:
        while True:
            if self.small and (len(self.small) >= self.small_max or not self.main):
                block, uses = self.small.popitem(last=False)
                if uses > 1:
                    self.main[block] = 0
                    continue
                self.ghost[block] = None
                if len(self.ghost) > self.capacity - self.small_max:
                    self.ghost.popitem(last=False)
                return
            block, uses = self.main.popitem(last=False)
            if not uses:
                return
            self.main[block] = uses - 1

    def access(self, block: int) -> None:
        for queue in (self.small, self.main):
            if block in queue:
                queue[block] = min(3, queue[block] + 1)
                return
        if len(self.small) + len(self.main) == self.capacity:
            self._evict()
        if block in self.ghost:
            del self.ghost[block]
            self.main[block] = 0
        else:
            self.small[block] = 0


def hit_rate(cache: ReferenceCache, requests: Iterable[Sequence[int]]) -> float:
    """Share of blocks in the longest prefix that is there.

    A request uses that prefix, then puts the rest; of both the root is newest.
    """
    hits = blocks = 0
    for request in requests:
        found = next((n for n, block in enumerate(request) if block not in cache), len(request))
        hits += found
        blocks += len(request)
        for block in reversed(request[:found]):
            cache.access(block)
        for block in reversed(request[found:]):
            cache.access(block)
    return hits / blocks
