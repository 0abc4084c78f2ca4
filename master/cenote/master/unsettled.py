"""What was freed by decisions that may not outlive this master yet: space, and keys.

With shared metadata a decision is durable some milliseconds after it was made. A successor that has
not heard of an eviction or a removal takes the object for present. Where somebody writes over it
meanwhile, without a slot that says so, it would serve wrong bytes; where the key was put again, it
would serve the object of before until its daemons have attached. So what is granted of that space,
or for these keys, is not told to its writer before the decision is durable. All else has no such
past, and need not wait.

A slot number needs no wait: a slot that says less than the table has drops the object, which is
what the successor did not hear of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT, UNIT_BYTES

from .effects import Effect, Gone
from .spans import NO_SPANS, Spans, segments_of

__all__ = ["Unsettled"]

PARTS_MAX: Final = 64
PIECES_MAX: Final = 100_000
"""More are not looked at one by one: whatever is granted waits then."""
_SEGMENT_SHIFT: Final = np.uint64(40)
"""Units of a segment are fewer than 2**32."""
_UNIT_BYTES: Final = np.uint64(UNIT_BYTES)

U64 = NDArray[np.uint64]


class _Part(NamedTuple):
    """What is settled once `entry` is durable; places are segment << 40 | unit."""

    entry: int
    number: int
    """Of the space, as whoever freed it counts."""
    starts: U64
    ends: U64
    keys: U64
    """First words of digests: one in 2**64 others waits in vain."""

    @property
    def pieces(self) -> int:
        return len(self.starts) + len(self.keys)


@final
class Unsettled:
    """One thread. Entries are numbers of the journal, none below one that was given before."""

    def __init__(self) -> None:
        self._spans: list[Spans] = []
        self._keys: list[U64] = []
        self._parts: deque[_Part] = deque()
        self._pieces = 0
        self._all_until = 0
        """Whatever is granted waits for this entry."""
        self._all_number = self._number = 0

    def __len__(self) -> int:
        """Spans and keys that are not known to be settled."""
        return self._pieces + sum(map(len, self._spans)) + sum(map(len, self._keys))

    def note(self, effect: Effect) -> None:
        """This was decided; `decided` says by which entry at the latest."""
        if type(effect) is Gone:
            self._keys.append(effect.digests[:, 0].copy())

    def note_freed(self, spans: Iterable[Spans], number: int) -> None:
        """This space was freed by what was decided. The number rises."""
        self._spans += spans
        self._number = number

    def decided(self, entry: int) -> None:
        """What was noted so far came of decisions up to this entry."""
        if not self._spans and not self._keys:
            return
        spans = np.concatenate(self._spans or [NO_SPANS])
        keys = np.concatenate(self._keys or [np.zeros(0, np.uint64)])
        self._spans, self._keys = [], []
        starts = segments_of(spans).astype(np.uint64) << _SEGMENT_SHIFT | spans[:, 2]
        self._parts.append(_Part(entry, self._number, starts, starts + spans[:, 3], keys))
        self._pieces += self._parts[-1].pieces
        if self._pieces > PIECES_MAX:
            self._parts.clear()
            self._pieces, self._all_until, self._all_number = 0, entry, self._number
        elif len(self._parts) > PARTS_MAX:
            columns = [np.concatenate(c) for c in zip(*(p[2:] for p in self._parts), strict=True)]
            self._parts = deque([_Part(entry, self._number, *columns)])

    def settled(self, durable: int) -> int:
        """Decisions up to this entry outlive this master. The number up to which space is settled
        by that; 0: nothing is that was not."""
        number = 0
        if 0 < self._all_until <= durable:
            self._all_until, number = 0, self._all_number
        while self._parts and self._parts[0].entry <= durable:
            part = self._parts.popleft()
            self._pieces -= part.pieces
            number = part.number
        return number

    def entry_under(self, digests: U64, *grants: bytes) -> int:
        """The entry that settles all of these keys (uint64[n, 2]) and of this space (packed EXTENT
        rows); 0: that is settled."""
        if not self._parts:
            return self._all_until
        rows = np.frombuffer(b"".join(grants), EXTENT)
        starts = rows["segment"].astype(np.uint64) << _SEGMENT_SHIFT
        starts += rows["offset"] // _UNIT_BYTES
        order = np.argsort(starts)
        starts = starts[order]
        ends = starts + (rows["length"][order] + (_UNIT_BYTES - np.uint64(1))) // _UNIT_BYTES
        for part in reversed(self._parts):
            # What is granted overlaps nothing else that is, so that both columns rise.
            at = np.searchsorted(ends, part.starts, "right")
            inside = at < len(ends)
            if (starts[at[inside]] < part.ends[inside]).any() or (
                len(part.keys) and np.isin(digests[:, 0], part.keys).any()
            ):
                return max(part.entry, self._all_until)
        return self._all_until
