"""Long keys behind their payloads: every replica of every put gets its own, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from cenote.api.rows import EXTENT, KEY_INLINE_BYTES
from cenote.client import Client
from cenote.client.plan import stores as stores_module
from cenote.client.plan import tails as tails_module
from cenote.client.plan.pieces import Pieces, cut_items, place_replicas
from cenote.client.plan.tails import KeyTails, cut_tails, join_neighbours
from fake_pool import FakeMaster

MakeClient = Callable[..., Client]
Placed = dict[bytes, list[list[tuple[int, int, int]]]]
UNWRITTEN = 0xEE


@pytest.fixture
def placed(master: FakeMaster) -> Placed:
    """Digest -> granted extents per replica, as soon as a put has moved its bytes."""
    found: Placed = {}
    for node in master.nodes.values():
        node.memory[:] = UNWRITTEN

    def note() -> None:
        for grant in master.grants.values():
            for digest, replicas in zip(grant.digests, grant.placed, strict=True):
                if replicas:
                    found[digest] = replicas

    master.hooks["put_commit"] = note
    return found


def check(master: FakeMaster, placed: Placed, values: dict[bytes, bytes], replicas: int) -> None:
    """What lies in the nodes is each payload with its long key behind it, and nothing else."""
    written = {i: np.zeros(len(node.memory), np.bool_) for i, node in master.nodes.items()}
    for key, value in values.items():
        wanted = value + (key if len(key) > KEY_INLINE_BYTES else b"")
        copies = placed[xxh3_128_digest(key, master.seed)]
        assert len(copies) == replicas
        for copy in copies:
            found = b""
            for node, offset, length in copy:
                found += master.nodes[node].memory[offset : offset + length].tobytes()
                # Up to the unit's end it is the extent's own room.
                written[node][offset : -(-(offset + length) // 64) * 64] = True
            assert found == wanted
    for number, fake in master.nodes.items():
        assert set(fake.memory[~written[number]].tolist()) <= {UNWRITTEN}
        for key, _, checksum in fake.sealed.values():
            assert checksum == xxh3_64_intdigest(values[key])


def key_of(number: int, length: int) -> bytes:
    return (b"%d-" % number).ljust(length, b"k")


UNIFORM = [(64, 101)] * 20
BATCHES = {
    "uniform": UNIFORM,
    "one after the other in units": [(27, 101)] * 20,
    "short keys": [(64, 64)] * 5,
    "mixed keys": [(64, 101), (64, 65), (64, 64), (64, 512), (64, 10)] * 3,
    "mixed sizes": [(1, 101), (1000, 101), (63, 101)] * 3,
    "as large as is copied": [(1024, 101)] * 9,
    "too large to copy": [(1025, 101)] * 9,
    "one": [(100, 300)],
}


@pytest.mark.parametrize("extent_bytes_max", [1 << 20, 192, 64, 7])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_each_replica_of_a_batch_has_its_keys(
    client: Client,
    master: FakeMaster,
    placed: Placed,
    batch: str,
    replicas: int,
    extent_bytes_max: int,
) -> None:
    if "large" in batch:
        extent_bytes_max <<= 4
    master.extent_bytes_max = extent_bytes_max
    values = {key_of(i, k): os.urandom(size) for i, (size, k) in enumerate(BATCHES[batch])}
    results = client.put_batch(list(values), list(values.values()), replicas=replicas)
    assert results.stored_count == len(values)
    check(master, placed, values, replicas)
    assert client.get_batch(list(values)) == list(values.values())


@pytest.mark.parametrize("by_lease", [True, False])
@pytest.mark.parametrize("size", [1, 16 << 10, (16 << 10) + 1, 64 << 10, (64 << 10) + 1])
@pytest.mark.parametrize("key_bytes", [64, 65, 512])
def test_a_single_put_brings_its_key(
    make_client: MakeClient,
    master: FakeMaster,
    placed: Placed,
    size: int,
    key_bytes: int,
    by_lease: bool,
) -> None:
    value = os.urandom(size)
    assert make_client(by_lease=by_lease).put(key_of(0, key_bytes), value).stored
    check(master, placed, {key_of(0, key_bytes): value}, 1)
    apart = size > (16 << 10 if by_lease else 64 << 10)
    assert master.nodes[1].writes == 1 + (apart and key_bytes > 64)


def test_neighbours_go_as_one(client: Client, master: FakeMaster, placed: Placed) -> None:
    lengths: list[int] = []
    memory = np.frombuffer(os.urandom(4096), np.uint8)
    addresses = memory.ctypes.data + np.random.default_rng(1).permutation(20).astype(np.uint64) * 64
    channel = client_channel(client, master)
    write_one = channel.write_one

    def noted(segment: int, offset: int, length: int, *rest: object) -> object:
        lengths.append(length)
        return write_one(segment, offset, length, *rest)

    channel.write_one = noted
    keys = [key_of(i, 101) for i in range(20)]
    results = client.put_from_batch(keys, addresses=addresses, lengths=64)
    assert results.stored_count == 20
    assert lengths == [19 * 192 + 165]
    starts = (addresses - np.uint64(memory.ctypes.data)).tolist()
    values = [memory[at : at + 64].tobytes() for at in starts]
    check(master, placed, dict(zip(keys, values, strict=True)), 1)


def client_channel(client: Client, master: FakeMaster) -> Any:
    """The client's channel to node 1."""
    client.put("warm", b"x")
    for node in master.nodes.values():
        node.memory[:] = UNWRITTEN
        node.sealed.clear()
    return client._session.channels[1]


