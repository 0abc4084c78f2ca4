"""Raw addresses: views, copies and checksums of memory that is named by numbers alone.

`MEMORY` is one memoryview over the whole address space. Slicing it costs about 0.1 µs and gives
what `recv_into`, `sendmsg`, slice assignment and xxhash take, so a batch of thousands of pieces
needs no ctypes object for each. It checks nothing: whoever slices it vouches for the addresses.

How copies are made, and why:

    below 64 KiB      slice assignment: half the call cost of ctypes.memmove, and nothing that long
                      needs the GIL released
    larger            ctypes.memmove, which releases the GIL (unless that costs more: see `gil`)
    neighbours        pieces that lie back to back on both sides become one copy; batches usually
                      do, since the master allocates them so
    with checksums    in steps that stay in the second-level cache, each hashed after its copy
    long batches      by several threads: see `copying`
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final, cast

import numpy as np
import xxhash
from numpy.typing import NDArray

from cenote.api.errors import DeadlineExceeded, InvalidArgument, StaleLocation

from .base import ExtentArray, U8Array, U64Array
from .gil import HELD_BYTES_MAX, LONG_STEP_BYTES, RELEASES, held_memmove

__all__ = [
    "FEW_ITEMS",
    "HASH_STEP_BYTES",
    "MEMORY",
    "SLICE_COPY_BYTES_MAX",
    "breaks_between",
    "checksum_at",
    "checksums_of",
    "copy",
    "copy_hashed",
    "groups_of",
    "hash_step_bytes",
    "lay_side_by_side",
    "locate",
]

MEMORY: Final = memoryview((ctypes.c_char * (1 << 47)).from_address(0)).cast("B")

# Typed as Any on purpose: the stubs would make every call a checked cast.
_memmove: Final[Any] = ctypes.memmove
_digest: Final = xxhash.xxh3_64_intdigest
_hasher: Final = xxhash.xxh3_64


def _hash_step_bytes() -> int:
    """Half of the second-level cache, within limits; the lower one where its size is not told."""
    try:
        told = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().strip()
        cache_bytes = int(told.removesuffix("K")) << 10
    except (ValueError, OSError):
        cache_bytes = 0
    return min(512 << 10, max(256 << 10, cache_bytes // 2))


SLICE_COPY_BYTES_MAX: Final = 64 << 10
HASH_STEP_BYTES: Final = _hash_step_bytes()
"""What is hashed at once after it was copied: it must still be in the second-level cache. Two
threads that do so hand the GIL to each other at every step, so longer ones are better."""
GROUP_ITEMS_MAX: Final = 512
FEW_ITEMS: Final = 8


def hash_step_bytes() -> int:
    """What is copied, and then hashed, at once at this moment."""
    return LONG_STEP_BYTES if RELEASES.wants_long_steps(monotonic()) else HASH_STEP_BYTES


def copy(target: int, source: int, length: int) -> None:
    """Copy `length` bytes between two addresses."""
    if length < SLICE_COPY_BYTES_MAX:
        MEMORY[target : target + length] = MEMORY[source : source + length]
        return
    begun = monotonic()
    if length <= HELD_BYTES_MAX and RELEASES.keeps(begun):
        held_memmove(target, source, length)
    else:
        _memmove(target, source, length)
        RELEASES.note(begun, length)


def checksum_at(address: int, length: int) -> int:
    """XXH3-64 of the bytes at an address."""
    return _digest(MEMORY[address : address + length])


def checksums_of(addresses: U64Array, lengths: U64Array) -> U64Array:
    """XXH3-64 of each piece of memory."""
    pieces = zip(addresses.tolist(), lengths.tolist(), strict=True)
    return np.array([checksum_at(address, length) for address, length in pieces], np.uint64)


def copy_hashed(target: int, source: int, length: int, deadline: float) -> int:
    """Copy and return XXH3-64 of what was copied.

    Raises DeadlineExceeded once `deadline` (on the monotonic clock) passed, part of it copied.
    """
    step_bytes = hash_step_bytes()
    if length <= step_bytes:
        copy(target, source, length)
        return _digest(MEMORY[target : target + length])
    hasher = _hasher()
    update = hasher.update
    end = target + length
    gap = source - target
    while target < end:
        step = min(step_bytes, end - target)
        copy(target, target + gap, step)
        update(MEMORY[target : target + step])
        target += step
        if monotonic() > deadline:
            raise DeadlineExceeded("the copy did not end before the deadline")
    return hasher.intdigest()


def breaks_between(starts: U64Array, lengths: U64Array) -> NDArray[np.bool_]:
    """bool[n - 1]: whether item i + 1 does not begin where item i ends."""
    return cast("NDArray[np.bool_]", starts[:-1] + lengths[:-1] != starts[1:])


def lay_side_by_side(breaks: NDArray[np.bool_], lengths: U64Array) -> tuple[list[int], list[int]]:
    """Merge items that have no break between them: (first item of each run, bytes of each run)."""
    if not breaks.any():
        return [0], [int(lengths.sum())]
    firsts = np.flatnonzero(breaks)
    firsts += 1
    firsts = np.concatenate((np.zeros(1, firsts.dtype), firsts))
    return firsts.tolist(), np.add.reduceat(lengths, firsts).tolist()


def groups_of(lengths: U64Array, group_bytes: int) -> Sequence[int]:
    """Cut items, in order, into groups that are handled in one step: the first item of each group.

    A group has at most `group_bytes` and GROUP_ITEMS_MAX items, or is one longer item.
    """
    count = len(lengths)
    largest = int(lengths.max())
    if largest == int(lengths.min()):
        per_group = max(1, min(GROUP_ITEMS_MAX, group_bytes // max(1, largest)))
        return range(0, count, per_group)
    ends: list[int] = np.cumsum(lengths).tolist()
    firsts = []
    first = done = 0
    while first < count:
        firsts.append(first)
        last = bisect_right(ends, done + group_bytes, first, min(count, first + GROUP_ITEMS_MAX))
        first = max(last, first + 1)
        done = ends[first - 1]
    return firsts


def locate(
    extents: ExtentArray, find: Callable[[int], tuple[int, int] | None]
) -> tuple[U8Array, U64Array, U64Array]:
    """Judge each row: statuses, addresses (0 for bad ones), lengths.

    `find(segment id)` gives (address, bytes that may be touched), or None where there is no such
    segment: then the location is stale. An extent outside of its segment is invalid.
    """
    if len(extents) <= FEW_ITEMS:
        return _locate_few(extents.tolist(), find)
    ids, offsets = extents["segment"], extents["offset"]
    lengths = np.ascontiguousarray(extents["length"])
    statuses = np.full(len(extents), StaleLocation.code, np.uint8)
    addresses = np.zeros(len(extents), np.uint64)
    for segment_id in set(ids.tolist()):
        place = find(segment_id)
        if place is None:
            continue
        mine = ids == segment_id
        ready = np.uint64(place[1])
        # Nothing can overflow: only lengths up to `ready` are subtracted from it.
        fits = mine & (lengths > 0) & (lengths <= ready)
        fits &= offsets <= ready - np.minimum(lengths, ready)
        statuses[mine] = InvalidArgument.code
        statuses[fits] = 0
        addresses[fits] = offsets[fits] + np.uint64(place[0])
    return statuses, addresses, lengths


def _locate_few(
    rows: list[tuple[int, int, int, int]], find: Callable[[int], tuple[int, int] | None]
) -> tuple[U8Array, U64Array, U64Array]:
    """As `locate`, without columns: NumPy's calls would cost more than the work."""
    statuses, addresses = bytearray(len(rows)), [0] * len(rows)
    for i, (segment_id, _, offset, length) in enumerate(rows):
        place = find(segment_id)
        if place is None:
            statuses[i] = StaleLocation.code
        elif not length or offset + length > place[1]:
            statuses[i] = InvalidArgument.code
        else:
            addresses[i] = place[0] + offset
    lengths = np.array([row[3] for row in rows], np.uint64)
    return np.frombuffer(statuses, np.uint8), np.array(addresses, np.uint64), lengths
