"""Items of a batch as one stream of bytes: between a socket, in order, and memory, anywhere.

Used by both ends. Neighbours in memory are moved as one; small strangers up to 512 in one system
call; checksums are taken in steps that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final

import numpy as np
import xxhash

from .base import U64Array
from .gil import LONG_STEP_BYTES, RELEASES
from .memory_access import (
    FEW_ITEMS,
    MEMORY,
    breaks_between,
    checksum_at,
    groups_of,
    lay_side_by_side,
)

__all__ = ["RECEIVE_STEP_BYTES", "SEND_STEP_BYTES", "move_hashed", "move_items"]

RECEIVE_STEP_BYTES: Final = 64 << 10
SEND_STEP_BYTES: Final = 1 << 20
"""Small steps keep received bytes in the cache until they are hashed; sending in small steps would
wake the receiver for each."""

_HELD_STEP_BYTES: Final = 1 << 20
"""Where giving up the GIL is costly: receiving several items at once does so."""
_digest: Final = xxhash.xxh3_64_intdigest


def move_items(
    one: Callable[[int, int], None],
    several: Callable[[list[memoryview]], None],
    addresses: U64Array,
    lengths: U64Array,
    checksums: U64Array | None,
    step_bytes: int,
) -> None:
    """Receive (or send) items in order at local addresses.

    `one(address, length)` moves a contiguous piece, `several(views)` up to 512 pieces in one system
    call. Items that lie back to back become one piece. `checksums`, if given, receives XXH3-64 of
    each item, taken while it is in cache.
    """
    if len(lengths) <= FEW_ITEMS:
        _move_few(one, addresses.tolist(), lengths.tolist(), checksums, step_bytes)
        return
    if RELEASES.cost_too_much(monotonic()):
        long = RELEASES.wants_long_steps(monotonic())
        step_bytes = max(step_bytes, LONG_STEP_BYTES if long else _HELD_STEP_BYTES)
    breaks = breaks_between(addresses, lengths)
    if checksums is None:
        firsts, sizes = lay_side_by_side(breaks, lengths)
        starts = addresses[firsts].tolist()
        if len(starts) == 1:
            one(starts[0], sizes[0])
            return
        lengths = np.array(sizes, np.uint64)
        seams = None
    else:
        starts, sizes = addresses.tolist(), lengths.tolist()
        seams = [0, *np.cumsum(breaks).tolist()]
    groups = groups_of(lengths, step_bytes)
    for first, last in zip(groups, [*groups[1:], len(sizes)], strict=True):
        if last == first + 1:
            if checksums is None:
                one(starts[first], sizes[first])
            else:
                checksums[first] = move_hashed(one, starts[first], sizes[first], step_bytes)
            continue
        if seams is not None and seams[first] == seams[last - 1]:
            start = starts[first]
            one(start, starts[last - 1] + sizes[last - 1] - start)
            views = [MEMORY[starts[i] : starts[i] + sizes[i]] for i in range(first, last)]
        else:
            views = [MEMORY[starts[i] : starts[i] + sizes[i]] for i in range(first, last)]
            several(views)
        if checksums is not None:
            checksums[first:last] = [_digest(view) for view in views]


def _move_few(
    one: Callable[[int, int], None],
    addresses: list[int],
    lengths: list[int],
    checksums: U64Array | None,
    step_bytes: int,
) -> None:
    """As `move_items`, without columns: NumPy's calls would cost more than the work."""
    count = len(lengths)
    first = 0
    while first < count:
        start, size = addresses[first], lengths[first]
        last = first + 1
        while (
            last < count and addresses[last] == start + size and size + lengths[last] <= step_bytes
        ):
            size += lengths[last]
            last += 1
        if checksums is None:
            one(start, size)
        elif last == first + 1:
            checksums[first] = move_hashed(one, start, size, step_bytes)
        else:
            one(start, size)
            for i in range(first, last):
                checksums[i] = checksum_at(addresses[i], lengths[i])
        first = last


def move_hashed(one: Callable[[int, int], None], address: int, length: int, step_bytes: int) -> int:
    """Move one piece and return its XXH3-64."""
    if length <= step_bytes:
        one(address, length)
        return checksum_at(address, length)
    hasher = xxhash.xxh3_64()
    update = hasher.update
    end = address + length
    while address < end:
        step = min(step_bytes, end - address)
        one(address, step)
        update(MEMORY[address : address + step])
        address += step
    return hasher.intdigest()