def test_keys_that_exist_are_not_copied(client: Client, placed: Placed, master: FakeMaster) -> None:
    values = {key_of(i, 101): os.urandom(64) for i in range(6)}
    some = dict(list(values.items())[::2])
    client.put_batch(list(some), list(some.values()))
    results = client.put_batch(list(values), list(values.values()))
    assert (results.stored_count, results.existed_count) == (3, 3)
    check(master, placed, values, 1)


def test_an_item_that_a_node_refuses_fails_all_that_it_joined(
    client: Client, master: FakeMaster, placed: Placed
) -> None:
    """They are put anew, with their keys."""
    values = {key_of(i, 101): os.urandom(64) for i in range(8)}
    master.nodes[1].statuses.append(21)
    assert client.put_batch(list(values), list(values.values())).stored_count == 8
    assert master.calls["put_start"] == 2
    for key, value in values.items():
        ((extent,),) = placed[xxh3_128_digest(key, master.seed)]
        node, offset, length = extent
        assert master.nodes[node].memory[offset : offset + length].tobytes() == value + key


def test_what_is_copied_is_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tails_module, "STAGING_BYTES_MAX", 1000)
    monkeypatch.setattr(stores_module, "Stage", None)
    values = [os.urandom(64) for _ in range(20)]
    keys = [key_of(i, 101) for i in range(20)]
    assert client.put_batch(keys, values).stored_count == 20
    assert client.get_batch(keys) == values


@given(st.data())
def test_payload_and_tail_cover_the_extents_once(data: st.DataObject) -> None:
    sizes, tails, extents, counts, at = [], [], [], [], 0
    for _ in range(data.draw(st.integers(1, 4))):
        size, tail = data.draw(st.integers(1, 20)), data.draw(st.sampled_from([0, 1, 9]))
        cuts = sorted(data.draw(st.sets(st.integers(1, max(1, size + tail - 1)), max_size=3)))
        edges = [0, *[cut for cut in cuts if cut < size + tail], size + tail]
        for a, b in pairwise(edges):
            extents.append((1, 0, at, b - a))
            at += b - a
        sizes.append(size)
        tails.append(tail)
        counts.append(len(edges) - 1)
    keys = [bytes([65 + i]) * (tail or 3) for i, tail in enumerate(tails)]
    placement = place_replicas(
        np.array(extents, EXTENT),
        np.array(counts),
        np.ones(len(sizes), np.int64),
        np.array(sizes) + np.array(tails),
    )
    place = placement.extents, placement.owner, placement.start, np.array(sizes)
    found = bytearray(at)
    behind = KeyTails(keys, np.array(tails))
    base = int(behind.addresses[0])
    items = cut_tails(*place, behind)
    for row, address, of in zip(items.extents, items.addresses, items.extent, strict=True):
        start, length = int(row["offset"]), int(row["length"])
        extent = extents[int(of)]
        assert extent[2] <= start < start + length <= extent[2] + extent[3]
        found[start : start + length] = behind.blob[int(address) - base :][:length]
    wanted = b"".join(
        bytes(size) + (key if tail else b"")
        for size, tail, key in zip(sizes, tails, keys, strict=True)
    )
    assert found == wanted
    pieces = Pieces(np.zeros(len(sizes), np.uint64), np.array(sizes, np.uint64), None)
    payload = cut_items(*place, pieces)
    both = payload.followed_by(items)
    assert int(both.extents["length"].sum()) == at


def test_runs_of_neighbours() -> None:
    def joined(offsets: list[int], length: int, segments: list[int] | None = None) -> object:
        rows = np.zeros(len(offsets), EXTENT)
        rows["offset"], rows["length"] = offsets, length
        rows["segment"] = segments or 1
        addresses = np.arange(len(offsets), dtype=np.uint64) * -(-length // 64) * 64
        made = join_neighbours(rows, addresses.astype(np.uint64))
        if made is None:
            return None
        return made[0]["length"].tolist(), made[1].tolist(), made[2].tolist()

    assert joined([0, 128, 256], 100) == ([356], [0], [3])
    assert joined([0, 128, 512, 640], 128) == ([256, 256], [0, 256], [2, 2])
    assert joined([0, 128, 256], 100, [1, 1, 2]) == ([228, 100], [0, 256], [2, 1])
    assert joined([256, 128, 0], 100) is None
    assert joined([0], 100) is None
