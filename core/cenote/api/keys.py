"""Keys as users write them and as the pool knows them.

A user's key is `str` (taken as UTF-8) or `bytes`, 1 to 512 bytes long. The pool looks objects up by
the key's *digest*: XXH3-128, seeded with the namespace's seed, 16 bytes in canonical byte order.
The functions for batches cost about 0.1 µs a key, so they check by sets and never by a loop.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_digest

from .errors import InvalidArgument, InvalidKey
from .rows import DIGEST_BYTES, KEY_BYTES_MAX, KEY_INLINE_BYTES

__all__ = [
    "Key",
    "KeySequence",
    "chain_keys",
    "digest_key",
    "digest_keys",
    "encode_key",
    "encode_keys",
    "split_digests",
    "tail_bytes",
    "tail_lengths",
]

Key: TypeAlias = str | bytes
KeySequence: TypeAlias = Sequence[Key] | NDArray[np.uint8]
"""Keys of a batch: a sequence of keys, or an array uint8[n, width] with one key of `width` bytes a
row (packed block hashes)."""

_SHOWN_BYTES_MAX: Final = 40


def encode_key(key: Key, position: int | None = None) -> bytes:
    """The bytes of one key; `position` in its batch is for the error message.

    Raises InvalidKey where it is no str or bytes, empty, longer than 512 bytes, or no valid UTF-8.
    """
    if isinstance(key, str):
        try:
            encoded = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidKey(f"{_name(position)} is no valid Unicode: {error.reason}") from None
    elif isinstance(key, bytes):
        encoded = bytes(key)
    else:
        text = f"{_name(position)} is of type {type(key).__name__}"
        if position is None and isinstance(key, list | tuple | np.ndarray):
            raise InvalidKey(text, remedy="for several keys there are get_batch, exists_batch ...")
        raise InvalidKey(text)
    if not 0 < len(encoded) <= KEY_BYTES_MAX:
        if not encoded:
            raise InvalidKey(f"{_name(position)} is empty")
        shown = encoded[:_SHOWN_BYTES_MAX]
        raise InvalidKey(f"{_name(position)} has {len(encoded)} bytes, it begins with {shown!r}")
    return encoded


def _name(position: int | None) -> str:
    return "the key" if position is None else f"key {position}"


def encode_keys(keys: KeySequence) -> list[bytes]:
    """The bytes of all keys of a batch, in order.

    Raises InvalidKey, naming the first position that is wrong and why.
    """
    if isinstance(keys, np.ndarray):
        return _rows_of(keys)
    if type(keys) is not list:
        if isinstance(keys, str | bytes | bytearray | memoryview):
            raise InvalidKey(
                f"a batch takes a sequence of keys, not one {type(keys).__name__}",
                remedy="pass [key], or use the call for a single key",
            )
        try:
            keys = list(keys)
        except TypeError:
            raise InvalidKey(f"keys are a sequence, not {type(keys).__name__}") from None
    encoded: list[bytes]
    if keys and type(keys[0]) is str:
        try:
            encoded = list(map(str.encode, keys))
        except (TypeError, UnicodeEncodeError):  # not all are str, or no valid Unicode
            return _encode_each(keys)
    elif set(map(type, keys)) == {bytes}:
        encoded = keys  # type: ignore[assignment]
    else:
        return _encode_each(keys)
    lengths = set(map(len, encoded))
    if min(lengths) == 0 or max(lengths) > KEY_BYTES_MAX:
        return _encode_each(keys)
    return encoded


def _encode_each(keys: Sequence[Key]) -> list[bytes]:
    """The slow way, which finds out which key is wrong."""
    return [encode_key(key, position) for position, key in enumerate(keys)]


def _rows_of(keys: NDArray[np.uint8]) -> list[bytes]:
    if keys.dtype != np.uint8 or keys.ndim != 2:
        raise InvalidKey(
            f"an array of keys is uint8[n, width], not {keys.dtype}{list(keys.shape)}",
            remedy="pass a list of str or bytes, or an array of bytes with one key a row",
        )
    count, width = keys.shape
    if not 0 < width <= KEY_BYTES_MAX:
        raise InvalidKey(f"the array's rows are keys of {width} bytes")
    rows = np.ascontiguousarray(keys).view(f"V{width}").reshape(count).tolist()
    return rows if not rows or isinstance(rows[0], bytes) else list(map(bytes, rows))


def digest_key(key: bytes, seed: int) -> bytes:
    """The 16-byte digest of an encoded key under a namespace's seed."""
    return xxh3_128_digest(key, seed)


