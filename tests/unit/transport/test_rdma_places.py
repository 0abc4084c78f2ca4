"""Extents as pieces, runs and requests: every byte once, at its place, whatever the shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import ProtocolError
from cenote.transport.rdma_places import Pieces, Places
from cenote.transport.rdma_queue import Ticket, chains_of, whole_regions
from cenote.transport.testing_support import batch
from cenote.v1 import store_pb2

BASES = {1: 0x10_000, 2: 0x90_000}
"""Where the daemon has its segments."""
chunks = st.lists(st.integers(1, 40), min_size=1, max_size=5)
extents = st.lists(
    st.tuples(st.sampled_from([1, 2, 3]), st.integers(0, 220), st.integers(0, 60)),
    min_size=1,
    max_size=30,
)


def reply_of(sizes: dict[int, list[int]]) -> store_pb2.RdmaReply:
    reply = store_pb2.RdmaReply(devices=["a", "b"])
    for segment_id, lengths in sizes.items():
        offset = 0
        for length in lengths:
            reply.registrations.add(
                segment_id=segment_id,
                offset=offset,
                length=length,
                address=BASES[segment_id] + offset,
                remote_keys=[100 * segment_id + offset, 7],
            )
            offset += length
    return reply


def moves(pieces: Pieces) -> dict[int, int]:
    """By local address: the daemon's. Each byte once."""
    found: dict[int, int] = {}
    for local, remote, length in zip(
        pieces.local.tolist(), pieces.remote.tolist(), pieces.lengths.tolist(), strict=True
    ):
        for i in range(length):
            assert local + i not in found
            found[local + i] = remote + i
    return found


@given(chunks, chunks, extents, st.booleans(), st.integers(1, 16))
def test_every_byte_has_its_place(
    first: list[int],
    second: list[int],
    places: list[tuple[int, int, int]],
    packed: bool,
    bytes_max: int,
) -> None:
    sizes = {1: first, 2: second}
    known = Places(reply_of(sizes))
    local, addresses = 1 << 20, []
    for _, _, length in places:
        addresses.append(local)
        local += length + (0 if packed else 8)
    rows = batch(places)
    pieces, reachable = known.find(rows, np.array(addresses, np.uint64))
    wanted: dict[int, int] = {}
    for (segment_id, offset, length), address, found in zip(
        places, addresses, reachable.tolist(), strict=True
    ):
        fits = segment_id in sizes and 0 < length <= sum(sizes.get(segment_id, [])) - offset
        assert found == fits
        if fits:
            wanted |= {address + i: BASES[segment_id] + offset + i for i in range(length)}
        one = known.find_one(segment_id, offset, length)
        assert one is None or (fits and one[0] == BASES[segment_id] + offset)
    assert moves(pieces) == wanted
    for remote, length, number in zip(
        pieces.remote.tolist(), pieces.lengths.tolist(), pieces.registrations.tolist(), strict=True
    ):
        ends = np.cumsum([*first, *second])
        segment_id = 1 if number < len(first) else 2
        begin = BASES[segment_id] + int(ends[number]) - [*first, *second][number]
        begin -= sum(first) if segment_id == 2 else 0
        assert begin <= remote
        assert remote + length <= begin + [*first, *second][number]
    runs, regions = pieces.merged(whole_regions(len(pieces), 0))
    assert moves(runs) == wanted
    requests, regions = runs.cut(bytes_max, regions)
    assert moves(requests) == wanted
    assert not len(requests) or int(requests.lengths.max()) <= bytes_max
    ticket = Ticket()
    chains = chains_of(requests, regions, ticket, 4)
    assert ticket.chains_left == len(chains)
    assert all(1 <= chain.count <= 4 for chain in chains)
    assert sum(chain.bytes for chain in chains) == len(wanted)


def test_back_to_back_is_one_request() -> None:
    known = Places(reply_of({1: [4096]}))
    rows = batch([(1, 16 * i, 16) for i in range(200)])
    addresses = np.arange(200, dtype=np.uint64) * np.uint64(16) + np.uint64(1 << 20)
    pieces, reachable = known.find(rows, addresses)
    assert reachable.all()
    runs, _ = pieces.merged(whole_regions(200, 0))
    assert (len(runs), int(runs.lengths[0])) == (1, 3200)


def test_a_reply_that_is_none() -> None:
    reply = reply_of({1: [10]})
    reply.registrations[0].remote_keys.append(3)
    with pytest.raises(ProtocolError):
        Places(reply)
