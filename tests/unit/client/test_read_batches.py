"""Reading long batches and chains, under leases as values, and in place."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import (
    BufferInUse,
    InvalidArgument,
    ProtocolError,
)
from cenote.client import Client
from fake_pool import FakeMaster
from waiting import wait_until

MakeClient = Callable[..., Client]


def fill(client: Client, count: int, size: int = 100, **options: Any) -> dict[str, bytes]:
    values = {f"key-{i}": os.urandom(size) for i in range(count)}
    client.put_batch(list(values), list(values.values()), **options).raise_for_errors()
    return values


def forget_locations(client: Client) -> None:
    client._space.locations.clear()


# ---- leases as values, slices, chains --------------------------------------------------------


def test_another_process_reads_under_a_lease(make_client: MakeClient, master: FakeMaster) -> None:
    scheduler, worker = make_client(), make_client()
    values = fill(scheduler, 10)
    lease = scheduler.acquire([*values, "absent"], 5.0)
    assert len(lease) == 11
    assert lease.prefix_keys == 10
    assert lease.present.tolist() == [True] * 10 + [False]
    assert lease.sizes.tolist() == [100] * 10 + [0]
    assert lease.leased.sum() == 10
    moved = pickle.loads(pickle.dumps(lease))
    assert moved == lease
    asked = master.calls["acquire"]
    block = np.zeros((11, 100), np.uint8)
    results = worker.get_into_batch([*values, "absent"], block, lease=moved)
    assert list(results) == [100] * 10 + [None]
    assert block[:10].tobytes() == b"".join(values.values())
    some = ["key-7", "key-2"]
    assert list(worker.get_into_batch(some, block[:2], lease=moved)) == [100, 100]
    assert block[:2].tobytes() == values["key-7"] + values["key-2"]
    assert worker.get_into("key-4", block[0], lease=moved) == 100
    assert block[0].tobytes() == values["key-4"]
    assert master.calls["acquire"] == asked
    with pytest.raises(InvalidArgument, match="key 1 is not one of"):
        worker.get_into_batch(["key-0", "other"], block[:2], lease=moved)
    with pytest.raises(InvalidArgument, match="namespace"):
        worker.namespace("other").get_into_batch(some, block[:2], lease=moved)
    scheduler.release(lease)
    wait_until(lambda: lease.lease_id not in master.leases, what="the lease is released")


def test_a_lease_that_is_over_is_no_proof(make_client: MakeClient, master: FakeMaster) -> None:
    client = make_client()
    values = fill(client, 3)
    master.lease_ttl_ms = 1
    lease = client.acquire(list(values), 0.001)
    master.lease_ttl_ms = None
    wait_until(lambda: client._session.state.now() > lease.end_s, what="the lease is over")
    asked = master.calls["acquire"]
    block = np.zeros((3, 100), np.uint8)
    assert client.get_into_batch(list(values), block, lease=lease).hit_count == 3
    assert master.calls["acquire"] == asked + 1


def test_on_another_host_a_leases_reads_are_proven_by_checksum(
    client: Client, master: FakeMaster
) -> None:
    values = fill(client, 2)
    lease = client.acquire(list(values), 5.0)
    client._session.clock_id = "another host"
    block = np.zeros((2, 100), np.uint8)
    assert client.get_into_batch(list(values), block, lease=lease).hit_count == 2
    asked = master.calls["acquire"]
    master.nodes[1].memory[:] = (
        0  # not what the lease says lies there: nobody's word is taken for it
    )
    client.get_into_batch(list(values), block, lease=lease)
    assert master.calls["acquire"] == asked + 1
    assert client.stats().stale_locations == 2


def test_long_batches_are_cut(master: FakeMaster, make_client: MakeClient) -> None:
    master.batch_keys_max = 7
    client = make_client()
    values = fill(client, 30)
    master.calls.clear()
    keys = [*values, "absent"]
    assert client.get_batch(keys) == [*values.values(), None]
    assert master.calls["acquire"] == 5
    block = np.zeros((31, 100), np.uint8)
    assert client.get_into_batch(keys, block).hit_count == 30
    assert block[:30].tobytes() == b"".join(values.values())


def test_a_chain_ends_at_its_first_miss(master: FakeMaster, make_client: MakeClient) -> None:
    master.batch_keys_max = 4
    client = make_client()
    values = fill(client, 10)
    client.remove("key-5")
    wanted = [values[f"key-{i}"] if i < 5 else None for i in range(10)]
    assert client.get_batch(list(values), chain=True) == wanted
    assert client.get_batch(list(values), chain=True) == wanted
    assert [request.chain for request in master.requests["acquire"]] == [True] * 3
    first = [f"key-{i}" for i in range(4)]
    assert client.get_batch(first, chain=True) == wanted[:4]
    wait_until(
        lambda: bool(master.touched_chains), what="cached reads of a chain are reported as one"
    )
    assert len(master.touched_chains[0]) == 4 * 16


def test_a_batch_that_is_cut_off_tells_what_it_has(
    master: FakeMaster, make_client: MakeClient
) -> None:
    master.batch_keys_max = 5
    client = make_client()
    values = fill(client, 10)
    master.calls["acquire"] = 0

    def fail_second() -> None:
        if master.calls["acquire"] == 2:
            raise ProtocolError("nonsense")

    master.hooks["acquire"] = fail_second
    block = np.zeros((10, 100), np.uint8)
    results = client.get_into_batch(list(values), block)
    assert results.hit_count == 5
    assert results.failed_count == 5
    with pytest.raises(ProtocolError):
        results[5]
    master.calls["acquire"] = 1
    forget_locations(client)
    with pytest.raises(ProtocolError):
        client.get_into_batch(list(values)[:5], block[:5])


def test_a_reset_namespace_is_opened_again(client: Client, master: FakeMaster) -> None:
    fill(client, 2)
    client.get("key-0")
    master.reset()
    assert client.get_batch(["key-0", "key-1", "key-2"]) == [None] * 3
    client.put("key-0", b"new")
    assert client.get("key-0") == b"new"


def test_a_forgotten_session_is_opened_again(client: Client, master: FakeMaster) -> None:
    values = fill(client, 1)
    master.known_sessions.clear()
    assert client.get("key-0") == values["key-0"]
    assert master.calls["hello"] == 2


# ---- views -----------------------------------------------------------------------------------


def test_a_view_is_the_pools_own_memory(client: Client, master: FakeMaster) -> None:
    values = fill(client, 3)
    with client.view([*values, "absent"]) as views:
        assert [None if view is None else bytes(view) for view in views] == [
            *values.values(),
            None,
        ]
        first = views[0]
        assert first is not None
        assert first.readonly
        offset = int(np.flatnonzero(master.nodes[1].memory[:64] == first[0])[0])
        master.nodes[1].memory[offset] ^= 0xFF
        assert first[0] == values["key-0"][0] ^ 0xFF
        assert master.requests["acquire"][-1].hold
        assert master.leases
    with pytest.raises(ValueError, match="released"):
        first[0]
    wait_until(lambda: not master.leases, what="the view's lease is released")


def test_what_can_not_be_seen_is_copied(make_client: MakeClient, master: FakeMaster) -> None:
    far = make_client(by_lease=False)
    values = fill(far, 2)
    view = far.view(list(values))
    with view as views:
        assert [bytes(each) for each in views if each is not None] == list(values.values())
        assert view.copied_count == 2
    with pytest.raises(InvalidArgument, match="can't be seen"), far.view(list(values), copy=False):
        pass
    near = make_client()
    master.extent_bytes_max = 30
    near.put("striped", b"s" * 100)
    view = near.view(["striped", "key-0"])
    with view as views:
        assert [bytes(each) for each in views if each is not None] == [b"s" * 100, values["key-0"]]
        assert view.copied_count == 1
    wait_until(lambda: not master.leases, what="all leases are released")
    with near.view([]) as views:
        assert views == []


def test_an_exported_view_keeps_its_objects(client: Client, master: FakeMaster) -> None:
    fill(client, 1)
    with pytest.raises(BufferInUse, match="1 of 1 views"), client.view(["key-0"]) as views:
        kept = np.frombuffer(views[0], np.uint8)  # type: ignore[arg-type]
    assert master.leases
    del kept, views
