"""Where the bytes of objects lie: packed extent rows, and chains of those beyond an object's first.

Most objects have one extent, which stands in their row. Each further one (a stripe, or another
replica's) is a node here; a row holds the number of its first node, a node that of the next, 0 ends
the chain. All work is done a batch of chains at a time, level by level.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .columns import Reservation, RowSpace

__all__ = ["EXTENT", "EXTENT_FORMAT", "ExtraExtents"]

EXTENT = np.dtype(
    [
        ("segment", "<u2"),
        ("replica", "u1"),
        ("shard", "u1"),
        ("slot", "<u4"),
        ("offset_units", "<u4"),
        ("length_units", "<u4"),
    ]
)
"""One extent at rest, 16 bytes."""
EXTENT_FORMAT = "<HBBIII"

Rows = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.complex128]
"""16-byte items: NumPy moves complex128 several times faster than structured rows."""
Pointers = npt.NDArray[np.uint32]


class ExtraExtents:
    """Chains of extents. Node 0 is none."""

    __slots__ = ("_cursor", "_next", "_next_words", "_nodes", "_space", "view")

    def __init__(self, capacity: int) -> None:
        """Room for `capacity` nodes (a multiple of 64), 21 bytes each."""
        nodes = Reservation(np.complex128, capacity)
        following = Reservation(np.uint32, capacity)
        mark = Reservation(np.uint8, capacity)
        self._nodes: Pairs = nodes.array.view(np.complex128)
        self.view = nodes.view
        """The nodes as bytes, 16 each: for `struct.unpack_from(EXTENT_FORMAT, view, 16 * node)`."""
        self._next: Pointers = following.array.view(np.uint32)
        self._next_words = following.view.cast("I")
        self._space = RowSpace(mark, [nodes, following], capacity)
        self._cursor = 1

    @property
    def count(self) -> int:
        return self._space.used_rows

    @property
    def memory_bytes(self) -> int:
        return self._space.memory_bytes

    def require(self, count: int) -> None:
        """Raise ResourceUnavailable unless `count` nodes are left."""
        self._space.require(count)

    def add(self, lengths: Rows, extents: Pairs) -> Pointers:
        """Chains of `lengths` nodes each (0 = none), filled from `extents`, one after the other.

        Returns the first node of each, 0 for an empty chain.
        """
        total = len(extents)
        firsts = np.zeros(len(lengths), np.uint32)
        if not total:
            return firsts
        nodes = self._space.take(total)
        self._space.columns[0].array[nodes] = 1
        self._nodes[nodes] = extents
        ends = np.cumsum(lengths)
        following = np.zeros(total, np.uint32)
        following[:-1] = nodes[1:]
        some = lengths > 0
        following[ends[some] - 1] = 0
        self._next[nodes] = following
        firsts[some] = nodes[(ends - lengths)[some]]
        return firsts

    def drop(self, firsts: npt.NDArray[np.integer]) -> None:
        """Free whole chains by their first nodes (none 0)."""
        while len(firsts):
            nodes = firsts.astype(np.int64)
            following = self._next.take(nodes)
            self._space.give(nodes)
            firsts = following[following != 0]

    def fill(self, out: Pairs, at: Rows, firsts: npt.NDArray[np.integer]) -> None:
        """Write each chain's extents to `out` from position `at` on (no first is 0)."""
        if len(firsts) == 1:
            node, position = int(firsts[0]), int(at[0])
            while node:
                out[position] = self._nodes[node]
                node, position = self._next_words[node], position + 1
            return
        while len(firsts):
            out[at] = self._nodes.take(firsts)
            following = self._next.take(firsts)
            more = following != 0
            firsts, at = following[more], at[more] + 1

    def chain(self, node: int) -> list[int]:
        """The nodes of one chain from `node` on."""
        nodes = []
        while node:
            nodes.append(node)
            node = self._next_words[node]
        return nodes

    def compact(self, firsts: Pointers, rows_max: int) -> None:
        """One bounded step: move nodes from the end into holes, and give the end back.

        A node does not know who points at it, so the step walks the chains of the next `rows_max`
        rows, going round. `firsts` is the column of first nodes of all rows.
        """
        space = self._space
        if space.free_rows * 8 < space.high_water and not space.pages_to_give:
            return
        space.trim(4 * rows_max)
        if space.free_rows < 64 or space.free_rows * 4 < space.high_water:
            return
        if self._cursor >= len(firsts):
            self._cursor = 1
        start, stop = self._cursor, min(self._cursor + rows_max, len(firsts))
        self._cursor = stop
        limit = space.used_rows + (space.used_rows >> 3) + 1
        heads = np.flatnonzero(firsts[start:stop]) + start
        pointers, holders = firsts, heads
        nodes = firsts[heads].astype(np.int64)
        while len(nodes):
            high = np.flatnonzero(nodes >= limit)
            holes = space.take_below(len(high), limit)
            high = high[: len(holes)]
            old = nodes[high]
            self._nodes[holes] = self._nodes.take(old)
            self._next[holes] = self._next.take(old)
            space.columns[0].array[holes] = 1
            pointers[holders[high]] = holes
            nodes[high] = holes
            space.give(old)
            following = self._next.take(nodes)
            more = following != 0
            pointers, holders, nodes = self._next, nodes[more], following[more].astype(np.int64)
        space.trim(4 * rows_max)

    def check(self, firsts: Pointers) -> None:
        """Raise AssertionError unless every node is in just one chain (for tests; O(nodes))."""
        self._space.check()
        seen: list[int] = []
        for first in firsts[firsts != 0].tolist():
            seen += self.chain(first)
        assert len(seen) == len(set(seen)) == self.count
        assert not seen or max(seen) < self._space.high_water
