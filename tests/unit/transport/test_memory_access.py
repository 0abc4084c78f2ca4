from __future__ import annotations

import ctypes
from time import monotonic
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cenote.api.errors import DeadlineExceeded
from cenote.api.rows import EXTENT
from cenote.transport import gil
from cenote.transport import memory_access as access
from cenote.transport.testing_support import LocalMemory, payload


def test_memory_is_all_of_it() -> None:
    memory = LocalMemory(100)
    access.MEMORY[memory.address + 3 : memory.address + 5] = b"ab"
    assert memory.bytes[2:6].tobytes() == b"\xa5ab\xa5"


@pytest.mark.parametrize("size", [1, 4096, 65_535, 65_536, 300_000])
def test_copies_and_checksums(size: int) -> None:
    data = payload(size, 1)
    source = np.frombuffer(data, np.uint8).ctypes.data
    memory = LocalMemory(size + 2)
    access.copy(memory.address + 1, source, size)
    assert memory.bytes[1 : 1 + size].tobytes() == data
    assert access.checksum_at(memory.address + 1, size) == xxh3_64_intdigest(data)
    memory.bytes[:] = 0xA5
    digest = access.copy_hashed(memory.address + 1, source, size, monotonic() + 60)
    assert digest == xxh3_64_intdigest(data)
    assert memory.bytes[1 : 1 + size].tobytes() == data
    assert memory.untouched(0, 1)
    assert memory.untouched(size + 1, size + 2)


@pytest.mark.parametrize("gives_way", [False, True])
def test_where_it_costs_much_the_gil_is_kept_unless_the_process_gives_way(
    gives_way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then copies are longer instead."""
    size = 3 * access.HASH_STEP_BYTES
    data = payload(size, 1)
    source = np.frombuffer(data, np.uint8).ctypes.data
    memory = LocalMemory(size)
    held: list[int] = []
    released: list[int] = []

    def counting(calls: list[int]) -> Any:
        def copy(target: int, source: int, length: int) -> None:
            calls.append(length)
            ctypes.memmove(target, source, length)

        return copy

    monkeypatch.setattr(access, "held_memmove", counting(held))
    monkeypatch.setattr(access, "_memmove", counting(released))
    monkeypatch.setattr(gil.RELEASES, "_keep_until", monotonic() + 60)
    gil.RELEASES.give_way(gives_way)
    try:
        digest = access.copy_hashed(memory.address, source, size, monotonic() + 60)
    finally:
        gil.RELEASES.give_way(False)
    assert digest == xxh3_64_intdigest(data)
    steps = [access.HASH_STEP_BYTES] * 3
    assert (held, released) == (([], [size]) if gives_way else (steps, []))


def test_a_copy_ends_at_its_deadline() -> None:
    memory = LocalMemory(4 << 20)
    with pytest.raises(DeadlineExceeded):
        access.copy_hashed(memory.address, memory.address + (2 << 20), 2 << 20, monotonic() - 1)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 50)), min_size=1, max_size=60))
def test_neighbours_become_one_run(pieces: list[tuple[int, int]]) -> None:
    starts, at = [], 1000
    for gap, length in pieces:
        at += gap
        starts.append(at)
        at += length
    lengths = np.array([length for _, length in pieces], np.uint64)
    breaks = access.breaks_between(np.array(starts, np.uint64), lengths)
    firsts, sizes = access.lay_side_by_side(breaks, lengths)
    expected: list[list[int]] = []
    for i, (gap, length) in enumerate(pieces):
        if i and not gap:
            expected[-1][1] += length
        else:
            expected.append([i, length])
    assert [list(run) for run in zip(firsts, sizes, strict=True)] == expected


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=200)
    | st.tuples(st.integers(1, 300), st.integers(1, 2000)).map(lambda t: [t[0]] * t[1]),
    st.integers(1, 1000),
)
def test_groups_are_bounded_and_complete(lengths: list[int], group_bytes: int) -> None:
    firsts = list(access.groups_of(np.array(lengths, np.uint64), group_bytes))
    assert firsts[0] == 0
    assert firsts == sorted(set(firsts))
    for first, last in zip(firsts, [*firsts[1:], len(lengths)], strict=True):
        group = lengths[first:last]
        assert len(group) <= access.GROUP_ITEMS_MAX
        assert sum(group) <= group_bytes or len(group) == 1
        if last < len(lengths) and len(group) < access.GROUP_ITEMS_MAX:
            assert sum(group) + lengths[last] > group_bytes  # no group ends too early


SEGMENTS = {1: (10_000, 1000), 2: (50_000, 64)}
near = st.integers(0, 1100) | st.sampled_from(
    [1 << 40, (1 << 63) - 1, (1 << 64) - 1, (1 << 64) - 64]
)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), near, near), max_size=40))
def test_extents_are_judged_as_arithmetic_without_bounds_does(
    rows: list[tuple[int, int, int]],
) -> None:
    extents: Any = np.zeros(len(rows), EXTENT)
    for i, (segment, offset, length) in enumerate(rows):
        extents[i] = (segment, 0, offset, length)
    statuses, addresses, lengths = access.locate(extents, SEGMENTS.get)
    assert lengths.tolist() == [length for *_, length in rows]
    for i, (segment, offset, length) in enumerate(rows):
        place = SEGMENTS.get(segment)
        if place is None:
            assert (statuses[i], addresses[i]) == (21, 0)
        elif length > 0 and offset + length <= place[1]:
            assert (statuses[i], addresses[i]) == (0, place[0] + offset)
        else:
            assert (statuses[i], addresses[i]) == (3, 0)
