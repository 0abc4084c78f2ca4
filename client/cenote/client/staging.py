"""Payloads and their long keys side by side, so that both are written as one.

A key of over 64 bytes lies in the pool behind its object's payload. Small payloads are copied
together with their keys: that costs less than a transfer of each key's own. The copies lie as far
apart as the extents of a batch do, so that neighbours in the pool are neighbours here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.runtime.memory import address_of
from cenote.transport.base import Channel
from cenote.transport.memory_access import MEMORY

from .buffers import bytes_address
from .plan.pieces import Pieces
from .plan.steps import MoveOne, Staged
from .plan.tails import staged_stride

__all__ = ["stage", "write_with_tail"]

_digest: Final = xxh3_64_intdigest
_ONE_BYTES_MAX: Final = 64 << 10
_ONE_NEAR_BYTES_MAX: Final = 16 << 10
"""Copying costs less than one more round trip; up to here also than one more call over shm."""


def stage(pieces: Pieces, size: int, keys: Sequence[bytes]) -> Staged:
    """Copies of payloads of `size` bytes (one piece each), each with its key behind it.

    All keys have one length.
    """
    count, tail = len(keys), len(keys[0])
    stride = staged_stride(size + tail)
    # Zeros, since what lies between two copies may go along.
    memory = np.zeros((count, stride), np.uint8)
    address = address_of(memory)
    slots = np.ndarray(count, f"V{size}", memory, strides=(stride,))
    sources = pieces.addresses.astype(np.intp)
    base = int(sources.min())
    reach = int(sources.max()) - base
    # As overlapping elements, a piece at each address: they are gathered without a step for each.
    around = np.ndarray(reach + 1, f"V{size}", MEMORY[base : base + reach + size], strides=(1,))
    sources -= base
    payloads = around[sources]
    slots[:] = payloads
    memory[:, size : size + tail] = np.frombuffer(b"".join(keys), np.uint8).reshape(count, tail)
    return Staged(
        Pieces(
            np.arange(address, address + count * stride, stride, dtype=np.uint64),
            np.full(count, size + tail, np.uint64),
            None,
            [memory],
        ),
        np.fromiter(map(_digest, payloads.tolist()), np.uint64, count),
    )


def write_with_tail(channel: Channel, step: MoveOne, now: Callable[[], float]) -> tuple[int, int]:
    """Write a payload and the key behind it: (item status, XXH3-64 of the payload)."""
    length, address, tail = step.length, step.address, step.tail
    if length <= (_ONE_NEAR_BYTES_MAX if channel.verifies_by_lease else _ONE_BYTES_MAX):
        staged = b"".join((MEMORY[address : address + length], tail))
        address = bytes_address(staged)
        checksum = _digest(MEMORY[address : address + length])
        status, _ = channel.write_one(
            step.segment, step.offset, len(staged), address, step.grant_id, step.budget_s, False
        )
        return status, checksum
    end_s = now() + step.budget_s
    status, checksum = channel.write_one(
        step.segment, step.offset, length, address, step.grant_id, step.budget_s, True
    )
    if not status:
        status, _ = channel.write_one(
            step.segment,
            step.offset + length,
            len(tail),
            bytes_address(tail),
            step.grant_id,
            max(0.001, end_s - now()),
            False,
        )
    return status, checksum
