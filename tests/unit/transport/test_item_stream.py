"""Items as a stream: wherever they lie, bytes come in order and checksums are theirs."""

from __future__ import annotations

from time import monotonic

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from cenote.transport import gil
from cenote.transport.item_stream import move_items
from cenote.transport.memory_access import MEMORY
from cenote.transport.testing_support import LocalMemory, payload

STEP_BYTES = 64

items = st.lists(
    st.tuples(st.sampled_from([1, 7, 30, 64, 65, 200]), st.sampled_from([0, 0, 0, 3])),
    min_size=1,
    max_size=40,
)


class Stream:
    """A peer that sends (or takes) a stream, and notes in which pieces that was asked for."""

    def __init__(self, data: bytes, *, receiving: bool) -> None:
        self.data = data
        self.receiving = receiving
        self.taken = bytearray()
        self.at = 0
        self.most_views = 0

    def one(self, address: int, length: int) -> None:
        assert length > 0
        self.several([MEMORY[address : address + length]])

    def several(self, views: list[memoryview]) -> None:
        self.most_views = max(self.most_views, len(views))
        for view in views:
            if self.receiving:
                view[:] = self.data[self.at : self.at + len(view)]
            else:
                self.taken += view
            self.at += len(view)


@pytest.mark.parametrize("costly", [False, True])
@given(places=items, hashed=st.booleans(), receiving=st.booleans(), backwards=st.booleans())
def test_any_batch(
    costly: bool, places: list[tuple[int, int]], hashed: bool, receiving: bool, backwards: bool
) -> None:
    lengths = np.array([length for length, _ in places], np.uint64)
    total = int(lengths.sum())
    room = sum(map(sum, places))
    memory = LocalMemory(room)
    offsets, at = [], 0
    for length, gap in places:
        offsets.append(at + gap)
        at += length + gap
    if backwards:  # the stream's order need not be that of the addresses
        offsets, lengths = offsets[::-1], lengths[::-1].copy()
    addresses = np.array(offsets, np.uint64) + np.uint64(memory.address)
    data = payload(total, room)
    ends = np.cumsum(lengths).tolist()
    parts = [data[e - n : e] for e, n in zip(ends, lengths.tolist(), strict=True)]
    if not receiving:
        for offset, part in zip(offsets, parts, strict=True):
            memory.bytes[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
    stream = Stream(data, receiving=receiving)
    checksums = np.zeros(len(places), np.uint64) if hashed else None
    gil.RELEASES._keep_until = monotonic() + 60 if costly else 0.0
    try:
        move_items(stream.one, stream.several, addresses, lengths, checksums, STEP_BYTES)
    finally:
        gil.RELEASES._keep_until = 0.0
    assert stream.at == total
    assert receiving or bytes(stream.taken) == data
    expected = np.full(room, 0xA5, np.uint8)
    for offset, part in zip(offsets, parts, strict=True):
        expected[offset : offset + len(part)] = np.frombuffer(part, np.uint8)
    assert memory.bytes.tobytes() == expected.tobytes()
    if checksums is not None:
        assert checksums.tolist() == [xxh3_64_intdigest(part) for part in parts]


def test_small_strangers_share_a_call_and_neighbours_are_one() -> None:
    memory = LocalMemory(4000)
    stream = Stream(payload(1000, 1), receiving=True)
    lengths = np.full(100, 10, np.uint64)
    apart = np.arange(100, dtype=np.uint64) * np.uint64(20) + np.uint64(memory.address)
    move_items(stream.one, stream.several, apart, lengths, None, 500)
    assert stream.most_views == 50
    stream = Stream(payload(1000, 1), receiving=True)
    joined = np.arange(100, dtype=np.uint64) * np.uint64(10) + np.uint64(memory.address)
    move_items(stream.one, stream.several, joined, lengths, None, 500)
    assert stream.most_views == 1


def test_only_a_suspiciously_long_step_makes_the_next_ones_keep_the_gil() -> None:
    releases = gil._Releases()
    now = monotonic()
    releases.note(now - 0.002, 100)
    assert not releases.cost_too_much(now)
    releases.note(now - 0.05, 1 << 30)  # a gibibyte may take that long
    assert not releases.cost_too_much(now)
    releases.note(now - 0.02, 1 << 20)
    assert releases.cost_too_much(monotonic())
    assert not releases.cost_too_much(monotonic() + 1.0)