def digest_keys(keys: Sequence[bytes], seed: int) -> bytes:
    """The digests of encoded keys, 16 bytes each, back to back."""
    return b"".join(map(xxh3_128_digest, keys, repeat(seed)))


def split_digests(digests: bytes) -> list[bytes]:
    """Packed digests as one `bytes` each, for use as dictionary keys."""
    rows: list[bytes] = np.frombuffer(digests, f"V{DIGEST_BYTES}").tolist()
    return rows


def tail_bytes(key_length: int) -> int:
    """Bytes that are stored behind the payload, of a key of so many."""
    return key_length if key_length > KEY_INLINE_BYTES else 0


def tail_lengths(keys: Sequence[bytes]) -> NDArray[np.uint16] | None:
    """Per key the bytes that are stored behind the payload: all of a key over 64 bytes.

    None where no key is that long.
    """
    lengths = np.fromiter(map(len, keys), np.uint16, len(keys))
    if not len(keys) or int(lengths.max()) <= KEY_INLINE_BYTES:
        return None
    lengths[lengths <= KEY_INLINE_BYTES] = 0
    return lengths


# ---- prefix chains ---------------------------------------------------------------------------

_CHAIN_ROOT: Final = b"cenote.chain.1"
_HASHES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "sha256": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128": xxh3_128_digest,
}

TokenBlock: TypeAlias = bytes | bytearray | memoryview | Sequence[int] | NDArray[np.integer]


def chain_keys(
    token_blocks: Iterable[TokenBlock],
    *,
    parent: bytes = b"",
    algorithm: Literal["sha256", "xxh3_128"] = "sha256",
) -> list[bytes]:
    """Keys of one prompt's blocks: each is a hash over the key before it and its own tokens.

    So equal keys mean equal prefixes, and key *i* is found only where all before it were the same.
    `token_blocks`: per block its token ids (integers below 2**63, an integer array, or a
    two-dimensional one with a block a row) or any bytes that stand for them. `parent`: the key of
    the block before the first one (of an earlier call), empty at the prompt's start; whatever else
    the KV bytes depend on (LoRA, cache salt, image hashes) belongs into the parent of the first
    block, what all keys of a namespace share belongs into its fingerprint. `sha256` gives 32-byte
    keys, `xxh3_128` 16-byte ones that are four times cheaper but can be forged on purpose.

    Tokens are hashed as little-endian 64-bit integers: the same in every process and on every
    machine, whatever PYTHONHASHSEED is. Raises InvalidArgument where a block is no tokens.
    """
    hash_of = _HASHES.get(algorithm)
    if hash_of is None:
        raise InvalidArgument(
            f"{algorithm!r} is no chain hash", remedy="one of: " + ", ".join(_HASHES)
        )
    if not isinstance(parent, bytes):
        raise InvalidArgument(f"parent is bytes, not {type(parent).__name__}")
    if (
        isinstance(token_blocks, np.ndarray)
        and token_blocks.ndim == 1
        and _are_numbers(token_blocks)
    ):
        raise InvalidArgument(
            "token_blocks is a flat array", remedy="one row a block, such as tokens.reshape(-1, 16)"
        )
    keys: list[bytes] = []
    last = parent or hash_of(_CHAIN_ROOT)
    # The length in front keeps (parent, tokens) and (longer parent, fewer tokens) apart.
    for position, block in enumerate(token_blocks):
        last = hash_of(len(last).to_bytes(4, "little") + last + _block_bytes(block, position))
        keys.append(last)
    return keys


def _are_numbers(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "biuf" and array.size > 0


def _block_bytes(block: TokenBlock, position: int) -> bytes:
    if isinstance(block, bytes | bytearray | memoryview):
        return bytes(block)
    try:
        tokens = np.asarray(block)
        if tokens.ndim == 1 and tokens.size and np.issubdtype(tokens.dtype, np.integer):
            return tokens.astype("<i8", casting="safe").tobytes()
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidArgument(
        f"token block {position} is no sequence of token ids",
        remedy="pass one row a block: integers below 2**63, or bytes",
    )
