"""The keys of sealed objects, out of their slot records and what lies behind their payloads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import KEY_INLINE_BYTES

__all__ = ["SlotKey", "slot_keys"]


@dataclass(frozen=True, slots=True)
class SlotKey:
    """A sealed object (one shard of one replica) as `cenote ls` shows it."""

    key: bytes
    """Empty where a long key is spread over two extents, of which this segment has the second."""
    digest: bytes
    object_size_bytes: int
    epoch: int
    seq: int
    replica: int


def slot_keys(records: NDArray[np.void], data: memoryview, prefix: bytes) -> Iterator[SlotKey]:
    """Of `SLOT_RECORD` rows (the last extents of their replicas), those whose key begins with
    `prefix`; `data`: the segment's, where keys of over 64 bytes lie."""
    ends = (records["offset"] + records["length"]).tolist()
    columns = zip(
        records["key"].tolist(),
        records["key_length"].tolist(),
        records["length"].tolist(),
        ends,
        strict=True,
    )
    for i, (inline, length, extent_length, end) in enumerate(columns):
        if length <= KEY_INLINE_BYTES:
            key = inline[:length]
        elif length > extent_length:
            key = b""
        else:
            key = bytes(data[end - length : end])
            if not key.startswith(inline):
                continue
        if key.startswith(prefix):
            record = records[i]
            yield SlotKey(
                key=key,
                digest=record["digest"].tobytes(),
                object_size_bytes=int(record["object_size"]),
                epoch=int(record["epoch"]),
                seq=int(record["seq"]),
                replica=int(record["replica"]),
            )
