"""Payloads on a data connection that have no place, or only some of them: the stream goes on."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import CenoteError, StaleLocation
from cenote.transport.base import U64Array
from cenote.transport.item_stream import move_items

from .served_socket import STEP_BYTES, ServedSocket

__all__ = ["drain", "drain_stale", "receive_some"]

_STALE_BYTES_MAX: Final = 8 << 20


def drain(io: ServedSocket, length: int, error: CenoteError, bytes_max: int = 1 << 30) -> None:
    """Receive what is not wanted; where that is too much, close with the error instead."""
    if length > bytes_max:
        raise error
    io.drain(length)


def drain_stale(io: ServedSocket, length: int, error: CenoteError) -> None:
    """`drain` of what came under a grant or an epoch that is over."""
    drain(io, length, error, _STALE_BYTES_MAX)


def receive_some(
    io: ServedSocket, good: NDArray[np.bool_], addresses: U64Array, lengths: U64Array
) -> int:
    """Receive a payload of which some items have no place; the bytes of those that have.

    Raises StaleLocation where too many have none.
    """
    received = 0
    turns = np.flatnonzero(good[1:] != good[:-1]) + 1
    for first, last in zip([0, *turns.tolist()], [*turns.tolist(), len(good)], strict=True):
        total = int(lengths[first:last].sum())
        if not good[first]:
            drain(io, total, StaleLocation("the segments are gone or smaller"))
            continue
        part = addresses[first:last], lengths[first:last]
        move_items(io.receive, io.receive_views, *part, None, STEP_BYTES)
        received += total
    return received
