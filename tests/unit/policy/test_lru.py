"""The LRU policy: stamps, chains, and victims against a sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.policy.base import STEP, EvictionPolicy
from cenote.policy.lru import LruPolicy


def test_stamps_rise_and_a_chains_root_is_newest() -> None:
    policy: EvictionPolicy = LruPolicy()
    first = policy.admit(np.zeros(3, np.uint64), False)
    chain = policy.admit(np.zeros((3, 2), np.uint64), True)
    ticks = [first // STEP, chain // STEP]
    assert [tick.tolist() for tick in ticks] == [[1, 2, 3], [6, 5, 4]]
    assert policy.admit_one(0) == 7 * STEP
    assert policy.clock == 8 * STEP
    assert first.dtype == chain.dtype == np.uint64
    assert policy.name == "lru"


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=60),
    st.integers(0, 70),
)
def test_victims_are_the_coldest_in_order(rows: list[tuple[int, bool]], count: int) -> None:
    stamps = np.array([stamp for stamp, _ in rows], np.uint64)
    evictable = np.array([able for _, able in rows], np.bool_)
    chosen = LruPolicy().victims(stamps, evictable, count)
    expected = sorted(int(stamp) for stamp in stamps[evictable])[:count]
    assert stamps[chosen].tolist() == expected
    assert len(set(chosen.tolist())) == len(chosen)
    assert evictable[chosen].all()


@pytest.mark.parametrize("order", ["rising", "falling", "random", "equal"])
def test_many_rows_are_chosen_from_exactly(order: str) -> None:
    n, count = 200_000, 3_000
    stamps = np.arange(1, n + 1, dtype=np.uint64)
    if order == "falling":
        stamps = stamps[::-1].copy()
    elif order == "random":
        np.random.default_rng(1).shuffle(stamps)
    elif order == "equal":
        stamps[:] = 7
    chosen = LruPolicy().victims(stamps, np.ones(n, np.bool_), count)
    assert count <= len(chosen) <= 3 * count
    assert (np.diff(stamps[chosen].astype(np.int64)) >= 0).all()
    coldest = np.sort(stamps)[: len(chosen)]
    assert (stamps[chosen] == coldest).all()
