"""Keys: what is accepted, what their digests are, how chains are made."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import InvalidArgument, InvalidKey
from cenote.api.keys import (
    chain_keys,
    digest_key,
    digest_keys,
    encode_key,
    encode_keys,
    split_digests,
    tail_lengths,
)

one_key = st.one_of(
    st.binary(min_size=1, max_size=512), st.text(min_size=1, max_size=100).filter(str.isprintable)
)


@given(st.lists(one_key, max_size=20))
def test_a_batch_is_encoded_as_its_keys_are(keys: list[str | bytes]) -> None:
    assert encode_keys(keys) == [encode_key(key) for key in keys]
    assert encode_keys(tuple(keys)) == encode_keys(keys)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "is empty"),
        (b"", "is empty"),
        ("x" * 513, "has 513 bytes"),
        ("é" * 257, "has 514 bytes"),
        ("\ud800", "no valid Unicode"),
        (7, "is of type int"),
        (None, "is of type NoneType"),
        (bytearray(b"x"), "is of type bytearray"),
    ],
)
def test_a_wrong_key_is_named(key: object, reason: str) -> None:
    with pytest.raises(InvalidKey, match=f"the key .*{reason}|the key {reason}"):
        encode_key(key)  # type: ignore[arg-type]
    with pytest.raises(InvalidKey, match="key 2 ") as caught:
        encode_keys(["a", b"b", key, "d"])  # type: ignore[list-item]
    assert reason in caught.value.message


@pytest.mark.parametrize("keys", [["a", "b"], ("a",), np.zeros((2, 16), np.uint8)])
def test_who_gives_a_batch_to_the_call_for_one_key_is_told_of_the_other(keys: object) -> None:
    with pytest.raises(InvalidKey, match="for several keys there are get_batch"):
        encode_key(keys)  # type: ignore[arg-type]


@pytest.mark.parametrize("keys", ["abc", b"abc", bytearray(b"abc"), 5, None])
def test_a_batch_is_a_sequence(keys: object) -> None:
    with pytest.raises(InvalidKey):
        encode_keys(keys)  # type: ignore[arg-type]


def test_rows_of_an_array_are_keys() -> None:
    hashes = np.arange(96, dtype=np.uint8).reshape(3, 32)
    assert encode_keys(hashes) == [bytes(row) for row in hashes]
    assert encode_keys(hashes[:, ::2]) == [bytes(row[::2]) for row in hashes]
    assert encode_keys(np.zeros((0, 32), np.uint8)) == []
    assert encode_keys(np.zeros((2, 4), np.uint8)) == [bytes(4), bytes(4)]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(4, np.uint8),
        np.zeros((2, 0), np.uint8),
        np.zeros((2, 513), np.uint8),
        np.zeros((2, 4), np.int64),
        np.array([b"ab", b"c"]),
    ],
)
def test_other_arrays_are_refused(array: np.ndarray) -> None:
    with pytest.raises(InvalidKey):
        encode_keys(array)


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=20), st.integers(0, 2**64 - 1))
def test_digests_are_canonical_xxh3(keys: list[bytes], seed: int) -> None:
    packed = digest_keys(keys, seed)
    assert split_digests(packed) == [digest_key(key, seed) for key in keys]
    for key, digest in zip(keys, split_digests(packed), strict=True):
        assert int.from_bytes(digest, "big") == xxhash.xxh3_128_intdigest(key, seed)


def test_only_long_keys_have_tails() -> None:
    assert tail_lengths([b"a" * 64, b"b"]) is None
    assert tail_lengths([]) is None
    tails = tail_lengths([b"a" * 64, b"b" * 65, b"c", b"d" * 512])
    assert tails is not None
    assert tails.tolist() == [0, 65, 0, 512]


def test_a_chain_key_names_its_whole_prefix() -> None:
    blocks = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    keys = chain_keys(blocks)
    assert len(set(keys)) == 3
    assert all(len(key) == 32 for key in keys)
    assert chain_keys(blocks[:2]) == keys[:2]
    assert chain_keys(blocks[2:], parent=keys[1]) == keys[2:]
    assert chain_keys([[1, 2, 4], *blocks[1:]])[1:] != keys[1:]
    assert chain_keys(np.array(blocks)) == keys
    assert chain_keys(np.array(blocks, np.uint32)) == keys
    assert chain_keys(np.array(block) for block in blocks) == keys
    assert [len(key) for key in chain_keys(blocks, algorithm="xxh3_128")] == [16] * 3


def test_the_blocks_borders_count() -> None:
    assert chain_keys([b"ab", b"c"])[-1] != chain_keys([b"a", b"bc"])[-1]
    assert chain_keys([b"x"], parent=b"ab") != chain_keys([b"bx"], parent=b"a")


def test_chain_keys_are_the_same_in_every_process() -> None:
    code = "from cenote.api.keys import chain_keys;print(chain_keys([[1, 2], [3]])[-1].hex())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == chain_keys([[1, 2], [3]])[-1].hex()


@pytest.mark.parametrize("block", [["a"], 5, [1.5], [[1], [2]], [2**63], []])
def test_other_blocks_are_refused(block: object) -> None:
    with pytest.raises(InvalidArgument, match="token block 1"):
        chain_keys([[1], block])  # type: ignore[list-item]


def test_an_unknown_hash_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="md5"):
        chain_keys([[1]], algorithm="md5")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="parent"):
        chain_keys([[1]], parent="x")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"flat array .*one row a block"):
        chain_keys(np.arange(32))
    assert len(chain_keys(np.array([b"ab", b"cd"]))) == 2  # blocks of bytes
