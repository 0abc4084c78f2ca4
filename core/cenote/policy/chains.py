"""Chain mode: of one prefix chain the end goes first, whatever the policy thinks of it.

A block is worth nothing to its readers once a block before it is gone. LRU with the root newest
keeps to that by itself, since whoever uses a block uses all before it. ARC and S3-FIFO have several
queues, and may choose a block of which a successor stays in another one.

`ChainMode` wraps a policy and changes nothing but the order of its victims: a block goes after
those of its successors that are victims, too; one that has another successor stays, and takes a
fresh place in its queue. Only where nothing else can go do such blocks go after all: space comes
first.

Which block stands before which is learned from the chains that clients use and put, and kept as 4
bytes an object, `parent_mark` of the key before it. It is not kept over a restart, but learned anew
as chains are used; until then a block is taken for one without predecessor. Two keys with the same
mark (one pair in 2**31) make a block stay longer than it should, and nothing worse.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from .arc import ArcPolicy
from .base import PUT, PUTS, Keys, Links, Mask, Positions, Stamps
from .lru import LruPolicy
from .s3fifo import S3FifoPolicy

__all__ = ["ChainMode", "parent_mark", "tails_first"]

_MARK_MASK: Final = np.uint64(0xFFFF_FFFF)
_PUT: Final = np.uint64(PUT)
_PUTS: Final = np.uint64(PUTS)
_ODD: Final = np.uint32(1)
_ROUNDS_MAX: Final = 32
"""Of doubling: chains are shorter than 2**32."""
_WIDER: Final = 4
_FILTER_BITS_MIN: Final = 16


def parent_mark(words: Keys) -> NDArray[np.uint32]:
    """What stands for keys in `Links.parents`; never 0."""
    return (words & _MARK_MASK).astype(np.uint32) | _ODD


@final
class ChainMode:
    """A policy under which no block goes before its successors."""

    __slots__ = ("_inner", "by_age", "name", "remembers", "victims_at_once")

    chained = True

    def __init__(self, inner: LruPolicy | ArcPolicy | S3FifoPolicy) -> None:
        self._inner = inner
        self.name = f"{inner.name}-chain"
        self.remembers = inner.remembers
        self.by_age = inner.by_age
        self.victims_at_once = inner.victims_at_once

    @property
    def inner(self) -> LruPolicy | ArcPolicy | S3FifoPolicy:
        return self._inner

    @property
    def clock(self) -> int:
        return self._inner.clock

    def admit_one(self, key: int) -> int:
        return self._inner.admit_one(key)

    def admit(self, keys: Keys, chain: bool) -> Stamps:
        return self._inner.admit(keys, chain)

    def restored(self, count: int) -> Stamps:
        return self._inner.restored(count)

    def touch_one(self, words: memoryview, row: int) -> None:
        self._inner.touch_one(words, row)

    def touch(self, stamps: Stamps, rows: Positions, chain: bool) -> None:
        self._inner.touch(stamps, rows, chain)

    def order(self, stamps: Stamps, rows: Positions) -> None:
        self._inner.order(stamps, rows)
        # Who was chosen before something was put behind it is not what it was.
        now = stamps[rows]
        stamps[rows] = (now & ~_PUTS) | ((now + _PUT) & _PUTS)

    def evicted(self, keys: Keys, stamps: Stamps) -> None:
        self._inner.evicted(keys, stamps)

    def victims(
        self, stamps: Stamps, evictable: Mask, count: int, links: Links | None = None
    ) -> Positions:
        chosen = self._inner.victims(stamps, evictable, count)
        if links is None or not len(chosen):
            return chosen
        wanted = min(count, len(chosen))
        free, kept = tails_first(chosen, links)
        asked = count
        while len(free) < wanted and len(kept):
            self._inner.requeue(stamps, kept)
            asked *= _WIDER
            more = self._inner.victims(stamps, evictable, asked)
            free, kept = tails_first(more, links)
            if len(more) < asked:
                break
        if len(kept):
            self._inner.requeue(stamps, kept)
        # Fewer than were wanted: the others have successors that may not go.
        return free if len(free) else chosen

    def coldest(self, stamps: Stamps, positions: Positions, count: int) -> Positions:
        return self._inner.coldest(stamps, positions, count)

    def memory_bytes(self) -> int:
        return self._inner.memory_bytes()


def tails_first(chosen: Positions, links: Links) -> tuple[Positions, Positions]:
    """(victims in an order in which no block precedes its successors, those that have to stay).

    What has to stay comes root first. O(rows), and O(log of the longest chain) steps per victim.
    """
    count = len(chosen)
    owners, children = _successors(chosen, links)
    if not len(owners):
        return chosen, chosen[:0]
    by_row = np.argsort(chosen)
    at = np.searchsorted(chosen[by_row], children)
    at[at == count] = 0
    among = by_row[at]
    is_victim = chosen[among] == children
    # A victim's place is that of the last of its successors; `count` where one of these stays.
    last = np.arange(count)
    last[owners[~is_victim]] = count
    parent = np.full(count, -1)
    parent[among[is_victim]] = owners[is_victim]
    parent[parent == np.arange(count)] = -1
    jump, depth = parent, (parent >= 0).astype(np.int64)
    for _ in range(_ROUNDS_MAX):
        has = np.flatnonzero(jump >= 0)
        if not len(has):
            break
        targets = jump[has]
        np.maximum.at(last, targets, last[has])
        depth[has] += depth[targets]
        further = np.full(count, -1)
        further[has] = jump[targets]
        jump = further
    stays = last == count
    order = np.lexsort((-depth, last))
    order = order[~stays[order]]
    held = np.flatnonzero(stays)
    return chosen[order], chosen[held[np.argsort(depth[held], kind="stable")]]


def _successors(chosen: Positions, links: Links) -> tuple[Positions, Positions]:
    """(index into `chosen`, row of a successor of it), one of each pair there is."""
    marks = parent_mark(links.keys[chosen])
    bits = max(_FILTER_BITS_MIN, (64 * len(chosen)).bit_length())
    low = np.uint32((1 << bits) - 1)
    sieve = np.zeros(1 << bits, np.bool_)
    sieve[marks & low] = True  # marks are odd, so that "none known" is never in it
    rows = np.flatnonzero(sieve[links.parents & low])
    order = np.argsort(marks)
    marks = marks[order]
    wanted = links.parents[rows]
    at = np.searchsorted(marks, wanted)
    at[at == len(marks)] = 0
    same = marks[at] == wanted
    return order[at[same]], rows[same]
