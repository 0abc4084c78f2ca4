"""Bytes that follow from a block's id, made and checked at several GB/s.

Word w of block b is `base[w] ^ mix(b)`: every word depends on the block, so a piece of another one
is found wherever it lies, and on its place, so that a shifted piece is found, too.
"""

from __future__ import annotations

import ctypes
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument
from cenote.runtime.memory import address_of

__all__ = ["BlockPattern"]

_WORD_BYTES: Final = 8
_SCRATCH_BYTES: Final = 128 << 10  # what is made and compared at once stays in the core's cache
_SEED: Final = 0x9E3779B97F4A7C15
_memcmp: Final = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int

U64 = NDArray[np.uint64]


@final
class BlockPattern:
    """The bytes of all blocks of `block_bytes`, a multiple of 8. For one thread at a time."""

    def __init__(self, block_bytes: int) -> None:
        if block_bytes <= 0 or block_bytes % _WORD_BYTES:
            raise InvalidArgument(
                f"a block of {block_bytes} bytes", remedy="use a positive multiple of 8"
            )
        self.block_bytes = block_bytes
        words = block_bytes // _WORD_BYTES
        self._base = _mix(np.arange(words, dtype=np.uint64) + np.uint64(_SEED))
        self._rows = max(1, _SCRATCH_BYTES // block_bytes)
        self._scratch = np.empty((self._rows, words), np.uint64)
        self._scratch_address = address_of(self._scratch)

    def fill(self, blocks: NDArray[np.uint8], ids: NDArray[np.int64]) -> None:
        """Write the bytes of block `ids[i]` to `blocks[i]`: uint8[n, block_bytes], contiguous."""
        np.bitwise_xor(self._base, _keys(ids), out=blocks.view(np.uint64))

    def fill_last_word(self, blocks: NDArray[np.uint8], ids: NDArray[np.int64]) -> None:
        """`fill` for the last 8 bytes alone."""
        blocks.view(np.uint64)[:, -1:] = self._base[-1] ^ _keys(ids)

    def wrong_bytes(self, blocks: NDArray[np.uint8], ids: NDArray[np.int64]) -> int:
        """How many bytes of `blocks` (as in `fill`) are not those of their blocks."""
        keys = _keys(ids)
        address, wrong = address_of(blocks), 0
        for first in range(0, len(ids), self._rows):
            some = keys[first : first + self._rows]
            expected = self._scratch[: len(some)]
            np.bitwise_xor(self._base, some, out=expected)
            at = address + first * self.block_bytes
            if _memcmp(at, self._scratch_address, expected.nbytes):
                found = blocks[first : first + len(some)]
                wrong += int(np.count_nonzero(found != expected.view(np.uint8)))
        return wrong


def _keys(ids: NDArray[np.int64]) -> U64:
    return _mix(ids.astype(np.uint64) ^ np.uint64(_SEED))[:, None]


def _mix(values: U64) -> U64:
    """splitmix64's finaliser: equal inputs only give equal outputs, and near ones far ones."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: U64 = values ^ (values >> np.uint64(31))
        return mixed
