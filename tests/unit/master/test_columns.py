"""Reservations give memory back; the row space hands out each row once, the lowest first."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt
import pytest

from cenote.api.errors import InternalError, ResourceUnavailable
from cenote.master.columns import PAGE_BYTES, Reservation, RowSpace

USED = 1


class TestReservation:
    def test_is_zero_and_writable_through_all_faces(self) -> None:
        column = Reservation(np.uint32, 10_000)
        array = column.array.view(np.uint32)
        assert not array.any()
        array[1234] = 7
        assert column.view.cast("I")[1234] == 7
        assert column.map[1234 * 4] == 7

    def test_discards_whole_pages_only(self) -> None:
        column = Reservation(np.uint32, 4 * PAGE_BYTES)
        array = column.array.view(np.uint32)
        array[:] = 1
        page_items = PAGE_BYTES // 4
        column.discard(page_items // 2, 3 * page_items + 5)
        assert array[:page_items].all()
        assert not array[page_items : 3 * page_items].any()
        assert array[3 * page_items :].all()

    def test_a_range_within_a_page_discards_nothing(self) -> None:
        column = Reservation(np.uint8, PAGE_BYTES)
        array = column.array.view(np.uint8)
        array[:] = 1
        column.discard(1, PAGE_BYTES - 1)
        assert array.all()

    def test_refused_address_space_is_a_typed_error(self) -> None:
        with pytest.raises(ResourceUnavailable, match="address space"):
            Reservation(np.uint64, 1 << 58)

    def test_big_ones_take_no_memory(self) -> None:
        column = Reservation(np.uint64, 1 << 33)
        array = column.array.view(np.uint64)
        array[-1] = 3
        assert array[-1] == 3
        assert mmap.PAGESIZE == PAGE_BYTES


def make_space(capacity: int = 64 * 20) -> tuple[RowSpace, npt.NDArray[np.uint8]]:
    mark = Reservation(np.uint8, capacity)
    column = Reservation(np.uint64, capacity)
    return RowSpace(mark, [column], capacity), mark.array.view(np.uint8)


class TestRowSpace:
    def test_takes_the_end_while_nothing_is_free(self) -> None:
        space, mark = make_space()
        rows = space.take(10)
        assert rows.tolist() == list(range(1, 11))
        mark[rows] = USED
        assert space.take_one() == 11
        assert space.high_water == 12

    def test_what_was_given_back_is_taken_first(self) -> None:
        space, mark = make_space()
        mark[space.take(100)] = USED
        space.give(np.array([7, 50]))
        assert sorted(space.take(2).tolist()) == [7, 50]
        assert space.high_water == 101

    def test_the_lowest_go_first_once_the_ready_ones_are_flushed(self) -> None:
        space, mark = make_space()
        mark[space.take(300)] = USED
        space.give(np.arange(200, 260))
        space.give(np.arange(20, 30))
        space.flush_ready()
        assert space.take_one() == 20
        mark[20] = USED
        assert sorted(space.take(9).tolist()) == list(range(21, 30))

    def test_a_full_table_is_a_typed_error_and_takes_nothing(self) -> None:
        space, mark = make_space(128)
        mark[space.take(100)] = USED
        with pytest.raises(ResourceUnavailable, match="table is full"):
            space.take(28)
        mark[space.take(27)] = USED
        with pytest.raises(ResourceUnavailable, match="127 of 127"):
            space.take_one()
        assert space.used_rows == 127

    def test_the_last_free_rows_are_found(self) -> None:
        space, mark = make_space(256)
        mark[space.take(255)] = USED
        space.give(np.arange(1, 256, 2))
        space.flush_ready()
        rows = space.take(128)
        assert sorted(rows.tolist()) == list(range(1, 256, 2))

    def test_trim_gives_pages_back(self) -> None:
        capacity = 64 * 1024
        mark = Reservation(np.uint8, capacity)
        column = Reservation(np.uint64, capacity)
        space = RowSpace(mark, [column], capacity)
        rows = space.take(60_000)
        mark.array.view(np.uint8)[rows] = USED
        values = column.array.view(np.uint64)
        values[rows] = 9
        before = space.memory_bytes
        space.give(rows[10:])
        while space.trim(8192) or space.pages_to_give:
            pass
        assert space.high_water == 11
        assert values[1:11].all()
        assert not values[4096 + 8192 :].any()
        assert space.memory_bytes < before / 4

    def test_losing_count_is_an_internal_error_not_an_endless_loop(self) -> None:
        space, mark = make_space()
        mark[space.take(10)] = USED
        space.free_rows += 1
        with pytest.raises(InternalError, match="nowhere"):
            space.take_one()

    def test_capacity_must_be_whole_blocks(self) -> None:
        with pytest.raises(ValueError, match="multiple of 64"):
            RowSpace(Reservation(np.uint8, 100), [], 100)
