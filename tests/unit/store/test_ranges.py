"""Byte ranges against sets of numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cenote.store.ranges import RangeSet

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=8)


def numbers(ranges: list[tuple[int, int]]) -> set[int]:
    return {n for offset, length in ranges for n in range(offset, offset + length)}


@given(ranges=RANGES, offset=st.integers(0, 80), length=st.integers(1, 20))
def test_a_range_set_is_a_set_of_numbers(
    ranges: list[tuple[int, int]], offset: int, length: int
) -> None:
    made, members = RangeSet(ranges), numbers(ranges)
    assert numbers(list(made.ranges)) == members
    assert made.total_bytes == len(members)
    assert bool(made) == bool(members)
    firsts = [first for first, _ in made.ranges]
    assert firsts == sorted(firsts)
    ends = [first + size for first, size in made.ranges]
    assert all(end < first for end, first in zip(ends, firsts[1:], strict=False))
    piece = set(range(offset, offset + length))
    assert made.covers(offset, length) == (piece <= members)
    assert made.overlaps(offset, length) == bool(piece & members)
    columns = np.array([offset], np.uint64), np.array([length], np.uint64)
    assert made.overlapping(*columns).tolist() == [bool(piece & members)]
    gaps = list(made.gaps(offset, offset + length))
    assert numbers(gaps) == piece - members
    assert all(size > 0 for _, size in gaps)
    assert numbers(list(made.added(offset, length).ranges)) == members | piece
