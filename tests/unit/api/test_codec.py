"""Packed columns: what comes out is what went in, and a wrong length is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api import codec
from cenote.api.errors import InvalidArgument, InvalidKey, NoSpace
from cenote.api.rows import EXTENT

KEYS = st.lists(st.binary(min_size=1, max_size=512), max_size=20)


@given(KEYS)
def test_keys_round_trip(keys: list[bytes]) -> None:
    assert codec.unpack_keys(*codec.pack_keys(keys)) == keys


@given(st.binary(max_size=100), st.binary(max_size=20))
def test_any_bytes_give_keys_or_a_typed_error(keys: bytes, lengths: bytes) -> None:
    try:
        found = codec.unpack_keys(keys, lengths)
    except InvalidArgument:
        return
    assert b"".join(found) == keys
    assert len(found) == len(lengths) // 2


@pytest.mark.parametrize("length", [0, 513])
def test_a_wrong_key_is_named(length: int) -> None:
    lengths = np.array([3, length], "<u2").tobytes()
    with pytest.raises(InvalidKey, match=f"key 1 has {length} bytes"):
        codec.unpack_keys(b"abc" + b"x" * length, lengths)


def test_key_lengths_must_add_up() -> None:
    with pytest.raises(InvalidArgument, match="add up to 3"):
        codec.unpack_keys(b"abcd", np.array([3], "<u2").tobytes())


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_numbers_round_trip(values: list[int]) -> None:
    assert codec.unpack_u64(codec.pack_u64(values), "x").tolist() == values
    small = [value % 2**32 for value in values]
    assert codec.unpack_u32(codec.pack_u32(small), "x").tolist() == small


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=5))
def test_ids_and_digests_round_trip(ids: list[bytes]) -> None:
    packed = codec.pack_ids(ids)
    assert codec.unpack_ids(packed, "x") == ids
    digests = codec.unpack_digests(packed)
    assert digests.shape == (len(ids), 2)
    assert digests.dtype == np.uint64
    assert digests.tobytes() == packed


@given(st.lists(st.booleans(), max_size=40))
def test_bitmaps_round_trip(present: list[bool]) -> None:
    column = np.array(present, np.uint8)
    packed = codec.pack_bitmap(column)
    assert codec.unpack_bitmap(packed, len(present)).tolist() == present
    with pytest.raises(InvalidArgument):
        codec.unpack_bitmap(packed + b"\0", len(present))


@pytest.mark.parametrize(
    ("unpack", "width"),
    [
        (codec.unpack_digests, 16),
        (codec.unpack_ids, 16),
        (codec.unpack_u64, 8),
        (codec.unpack_u32, 4),
        (codec.unpack_u16, 2),
        (lambda data, field: codec.unpack_rows(data, EXTENT, field), 24),
    ],
)
def test_a_wrong_length_names_the_field(unpack: Callable[[bytes, str], object], width: int) -> None:
    unpack(b"x" * 2 * width, "sizes")
    with pytest.raises(InvalidArgument, match=f"sizes has {width + 1} bytes.*multiple of {width}"):
        unpack(b"x" * (width + 1), "sizes")


def test_columns_are_views() -> None:
    column = codec.unpack_u64(b"\1" + bytes(15), "x")
    assert column.tolist() == [1, 0]
    assert not column.flags.writeable
    assert not column.flags.owndata


def test_errors_travel_in_replies() -> None:
    error = NoSpace("full", remedy="add a node")
    again = codec.error_from_detail(codec.error_to_detail(error))
    assert type(again) is NoSpace
    assert (again.message, again.remedy) == ("full", "add a node")
