"""The header of a table file: two copies, of which one is whole at any moment."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.store.slot_format import (
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    RANGE_BYTES,
    RANGES_MAX,
    SLOT_BYTES,
    SLOTS_AT,
    TableHeader,
    boot_id_bytes,
    pack_range,
    slots_for,
    table_file_bytes,
    table_memory_bytes,
    unpack_header,
    unpack_ranges,
)

HEADER = TableHeader(
    sequence=7,
    incarnation=bytes(range(16)),
    boot_id=b"b" * 16,
    node_uuid=b"u" * 16,
    index=3,
    unit_bytes=64,
    data_bytes=(1 << 38) - 4096,
    data_inode=(1 << 64) - 1,
    ready_bytes=1 << 30,
    last_epoch=(1 << 32) - 1,
    slots=1 << 33,
    node_id=9,
    segment_id=(1 << 32) - 1,
    retired_count=RANGES_MAX,
)


def test_what_is_packed_is_unpacked() -> None:
    assert unpack_header(HEADER.pack() + bytes(HEADER_COPY_BYTES)) == HEADER
    assert unpack_header(bytes(HEADER_COPY_BYTES) + HEADER.pack()) == HEADER
    too_many = dataclasses.replace(HEADER, retired_count=RANGES_MAX + 1)
    assert unpack_header(too_many.pack() + bytes(HEADER_COPY_BYTES)) is None


def test_the_later_valid_copy_counts() -> None:
    later = HEADER.next(last_epoch=5)
    assert (later.sequence, later.last_epoch) == (8, 5)
    assert unpack_header(HEADER.pack() + later.pack()) == later
    assert unpack_header(later.pack() + HEADER.pack()) == later
    torn = later.pack()[:100] + HEADER.pack()[100:]
    assert unpack_header(torn + HEADER.pack()) == HEADER
    assert unpack_header(torn + torn) is None
    assert unpack_header(b"") is None


@given(at=st.integers(0, HEADER_COPY_BYTES - 1), flip=st.integers(1, 255))
def test_a_damaged_copy_never_counts(at: int, flip: int) -> None:
    copy = bytearray(HEADER.pack())
    copy[at] ^= flip
    assert unpack_header(bytes(copy) + bytes(HEADER_COPY_BYTES)) is None


def test_ranges_are_whole_or_none_counts() -> None:
    ranges = [(0, 4096), (1 << 63, (1 << 64) - 1)]
    packed = b"".join(pack_range(*r) for r in ranges)
    assert len(packed) == 2 * RANGE_BYTES
    assert unpack_ranges(packed) == ranges
    assert unpack_ranges(b"") == []
    for at in range(len(packed)):
        damaged = bytearray(packed)
        damaged[at] ^= 1
        assert unpack_ranges(bytes(damaged)) is None


@given(slots=st.integers(0, 1 << 40), page=st.sampled_from([4096, 1 << 16]))
def test_memory_and_slots_of_a_table_go_together(slots: int, page: int) -> None:
    size = table_file_bytes(slots, page)
    assert size % page == 0
    assert 0 <= size - SLOTS_AT - slots * SLOT_BYTES < page
    memory = table_memory_bytes(slots, page)
    assert memory % page == 0
    assert slots * SLOT_BYTES < memory <= slots * SLOT_BYTES + HEADER_BYTES + 3 * page
    room = slots_for(memory, page)
    assert room >= slots
    assert table_memory_bytes(room, page) == memory
    assert table_memory_bytes(room + 1, page) > memory
    assert slots_for(0, page) == 0


def test_boot_ids_are_uuids() -> None:
    assert boot_id_bytes("00010203-0405-0607-0809-0a0b0c0d0e0f\n".strip()) == bytes(range(16))
    with pytest.raises(ValueError, match="badly formed"):
        boot_id_bytes("yesterday")
