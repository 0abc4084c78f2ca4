"""The queue of evicted keys against an ordered dictionary."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.policy.ghosts import GhostQueue
from cenote.policy.model import spread


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "take", "take one", "trim"]), st.integers(0, 300)),
        max_size=60,
    ),
    st.integers(1, 400),
)
def test_it_forgets_the_oldest_and_what_came_back(steps: list[tuple[str, int]], limit: int) -> None:
    queue, model = GhostQueue(), OrderedDict[int, None]()
    for what, number in steps:
        keys = spread(np.arange(number, number + number % 97 + 1))
        if what == "add":
            keys = np.array([key for key in keys.tolist() if key not in model], np.uint64)
            queue.add(keys, limit)
            model.update(dict.fromkeys(keys.tolist()))
            while len(model) > limit:
                model.popitem(last=False)
        elif what == "take":
            expected = [key in model for key in keys.tolist()]
            assert queue.take(keys).tolist() == expected
            for key in keys.tolist():
                model.pop(key, None)
        elif what == "take one":
            key = int(keys[0])
            assert queue.take_one(key) == (key in model)
            model.pop(key, None)
        else:
            queue.trim(number)
            while len(model) > number:
                model.popitem(last=False)
        assert len(queue) == len(model)


def test_of_many_keys_hardly_any_is_lost_and_memory_is_bounded() -> None:
    limit, queue = 20_000, GhostQueue()
    rng = np.random.default_rng(1)
    for first in range(0, 200_000, 500):
        queue.add(spread(np.arange(first, first + 500)), limit)
        queue.take(spread(rng.integers(max(0, first - 10_000), first + 1, 200)))
    kept = len(queue)
    found = int(queue.take(spread(np.arange(200_000))).sum())
    assert found == pytest.approx(kept, abs=2)
    assert not len(queue) - (kept - found)
    assert queue.memory_bytes() <= 29 * limit


def test_a_key_that_is_asked_for_twice_is_found_once() -> None:
    queue = GhostQueue()
    keys = np.array([7, 0], np.uint64)
    queue.add(keys, 10)
    assert queue.take(np.array([7, 7, 0], np.uint64)).sum() == 2
    assert not queue.take(keys).any()
