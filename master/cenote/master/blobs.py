"""Which objects hold which bytes: what content dedup looks up, and no more than a hint.

An entry says that the object of a key, in that version, was put with a content digest. Whether it
is still there is seen when the entry is used; entries of what has gone are overwritten, or left out
when the table is made anew. So nothing has to be told to it but puts, and it may forget: then bytes
are stored twice. Bounded: 40 bytes an entry, and room for four times as many as there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlobTable"]

U64: TypeAlias = NDArray[np.uint64]
Entry: TypeAlias = tuple[int, int, int]
"""The words of a key's digest, and the seq of its object."""

_WAYS: Final = 8
"""An entry stands at most so many rows behind where its digest points."""
_ROWS_MIN: Final = 1 << 10
_ROWS_MAX: Final = 1 << 22
_WORDS: Final = 5


@final
class BlobTable:
    """Entries of five words: content digest (2), key digest (2), seq (never 0)."""

    __slots__ = ("_array", "_rows", "_words", "count", "is_alive")

    def __init__(self, is_alive: Callable[[U64, U64], NDArray[np.bool_]]) -> None:
        """`is_alive(key digests, seqs)`: which of these objects are still there."""
        self.is_alive = is_alive
        self._make(_ROWS_MIN)

    def _make(self, rows: int) -> None:
        self._rows = rows
        self._array = np.zeros((rows + _WAYS, _WORDS), np.uint64)
        self._words = self._array.data.cast("B").cast("Q")
        self.count = 0
        """Rows that hold an entry, whatever became of its object."""

    @property
    def memory_bytes(self) -> int:
        return self._array.nbytes if self.count else 0

    def find(self, low: int, high: int) -> Iterator[Entry]:
        """Objects that were put with this content digest."""
        words, at = self._words, (low & (self._rows - 1)) * _WORDS
        for row in range(at, at + _WAYS * _WORDS, _WORDS):
            if words[row] == low and words[row + 1] == high and words[row + 4]:
                yield words[row + 2], words[row + 3], words[row + 4]

    def add(self, contents: U64, digests: U64, seqs: U64) -> None:
        """These objects (uint64[n, 2] each, uint64[n]) were put with these content digests, those
        of zeros left aside."""
        for content, digest, seq in zip(
            contents.tolist(), digests.tolist(), seqs.tolist(), strict=True
        ):
            if any(content):
                if 2 * self.count >= self._rows:
                    self._anew()
                self._add_one(content, digest, seq)

    def _add_one(self, content: list[int], digest: list[int], seq: int) -> None:
        words, (low, high), (key_low, key_high) = self._words, content, digest
        first = (low & (self._rows - 1)) * _WORDS
        # Where there is no room another entry goes: which one is as good as any.
        chosen = first + seq % _WAYS * _WORDS
        for row in range(first, first + _WAYS * _WORDS, _WORDS):
            if not words[row + 4]:
                chosen = row
                self.count += 1
                break
            if words[row] == low and words[row + 2] == key_low and words[row + 3] == key_high:
                chosen = row
                break
        for i, word in enumerate((low, high, key_low, key_high, seq)):
            words[chosen + i] = word

    def entries(self) -> tuple[U64, U64, U64]:
        """(content digests, key digests, seqs) of what is still there."""
        found = self._array[self._array[:, 4] != 0]
        keys, seqs = np.ascontiguousarray(found[:, 2:4]), np.ascontiguousarray(found[:, 4])
        alive = self.is_alive(keys, seqs)
        return np.ascontiguousarray(found[alive, :2]), keys[alive], seqs[alive]

    def _anew(self) -> None:
        """Leave out what has gone, and make room for four times what is left."""
        contents, keys, seqs = self.entries()
        rows = _ROWS_MIN
        while rows < min(4 * len(seqs), _ROWS_MAX):
            rows *= 2
        self._make(rows)
        if not len(seqs):
            return
        start = (contents[:, 0] & np.uint64(rows - 1)).astype(np.int64)
        order = np.argsort(start, kind="stable")
        start = start[order]
        # Each in the first free row from where its digest points on.
        turn = np.arange(len(order))
        place = np.maximum.accumulate(start - turn) + turn
        near = place - start < _WAYS
        place, order = place[near], order[near]
        if 2 * len(order) >= rows:  # as large as it gets: every other one is forgotten
            place, order = place[::2], order[::2]
        self._array[place, :2] = contents[order]
        self._array[place, 2:4] = keys[order]
        self._array[place, 4] = seqs[order]
        self.count = len(order)
