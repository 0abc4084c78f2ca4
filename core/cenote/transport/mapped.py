"""What a channel over shared memory has mapped: segments by id, its page of claims, their head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cenote.runtime.memory import PAGE_BYTES

from .base import ExtentArray, U64Array
from .claims import CLAIM_PAGE_BYTES, RANGES_MAX, ClaimPage, ranges_of
from .mapping import Mapping
from .opening import close_all

__all__ = ["claimed_ranges", "finder", "head_of", "page_of"]


def finder(mappings: dict[int, Mapping]) -> Callable[[int], tuple[int, int] | None]:
    def find(segment_id: int) -> tuple[int, int] | None:
        mapping = mappings.get(segment_id)
        return None if mapping is None else (mapping.address, mapping.ready_bytes)

    return find


def head_of(descriptor: int) -> memoryview:
    """Map the head of the claims; the descriptor is closed."""
    try:
        mapping = Mapping(descriptor, PAGE_BYTES, PAGE_BYTES, b"", writable=False)
    finally:
        close_all([descriptor])
    return mapping.view.cast("Q")


def page_of(descriptor: int, offset: int) -> ClaimPage:
    """Map this channel's page; the descriptor is closed."""
    try:
        mapping = Mapping(
            descriptor, CLAIM_PAGE_BYTES, CLAIM_PAGE_BYTES, b"", writable=True, offset=offset
        )
    finally:
        close_all([descriptor])
    return ClaimPage(mapping.memory, mapping)


def claimed_ranges(
    extents: ExtentArray, mappings: dict[int, Mapping], most: int = RANGES_MAX
) -> U64Array:
    """What a batch is about to write, for its claim. Extents without a mapping are not written."""
    ids = extents["segment"]
    first = mappings.get(int(ids[0]))
    if first is not None and (len(ids) == 1 or bool((ids == ids[0]).all())):
        return ranges_of(first.index, extents["offset"], extents["length"], most)
    known = np.isin(ids, list(mappings))
    extents, ids = extents[known], ids[known]
    indexes = np.zeros(len(ids), np.uint64)
    for segment_id, mapping in mappings.items():
        indexes[ids == segment_id] = mapping.index
    return ranges_of(indexes, extents["offset"], extents["length"], most)
