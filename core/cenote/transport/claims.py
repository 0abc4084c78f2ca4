"""What a session says it is touching in shared memory: a page of its own, which its daemon reads.

Nobody can stop a copy that another process makes into memory that both have mapped. But a daemon
can know of it. Before each write the writer puts the ranges into its page (it *claims* them), then
looks at the word in that page that names the first valid grant, and writes only if its own grant is
not an older one. The daemon does two things the other way round: it raises the word, then reads the
claims. So one of them sees the other: either the writer sees the new word and does not begin, or
the daemon sees the claim. The barrier that this needs between the two steps is the daemon's alone
(`membarrier`), so that a write costs no more than a few stores. See docs/internals/fencing.md.

What is looked at in place (`view`) is claimed in the same way for as long as it is seen: a master
that was restarted knows no holds of before.

    page    64 bytes: session id (16), word (u64), spare; PENS pens of writes; from VIEWS_WORD on
            VIEW_PENS pens of views
    pen     state (u64), then up to RANGES_MAX or VIEW_RANGES_MAX ranges of three u64: segment
            index, offset, length

A page has several pens, for writes of several threads at once. A pen's state is 0 while it claims
nothing, else a number that rises with each claim, times 256, plus the number of ranges. A page is
written by one channel, but for the word and the session id.

Readers look at a word, too, after they have read: a lease of an earlier tenure than the word's
proves nothing any more (`is_of_tenure`). Theirs stands at the head of the file, at the same place.
"""

from __future__ import annotations

import threading
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import DeadlineExceeded, GrantRevoked

from .base import U64Array

__all__ = [
    "CLAIM_PAGE_BYTES",
    "EVERYWHERE",
    "PENS",
    "PEN_WORDS",
    "RANGES_MAX",
    "VIEWS_WORD",
    "VIEW_PENS",
    "VIEW_PEN_WORDS",
    "VIEW_RANGES_MAX",
    "VOID",
    "WORD_AT",
    "ClaimPage",
    "first_pen_word",
    "is_of_tenure",
    "ranges_of",
]

CLAIM_PAGE_BYTES: Final = 16_384
PENS: Final = 7
"""For writes; views have numbers from here on."""
PEN_WORDS: Final = 128
RANGES_MAX: Final = 42
VIEWS_WORD: Final = 1024
"""Where the pens of views begin."""
VIEW_PENS: Final = 64
VIEW_PEN_WORDS: Final = 16
VIEW_RANGES_MAX: Final = 5
WORD_AT: Final = 2
"""Which word of a page names the first valid grant."""
EVERYWHERE: Final = (1 << 32) - 1
"""As a segment index: all of all segments."""
VOID: Final = GrantRevoked.code
"""Status of an item that is not written, since its grant is void."""
_TENURE_SHIFT: Final = 40
"""Ids of grants and leases begin with the epoch that they were given in."""
_COUNT_BITS: Final = 8
_HEAD_WORDS: Final = 8
_OFFSET_BITS: Final = 48

assert _HEAD_WORDS + PENS * PEN_WORDS <= VIEWS_WORD
assert VIEWS_WORD + VIEW_PENS * VIEW_PEN_WORDS <= CLAIM_PAGE_BYTES // 8
assert RANGES_MAX * 3 < PEN_WORDS
assert VIEW_RANGES_MAX * 3 < VIEW_PEN_WORDS


def is_of_tenure(lease_id: int, first_grant_id: int) -> bool:
    """Whether this lease (0: none) was given in the tenure of that grant, or in a later one.

    As long as no grant of a later tenure is valid where its bytes lie, it proves what was read.
    """
    return lease_id >> _TENURE_SHIFT >= first_grant_id >> _TENURE_SHIFT and lease_id != 0


def first_pen_word(pen: int) -> int:
    """Where a pen begins: its state, then its ranges."""
    if pen < PENS:
        return _HEAD_WORDS + pen * PEN_WORDS
    return VIEWS_WORD + (pen - PENS) * VIEW_PEN_WORDS


