"""Bytes that follow from their key: a reader needs no copy of them to see that they are right."""

from __future__ import annotations

import hashlib

__all__ = ["payload_of"]


def payload_of(key: str | bytes, size_bytes: int) -> bytes:
    """`size_bytes` bytes that depend on the key in every block of 64."""
    raw = key.encode() if isinstance(key, str) else key
    return hashlib.shake_128(raw).digest(size_bytes)
