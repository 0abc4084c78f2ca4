"""The LRU policy: stamps, chains, and victims against a sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.policy.base import EvictionPolicy
from cenote.policy.lru import LruPolicy


def test_stamps_rise_and_a_chains_root_is_newest() -> None:
    policy: EvictionPolicy = LruPolicy()
    first = policy.fresh(3, False)
    chain = policy.fresh(3, True)
    assert first.tolist() == [1, 2, 3]
    assert chain.tolist() == [6, 5, 4]
    assert policy.take(2) == 7
    assert policy.clock == 9
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
