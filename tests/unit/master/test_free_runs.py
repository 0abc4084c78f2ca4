"""Free runs in several chunks: what a chunk's address range says stays true."""

from __future__ import annotations

import pytest

from cenote.master.allocator import SegmentAllocator

RUNS = 2200  # more than two chunks of them
STEP = 100


@pytest.fixture
def allocator() -> SegmentAllocator:
    """A segment of many short free runs, one at each multiple of STEP."""
    made = SegmentAllocator(RUNS * STEP)
    assert made.allocate(RUNS * STEP) == 0
    for number in range(RUNS):
        made.free(number * STEP, 10)
    return made


def border_of(allocator: SegmentAllocator) -> int:
    """Where the second chunk begins; its first run is taken, and the chunk keeps its range."""
    border = allocator._runs._firsts[1]
    assert allocator.allocate_at(border, 10)
    return border


@pytest.mark.parametrize("from_the_beginning", [True, False])
def test_a_run_that_grew_over_a_border_and_lost_what_was_before_it(
    allocator: SegmentAllocator, from_the_beginning: bool
) -> None:
    """Found by a million operations of benchmarks/churn.py: what was free was then taken for used,
    and what was used for free."""
    border = border_of(allocator)
    last = border - STEP
    # The first chunk's last run grows over the border of the second ...
    allocator.free(last + 10, border + 50 - (last + 10))
    allocator.check()
    # ... and what is left of it begins behind that.
    start = last if from_the_beginning else last + 5
    assert allocator.allocate_at(start, border + 20 - start)
    allocator.check()
    assert not allocator.allocate_at(border, 10)
    assert allocator.allocate_at(border + 20, 30)
    allocator.check()


def test_what_is_freed_beside_it_becomes_one_run(allocator: SegmentAllocator) -> None:
    border = border_of(allocator)
    last = border - STEP
    allocator.free(last + 10, border + 50 - (last + 10))
    assert allocator.allocate_at(last, border + 20 - last)
    runs = allocator.free_runs
    allocator.free(border + 10, 10)
    assert allocator.free_runs == runs
    allocator.check()
