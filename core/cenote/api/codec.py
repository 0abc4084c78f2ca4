"""Values and the packed columns of messages, both ways; the only place that knows their widths.

Each `unpack_*` checks what a stranger may have got wrong and raises InvalidArgument naming the
field. Columns are NumPy views of the message's bytes: read-only, no copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from cenote.v1 import common_pb2

from .errors import CenoteError, InvalidArgument, InvalidKey, error_from_code
from .rows import DIGEST_BYTES, KEY_BYTES_MAX

__all__ = [
    "SESSION_ID_BYTES",
    "error_from_detail",
    "error_to_detail",
    "pack_bitmap",
    "pack_ids",
    "pack_keys",
    "pack_u32",
    "pack_u64",
    "unpack_bitmap",
    "unpack_digests",
    "unpack_ids",
    "unpack_keys",
    "unpack_rows",
    "unpack_u16",
    "unpack_u32",
    "unpack_u64",
]

SESSION_ID_BYTES: Final = 16
"""Also of node uuids."""

_U16: Final = np.dtype("<u2")
_U32: Final = np.dtype("<u4")
_U64: Final = np.dtype("<u8")
_DIGEST: Final = np.dtype(("<u8", (2,)))
_EMPTY_IDS: Final[list[bytes]] = []


def _misfit(field: str, length: int, width: int) -> InvalidArgument:
    return InvalidArgument(f"{field} has {length} bytes, which is no multiple of {width}")


# ---- columns --------------------------------------------------------------------------------


def unpack_digests(data: bytes, field: str = "digests") -> NDArray[np.uint64]:
    """Packed digests as uint64[n, 2]."""
    if len(data) % DIGEST_BYTES:
        raise _misfit(field, len(data), DIGEST_BYTES)
    return np.frombuffer(data, _DIGEST)


def unpack_u64(data: bytes, field: str) -> NDArray[np.uint64]:
    """A packed column of u64."""
    if len(data) % 8:
        raise _misfit(field, len(data), 8)
    return np.frombuffer(data, _U64)


def unpack_u32(data: bytes, field: str) -> NDArray[np.uint32]:
    """A packed column of u32."""
    if len(data) % 4:
        raise _misfit(field, len(data), 4)
    return np.frombuffer(data, _U32)


def unpack_u16(data: bytes, field: str) -> NDArray[np.uint16]:
    """A packed column of u16."""
    if len(data) % 2:
        raise _misfit(field, len(data), 2)
    return np.frombuffer(data, _U16)


def unpack_rows(data: bytes, row: np.dtype[Any], field: str) -> NDArray[np.void]:
    """Packed rows of a type of `cenote.api.rows`."""
    if len(data) % row.itemsize:
        raise _misfit(field, len(data), row.itemsize)
    return np.frombuffer(data, row)


def unpack_ids(data: bytes, field: str) -> list[bytes]:
    """Session ids (16 bytes each), one `bytes` each."""
    if not data:
        return _EMPTY_IDS.copy()
    if len(data) % SESSION_ID_BYTES:
        raise _misfit(field, len(data), SESSION_ID_BYTES)
    return [data[a : a + SESSION_ID_BYTES] for a in range(0, len(data), SESSION_ID_BYTES)]


def pack_ids(ids: Iterable[bytes]) -> bytes:
    """Session ids back to back."""
    return b"".join(ids)


def pack_u64(values: Sequence[int] | NDArray[np.unsignedinteger[Any]]) -> bytes:
    """A column of u64."""
    return np.asarray(values, _U64).tobytes()


def pack_u32(values: Sequence[int] | NDArray[np.unsignedinteger[Any]]) -> bytes:
    """A column of u32."""
    return np.asarray(values, _U32).tobytes()


def pack_bitmap(present: NDArray[np.uint8]) -> bytes:
    """One bit each, least significant first; any byte but 0 is a 1."""
    return np.packbits(present, bitorder="little").tobytes()


def unpack_bitmap(data: bytes, count: int) -> NDArray[np.bool_]:
    """bool[count]. Raises InvalidArgument where the bitmap is not of that many bits."""
    if len(data) != (count + 7) // 8:
        raise InvalidArgument(f"a bitmap of {count} bits has {len(data)} bytes")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")
    return bits.view(np.bool_)


# ---- full keys ------------------------------------------------------------------------------


def pack_keys(keys: Sequence[bytes]) -> tuple[bytes, bytes]:
    """(keys back to back, their lengths as packed u16), for KeyBatch.keys and key_lengths."""
    lengths = np.fromiter(map(len, keys), _U16, len(keys))
    return b"".join(keys), lengths.tobytes()


def unpack_keys(keys: bytes, key_lengths: bytes) -> list[bytes]:
    """The keys of a KeyBatch. Raises InvalidKey (a length) and InvalidArgument (their sum)."""
    lengths = unpack_u16(key_lengths, "key_lengths").tolist()
    if lengths and not 0 < min(lengths) <= max(lengths) <= KEY_BYTES_MAX:
        wrong = next(i for i, n in enumerate(lengths) if not 0 < n <= KEY_BYTES_MAX)
        raise InvalidKey(f"key {wrong} has {lengths[wrong]} bytes")
    ends = list(accumulate(lengths))
    if (ends[-1] if ends else 0) != len(keys):
        raise InvalidArgument(f"keys has {len(keys)} bytes, key_lengths add up to {sum(lengths)}")
    return [keys[end - length : end] for end, length in zip(ends, lengths, strict=True)]


# ---- errors inside messages -----------------------------------------------------------------


def error_to_detail(error: CenoteError) -> common_pb2.ErrorDetail:
    """An error as a part of a reply."""
    return common_pb2.ErrorDetail(
        code=error.code, reason=error.reason, message=error.message, remedy=error.remedy
    )


def error_from_detail(detail: common_pb2.ErrorDetail) -> CenoteError:
    """The typed error that a detail stands for."""
    return error_from_code(detail.code, detail.message, detail.remedy)
