"""The allocator of one segment: what fits, what coalesces, what misuse is told, what it wastes."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from cenote.api.errors import InternalError, InvalidArgument
from cenote.master import free_runs
from cenote.master.allocator import UNITS_MAX, SegmentAllocator
from cenote.master.free_runs import bin_of, bins_of, longest_in
from cenote.master.windows import UNEVICTABLE, find_window

SMALL = 64


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


def fragmented(count: int, length: int = SMALL) -> SegmentAllocator:
    """Full but for every second piece of `length`, `count` holes in all."""
    allocator = SegmentAllocator(2 * count * length)
    allocator.allocate(2 * count * length)
    for offset in range(0, 2 * count * length, 2 * length):
        allocator.free(offset, length)
    assert allocator.free_runs == count
    return allocator


class TestBins:
    def test_bins_are_consecutive_ranges(self) -> None:
        lengths = np.unique(np.concatenate((np.arange(1, 3000), 2 ** np.arange(33) - 1)))[1:]
        assert bins_of(lengths).tolist() == [bin_of(length) for length in lengths.tolist()]
        for length in lengths.tolist():
            longest = longest_in(bin_of(length))
            assert bin_of(longest) == bin_of(length)
            assert bin_of(longest + 1) == bin_of(length) + 1
            assert longest < length * 9 / 8 + 1


class TestAllocate:
    def test_takes_ascending_neighbours(self) -> None:
        allocator = SegmentAllocator(1000)
        assert [allocator.allocate(n) for n in (10, 20, 30)] == [0, 10, 30]
        assert allocator.free_units == 940
        assert allocator.used_units == 60
        assert allocator.largest_free_units == 940

    def test_a_full_segment_says_so(self) -> None:
        allocator = SegmentAllocator(100)
        assert allocator.allocate(101) == -1
        assert allocator.allocate(100) == 0
        assert allocator.allocate(1) == -1
        assert allocator.free_runs == allocator.largest_free_units == 0
        allocator.free(50, 10)
        assert allocator.allocate(10) == 50

    def test_small_objects_fill_small_holes(self) -> None:
        allocator = SegmentAllocator(10_000)
        allocator.allocate(10_000)
        for offset, length in ((100, 500), (1000, 10), (2000, 100), (4000, 4000)):
            allocator.free(offset, length)
        assert allocator.allocate(10) == 1000
        assert allocator.allocate(90) == 2000
        assert allocator.allocate(450) == 100
        assert allocator.allocate(3500) == 4000

    def test_the_one_that_fits_is_found_among_many_of_its_bin(self) -> None:
        """Runs of 64 to 71 share a bin: a 71 must not hide behind many that are shorter."""
        for holes in (20, 400):
            allocator = fragmented(holes, 64)
            allocator.grow(200)
            start = holes * 128
            allocator.allocate_at(start, 200)
            allocator.free(start + 10, 71)
            for offset in range(0, 128 * 12, 128):
                assert allocator.allocate_at(offset, 64)
                allocator.free(offset, 64)
            assert allocator.allocate(71) == start + 10
            assert allocator.allocate(65) == -1

    @pytest.mark.parametrize("length", [0, -1])
    def test_lengths_are_positive(self, length: int) -> None:
        with pytest.raises(InvalidArgument):
            SegmentAllocator(100).allocate(length)

    def test_segments_have_a_largest_size(self) -> None:
        with pytest.raises(InvalidArgument, match="out of range"):
            SegmentAllocator(UNITS_MAX + 1)
        allocator = SegmentAllocator(UNITS_MAX)
        with pytest.raises(InvalidArgument, match="out of range"):
            allocator.grow(1)
        assert allocator.allocate(UNITS_MAX) == 0
        allocator.free(UNITS_MAX - 1, 1)
        assert allocator.allocate(1) == UNITS_MAX - 1

    def test_an_empty_segment_grows(self) -> None:
        allocator = SegmentAllocator(0)
        assert allocator.allocate(1) == -1
        allocator.grow(10)
        allocator.grow(10)
        assert allocator.free_runs == 1
        assert allocator.allocate(20) == 0


class TestAllocateAt:
    def test_adopts_what_a_daemon_still_holds(self) -> None:
        allocator = SegmentAllocator(100)
        assert allocator.allocate_at(40, 20)
        assert not allocator.allocate_at(59, 1)
        assert not allocator.allocate_at(30, 11)
        assert allocator.allocate_at(60, 40)
        assert allocator.allocate_at(0, 40)
        assert allocator.free_units == 0
        allocator.check()

    @pytest.mark.parametrize(("offset", "length"), [(-1, 5), (95, 6), (100, 1), (0, 0), (5, -1)])
    def test_refuses_what_is_not_there(self, offset: int, length: int) -> None:
        assert not SegmentAllocator(100).allocate_at(offset, length)


class TestBatches:
    def test_a_run_is_back_to_back(self) -> None:
        allocator = SegmentAllocator(1000)
        allocator.allocate(5)
        offsets = allocator.allocate_run(ints(10, 1, 100))
        assert offsets is not None
        assert offsets.tolist() == [5, 15, 16]
        assert allocator.allocate_run(ints(500, 500)) is None
        assert allocator.allocate_run(ints()) is not None
        assert allocator.used_units == 116

    def test_many_fall_back_to_halves(self) -> None:
        allocator = fragmented(8)
        offsets = allocator.allocate_many(np.full(16, SMALL // 2))
        assert offsets is not None
        assert allocator.free_units == 0
        assert sorted((offsets // (2 * SMALL)).tolist()) == sorted(list(range(8)) * 2)
        assert allocator.allocate_many(ints()) is not None

    def test_many_take_all_or_nothing(self) -> None:
        allocator = fragmented(8)
        assert allocator.allocate_many(np.full(9, SMALL)) is None
        assert allocator.allocate_many(ints(SMALL, SMALL + 1)) is None
        assert allocator.free_runs == 8
        allocator.check()

    def test_freed_in_any_order_coalesces(self, rng: random.Random) -> None:
        allocator = SegmentAllocator(100 * 300)
        offsets = allocator.allocate_run(np.full(300, 100))
        assert offsets is not None
        order = list(range(300))
        rng.shuffle(order)
        for part in (order[:3], order[3:150], order[150:]):
            allocator.free_bulk(offsets[part], np.full(len(part), 100))
            allocator.check()
        assert allocator.free_runs == 1
        allocator.free_bulk(ints(), ints())


class TestPieces:
    def test_takes_the_longest_runs(self) -> None:
        allocator = SegmentAllocator(10_000)
        allocator.allocate(10_000)
        for offset, length in ((0, 100), (1000, 300), (2000, 200), (3000, 90), (4000, 70)):
            allocator.free(offset, length)
        pieces = allocator.allocate_pieces(560)
        assert pieces == [(1000, 300), (2000, 200), (4000, 60)]
        assert allocator.allocate_pieces(300) is None
        assert allocator.free_units == 200
        assert allocator.free_runs == 3

    def test_one_piece_where_one_is_enough(self) -> None:
        allocator = SegmentAllocator(1000)
        assert allocator.allocate_pieces(10) == [(0, 10)]

    def test_limits_hold(self) -> None:
        allocator = fragmented(100)
        assert allocator.allocate_pieces(65 * SMALL) is None
        assert allocator.allocate_pieces(3 * SMALL, pieces_max=2) is None
        assert allocator.allocate_pieces(SMALL + 1, piece_min_units=SMALL + 1) is None
        assert allocator.allocate_pieces(101 * SMALL) is None
        pieces = allocator.allocate_pieces(64 * SMALL)
        assert pieces is not None
        assert len(pieces) == 64
        assert allocator.free_runs == 36

    def test_among_very_many_runs(self) -> None:
        allocator = fragmented(5000)
        pieces = allocator.allocate_pieces(63 * SMALL + 7)
        assert pieces is not None
        assert [length for _, length in pieces] == [SMALL] * 63 + [7]
        allocator.check()

    def test_never_fails_while_enough_is_free_in_64_pieces(self, rng: random.Random) -> None:
        for _ in range(50):
            allocator = SegmentAllocator(100_000)
            allocator.allocate(100_000)
            lengths = [rng.choice((64, 65, 70, 71, 100, 900)) for _ in range(rng.randint(1, 80))]
            for i, length in enumerate(lengths):
                allocator.free(i * 1000, length)
            enough = sum(sorted(lengths)[-64:])
            assert allocator.allocate_pieces(enough + 1) is None
            pieces = allocator.allocate_pieces(enough)
            assert pieces is not None
            assert sum(length for _, length in pieces) == enough
            allocator.check()


class TestChunks:
    def test_runs_cross_the_borders_of_chunks(
        self, rng: random.Random, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Small chunks, so that they split and merge all the time."""
        monkeypatch.setattr(free_runs, "_CHUNK_RUNS_MAX", 16)
        size = 600
        runs = free_runs.FreeRuns()
        free = bytearray(size)
        for step in range(30_000):
            start = rng.randrange(size)
            end = min(start + rng.choice((1, 1, 2, 5)), size)
            # Swing between nearly full and nearly empty, where chunks merge and vanish.
            if rng.random() < (0.9 if step // 3000 % 2 else 0.1):
                if any(free[start:end]):
                    with pytest.raises(InternalError):
                        runs.insert(start, end)
                else:
                    runs.insert(start, end)
                    free[start:end] = b"\1" * (end - start)
            else:
                took = runs.take_at(start, end)
                assert took == all(free[start:end])
                if took:
                    free[start:end] = bytes(end - start)
            if step % 50 == 0:
                runs.check()
                assert runs.units == sum(free)


class TestMisuse:
    @pytest.mark.parametrize(
        ("offset", "length"), [(0, 10), (5, 1), (95, 10), (85, 20), (-1, 5), (195, 10), (150, 0)]
    )
    def test_is_noticed_and_changes_nothing(self, offset: int, length: int) -> None:
        allocator = SegmentAllocator(200)
        allocator.allocate(200)
        allocator.free(0, 10)
        allocator.free(90, 10)
        with pytest.raises(InternalError):
            allocator.free(offset, length)
        with pytest.raises(InternalError):
            allocator.free_bulk(ints(20, offset, 40), ints(5, length, 5))
        assert allocator.free_units == 20
        allocator.check()

    def test_is_noticed_in_bulk(self) -> None:
        allocator = fragmented(500)
        used = np.arange(SMALL, 500 * 2 * SMALL, 2 * SMALL)
        lengths = np.full(500, SMALL)
        free = allocator.free_units
        with pytest.raises(InternalError, match="one batch"):
            allocator.free_bulk(np.append(used, used[7] + 1), np.append(lengths, 2))
        with pytest.raises(InternalError, match="twice"):
            allocator.free_bulk(np.append(used, 0), np.append(lengths, 1))
        with pytest.raises(InternalError, match="beyond"):
            allocator.free_bulk(np.append(used, allocator.size_units), np.append(lengths, 1))
        assert allocator.free_units == free
        allocator.free_bulk(used, lengths)
        assert allocator.free_runs == 1
        allocator.check()


class TestRetire:
    def test_retired_units_never_come_back(self) -> None:
        allocator = SegmentAllocator(1000)
        allocator.allocate(100)
        assert allocator.retire_last(50) == 950
        assert allocator.retire_last(50) == 900
        assert allocator.retire(300, 10)
        assert not allocator.retire(300, 10)
        assert allocator.retire_last(591) == -1
        assert allocator.retired == [(300, 10), (900, 50), (950, 50)]
        assert allocator.retired_units == 110
        assert allocator.used_units == 100
        for offset, length in ((300, 10), (305, 1), (895, 10), (999, 1), (250, 100)):
            with pytest.raises(InternalError):
                allocator.free(offset, length)
        many = np.arange(0, 100, 2)
        with pytest.raises(InternalError, match="retired"):
            allocator.free_bulk(np.append(many, 920), np.append(np.ones_like(many), 1))
        allocator.free_bulk(many, np.ones_like(many))
        allocator.free(1, 1)
        allocator.check()


class TestFindWindow:
    def test_prefers_the_coldest_neighbourhood(self) -> None:
        #         0..10 hot, 10..20 free, 20..30 cold, 30..40 cool, 40..50 free, 50..60 hot
        window = find_window(25, ints(0, 20, 30, 50), ints(10, 10, 10, 10), heat(9, 1, 2, 8), 60)
        assert window == (10, 50)
        assert find_window(20, ints(0, 20, 30, 50), ints(10, 10, 10, 10), heat(9, 1, 2, 8), 60) == (
            10,
            30,
        )

    def test_free_space_alone_is_enough(self) -> None:
        assert find_window(10, ints(0, 20), ints(10, 10), heat(1, 1), 30) == (10, 20)
        assert find_window(10, ints(), ints(), heat(), 30) == (0, 30)

    def test_what_must_stay_stays(self) -> None:
        stay = UNEVICTABLE
        assert find_window(20, ints(0, 10, 20), ints(10, 10, 10), heat(1, stay, 2), 30) is None
        assert find_window(31, ints(0), ints(10), heat(1), 30) is None
        window = find_window(20, ints(0, 10, 20, 30), ints(*[10] * 4), heat(1, stay, 8, 7), 40)
        assert window == (20, 40)

    def test_fewest_units_among_equally_cold(self) -> None:
        window = find_window(20, ints(0, 20, 40), ints(20, 10, 10), heat(5, 5, 5), 50)
        assert window == (20, 40)

    def test_unlisted_space_must_stay(self) -> None:
        allocator = SegmentAllocator(100)
        granted = allocator.allocate(10)
        offsets = allocator.allocate_run(np.full(8, 10))
        assert granted == 0
        assert offsets is not None
        allocator.retire_last(5)
        lengths, warm = np.full(8, 10), np.arange(8, dtype=np.uint64)
        assert allocator.find_window(20, offsets, lengths, warm) == (10, 30)
        assert allocator.find_window(80, offsets, lengths, warm) == (10, 90)
        assert allocator.find_window(86, offsets, lengths, warm) is None
        assert allocator.find_window(20, offsets[1:], lengths[1:], warm[1:]) == (20, 40)
        with pytest.raises(InternalError, match="overlap"):
            allocator.find_window(5, np.append(offsets, 12), np.append(lengths, 3), warm[[0] * 9])

    def test_makes_room(self, rng: random.Random) -> None:
        allocator = SegmentAllocator(64_000)
        offsets = allocator.allocate_run(np.full(1000, 64))
        assert offsets is not None
        warm = np.array([rng.randrange(1000) for _ in range(1000)], np.uint64)
        assert allocator.allocate(1000) == -1
        window = allocator.find_window(1000, offsets, np.full(1000, 64), warm)
        assert window is not None
        victims = (offsets >= window[0]) & (offsets < window[1])
        assert np.count_nonzero(victims) == 16
        allocator.free_bulk(offsets[victims], np.full(16, 64))
        assert allocator.allocate(1000) == window[0]


def heat(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, np.uint64)


@pytest.mark.parametrize("spared", [0.0, 0.5])
def test_a_churned_pool_stays_full(rng: random.Random, spared: float) -> None:
    """70 % 4 KiB, 20 % 256 KiB, 10 % 3 MiB, the oldest (or half of them) evicted."""
    size_units = (1 << 30) // 64
    allocator = SegmentAllocator(size_units)
    live: deque[list[tuple[int, int]]] = deque()
    lowest = size_units
    for length in rng.choices([64, 4096, 49152], [0.7, 0.2, 0.1], k=20_000):
        while True:
            offset = allocator.allocate(length)
            found = [(offset, length)] if offset >= 0 else allocator.allocate_pieces(length, 4)
            if found:
                live.append(found)
                break
            lowest = min(lowest, allocator.used_units)
            while rng.random() < spared:
                live.rotate(-1)
            for extent in live.popleft():
                allocator.free(*extent)
    assert lowest >= 0.93 * size_units
    used = sum(length for extents in live for _, length in extents)
    assert used == allocator.used_units
    allocator.check()
