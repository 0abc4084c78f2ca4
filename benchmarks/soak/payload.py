"""Bytes that say whose they are: any part of another object, or of another version, is noticed.

A payload starts with a header (client, key, version, size); what follows are words of a fixed
random pool, from an offset and xored with a number that both stem from client, key and version.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

__all__ = ["SIZE_MAX", "SIZE_MIN", "Verdict", "check", "make"]

SIZE_MIN = 64
SIZE_MAX = 4 << 20
_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"cn-soak\0"
_POOL_WORDS = 1 << 20
_POOL = np.random.default_rng(20).integers(0, 1 << 64, _POOL_WORDS, np.uint64)
_MASK = (1 << 64) - 1


class Verdict(NamedTuple):
    """What bytes turned out to be: a version of the key, or what is wrong with them."""

    version: int
    wrong: str


def _mix(client: int, key: int, version: int) -> int:
    """A number for each (client, key, version): the finaliser of splitmix64."""
    x = (client << 56 ^ key << 36 ^ version) * 0x9E3779B97F4A7C15 & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def make(client: int, key: int, version: int, size_bytes: int) -> np.ndarray:
    """uint8[size_bytes]; at least `SIZE_MIN`."""
    mixed = _mix(client, key, version)
    words = -(-size_bytes // 8)
    first = mixed % (_POOL_WORDS - words)
    out = (_POOL[first : first + words] ^ np.uint64(mixed)).view(np.uint8)[:size_bytes]
    header = _HEADER.pack(_MAGIC, client, key, version, size_bytes)
    out[: _HEADER.size] = np.frombuffer(header, np.uint8)
    return out


def check(data: object, client: int, key: int) -> Verdict:
    """Whether these bytes are some version of this key, whole and unmixed."""
    got = np.frombuffer(data, np.uint8)  # type: ignore[call-overload]
    if len(got) < SIZE_MIN:
        return Verdict(0, f"{len(got)} bytes only")
    magic, of_client, of_key, version, size = _HEADER.unpack(got[: _HEADER.size].tobytes())
    if magic != _MAGIC:
        return Verdict(0, f"no header, but {got[:32].tobytes().hex()}")
    if (of_client, of_key) != (client, key):
        return Verdict(0, f"bytes of client {of_client}, key {of_key}, version {version}")
    if size != len(got):
        return Verdict(version, f"{len(got)} bytes of {size} of version {version}")
    different = np.flatnonzero(got != make(client, key, version, size))
    if len(different):
        span = f"{different[0]} to {different[-1]}"
        return Verdict(
            version, f"version {version}: {len(different)} bytes differ, {span} of {size}"
        )
    return Verdict(version, "")
