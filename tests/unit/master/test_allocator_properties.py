"""The allocator against a map of single units, and windows against trying them all."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cenote.api.errors import InternalError
from cenote.master import free_runs
from cenote.master.allocator import SegmentAllocator
from cenote.master.windows import UNEVICTABLE, find_window

FREE, USED, RETIRED = 0, 1, 2
LENGTHS = st.one_of(st.integers(1, 80), st.sampled_from([1, 64, 64, 200, 1500, 6000]))

Pieces = list[tuple[int, int]]


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(
        size=st.sampled_from([0, 1, 300, 12_000]),
        seed=st.integers(0, 1 << 30),
        small=st.booleans(),
    )
    def start(self, size: int, seed: int, small: bool) -> None:
        """With small chunks and bins, few runs take the paths of many."""
        self.patch = pytest.MonkeyPatch()
        if small:
            self.patch.setattr(free_runs, "_CHUNK_RUNS_MAX", 16)
            self.patch.setattr(free_runs, "_SCALAR_ENTRIES", 12)
            self.patch.setattr(free_runs, "_STALE_ENTRIES_MIN", 8)
        self.allocator = SegmentAllocator(size)
        self.units = np.zeros(size, np.uint8)
        self.random = np.random.default_rng(seed)
        self.pieces: Pieces = []
        self.number = 0

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    # ---- helpers --------------------------------------------------------------------------

    def free_lengths(self) -> npt.NDArray[np.int64]:
        """Lengths of all free runs, longest first."""
        edges = np.flatnonzero(np.diff(np.concatenate(([1], self.units, [1])) == FREE))
        return np.sort(edges[1::2] - edges[::2])[::-1]

    def longest(self) -> int:
        return int(self.free_lengths()[:1].sum())

    def taken(self, pieces: Pieces) -> None:
        for offset, length in pieces:
            assert not self.units[offset : offset + length].any()
            assert offset >= 0
            assert offset + length <= len(self.units)
            self.units[offset : offset + length] = USED
        self.pieces += pieces

    def some(self, count: int) -> Pieces:
        chosen = self.random.permutation(len(self.pieces))[:count]
        pieces = [self.pieces[i] for i in chosen.tolist()]
        keep = np.ones(len(self.pieces), bool)
        keep[chosen] = False
        self.pieces = [self.pieces[i] for i in np.flatnonzero(keep).tolist()]
        return pieces

    # ---- rules ----------------------------------------------------------------------------

    @rule(length=LENGTHS)
    def allocate(self, length: int) -> None:
        longest = self.longest()
        offset = self.allocator.allocate(length)
        assert (offset >= 0) == (longest >= length)
        if offset >= 0:
            self.taken([(offset, length)])

    @rule(place=st.floats(0, 1), length=LENGTHS, retire=st.booleans())
    def allocate_at(self, place: float, length: int, retire: bool) -> None:
        offset = int(place * len(self.units))
        end = offset + length
        fits = end <= len(self.units) and not self.units[offset:end].any()
        take = self.allocator.retire if retire else self.allocator.allocate_at
        assert take(offset, length) == fits
        if fits:
            self.taken([(offset, length)])
            if retire:
                self.pieces.pop()
                self.units[offset:end] = RETIRED

    @rule(length=LENGTHS)
    def retire_last(self, length: int) -> None:
        offset = self.allocator.retire_last(length)
        edges = np.flatnonzero(np.diff(np.concatenate(([1], self.units, [1])) == FREE))
        fits = edges[1::2][edges[1::2] - edges[::2] >= length]
        assert offset == (int(fits[-1]) - length if len(fits) else -1)
        if offset >= 0:
            self.units[offset : offset + length] = RETIRED

    @rule(lengths=st.lists(LENGTHS, max_size=30), equal=st.booleans(), run=st.booleans())
    def allocate_batch(self, lengths: list[int], equal: bool, run: bool) -> None:
        lengths = lengths[:1] * len(lengths) if equal else lengths
        sizes = np.array(lengths, np.int64)
        longest, free = self.longest(), self.allocator.free_units
        method = self.allocator.allocate_run if run else self.allocator.allocate_many
        offsets = method(sizes)
        if sum(lengths) <= longest:
            assert offsets is not None
            assert (np.diff(offsets) == sizes[:-1]).all()
        elif run or sum(lengths) > free or max(lengths) > longest:
            assert offsets is None
        if offsets is None:
            assert self.allocator.free_units == free
        else:
            self.taken(list(zip(offsets.tolist(), lengths, strict=True)))

    @rule(length=LENGTHS, most=st.integers(1, 64), least=st.sampled_from([1, 5, 64]))
    def allocate_pieces(self, length: int, most: int, least: int) -> None:
        runs = self.free_lengths()
        enough = int(runs[runs >= least][:most].sum()) >= length
        held = bool(self.allocator._held)
        pieces = self.allocator.allocate_pieces(length, most, least)
        assert (pieces is not None) == enough
        if pieces is not None:
            assert sum(size for _, size in pieces) == length
            assert len(pieces) <= most
            assert all(size >= least for _, size in pieces[:-1])
            # Whole runs, the longest ones: no more pieces than there must be, no crumbs.
            assert held or [size for _, size in pieces[:-1]] == runs[: len(pieces) - 1].tolist()
            self.taken(pieces)

    @rule(count=st.sampled_from([1, 2, 30, 10_000]), bulk=st.booleans())
    def free(self, count: int, bulk: bool) -> None:
        pieces = self.some(count)
        if bulk:
            columns = np.array(pieces, np.int64).reshape(-1, 2)
            self.allocator.free_bulk(columns[:, 0], columns[:, 1])
        for offset, length in pieces:
            if not bulk:
                self.allocator.free(offset, length)
            self.units[offset : offset + length] = FREE

    @rule(count=st.sampled_from([1, 2, 30]))
    def hold(self, count: int) -> None:
        """Free, and granted in need."""
        pieces = self.some(count)
        columns = np.array(pieces, np.int64).reshape(-1, 2)
        self.number += 1
        self.allocator.hold(self.number, columns[:, 0], columns[:, 1])
        for offset, length in pieces:
            self.units[offset : offset + length] = FREE

    @rule(back=st.integers(0, 3))
    def release(self, back: int) -> None:
        self.allocator.release(self.number - back)

    @rule(length=st.integers(1, 80))
    def what_is_held_back_comes_last(self, length: int) -> None:
        settled = self.allocator._runs.units
        before = list(self.allocator._held)
        offset = self.allocator.allocate(length)
        if offset >= 0:
            self.taken([(offset, length)])
        if self.allocator._runs.units == settled - length:
            assert [part[0] for part in self.allocator._held] == [part[0] for part in before]

    @rule(step=st.integers(2, 6), bulk=st.booleans())
    def free_a_pattern(self, step: int, bulk: bool) -> None:
        """Thousands of runs: every so many units of every piece."""
        parts = [np.arange(at, at + length, step) for at, length in self.pieces]
        offsets = np.concatenate([np.zeros(0, np.int64), *parts])
        self.random.shuffle(offsets)
        if bulk:
            self.allocator.free_bulk(offsets, np.ones_like(offsets))
        else:
            for offset in offsets.tolist():
                self.allocator.free(offset, 1)
        self.units[offsets] = FREE
        rest = [
            (at + first, min(step - 1, length - first))
            for at, length in self.pieces
            for first in range(1, length, step)
        ]
        self.pieces = [piece for piece in rest if piece[1]]

    @rule(place=st.floats(0, 1), length=LENGTHS, bulk=st.booleans())
    def free_what_is_not_used(self, place: float, length: int, bulk: bool) -> None:
        offset = int(place * len(self.units))
        if (
            offset + length <= len(self.units)
            and (self.units[offset : offset + length] == USED).all()
        ):
            return
        self.allocator.release(self.number)  # of what is held back it would be noticed then
        if bulk:
            good = [piece for piece in self.pieces if piece[0] + piece[1] <= offset]
            columns = np.array([*good, (offset, length)], np.int64)
            with pytest.raises(InternalError):
                self.allocator.free_bulk(columns[:, 0], columns[:, 1])
        else:
            with pytest.raises(InternalError):
                self.allocator.free(offset, length)

    @rule(extra=st.sampled_from([0, 1, 500]))
    def grow(self, extra: int) -> None:
        self.allocator.grow(extra)
        self.units = np.concatenate((self.units, np.zeros(extra, np.uint8)))

    @rule(length=LENGTHS, unlisted=st.floats(0, 0.3))
    def find_window(self, length: int, unlisted: float) -> None:
        listed = [piece for piece in self.pieces if self.random.random() >= unlisted]
        columns = np.array(listed, np.int64).reshape(-1, 2)
        heat = self.random.integers(1, 5, len(listed)).astype(np.uint64)
        window = self.allocator.find_window(length, columns[:, 0], columns[:, 1], heat)
        if window is None:
            return
        start, end = window
        assert end - start >= length
        inside = (columns[:, 0] >= start) & (columns[:, 0] < end)
        assert (columns[inside].sum(axis=1) <= end).all()
        units = self.units.copy()
        for offset, size in columns[inside].tolist():
            units[offset : offset + size] = FREE
        assert not units[start:end].any()

    # ---- invariants -----------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        allocator.check()
        lengths = self.free_lengths()
        assert allocator.size_units == len(self.units)
        assert allocator.free_units == int(lengths.sum())
        if not allocator._held:
            assert allocator.free_runs == len(lengths)
            assert allocator.largest_free_units == int(lengths[:1].sum())
        assert allocator.used_units == np.count_nonzero(self.units == USED)
        assert allocator.retired_units == np.count_nonzero(self.units == RETIRED)


AllocatorMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None
)
TestAllocatorMachine = AllocatorMachine.TestCase


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 9), st.sampled_from([0, 1, 2, 3, UNEVICTABLE])),
        max_size=12,
    ),
    tail=st.integers(0, 5),
    length=st.integers(1, 40),
)
def test_windows_are_the_coldest(
    pieces: list[tuple[int, int, int]], tail: int, length: int
) -> None:
    ends = np.cumsum([gap + size for gap, size, _ in pieces]).astype(np.int64)
    sizes = np.array([size for _, size, _ in pieces], np.int64)
    heat = np.array([warmth for _, _, warmth in pieces], np.uint64)
    starts = ends - sizes
    total = int(ends[-1] if len(ends) else 0) + tail
    borders = list(zip([0, *ends.tolist()], range(len(pieces) + 1), strict=True))
    best = None
    for begin, first in borders:
        for last in range(first, len(pieces) + 1):
            end = int(starts[last]) if last < len(pieces) else total
            hottest = max(heat[first:last].tolist(), default=0)
            if end - begin >= length and hottest != UNEVICTABLE:
                cost = (hottest, int(sizes[first:last].sum()))
                best = min(best, cost) if best else cost
    window = find_window(length, starts, sizes, heat, total)
    assert (window is None) == (best is None)
    if window is not None:
        inside = (starts >= window[0]) & (starts < window[1])
        assert window[1] - window[0] >= length
        assert (max(heat[inside].tolist(), default=0), int(sizes[inside].sum())) == best
