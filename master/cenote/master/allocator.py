"""Space of one segment, in units (64 bytes in DRAM): what is free, and what to grant from it.

Only free space is known here, as runs (`free_runs`); nothing is kept per allocation. A request
takes the beginning of a run that fits well, so small objects fill small holes and long runs stay
long. A batch is one request for its sum, which comes out in one piece: neighbours in a batch are
neighbours in the segment, and the data path moves them as one. What fits nowhere in one piece may
be had in several (`allocate_pieces`).

Units outside the segment, freed twice, or retired raise InternalError before anything changes.

What was freed may be held back for a while (`hold`, `release`): it counts as free, and is granted
only where nothing else will do.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque

import numpy as np
import numpy.typing as npt

from cenote.api.errors import InternalError, InvalidArgument

from .free_runs import FreeRuns, Units
from .windows import UNEVICTABLE, find_window_in_order

__all__ = ["UNITS_MAX", "SegmentAllocator"]

UNITS_MAX = (1 << 32) - 1
"""Largest segment: offsets are uint32 units (256 GiB of 64 bytes)."""

_UNITS_END = 1 << 33
_SCALAR_RUNS = 8
_BULK_SHARE = 8
_PIECES_MAX = 64
_PIECE_UNITS_MIN = 64


class SegmentAllocator:
    """Offsets and lengths are ints in units, their columns int64 arrays."""

    __slots__ = ("_held", "_held_units", "_retired", "_runs", "retired_units", "size_units")

    def __init__(self, size_units: int) -> None:
        """All of [0, size_units) is free. Raises InvalidArgument above UNITS_MAX."""
        self._runs = FreeRuns()
        self._retired: list[tuple[int, int]] = []
        self._held: deque[tuple[int, Units, Units]] = deque()
        self._held_units = 0
        self.size_units = 0
        self.retired_units = 0
        """Units that `retire` took for good."""
        self.grow(size_units)

    # ---- figures ------------------------------------------------------------------------------

    @property
    def free_units(self) -> int:
        """What is held back included."""
        return self._runs.units + self._held_units

    @property
    def used_units(self) -> int:
        """Units that are allocated."""
        return self.size_units - self.retired_units - self.free_units

    @property
    def free_runs(self) -> int:
        """Pieces that free space is in, but for what is held back."""
        return self._runs.count

    @property
    def largest_free_units(self) -> int:
        """The longest run; O(runs), for reports."""
        starts, ends = self._runs.columns()
        return int((ends - starts).max()) if len(starts) else 0

    # ---- allocating ---------------------------------------------------------------------------

    def allocate(self, length_units: int) -> int:
        """One piece; its offset, or -1 when no run is long enough."""
        if length_units <= 0:
            raise InvalidArgument(f"can't allocate {length_units} units")
        at = self._runs.take(length_units)
        return self._runs.take(length_units) if at < 0 and self._release_all() else at

    def allocate_at(self, offset: int, length_units: int) -> bool:
        """Take just [offset, offset + length): a restarted daemon still holds it. False if used."""
        if offset < 0 or length_units <= 0:
            return False
        self._release_all()
        return self._runs.take_at(offset, offset + length_units)

    def allocate_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """Take all that is free in [start, end); (offset, length) of each piece."""
        if start >= end:
            return []
        self._release_all()
        starts, ends = self._runs.columns()
        first = int(np.searchsorted(ends, start, "right"))
        last = int(np.searchsorted(starts, end, "left"))
        pieces = [
            (max(low, start), min(high, end))
            for low, high in zip(
                starts[first:last].tolist(), ends[first:last].tolist(), strict=True
            )
        ]
        for low, high in pieces:
            self._runs.take_at(low, high)
        return [(low, high - low) for low, high in pieces]

    def allocate_run(self, lengths_units: Units) -> Units | None:
        """One piece for all, back to back in their order; their offsets, or None."""
        ends = np.cumsum(lengths_units)
        start = self.allocate(int(ends[-1])) if len(ends) else 0
        return None if start < 0 else ends - lengths_units + start

    def allocate_many(self, lengths_units: Units) -> Units | None:
        """Each in one piece, all of them back to back where a run allows; offsets, or None.

        What does not fit as a whole is tried as halves, and so on down to single ones.
        """
        if self._held:
            offsets = self.allocate_run(lengths_units)
            if offsets is not None:
                return offsets
        return self._allocate_halves(lengths_units)

    def _allocate_halves(self, lengths_units: Units) -> Units | None:
        n = len(lengths_units)
        ends = np.cumsum(lengths_units)
        starts = ends - lengths_units
        offsets = starts.copy()
        todo = [(0, n)] if n else []
        done: list[tuple[int, int]] = []
        while todo:
            first, stop = todo.pop()
            length = int(ends[stop - 1] - starts[first])
            # Asking for more than there is costs nothing, but would be asked over and over.
            at = self._runs.take(length) if length <= self._runs.units else -1
            if at >= 0:
                done.append((at, length))
                offsets[first:stop] += at - int(starts[first])
            elif stop - first > 1:
                middle = (first + stop) // 2
                todo += [(middle, stop), (first, middle)]
            else:
                for at, length in done:
                    self._runs.insert(at, at + length)
                return None
        return offsets

    def allocate_pieces(
        self,
        length_units: int,
        pieces_max: int = _PIECES_MAX,
        piece_min_units: int = _PIECE_UNITS_MIN,
    ) -> list[tuple[int, int]] | None:
        """Several pieces that add up to the length, longest first: [(offset, length)], or None.

        Takes whole runs, the longest ones, so as few as will do, none shorter than
        `piece_min_units`. The last piece alone may be shorter, and comes from a run that fits it
        well. None when the `pieces_max` longest runs don't hold the length.
        """
        pieces = self._allocate_pieces(length_units, pieces_max, piece_min_units)
        if pieces is None and self._release_all():
            pieces = self._allocate_pieces(length_units, pieces_max, piece_min_units)
        return pieces

    def _allocate_pieces(
        self, length_units: int, pieces_max: int, piece_min_units: int
    ) -> list[tuple[int, int]] | None:
        if length_units > self._runs.units:
            return None
        pieces: list[tuple[int, int]] = []
        rest = length_units
        for start, size in self._runs.longest(length_units, pieces_max, piece_min_units):
            pieces.append((start, min(size, rest)))
            rest -= pieces[-1][1]
            if not rest:
                break
        else:
            return None
        for start, size in pieces[:-1]:
            self._runs.take_at(start, start + size)
        # The run that ended the search is long enough; take one that fits better if there is.
        length = pieces[-1][1]
        pieces[-1] = (self._runs.take(length), length)
        return pieces

    # ---- freeing ------------------------------------------------------------------------------

    def free(self, offset: int, length_units: int) -> None:
        """Free one piece, or part of one."""
        self._check_range(offset, offset + length_units)
        self._runs.insert(offset, offset + length_units)

    def free_bulk(self, offsets: Units, lengths_units: Units) -> None:
        """Free many pieces; neighbours among them are freed as one. All or none if one is wrong."""
        if not len(offsets):
            return
        order = np.argsort(offsets, kind="stable")
        starts = offsets[order]
        ends = starts + lengths_units[order]
        border = starts[1:] != ends[:-1]
        if np.count_nonzero(starts[1:] < ends[:-1]) or np.count_nonzero(starts >= ends):
            raise InternalError("units are freed twice within one batch")
        starts = starts[np.concatenate(([True], border))]
        ends = ends[np.concatenate((border, [True]))]
        if int(starts[0]) < 0 or int(ends[-1]) > self.size_units:
            raise InternalError(f"units beyond [0, {self.size_units}) are freed")
        if len(starts) > _SCALAR_RUNS and len(starts) * _BULK_SHARE > self._runs.count:
            self._check_retired(starts, ends)
            self._runs.insert_many(starts, ends)
        else:
            self._free_runs(list(zip(starts.tolist(), ends.tolist(), strict=True)))

    def hold(self, number: int, offsets: Units, lengths_units: Units) -> None:
        """Free many pieces, which are granted only in need before `release` comes to `number`
        (never below the one before)."""
        self._held.append((number, offsets, lengths_units))
        self._held_units += int(lengths_units.sum())

    def release(self, number: int) -> bool:
        """Hold back no longer what was freed under numbers up to this one. Whether some of later
        ones still is."""
        held = self._held
        while held and held[0][0] <= number:
            _, offsets, lengths = held.popleft()
            self._held_units -= int(lengths.sum())
            self.free_bulk(offsets, lengths)
        return bool(held)

    def _release_all(self) -> bool:
        """Whether there was anything."""
        if not self._held:
            return False
        self.release(self._held[-1][0])
        return True

    def _free_runs(self, runs: list[tuple[int, int]]) -> None:
        for done, (start, end) in enumerate(runs):
            try:
                self._check_range(start, end)
                self._runs.insert(start, end)
            except InternalError:
                for start, end in runs[:done]:
                    self._runs.take_at(start, end)
                raise

    def _check_range(self, start: int, end: int) -> None:
        if start >= end or start < 0 or end > self.size_units:
            raise InternalError(f"units [{start}, {end}) are not in [0, {self.size_units})")
        if self._retired and end > self._retired[0][0]:
            at = bisect_right(self._retired, (end - 1, _UNITS_END)) - 1
            if at >= 0 and self._retired[at][1] > start:
                raise InternalError(f"units of [{start}, {end}) are retired and can't be freed")

    def _check_retired(self, starts: Units, ends: Units) -> None:
        for retired_start, retired_end in self._retired:
            if np.count_nonzero((starts < retired_end) & (ends > retired_start)):
                raise InternalError(f"retired units {retired_start} to {retired_end} are freed")

    # ---- growing and retiring -----------------------------------------------------------------

    def grow(self, extra_units: int) -> None:
        """That many more units at the end are free: another chunk of the segment is there."""
        size = self.size_units + extra_units
        if extra_units < 0 or size > UNITS_MAX:
            raise InvalidArgument(
                f"a segment of {size} units is out of range",
                remedy=f"a segment has at most {UNITS_MAX} units; contribute several smaller ones",
            )
        if extra_units:
            self._runs.insert(self.size_units, size)
            self.size_units = size

    def retire(self, offset: int, length_units: int) -> bool:
        """Take just this range for good (a range that went to the slot table). False if used."""
        if not self.allocate_at(offset, length_units):
            return False
        insort(self._retired, (offset, offset + length_units))
        self.retired_units += length_units
        return True

    def retire_last(self, length_units: int) -> int:
        """Take a piece as near to the end as can be for good; its offset, or -1. O(runs)."""
        self._release_all()
        offset = self._runs.take_last(length_units)
        if offset >= 0:
            insort(self._retired, (offset, offset + length_units))
            self.retired_units += length_units
        return offset

    @property
    def retired(self) -> list[tuple[int, int]]:
        """What was retired: [(offset, length)], by offset."""
        return [(start, end - start) for start, end in self._retired]

    # ---- making room --------------------------------------------------------------------------

    def find_window(
        self,
        length_units: int,
        offsets: Units,
        lengths: Units,
        heat: npt.NDArray[np.uint64],
    ) -> tuple[int, int] | None:
        """`windows.find_window` in this segment, given the allocations that may be evicted.

        What is neither among them nor free (retired, granted to writers, unlisted) must stay.
        """
        self._release_all()
        order = np.argsort(offsets)
        starts, sizes = offsets[order], lengths[order]
        gap_starts = np.concatenate(([0], starts + sizes))
        gap_ends = np.concatenate((starts, [self.size_units]))
        if np.count_nonzero(gap_ends < gap_starts):
            raise InternalError("allocations that were listed overlap")
        # A gap in the list is either just one free run, or not free as a whole.
        run_starts, run_ends = self._runs.columns()
        run_starts, run_ends = np.append(run_starts, -1), np.append(run_ends, -1)
        run = np.searchsorted(run_starts[:-1], gap_starts)
        free = (run_starts[run] == gap_starts) & (run_ends[run] == gap_ends)
        blocked = np.flatnonzero((gap_ends > gap_starts) & ~free)
        return find_window_in_order(
            length_units,
            np.insert(starts, blocked, gap_starts[blocked]),
            np.insert(sizes, blocked, (gap_ends - gap_starts)[blocked]),
            np.insert(heat[order], blocked, UNEVICTABLE),
            self.size_units,
        )

    def check(self) -> None:
        """Raise AssertionError unless all is consistent (for tests; O(runs))."""
        self._runs.check()
        assert self.retired_units == sum(length for _, length in self.retired)
        assert self.used_units >= 0
        for start, end in self._retired:
            assert 0 <= start < end <= self.size_units
            assert self._runs.run_at(start) is None
