"""A pool that is full of what may not go says so, per key, and recovers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from admin import admin_of
from cenote.api.errors import CenoteError, NoSpace, ObjectTooLarge, QuotaExceeded
from cenote.client import Client
from cluster import Cluster
from payloads import payload_of
from remote import Remote
from waiting import wait_until

pytestmark = pytest.mark.integration

KIB = 1 << 10
MIB = 1 << 20
POOL_BYTES = 32 * MIB
SIZE = 256 * KIB
FIT = 120  # objects, and a bit more


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    flags = {"leased-share-max": 1, "pinned-share-max": 1, "lease-ttl-max-s": 60}
    with Cluster(stores=1, dram_bytes=POOL_BYTES, master_flags=flags) as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def client(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Client]:
    with cluster.client(transports=(request.param,)) as made:
        yield made


def fill(client: Client) -> list[str]:
    """Keys of nearly all that the pool holds afterwards."""
    keys = [f"full{i}" for i in range(2 * FIT)]
    for first in range(0, len(keys), 16):
        some = keys[first : first + 16]
        client.put_batch(some, [payload_of(k, SIZE) for k in some]).raise_for_errors()
    present = client.exists_batch(keys)
    # Without the coldest, which eviction ahead of need may be about to take.
    return [key for key, there in zip(keys, present, strict=True) if there][4:]


def put_error(client: Client, key: str, size: int = SIZE) -> CenoteError | None:
    try:
        client.put(key, payload_of(key, size))
    except CenoteError as error:
        return error
    return None


@pytest.mark.parametrize("how", ["leased", "pinned", "viewed"])
def test_a_pool_full_of_what_must_stay(client: Client, cluster: Cluster, how: str) -> None:
    held = fill(client)
    lease = client.acquire(held, 50.0) if how == "leased" else None
    if lease is not None:
        assert lease.leased.all()
    if how == "pinned":
        assert client.pin(held).all()
    view = client.view(held)
    if how == "viewed":
        view.__enter__()
    # One or two small ones fit where eviction ahead of need had made room, and replace each other.
    errors = [put_error(client, f"more{i}", 2 * MIB) for i in range(5)]
    assert all(isinstance(error, NoSpace) for error in errors), errors
    assert all(error.remedy for error in errors if error is not None)
    batch = client.put_batch(["one", "two"], [payload_of(k, 2 * MIB) for k in ("one", "two")])
    assert batch.failed_count == 2
    assert isinstance(batch[0].error, NoSpace)
    assert client.exists_batch(held).all(), "something that must stay was evicted"
    # It recovers at once when they may go.
    if lease is not None:
        client.release(lease)
    elif how == "pinned":
        client.unpin(held)
    else:
        view.__exit__(None, None, None)
    wait_until(lambda: put_error(client, "after") is None, what="room")
    assert client.get("after") == payload_of("after", SIZE)
    for i in range(0, 2 * FIT, 8):
        some = [f"last{i + j}" for j in range(8)]
        client.put_batch(some, [payload_of(k, SIZE) for k in some]).raise_for_errors()


def test_one_larger_than_the_pool(client: Client) -> None:
    fill(client)
    before = [key for key in (f"full{i}" for i in range(2 * FIT)) if client.exists(key)]
    for size in (POOL_BYTES, 40 * MIB):
        with pytest.raises(ObjectTooLarge, match=r"object of .* is larger than the pool"):
            client.put("huge", np.zeros(size, np.uint8))
    results = client.put_batch(["huge", "fine"], [np.zeros(40 * MIB, np.uint8), b"x"])
    assert isinstance(results[0].error, ObjectTooLarge)
    assert results[1].stored
    with pytest.raises(ObjectTooLarge, match="huge"):
        results.raise_for_errors()
    # Nothing was evicted for what could not be stored anyway.
    assert client.exists_batch(before).sum() >= len(before) - 2
    # One that takes most of the pool is stored, and everything else goes for it.
    client.put("large", payload_of("large", 28 * MIB), deadline_s=20.0)
    assert client.get("large", deadline_s=20.0) == payload_of("large", 28 * MIB)


def test_a_batch_larger_than_the_pool(client: Client) -> None:
    """It overwrites its own beginning: no key fails, and the newest are there."""
    keys = [f"b{i}" for i in range(3 * FIT)]
    results = client.put_batch(keys, [payload_of(k, SIZE) for k in keys], deadline_s=30.0)
    assert results.failed_count == 0, [r.error for r in results if r.error][:1]
    newest = keys[-FIT // 2 :]
    assert client.get_batch(newest) == [payload_of(k, SIZE) for k in newest]


def test_the_leased_share_is_bounded() -> None:
    """Readers can't starve writers: beyond their share they read without a lease."""
    flags = {"leased-share-max": 0.25}
    with (
        Cluster(stores=1, dram_bytes=POOL_BYTES, master_flags=flags) as cluster,
        cluster.client() as client,
        admin_of(cluster) as admin,
    ):
        keys = fill(client)
        lease = client.acquire(keys, 9.0)
        assert lease.present.all()
        assert 0 < lease.leased.sum() < len(keys) / 3
        status = admin.status()
        assert status.leased_bytes <= 0.25 * status.capacity_bytes
        for i in range(0, 2 * FIT, 8):
            some = [f"w{i + j}" for j in range(8)]
            client.put_batch(some, [payload_of(k, SIZE) for k in some]).raise_for_errors()
        buffers = [bytearray(SIZE) for _ in keys]
        results = client.get_into_batch(keys, buffers, lease=lease)
        for i, key in enumerate(keys):
            if lease.leased[i]:
                assert results[i] == SIZE
            if results.error(i) is None and results[i] is not None:
                assert bytes(buffers[i]) == payload_of(key, SIZE)
        client.release(lease)


def test_space_of_a_dead_holder_comes_back(cluster: Cluster) -> None:
    """Leases and views of a process that was killed hold nothing for ever."""
    with cluster.client() as client:
        held = fill(client)
        with Remote("peer", cluster.lane, {"transports": ("shm",)}) as holder:
            holder.expect("ready")
            holder.say(("acquire", (held, 8.0), {}))
            done, lease = holder.hear()
            assert done
            assert lease.leased.all()
            assert isinstance(put_error(client, "big", 8 * MIB), NoSpace | QuotaExceeded)
            holder.process.kill()
            holder.process.wait(5.0)
        wait_until(lambda: put_error(client, "big", 8 * MIB) is None, what="the space")
        assert client.get("big") == payload_of("big", 8 * MIB)
