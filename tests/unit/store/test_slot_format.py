"""The header of a table file: two copies, of which one is whole at any moment."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.store.slot_format import (
    HEADER_BYTES,
    HEADER_COPY_BYTES,
    RETIRED_RANGES_MAX,
    SLOT_BYTES,
    TableHeader,
    boot_id_bytes,
    slots_in,
    table_file_bytes,
    unpack_header,
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
    retired=((0, 4096), (1 << 37, 64)),
)


def test_what_is_packed_is_unpacked() -> None:
    assert unpack_header(HEADER.pack() + bytes(HEADER_COPY_BYTES)) == HEADER
    assert unpack_header(bytes(HEADER_COPY_BYTES) + HEADER.pack()) == HEADER
    full = dataclasses.replace(HEADER, retired=tuple((i, 1) for i in range(RETIRED_RANGES_MAX)))
    assert unpack_header(full.pack() + HEADER.pack()) == full
    with pytest.raises(ValueError, match="retired ranges"):
        dataclasses.replace(full, retired=(*full.retired, (9, 9))).pack()


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


@given(slots=st.integers(0, 1 << 40), page_bytes=st.sampled_from([4096, 1 << 21]))
def test_a_file_has_room_for_its_slots_and_less_than_a_page_more(
    slots: int, page_bytes: int
) -> None:
    size = table_file_bytes(slots, page_bytes)
    assert size % page_bytes == 0
    assert 0 <= size - HEADER_BYTES - slots * SLOT_BYTES < page_bytes
    assert slots_in(size) >= slots
    assert slots_in(0) == 0


def test_boot_ids_are_uuids() -> None:
    assert boot_id_bytes("00010203-0405-0607-0809-0a0b0c0d0e0f\n".strip()) == bytes(range(16))
    with pytest.raises(ValueError, match="badly formed"):
        boot_id_bytes("yesterday")
