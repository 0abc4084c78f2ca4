"""Claims of writers over shared memory, on their side: what is in a page, and when not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import DeadlineExceeded
from cenote.transport.claims import (
    CLAIM_PAGE_BYTES,
    EVERYWHERE,
    PENS,
    RANGES_MAX,
    VIEW_PENS,
    WORD_AT,
    ClaimPage,
    first_pen_word,
    ranges_of,
)


def page() -> tuple[ClaimPage, memoryview]:
    memory = memoryview(bytearray(CLAIM_PAGE_BYTES))
    return ClaimPage(memory), memory.cast("Q")


def claimed(words: memoryview, pen: int) -> list[int]:
    at = first_pen_word(pen)
    return words[at + 1 : at + 1 + 3 * (words[at] & 0xFF)].tolist()


def test_a_claim_is_seen_until_it_is_withdrawn() -> None:
    made, words = page()
    one = made.claim_one(5, 1, 640, 64, 0.0)
    many = made.claim(5, np.array([(0, 0, 10), (2, 64, 20)], np.uint64), 0.0)
    assert claimed(words, one) == [1, 640, 64]
    assert claimed(words, many) == [0, 0, 10, 2, 64, 20]
    states = [words[first_pen_word(pen)] for pen in (one, many)]
    made.withdraw(one)
    made.withdraw(many)
    assert [words[first_pen_word(pen)] for pen in range(PENS)] == [0] * PENS
    again = made.claim_one(5, 1, 640, 64, 0.0)
    assert words[first_pen_word(again)] not in states, "a new claim looks like an old one"


def test_a_void_grant_claims_nothing() -> None:
    made, words = page()
    words[WORD_AT] = 6
    assert made.claim_one(5, 1, 640, 64, 0.0) == -1
    assert made.claim(5, np.array([(0, 0, 10)], np.uint64), 0.0) == -1
    assert [words[first_pen_word(pen)] for pen in range(PENS)] == [0] * PENS
    for _ in range(2 * PENS):  # pens were given back
        made.withdraw(made.claim_one(6, 1, 640, 64, 0.0))


def test_a_thread_more_than_there_are_pens_waits() -> None:
    made, _ = page()
    pens = [made.claim_one(1, 0, 0, 1, 0.0) for _ in range(PENS)]
    assert sorted(pens) == list(range(PENS))
    with pytest.raises(DeadlineExceeded):
        made.claim_one(1, 0, 0, 1, 0.01)
    made.withdraw(pens[0])
    assert made.claim_one(1, 0, 0, 1, 0.0) == pens[0]


def test_views_have_pens_of_their_own_and_end_no_write() -> None:
    made, words = page()
    epoch = 3 << 40
    words[WORD_AT] = epoch | 77
    ranges = np.array([(1, 64, 128)], np.uint64)
    assert made.claim_view((2 << 40) | 500, ranges) == -1, "a hold of an earlier epoch"
    pens = [made.claim_view(epoch | 1, ranges) for _ in range(VIEW_PENS)]
    assert sorted(pens) == list(range(PENS, PENS + VIEW_PENS))
    assert all(claimed(words, pen) == [1, 64, 128] for pen in pens)
    assert made.claim_view(epoch | 1, ranges) == -1, "all pens are taken"
    assert made.claim_one(epoch | 77, 1, 0, 1, 0.0) >= 0
    state = words[first_pen_word(pens[5])]
    made.withdraw_view(pens[5])
    assert not words[first_pen_word(pens[5])]
    assert made.claim_view(epoch | 1, ranges) == pens[5]
    assert words[first_pen_word(pens[5])] != state


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 300), st.integers(1, 5)),
        min_size=1,
        max_size=120,
    )
)
def test_ranges_cover_all_extents(extents: list[tuple[int, int, int]]) -> None:
    columns = np.array(extents, np.uint64).T
    ranges = ranges_of(*columns)
    assert len(ranges) <= RANGES_MAX
    found = [(index, at, at + length) for index, at, length in ranges.tolist()]
    for index, at, length in extents:
        assert any(i == index and low <= at and at + length <= high for i, low, high in found)
    if len(extents) <= RANGES_MAX:
        assert ranges.tolist() == [list(extent) for extent in extents]
    for index, low, high in found:  # no wider than what it covers
        inside = [(a, a + n) for i, a, n in extents if i == index and low <= a and a + n <= high]
        assert (min(a for a, _ in inside), max(b for _, b in inside)) == (low, high)


def test_extents_all_over_the_place_claim_everything() -> None:
    many = np.arange(2 * RANGES_MAX, dtype=np.uint64)
    assert ranges_of(many, many * 64, many + 1).tolist() == [[EVERYWHERE, 0, 0]]
