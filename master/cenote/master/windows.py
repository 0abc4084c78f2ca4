"""Which neighbourhood of a segment to evict, when evicting by age makes no room in one piece."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["UNEVICTABLE", "find_window", "find_window_in_order"]

UNEVICTABLE = 2**64 - 1
"""Heat of what may not be evicted."""

Units = npt.NDArray[np.int64]


def find_window(
    length_units: int,
    offsets: Units,
    lengths: Units,
    heat: npt.NDArray[np.uint64],
    size_units: int,
) -> tuple[int, int] | None:
    """The coldest window of a segment of at least `length_units`, as (start, end) in units.

    `offsets` and `lengths` are all that is not free, in any order, `heat` how recently each was
    used (UNEVICTABLE for what must stay). Of all windows between two allocations that are long
    enough the one is chosen whose hottest allocation is coldest, then the one with the fewest units
    to evict. It takes in the free space around; allocations with offset in [start, end) are the
    victims. None when every window holds something unevictable. O(n log n), n allocations.
    """
    order = np.argsort(offsets)
    return find_window_in_order(
        length_units, offsets[order], lengths[order], heat[order], size_units
    )


def find_window_in_order(
    length_units: int,
    starts: Units,
    sizes: Units,
    warmth: npt.NDArray[np.uint64],
    size_units: int,
) -> tuple[int, int] | None:
    """`find_window` of allocations that are sorted by offset."""
    n = len(starts)
    # Window (i, j) evicts allocations i to j-1: it reaches from the end of i-1 to the start of j.
    begins = np.concatenate(([0], starts + sizes))
    ends = np.concatenate((starts, [size_units]))
    stops = np.searchsorted(ends, begins + length_units)
    first = np.flatnonzero(stops <= n)
    if not len(first):
        return None
    stop = stops[first]
    hottest = _range_max(warmth, first, stop)
    evicted = np.concatenate(([0], np.cumsum(sizes)))
    victims = evicted[stop] - evicted[first]
    coldest = np.flatnonzero(hottest == hottest.min())
    best = int(coldest[np.argmin(victims[coldest])])
    if int(hottest[best]) == UNEVICTABLE:
        return None
    return int(begins[first[best]]), int(ends[stop[best]])


def _range_max(values: npt.NDArray[np.uint64], first: Units, stop: Units) -> npt.NDArray[np.uint64]:
    """Maximum of values[first:stop] for each pair, 0 for an empty range; O(n log longest)."""
    result = np.zeros(len(first), np.uint64)
    counts = stop - first
    # `maxima[i]` covers `span` values from i on: two of them that overlap cover any range of up to
    # twice as many.
    maxima, span = values, 1
    longest = int(counts.max())
    while span <= longest:
        here = np.flatnonzero((counts >= span) & (counts < 2 * span))
        result[here] = np.maximum(maxima[first[here]], maxima[stop[here] - span])
        if len(maxima) <= span:
            break
        maxima = np.maximum(maxima[:-span], maxima[span:])
        span *= 2
    return result
