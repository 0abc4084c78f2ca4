"""Extents on the move: between grants, quarantine and the allocators, as uint32[n, 4].

A span is an `extents.EXTENT` seen as four words: segment | replica << 16 | shard << 24, slot,
offset and length in 64-byte units. Plain words are cheaper to gather, mask and group than named
fields.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES

from .effects import PLACED
from .extents import EXTENT

__all__ = [
    "NO_SPANS",
    "SEGMENT_MASK",
    "Spans",
    "by_segment",
    "distinct",
    "extent_rows",
    "from_extents",
    "from_placed",
    "joined_runs",
    "leaders_of",
    "pack_span",
    "segment_ids_of",
    "segments_of",
    "to_extents",
    "to_placed",
    "units_of",
]

T = TypeVar("T", bound=np.generic)
Spans: TypeAlias = NDArray[np.uint32]

SEGMENT_MASK = 0xFFFF
_MASK = np.uint32(SEGMENT_MASK)
_REPLICA_SHIFT, _REPLICA_MASK = np.uint32(16), np.uint32(0xFF)
_SEGMENT_AND_SLOT = np.uint64(0xFFFF_FFFF_0000_FFFF)
_LOW_WORD = np.uint64(0xFFFF_FFFF)
_UNIT_SHIFT = np.uint64(UNIT_BYTES.bit_length() - 1)
NO_SPANS: Spans = np.zeros((0, 4), np.uint32)

assert EXTENT.itemsize == 16


def units_of(spans: Spans) -> int:
    return int(spans[:, 3].sum(dtype=np.int64))


def segments_of(spans: Spans) -> NDArray[np.uint32]:
    return spans[:, 0] & _MASK


def segment_ids_of(spans: Spans) -> list[int]:
    """Each segment once."""
    return [int(segment_id) for segment_id in distinct(segments_of(spans))]


def pack_span(segment: int, replica: int, slot: int, offset: int, length: int) -> Spans:
    """One span."""
    return np.array([(segment | replica << 16, slot, offset, length)], np.uint32)


def from_extents(extents: NDArray[np.generic]) -> Spans:
    """View packed extents (any 16-byte dtype, contiguous) as spans."""
    return extents.view(np.uint32).reshape(-1, 4)


def to_extents(spans: Spans) -> NDArray[np.complex128]:
    """View contiguous spans as the 16-byte items that the object table takes."""
    return spans.view(np.complex128).reshape(-1)


def to_placed(spans: Spans) -> NDArray[np.void]:
    """As effects.PLACED rows."""
    words = np.empty((len(spans), 5), np.uint32)
    first = spans[:, 0]
    words[:, :4] = spans
    words[:, 0] &= _MASK
    words[:, 4] = (first >> _REPLICA_SHIFT) & _REPLICA_MASK
    return words.view(PLACED).reshape(-1)


def from_placed(placed: NDArray[np.void]) -> Spans:
    words = np.ascontiguousarray(placed).view(np.uint32).reshape(-1, 5)
    spans = np.empty((len(words), 4), np.uint32)
    spans[:, 0] = words[:, 0] | (words[:, 4] & 0xFF) << 16
    spans[:, 1:] = words[:, 1:4]
    return spans


def distinct(values: NDArray[T]) -> NDArray[T]:
    """Sorted, each once; for integers faster than np.unique, which hashes."""
    ordered = np.sort(values)
    if len(ordered) < 2:
        return ordered
    first = np.empty(len(ordered), np.bool_)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def by_segment(spans: Spans) -> Iterator[tuple[int, Spans]]:
    """(segment id, its spans), each segment once."""
    if not len(spans):
        return
    segments = spans[:, 0] & SEGMENT_MASK
    first = int(segments[0])
    if len(spans) == 1 or (segments == first).all():
        yield first, spans
        return
    order = np.argsort(segments, kind="stable")
    segments = segments[order]
    cuts = np.flatnonzero(segments[1:] != segments[:-1]) + 1
    for part in np.split(order, cuts):
        yield int(spans[part[0], 0]) & SEGMENT_MASK, spans[part]


def extent_rows(
    spans: Spans,
    lengths: NDArray[np.int64],
    counts: NDArray[np.uint16] | None,
    replicas: NDArray[np.uint8] | None,
) -> bytes:
    """EXTENT rows of a grant; per replica their lengths add up to payload and key tail."""
    out = np.empty((len(spans), 3), np.uint64)
    pairs = np.ascontiguousarray(spans).view(np.uint64)
    out[:, 0] = pairs[:, 0] & _SEGMENT_AND_SLOT
    out[:, 1] = (pairs[:, 1] & _LOW_WORD) << _UNIT_SHIFT
    if counts is None:
        out[:, 2] = lengths
        return out.tobytes()
    out[:, 2] = spans[:, 3]
    out[:, 2] <<= _UNIT_SHIFT
    if replicas is not None and (counts == replicas).all():
        out[:, 2] = np.repeat(lengths, counts)
        return out.tobytes()
    # The last extent of each replica is cut to what is left for it.
    owner = np.repeat(np.arange(len(counts)), counts)
    replica = (spans[:, 0] >> 16) & 0xFF
    key = owner * 256 + replica
    first = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    last = np.r_[first[1:], len(key)] - 1
    sums = np.add.reduceat(out[:, 2], first).astype(np.int64)
    out[last, 2] -= (sums - lengths[owner[first]]).astype(np.uint64)
    return out.tobytes()


def joined_runs(spans: Spans, ready_units: int) -> list[tuple[int, int]] | None:
    """(offset, length) of what spans cover, neighbours joined; None when some overlap."""
    if not len(spans):
        return []
    order = np.argsort(spans[:, 2], kind="stable")
    starts = spans[order, 2].astype(np.int64)
    ends = starts + spans[order, 3]
    if int(ends[-1]) > ready_units or (starts[1:] < ends[:-1]).any():
        return None
    heads = np.flatnonzero(np.r_[True, starts[1:] != ends[:-1]])
    tails = np.r_[heads[1:], len(starts)] - 1
    return list(zip(starts[heads].tolist(), (ends[tails] - starts[heads]).tolist(), strict=True))


def leaders_of(spans: Spans, contents: NDArray[np.uint64]) -> NDArray[np.int64]:
    """For each span the first one of the same place and contents, mostly itself."""
    rows = np.column_stack((spans[:, 2:4].astype(np.uint64), contents))
    _, first, group = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    return first[group.reshape(-1)]