@final
class ClaimPage:
    """The writer's side of a page; safe from several threads."""

    def __init__(self, memory: memoryview, keeper: object = None) -> None:
        """`memory`: CLAIM_PAGE_BYTES, writable. `keeper` stays alive as long as this does."""
        self._keeper = keeper
        self._words = memory.cast("B").cast("Q")
        self._columns: U64Array = np.frombuffer(memory, np.uint64)
        self._numbers = [0] * PENS
        self._free = list(range(PENS))
        self._view_numbers = [0] * VIEW_PENS
        self._free_views = list(range(VIEW_PENS))
        self._lock = threading.RLock()
        self._given_back = threading.Condition(self._lock)
        self._waiting = 0

    def claim_one(
        self, grant_id: int, index: int, offset: int, length: int, deadline_s: float
    ) -> int:
        """Claim one range; the pen to `withdraw` after the write, -1 where the grant is void.

        Raises DeadlineExceeded where other writes take all pens for that long.
        """
        words = self._words
        pen = self._take(deadline_s)
        at = _HEAD_WORDS + pen * PEN_WORDS
        words[at + 1] = index
        words[at + 2] = offset
        words[at + 3] = length
        number = self._numbers[pen] = self._numbers[pen] + 1 & 0xFFFF_FFFF
        words[at] = number << _COUNT_BITS | 1
        if grant_id < words[WORD_AT]:
            self.withdraw(pen)
            return -1
        return pen

    def claim(self, grant_id: int, ranges: U64Array, deadline_s: float) -> int:
        """As `claim_one`, for up to RANGES_MAX rows of (segment index, offset, length)."""
        words = self._words
        pen = self._take(deadline_s)
        at = _HEAD_WORDS + pen * PEN_WORDS
        count = len(ranges)
        self._columns[at + 1 : at + 1 + 3 * count] = ranges.ravel()
        number = self._numbers[pen] = self._numbers[pen] + 1 & 0xFFFF_FFFF
        words[at] = number << _COUNT_BITS | count
        if grant_id < words[WORD_AT]:
            self.withdraw(pen)
            return -1
        return pen

    def withdraw(self, pen: int) -> None:
        """The write is over: nothing of it can touch the segments any more."""
        self._words[_HEAD_WORDS + pen * PEN_WORDS] = 0
        # Append first, then look: whoever waits does it the other way round.
        self._free.append(pen)
        if self._waiting:
            with self._lock:
                self._given_back.notify()

    def claim_view(self, lease_id: int, ranges: U64Array) -> int:
        """Claim up to VIEW_RANGES_MAX rows for as long as they are looked at under a lease; the pen
        to `withdraw_view`, -1 where the lease is of an earlier epoch or all pens are taken."""
        words = self._words
        try:
            view = self._free_views.pop()
        except IndexError:
            return -1
        at = VIEWS_WORD + view * VIEW_PEN_WORDS
        count = len(ranges)
        self._columns[at + 1 : at + 1 + 3 * count] = ranges.ravel()
        number = self._view_numbers[view] = self._view_numbers[view] + 1 & 0xFFFF_FFFF
        words[at] = number << _COUNT_BITS | count
        if not is_of_tenure(lease_id, words[WORD_AT]):
            self.withdraw_view(PENS + view)
            return -1
        return PENS + view

    def withdraw_view(self, pen: int) -> None:
        """Nobody looks there any more."""
        self._words[first_pen_word(pen)] = 0
        self._free_views.append(pen - PENS)

    def _take(self, deadline_s: float) -> int:
        try:
            return self._free.pop()
        except IndexError:
            pass
        with self._lock:
            self._waiting += 1
            try:
                if self._given_back.wait_for(lambda: self._free, max(0.0, deadline_s)):
                    return self._free.pop()
            except IndexError:  # another thread was faster, once more
                pass
            finally:
                self._waiting -= 1
        raise DeadlineExceeded(f"{PENS} other writes to this daemon did not end in time")


def ranges_of(
    indexes: U64Array | int, offsets: U64Array, lengths: U64Array, most: int = RANGES_MAX
) -> U64Array:
    """uint64[n, 3]: at most `most` ranges (segment index, offset, length) that cover these extents,
    and where there are more of them, as little else as can be."""
    count = len(offsets)
    ranges = np.empty((count, 3), np.uint64)
    ranges[:, 0], ranges[:, 1], ranges[:, 2] = indexes, offsets, lengths
    if count <= most:
        return ranges
    starts = (ranges[:, 0] << np.uint64(_OFFSET_BITS)) + ranges[:, 1]
    order = np.argsort(starts, kind="stable")
    ranges, starts = ranges[order], starts[order]
    ends = np.maximum.accumulate(starts + ranges[:, 2])
    gaps = np.where(starts[1:] > ends[:-1], starts[1:] - ends[:-1], np.uint64(0))
    crosses = ranges[1:, 0] != ranges[:-1, 0]
    if int(np.count_nonzero(crosses)) >= most:
        return np.array([(EVERYWHERE, 0, 0)], np.uint64)
    gaps[crosses] = np.uint64((1 << 64) - 1)
    return _joined(ranges, starts, ends, gaps, most)


def _joined(
    ranges: U64Array, starts: U64Array, ends: U64Array, gaps: U64Array, most: int
) -> U64Array:
    """Keep the widest gaps apart, join what lies at both ends of all others."""
    widest = np.sort(np.argpartition(gaps, len(gaps) - most + 1)[-(most - 1) :])
    widest = widest[gaps[widest] > 0]
    firsts = np.concatenate((np.zeros(1, np.int64), widest + 1))
    lasts = np.concatenate((widest, np.full(1, len(starts) - 1)))
    joined: NDArray[np.uint64] = np.empty((len(firsts), 3), np.uint64)
    joined[:, 0] = ranges[firsts, 0]
    joined[:, 1] = ranges[firsts, 1]
    joined[:, 2] = ends[lasts] - starts[firsts]
    return joined
