"""Reading: hits and misses, what proves bytes, replicas, stale locations."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import (
    BufferInUse,
    DeadlineExceeded,
    InvalidArgument,
    InvalidBuffer,
    ProtocolError,
    StaleLocation,
    Unavailable,
)
from cenote.client import Client, GetStatus, RawBuffer
from cenote.client.housekeeping import Housekeeper
from cenote.runtime.clock import ManualClock
from fake_pool import FakeMaster
from waiting import wait_until

MakeClient = Callable[..., Client]


def fill(client: Client, count: int, size: int = 100, **options: Any) -> dict[str, bytes]:
    values = {f"key-{i}": os.urandom(size) for i in range(count)}
    client.put_batch(list(values), list(values.values()), **options).raise_for_errors()
    return values


def forget_locations(client: Client) -> None:
    client._space.locations.clear()


def test_a_miss_is_none_and_a_hit_is_the_bytes(client: Client) -> None:
    assert client.get("a") is None
    assert client.get_into("a", bytearray(4)) is None
    client.put("a", b"x")
    assert client.get("a") == b"x"
    assert client.get_batch(["b", "a", b"a"]) == [None, b"x", b"x"]
    assert client.get_batch([]) == []


def test_get_into_leaves_the_rest_of_the_buffer(client: Client) -> None:
    client.put("a", b"abc")
    target = bytearray(b"........")
    assert client.get_into("a", target) == 3
    assert target == b"abc....."
    scattered = [bytearray(2), bytearray(5)]
    assert client.get_into("a", scattered) == 3
    assert scattered == [b"ab", b"c\0\0\0\0"]


def test_a_too_small_buffer_fails_its_key_only(client: Client) -> None:
    values = fill(client, 3)
    buffers = [bytearray(100), bytearray(99), bytearray(200)]
    results = client.get_into_batch(list(values), buffers)
    assert results.statuses.tolist() == [GetStatus.HIT, GetStatus.FAILED, GetStatus.HIT]
    assert results.sizes.tolist() == [100, 0, 100]
    assert [results[0], results[2]] == [100, 100]
    assert [bytes(buffers[0]), bytes(buffers[2][:100])] == [values["key-0"], values["key-2"]]
    with pytest.raises(InvalidBuffer, match="buffer 1 has 99 bytes, the object has 100"):
        results[1]
    with pytest.raises(InvalidBuffer, match="1 of 3 keys failed, first key 1"):
        results.raise_for_errors()
    with pytest.raises(InvalidBuffer, match="the object has 100"):
        client.get_into("key-0", bytearray(10))
    assert not results.ok
    assert "1 failed" in repr(results)


@pytest.mark.parametrize("by_lease", [True, False])
def test_every_kind_of_buffer_is_filled(make_client: MakeClient, by_lease: bool) -> None:
    client = make_client(by_lease=by_lease)
    values = fill(client, 4, 64)
    wanted = b"".join(values.values())
    keys = list(values)
    for _ in range(2):  # first by the master's locations, then by cached ones
        block = np.zeros((4, 8), np.int64)
        assert client.get_into_batch(keys, block).sizes.tolist() == [64] * 4
        assert block.tobytes() == wanted
        raw = bytearray(256)
        at = np.frombuffer(raw, np.uint8).ctypes.data
        addresses = np.uint64(at) + np.arange(4, dtype=np.uint64) * np.uint64(64)
        assert client.get_into_batch(keys, addresses=addresses, lengths=64).ok
        assert raw == wanted
        halves = bytearray(256)
        at = np.frombuffer(halves, np.uint8).ctypes.data
        base = np.uint64(at) + np.arange(4, dtype=np.uint64)[:, None] * np.uint64(32)
        table = np.concatenate([base, base + np.uint64(128)], axis=1)
        assert client.get_into_batch(keys, addresses=table, lengths=32).ok
        assert halves[:32] + halves[128:160] == values["key-0"]
        buffers = [RawBuffer(at + 64 * i, 64, halves) for i in range(4)]
        assert client.get_into_batch(keys, buffers).hit_count == 4
        assert halves == wanted


def test_bad_arguments_are_refused_before_anything_is_sent(
    client: Client, master: FakeMaster
) -> None:
    before = dict(master.calls)
    for call in (
        lambda: client.get_into_batch(["a"], [b"readonly"]),
        lambda: client.get_into_batch(["a", "b"], [bytearray(1)]),
        lambda: client.get_into_batch(["a"]),
        lambda: client.get_into_batch(["a"], [bytearray(1)], addresses=[1], lengths=1),
        lambda: client.get_into_batch(["a"], addresses=[4096]),
        lambda: client.get(""),
        lambda: client.get_batch("abc"),
        lambda: client.get("a", deadline_s=float("nan")),
        lambda: client.get("a", deadline_s="1"),  # type: ignore[arg-type]
        lambda: client.get("a", deadline_s=0),
        lambda: client.acquire(["a"], 0),
        lambda: client.get_into_batch(["a"], [bytearray(1)], lease=5),  # type: ignore[arg-type]
    ):
        with pytest.raises((InvalidArgument, DeadlineExceeded)):
            call()
    assert dict(master.calls) == before


# ---- cached locations ------------------------------------------------------------------------


def test_a_cached_location_needs_no_master(client: Client, master: FakeMaster) -> None:
    values = fill(client, 20)
    keys = list(values)
    assert client.get_batch(keys) == list(values.values())
    asked = master.calls["acquire"]
    assert client.get_batch(keys) == list(values.values())
    assert client.get("key-3") == values["key-3"]
    assert client.get_into("key-4", bytearray(100)) == 100
    assert master.calls["acquire"] == asked
    assert client.stats().cached_reads == 22
    # ... but it learns of these reads.
    wait_until(
        lambda: len(set(master.touched)) == 20, what="reads from cached locations are reported"
    )


def test_locations_expire(master: FakeMaster, make_client: MakeClient) -> None:
    master.location_ttl_ms = 0
    client = make_client()
    fill(client, 1)
    for _ in range(2):
        client.get("key-0")
    assert master.calls["acquire"] == 2


def test_the_cache_is_bounded(make_client: MakeClient) -> None:
    client = make_client(location_cache_entries=10)
    values = fill(client, 30)
    for key, value in values.items():
        assert client.get(key) == value
    assert client.get_batch(list(values)) == list(values.values())
    assert 0 < client.stats().locations_cached <= 10
    none = make_client(location_cache_entries=0)
    assert none.get_batch(list(values)) == list(values.values())
    assert none.stats().locations_cached == 0


@pytest.mark.parametrize("by_lease", [True, False])
@pytest.mark.parametrize("batch", [True, False])
def test_overwritten_bytes_are_never_returned(
    master: FakeMaster, make_client: MakeClient, by_lease: bool, batch: bool
) -> None:
    client = make_client(by_lease=by_lease)
    values = fill(client, 3)
    client.get_batch(list(values))
    for node in master.nodes.values():
        node.memory[:] = 0xEE  # what was there went, and its place was used again
    master.objects.clear()
    if batch:
        assert client.get_batch(list(values)) == [None] * 3
    else:
        assert [client.get(key) for key in values] == [None] * 3
    assert client.stats().misses == 3


def test_a_stale_status_means_ask_again(client: Client, master: FakeMaster) -> None:
    values = fill(client, 1)
    client.get("key-0")
    master.nodes[1].statuses = [StaleLocation.code]
    asked = master.calls["acquire"]
    assert client.get("key-0") == values["key-0"]
    assert master.calls["acquire"] == asked + 1
    assert client.stats().stale_locations == 1


def test_bytes_that_move_on_and_never_match_end_in_an_error(
    make_client: MakeClient, master: FakeMaster
) -> None:
    client = make_client(by_lease=False)
    fill(client, 2)

    def replaced() -> None:
        for obj in master.objects.values():
            obj.seq += 1
            obj.checksum = (obj.checksum * 3 + 1) % 2**64

    master.hooks["acquire"] = replaced
    with pytest.raises(StaleLocation):
        client.get("key-0")
    with pytest.raises(StaleLocation, match="2 of 2 keys"):
        client.get_batch(["key-0", "key-1"])
    assert client.stats().misreads == 0


@pytest.mark.parametrize("count", [1, 3])
def test_bytes_that_are_wrong_where_they_lie_are_a_miss_and_reported(
    make_client: MakeClient, master: FakeMaster, count: int
) -> None:
    client = make_client(by_lease=False, location_cache_entries=0)
    values = fill(client, 4)
    bad = list(values)[:count]
    for key, obj in zip(values, master.objects.values(), strict=True):
        if key in bad:
            (((node, offset, _),),) = obj.replicas
            master.nodes[node].memory[offset] ^= 1
    if count == 1:
        assert client.get(bad[0]) is None
    wanted = [None if key in bad else value for key, value in values.items()]
    assert client.get_batch(list(values)) == wanted
    assert client.stats().misreads == count
    assert client.stats().node_failures == 0
    assert len(master.objects) == 4 - count
    assert client.put(bad[0], b"new").stored
    assert client.get(bad[0]) == b"new"


def test_of_two_replicas_the_right_one_is_found(
    make_client: MakeClient, master: FakeMaster
) -> None:
    client = make_client(by_lease=False, location_cache_entries=0)
    values = fill(client, 3, replicas=2)
    for obj in master.objects.values():
        ((node, offset, _),) = obj.replicas[0]
        master.nodes[node].memory[offset + 5] ^= 0x40
    assert client.get("key-0") == values["key-0"]
    assert client.get_batch(list(values)) == list(values.values())
    assert [len(obj.replicas) for obj in master.objects.values()] == [1, 1, 1]
    assert client.stats().misreads == 3


def test_a_cached_location_on_a_dead_node_asks_the_master(
    client: Client, master: FakeMaster
) -> None:
    values = fill(client, 1, replicas=2)
    client.get("key-0")
    master.nodes[1].fault = Unavailable("gone")
    assert client.get("key-0") == values["key-0"]


# ---- proof -----------------------------------------------------------------------------------


def test_objects_without_a_lease_are_proven_by_checksum(client: Client, master: FakeMaster) -> None:
    values = fill(client, 2)
    master.grants_leases = False
    assert client.get_batch(list(values)) == list(values.values())
    forget_locations(client)
    next(iter(master.objects.values())).checksum ^= 1
    assert client.get_batch(list(values)) == [None, values["key-1"]]


@pytest.mark.parametrize(
    ("verify", "by_lease", "checked"),
    [
        ("auto", True, False),
        ("auto", False, True),
        ("lease", True, False),
        ("lease", False, True),
        ("checksum", True, True),
    ],
)
def test_verify_chooses_the_proof(
    make_client: MakeClient, master: FakeMaster, verify: str, by_lease: bool, checked: bool
) -> None:
    client = make_client(by_lease=by_lease, verify=verify)
    fill(client, 2)
    master.extent_bytes_max = 33
    fill_striped = {"striped": os.urandom(100)}
    client.put("striped", fill_striped["striped"])
    for obj in master.objects.values():
        obj.checksum ^= 1
    for key in ("key-0", "striped"):
        if checked:
            assert client.get(key) is None
        else:
            assert client.get(key) is not None


def test_a_lease_of_an_earlier_tenure_proves_nothing(client: Client, master: FakeMaster) -> None:
    """The next master does not know of it, and may have given the space to others meanwhile."""
    values = fill(client, 3)
    master.extent_bytes_max = 33
    values["striped"] = os.urandom(100)
    client.put("striped", values["striped"])
    master.nodes[1].tenure_over = True
    assert client.get_batch(list(values)) == list(values.values())
    for key, value in values.items():
        assert client.get(key) == value
    forget_locations(client)
    for obj in master.objects.values():
        obj.checksum ^= 1
    assert client.get_batch(list(values)) == [None] * 4
    assert [client.get(key) for key in values] == [None] * 4


def test_a_read_that_outlives_its_lease_does_not_count(
    client: Client, master: FakeMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = fill(client, 1)
    # It keeps to the machine's clock, and would renew a lease of another one's time.
    monkeypatch.setattr(Housekeeper, "_holds_are_due", lambda *_: False)
    master.lease_ttl_ms = 1  # over before the read can be
    clock = ManualClock()
    client._session.state.now = clock.monotonic_s
    master.nodes[1].on_copy = lambda: clock.advance_s(1.0)
    with pytest.raises(StaleLocation):
        client.get_batch(list(values), deadline_s=60)
    assert master.calls["acquire"] == 5


def test_leases_are_released(client: Client, master: FakeMaster) -> None:
    values = fill(client, 5)
    client.get_batch(list(values))
    wait_until(lambda: not master.leases, what="the read's lease is released")


# ---- replicas and dead nodes -----------------------------------------------------------------


@pytest.mark.parametrize("extent_bytes_max", [1 << 20, 30])
def test_a_dead_node_costs_nothing_with_a_second_replica(
    client: Client, master: FakeMaster, extent_bytes_max: int
) -> None:
    master.extent_bytes_max = extent_bytes_max
    values = fill(client, 10, replicas=2)
    master.nodes[1].fault = Unavailable("killed")
    assert client.get_batch(list(values)) == list(values.values())
    assert client.get("key-0") == values["key-0"]
    wait_until(lambda: master.failures == [1], what="the failure is reported, once")
    assert client.stats().node_failures == 1


def test_a_dead_node_costs_a_miss_without_one(client: Client, master: FakeMaster) -> None:
    values = fill(client, 2)
    master.nodes[1].fault = Unavailable("killed")
    assert client.get_batch(list(values)) == [None, None]
    assert client.get("key-0") is None
    assert client.get_into("key-1", bytearray(100)) is None
    assert client.stats().unreachable_misses == 4
    assert client.stats().node_failures == 3  # nothing else has them, so each call tries


def test_a_node_that_works_again_is_used_again(client: Client, master: FakeMaster) -> None:
    values = fill(client, 1)
    master.nodes[1].fault = Unavailable("down")
    assert client.get("key-0") is None
    master.nodes[1].fault = None
    wait_until(lambda: client.get("key-0") == values["key-0"], what="the node is tried again")
    assert client._session.state.suspects == {}


def test_an_item_that_was_not_done_comes_from_the_other_replica(
    client: Client, master: FakeMaster
) -> None:
    values = fill(client, 2, replicas=2)
    master.nodes[1].statuses = [Unavailable.code]
    assert client.get_batch(list(values)) == list(values.values())


def test_a_segment_newer_than_the_view_is_looked_up(
    make_client: MakeClient, master: FakeMaster
) -> None:
    client = make_client()
    values = fill(client, 1)
    late = client._session.state
    late.peers.node_by_segment.clear()
    late.peers._table[:] = -1
    master.view_version += 1
    assert client.get("key-0") == values["key-0"]
    assert master.calls["get_cluster_view"] == 1


def test_a_nodes_refusal_is_the_keys_error(client: Client, master: FakeMaster) -> None:
    values = fill(client, 2)
    master.nodes[1].statuses = [InvalidArgument.code] * 2
    results = client.get_into_batch(list(values), [bytearray(100), bytearray(100)])
    assert results.failed_count == 2
    with pytest.raises(InvalidArgument, match="node 1 refused"):
        results.raise_for_errors()


def test_a_buffer_that_may_still_be_written_is_named(client: Client, master: FakeMaster) -> None:
    fill(client, 1)
    master.nodes[1].fault = BufferInUse("buffer at 0x1 is still in use")
    with pytest.raises(BufferInUse):
        client.get("key-0")


def test_nonsense_from_the_master_is_a_protocol_error(client: Client, master: FakeMaster) -> None:
    fill(client, 1)
    next(iter(master.objects.values())).replicas[0][0] = (1, 0, 7)
    with pytest.raises(ProtocolError, match="add up"):
        client.get("key-0")


def test_an_unreachable_master_is_tried_until_the_deadline(
    client: Client, master: FakeMaster
) -> None:
    values = fill(client, 1)
    master.faults["acquire"] = [Unavailable("not yet"), Unavailable("not yet")]
    assert client.get("key-0") == values["key-0"]
    forget_locations(client)
    master.faults["acquire"] = [Unavailable("no master at all")] * 1000
    with pytest.raises(DeadlineExceeded, match="no master at all"):
        client.get("key-0", deadline_s=0.05)
    master.faults["acquire"] = []
