"""Moving what the devices may not touch by themselves: through staging blocks, two at a time.

While the device fills (or empties) one block, the other one is copied out (or filled), and hashed
while its bytes are in cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, final

import numpy as np
import xxhash

from .base import U64Array
from .memory_access import MEMORY, breaks_between, copy, copy_hashed, groups_of, lay_side_by_side
from .rdma_memory import BLOCK_BYTES, Snapshot, StagingBlock
from .rdma_mover import Mover
from .rdma_places import Pieces
from .rdma_queue import Ticket, whole_regions

__all__ = ["BLOCKS_PER_CALL", "StagedMove"]

BLOCKS_PER_CALL: Final = 2
_HASH_STEP_BYTES: Final = 256 << 10


@final
class StagedMove:
    """One direction of one call. `pieces.local` are the caller's addresses."""

    def __init__(
        self,
        mover: Mover,
        blocks: Sequence[StagingBlock],
        snapshot: Snapshot,
        pieces: Pieces,
        lengths: U64Array,
        checksums: U64Array | None,
        deadline: float,
    ) -> None:
        """`lengths` of the batch's items; `checksums` receives XXH3-64 of each that is moved."""
        one = np.array([BLOCK_BYTES], np.uint64)
        self._blocks = [
            (block, int(snapshot.find(np.array([block.address], np.uint64), one)[0]))
            for block in blocks
        ]
        self._mover = mover
        self._pieces, _ = pieces.cut(BLOCK_BYTES, whole_regions(len(pieces), 0))
        self._lengths = lengths
        self._checksums = checksums
        self._deadline = deadline
        self._hasher = xxhash.xxh3_64()
        self._hashed_bytes = 0

    def read(self) -> None:
        """From the peer's memory to the caller's."""
        under_way: deque[tuple[Ticket, Pieces, U64Array]] = deque()
        for mine, starts, region in self._steps():
            if len(under_way) == len(self._blocks):
                self._copy_out(*under_way.popleft())
            staged = Pieces(mine.items, starts, mine.remote, mine.lengths, mine.registrations)
            ticket = self._mover.post(staged, whole_regions(len(mine), region))
            under_way.append((ticket, mine, starts))
        while under_way:
            self._copy_out(*under_way.popleft())

    def write(self) -> None:
        """From the caller's memory to the peer's."""
        under_way: deque[Ticket] = deque()
        for mine, starts, region in self._steps():
            if len(under_way) == len(self._blocks):
                self._mover.finish(under_way.popleft())
            self._copy(mine, starts, mine.local)
            staged = Pieces(mine.items, starts, mine.remote, mine.lengths, mine.registrations)
            under_way.append(self._mover.post(staged, whole_regions(len(mine), region)))
        while under_way:
            self._mover.finish(under_way.popleft())

    def _steps(self) -> Iterator[tuple[Pieces, U64Array, int]]:
        """(pieces, their addresses in a block, its region), block by block in turn."""
        pieces = self._pieces
        if not len(pieces):
            return
        firsts = list(groups_of(pieces.lengths, BLOCK_BYTES))
        for turn, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(pieces)], strict=True)):
            block, region = self._blocks[turn % len(self._blocks)]
            mine = pieces[first:last]
            ends = np.cumsum(mine.lengths, dtype=np.uint64)
            yield mine, ends - mine.lengths + np.uint64(block.address), region

    def _copy_out(self, ticket: Ticket, mine: Pieces, starts: U64Array) -> None:
        self._mover.finish(ticket)
        self._copy(mine, mine.local, starts)

    def _copy(self, mine: Pieces, targets: U64Array, sources: U64Array) -> None:
        if self._checksums is None:
            self._copy_merged(mine.lengths, targets, sources)
            return
        rows = zip(
            mine.items.tolist(),
            targets.tolist(),
            sources.tolist(),
            mine.lengths.tolist(),
            self._lengths[mine.items].tolist(),
            strict=True,
        )
        for item, target, source, length, whole in rows:
            if length == whole:
                self._checksums[item] = copy_hashed(target, source, length, self._deadline)
            else:
                self._copy_part(item, target, source, length, whole)

    def _copy_part(self, item: int, target: int, source: int, length: int, whole: int) -> None:
        """A piece of an item that has several, which come in order."""
        assert self._checksums is not None
        for start in range(0, length, _HASH_STEP_BYTES):
            step = min(_HASH_STEP_BYTES, length - start)
            copy(target + start, source + start, step)
            self._hasher.update(MEMORY[target + start : target + start + step])
        self._hashed_bytes += length
        if self._hashed_bytes == whole:
            self._checksums[item] = self._hasher.intdigest()
            self._hasher.reset()
            self._hashed_bytes = 0

    def _copy_merged(self, lengths: U64Array, targets: U64Array, sources: U64Array) -> None:
        breaks = breaks_between(targets, lengths) | breaks_between(sources, lengths)
        firsts, sizes = lay_side_by_side(breaks, lengths)
        for target, source, size in zip(
            targets[firsts].tolist(), sources[firsts].tolist(), sizes, strict=True
        ):
            copy(target, source, size)
