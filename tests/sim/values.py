"""Payloads that tell of each of their blocks whose it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

__all__ = ["BLOCK_BYTES", "PutRecord", "Removal", "make_value", "origin_of"]

BLOCK_BYTES: Final = 16
Version = tuple[int, int]
"""(epoch, seq)."""


def make_value(serial: int, key: int, client: int, size: int) -> bytes:
    """Bytes of which each block of 16 says which put, key, client, and place it is of."""
    count = -(-size // BLOCK_BYTES)
    blocks = np.empty((count, 2), "<u8")
    blocks[:, 0] = serial << 32 | key << 16 | client
    blocks[:, 1] = np.arange(count, dtype=np.uint64) + np.uint64(size << 32)
    return blocks.tobytes()[:size]


def origin_of(block: bytes) -> str:
    """Which put such a block is of, for people."""
    if len(block) < 8 or not any(block):
        return "nothing that was put"
    word = int.from_bytes(block[:8], "little")
    return f"put {word >> 32} of key {word >> 16 & 0xFFFF} by client {word & 0xFFFF}"


@dataclass(eq=False)
class PutRecord:
    """One call's attempt to put one value."""

    serial: int
    key: int
    client: int
    value: bytes
    min_replicas: int = 1
    acked: bool = False
    """Its own client was told that it is stored."""
    versions: list[Version] = field(default_factory=list)
    said_to_exist: set[Version] = field(default_factory=set)
    """Of these others were told so: not of what the same call decides later on, once they were
    removed."""

    def is_acked(self, version: Version) -> bool:
        """Whether anybody was told that this is there."""
        return self.acked or version in self.said_to_exist


@dataclass
class Removal:
    number: int
    """Of the master's decisions."""
    acked_s: float
    """After this, no read may begin that sees what was decided before."""


def wrong_bytes(key: int, put: PutRecord | None, data: bytes) -> str:
    """What was read instead of a put's value, for people."""
    expected = b"" if put is None else put.value
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        if block != expected[at : at + BLOCK_BYTES]:
            what = f"put {put.serial}" if put else "something"
            return (
                f"wrong bytes under key {key}: {what}, but at {at} of {len(data)}"
                f" {origin_of(block)}"
            )
    return f"wrong bytes under key {key}: {len(data)} of {len(expected)} bytes"
