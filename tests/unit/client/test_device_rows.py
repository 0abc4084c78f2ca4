"""Which bytes are copied between GPUs and staging memory: held against one byte at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import InvalidBuffer
from cenote.client.plan.device_rows import Devices, rows_of, staged_pieces, turns_of
from cenote.client.plan.pieces import Pieces

Objects = list[list[tuple[int, int]]]
"""Of each object its pieces: (bytes, device)."""
STAGED_AT = 1 << 20

objects = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.integers(-1, 1)), min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)


@given(objects, st.data())
def test_every_byte_goes_to_its_place(told: Objects, data: st.DataObject) -> None:
    """Some objects of one turn, each of them in part or whole (what a get found of it)."""
    flat = [piece for each in told for piece in each]
    gaps = data.draw(st.lists(st.integers(0, 1), min_size=len(flat), max_size=len(flat)))
    addresses, at = [], 100
    for (size, _), gap in zip(flat, gaps, strict=True):
        addresses.append(at)
        at += size + gap
    counts = [len(each) for each in told]
    starts = np.cumsum([0, *counts]).astype(np.int64)
    lengths = np.array([size for size, _ in flat], np.uint64)
    numbers = np.array([device for _, device in flat], np.int64)
    plain = all(count == 1 for count in counts) and data.draw(st.booleans())
    pieces = Pieces(np.array(addresses, np.uint64), lengths, None if plain else starts)
    devices = Devices(numbers, np.zeros(len(flat), np.int64))

    first = data.draw(st.integers(0, len(told) - 1))
    last = data.draw(st.integers(first + 1, len(told)))
    staged = staged_pieces(pieces.totals()[first:last], STAGED_AT, None)
    chosen = sorted(data.draw(st.sets(st.integers(first, last - 1))))
    wholes = pieces.totals()[chosen].tolist()
    sizes = [data.draw(st.integers(0, size)) for size in wholes]

    expected: dict[int, tuple[int, int]] = {}
    for position, size in zip(chosen, sizes, strict=True):
        here = int(staged.addresses[position - first])
        there = [
            (addresses[i] + byte, int(numbers[i]))
            for i in range(int(starts[position]), int(starts[position + 1]))
            for byte in range(int(lengths[i]))
        ]
        expected |= {here + byte: there[byte] for byte in range(size)}

    rows = rows_of(
        pieces,
        devices,
        np.array(chosen, np.int64),
        staged,
        first,
        np.array(sizes, np.uint64),
    )
    found: dict[int, tuple[int, int]] = {}
    for there, here, length, number in zip(
        rows.pieces.tolist(),
        rows.staged.tolist(),
        rows.lengths.tolist(),
        rows.numbers.tolist(),
        strict=True,
    ):
        for byte in range(length):
            assert here + byte not in found
            found[here + byte] = there + byte, number
    assert found == expected


@given(st.lists(st.integers(1, 100), max_size=50), st.integers(100, 250))
def test_turns_are_as_long_as_fits(sizes: list[int], area: int) -> None:
    turns = turns_of(np.array(sizes, np.uint64), area)
    assert [i for first, last in turns for i in range(first, last)] == list(range(len(sizes)))
    for first, last in turns:
        assert sum(sizes[first:last]) <= area
        assert last == len(sizes) or sum(sizes[first : last + 1]) > area


def test_what_fits_in_no_turn() -> None:
    with pytest.raises(InvalidBuffer, match="buffer 1 of 11 B"):
        turns_of(np.array([10, 11], np.uint64), 10)
