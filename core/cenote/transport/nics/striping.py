"""Dividing a batch among several NICs: a pure planner.

A batch is a row of extents. Each NIC gets a run of neighbours, so that pieces which lie side by
side in memory still merge into one work request there, and as many bytes that all NICs are done at
about the same time, whatever they still have to do from before. Small batches are not divided: what
it costs to have another NIC begin is more than it would save.

When a NIC fails, `unfinished` gives what it had and did not complete, and that is planned once more
on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lane", "Pieces", "Share", "plan_stripes", "unfinished", "whole"]

SHARE_BYTES_MIN: Final = 256 << 10
"""What is less than this is not worth a second NIC: some 5 µs at 400 Gb/s."""
CUT_BYTES: Final = 64 << 10
"""Extents are cut at multiples of this: of pages of all sizes in use but huge ones."""
RATE_UNKNOWN_GBPS: Final = 100.0

U32Array = NDArray[np.uint32]
U64Array = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Lane:
    """A NIC path that works, as the planner sees it."""

    index: int
    """The caller's name for it."""
    rate_gbps: float = 0.0
    outstanding_bytes: int = 0
    """Posted and not completed."""
    standby: bool = False
    """Only used where all lanes are standby."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns: piece i is `lengths[i]` bytes from `starts[i]` on of item `items[i]` of a batch."""

    items: U32Array
    starts: U64Array
    lengths: U64Array

    def __len__(self) -> int:
        return len(self.items)

    @property
    def total_bytes(self) -> int:
        return int(self.lengths.sum())

    def __getitem__(self, chosen: slice | NDArray[np.bool_]) -> Pieces:
        return Pieces(self.items[chosen], self.starts[chosen], self.lengths[chosen])


@dataclass(frozen=True, slots=True)
class Share:
    """What one lane moves, in the batch's order."""

    lane: int
    pieces: Pieces


def whole(lengths: U64Array) -> Pieces:
    """A batch of which nothing is cut: a piece for each item."""
    count = len(lengths)
    sizes = np.asarray(lengths, np.uint64)
    return Pieces(np.arange(count, dtype=np.uint32), np.zeros(count, np.uint64), sizes)


def unfinished(share: Share, completed: NDArray[np.bool_]) -> Pieces:
    """What a failed lane's share still lacks; `completed`: one for each of its pieces.

    A piece whose completion was not seen may have been moved; moving it once more does no harm once
    the failed lane is drained, and not before: see docs/internals/fencing.md.
    """
    return share.pieces[~completed]


def plan_stripes(
    pieces: Pieces, lanes: Sequence[Lane], *, share_bytes_min: int = SHARE_BYTES_MIN
) -> list[Share]:
    """The share of each lane that gets one. Every byte is in exactly one share.

    Empty where there is no lane: then all NICs are gone, and the bytes go over TCP.
    """
    usable = [lane for lane in lanes if not lane.standby] or list(lanes)
    if not usable or not len(pieces):
        return []
    amounts = _amounts(usable, pieces.total_bytes, share_bytes_min)
    chosen = [(lane, amount) for lane, amount in zip(usable, amounts, strict=True) if amount]
    if len(chosen) <= 1:
        lane = chosen[0][0] if chosen else min(usable, key=_wait)
        return [Share(lane.index, pieces)]
    cuts = np.cumsum([amount for _, amount in chosen])[:-1]
    shares = []
    rest = pieces
    done = 0
    for (lane, _), cut in zip(chosen[:-1], cuts, strict=True):
        first, rest = _divide(rest, int(cut) - done)
        done += first.total_bytes
        if len(first):
            shares.append(Share(lane.index, first))
    if len(rest):
        shares.append(Share(chosen[-1][0].index, rest))
    return shares


def _wait(lane: Lane) -> float:
    """How long it has still to do, in units that are equal for all lanes."""
    return lane.outstanding_bytes / _rate(lane)


def _rate(lane: Lane) -> float:
    return lane.rate_gbps if lane.rate_gbps > 0 else RATE_UNKNOWN_GBPS


def _amounts(lanes: Sequence[Lane], total: int, share_bytes_min: int) -> list[int]:
    """Bytes for each lane so that all end at once; none for those that would get too few.

    Water is poured into vessels: the level rises over the lanes that have least to do, and reaches
    the others when these are as full.
    """
    active = sorted(range(len(lanes)), key=lambda i: (_wait(lanes[i]), -_rate(lanes[i]), i))
    while True:
        amounts = _fill([lanes[i] for i in active], total)
        if len(active) == 1 or min(amounts) >= share_bytes_min:
            break
        # Without the one that would get least, the others get more.
        del active[max(range(len(active)), key=lambda at: (-amounts[at], at))]
    found = [0] * len(lanes)
    for i, amount in zip(active, amounts, strict=True):
        found[i] = amount
    return found


def _fill(lanes: Sequence[Lane], total: int) -> list[int]:
    """`lanes` by the time that they have still to do, least first; the sum is `total`."""
    rates, backlog, level, filled = 0.0, 0.0, 0.0, 0
    for lane in lanes:
        if filled and level <= _wait(lane):
            break
        filled += 1
        rates += _rate(lane)
        backlog += lane.outstanding_bytes
        level = (total + backlog) / rates
    amounts = [
        max(0, int(level * _rate(lane)) - lane.outstanding_bytes) if number < filled else 0
        for number, lane in enumerate(lanes)
    ]
    excess = sum(amounts) - total  # of rounding
    for number in range(filled):
        change = max(-amounts[number], -excess)
        amounts[number] += change
        excess += change
    return amounts


def _divide(pieces: Pieces, size_bytes: int) -> tuple[Pieces, Pieces]:
    """About the first `size_bytes`, and the rest; a long piece is cut."""
    ends = np.cumsum(pieces.lengths, dtype=np.uint64)
    at = int(np.searchsorted(ends, np.uint64(max(0, size_bytes)), side="right"))
    if at >= len(pieces):
        return pieces, pieces[:0]
    before = int(ends[at - 1]) if at else 0
    length = int(pieces.lengths[at])
    inside = (size_bytes - before + CUT_BYTES // 2) // CUT_BYTES * CUT_BYTES
    if length < 2 * CUT_BYTES or inside <= 0 or inside >= length:
        at += inside >= length or (length < 2 * CUT_BYTES and 2 * (size_bytes - before) >= length)
        return pieces[:at], pieces[at:]
    return _with_last(pieces[: at + 1], inside), _with_first(pieces[at:], inside)


def _with_last(pieces: Pieces, length: int) -> Pieces:
    lengths = pieces.lengths.copy()
    lengths[-1] = length
    return Pieces(pieces.items, pieces.starts, lengths)


def _with_first(pieces: Pieces, skipped: int) -> Pieces:
    starts, lengths = pieces.starts.copy(), pieces.lengths.copy()
    starts[0] += np.uint64(skipped)
    lengths[0] -= np.uint64(skipped)
    return Pieces(pieces.items, starts, lengths)
