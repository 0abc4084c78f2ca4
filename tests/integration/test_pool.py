"""Two clients in two processes and one pool: what one puts the other gets, over each transport."""

from __future__ import annotations

import pickle
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from admin import admin_of
from cenote.api.errors import (
    BufferInUse,
    InvalidArgument,
    LeaseExpired,
    ObjectTooLarge,
    ReplicasUnavailable,
    StaleLocation,
)
from cenote.client import Client
from cluster import Cluster
from payloads import payload_of
from remote import Peer, Remote
from waiting import wait_until

pytestmark = pytest.mark.integration

KIB = 1 << 10
MIB = 1 << 20
SIZES = [1, 63, 64, 65, 4096, 70_001, 1 << 20, (3 << 20) + 1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = {"location-ttl-s": 1, "session-ttl-s": 3}
    with Cluster(stores=0, master_flags=flags) as made:
        for i in range(2):
            made.add_store(dram_bytes=128 * MIB, flags={"failure-domain": f"domain{i}"})
        made.wait_alive(2)
        yield made


@pytest.fixture(scope="module", params=["shm", "tcp"])
def transports(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return (request.param,)


@pytest.fixture(scope="module")
def peer(cluster: Cluster, transports: tuple[str, ...]) -> Iterator[Peer]:
    with Peer(cluster.lane, transports=transports) as made:
        yield made


@pytest.fixture(scope="module")
def shared_client(cluster: Cluster, transports: tuple[str, ...]) -> Iterator[Client]:
    with cluster.client(transports=transports) as made:
        yield made


@pytest.fixture
def client(shared_client: Client) -> Iterator[Client]:
    failed = shared_client.stats().node_failures
    yield shared_client
    assert shared_client.stats().node_failures == failed, "a healthy node counts as failed"


NAMES = iter(range(1_000_000))


def fresh(*, count: int = 1) -> list[str]:
    """Keys that nobody used yet."""
    return [f"key{next(NAMES)}" for _ in range(count)]


@pytest.mark.parametrize("size", SIZES)
def test_what_one_puts_the_other_gets(client: Client, peer: Peer, size: int) -> None:
    mine, its = fresh(count=2)
    client.put(mine, payload_of(mine, size))
    assert peer.call("get", mine) == payload_of(mine, size)
    peer.call("put", its, payload_of(its, size))
    buffer = bytearray(size + 10)
    assert client.get_into(its, buffer) == size
    assert buffer[:size] == payload_of(its, size)
    assert buffer[size:] == bytes(10)
    assert client.exists(its)
    assert peer.call("exists", mine)


def test_batches_of_all_sizes(client: Client, peer: Peer, rng: random.Random) -> None:
    keys = fresh(count=120)
    sizes = {key: rng.choice(SIZES[:6]) for key in keys}
    client.put_batch(keys, [payload_of(k, sizes[k]) for k in keys]).raise_for_errors()
    rng.shuffle(keys)
    wanted = [*keys[:60], "nobody's", *keys[60:], keys[0]]
    values = peer.call("get_batch", wanted)
    assert values == [payload_of(k, sizes[k]) if k in sizes else None for k in wanted]
    present = peer.call("exists_batch", wanted)
    assert present.tolist() == [k in sizes for k in wanted]


def test_the_first_of_two_puts_wins(client: Client, peer: Peer) -> None:
    (key,) = fresh()
    assert client.put(key, b"first").stored
    again = peer.call("put", key, b"second")
    assert again.existed
    assert not again.stored
    assert peer.call("get", key) == client.get(key) == b"first"


def test_two_put_the_same_key_at_once(client: Client, peer: Peer) -> None:
    for _ in range(10):
        (key,) = fresh()
        peer.begin("put", key, payload_of(key, 300_000))
        mine = client.put(key, payload_of(key, 300_000))
        its = peer.result()
        assert sorted((mine.stored, its.stored)) == [False, True]
        assert client.get(key) == peer.call("get", key) == payload_of(key, 300_000)


def test_what_one_removes_is_gone_for_the_other(client: Client, peer: Peer) -> None:
    keys = fresh(count=40)
    client.put_batch(keys, [payload_of(k, 5000) for k in keys]).raise_for_errors()
    assert peer.call("remove", keys[0])
    assert peer.call("remove_batch", keys[1:20]).all()
    assert not client.exists_batch(keys[:20]).any()
    assert client.exists_batch(keys[20:]).all()
    assert not client.remove(keys[0])
    # The remover itself, and who asks the master, sees it at once.
    assert peer.call("get", keys[0]) is None
    assert client.get_batch(keys[:20]) == [None] * 20


def test_a_chain_is_matched_up_to_its_first_gap(client: Client, peer: Peer) -> None:
    keys = fresh(count=30)
    client.put_batch(keys, [payload_of(k, 4096) for k in keys], chain=True).raise_for_errors()
    peer.call("remove", keys[17])
    matched = client.match(keys)
    assert matched.prefix_keys == 17
    assert matched.present.tolist() == [i != 17 for i in range(30)]
    assert client.get_batch(keys, chain=True)[17:] == [None] * 13


# ---- replicas and stripes -----------------------------------------------------------------------


def test_replicas_are_met_or_refused(cluster: Cluster, client: Client, peer: Peer) -> None:
    keys = fresh(count=20)
    results = client.put_batch(
        keys, [payload_of(k, 9999) for k in keys], replicas=2, min_replicas=2
    )
    assert results.stored_count == len(keys)
    lease = client.acquire(keys, 5.0)
    with admin_of(cluster) as admin:
        nodes = admin.node_of_segments()
    for pair in lease.extent_rows.reshape(len(keys), 2):
        assert len({nodes[int(extent["segment"])] for extent in pair}) == 2
    client.release(lease)
    (key,) = fresh()
    with pytest.raises(ReplicasUnavailable):
        peer.call("put", key, b"three places", replicas=3, min_replicas=3)
    assert not client.exists(key)
    # Fewer will do where that was said.
    assert peer.call("put", key, b"two places", replicas=3, min_replicas=2).stored
    assert client.get(key) == b"two places"


def test_an_object_larger_than_any_segment_is_striped(transports: tuple[str, ...]) -> None:
    with Cluster(stores=3, dram_bytes=16 * MIB) as cluster, admin_of(cluster) as admin:
        wait_until(lambda: admin.status().capacity_bytes > 45 * MIB, what="the memory")
        with (
            cluster.client(transports=transports) as client,
            Peer(cluster.lane, transports=transports) as peer,
        ):
            sizes = {"wide": 30 * MIB + 12_345, "wider": 38 * MIB}
            for key, size in sizes.items():
                client.put(key, payload_of(key, size), deadline_s=20.0)
                assert peer.call("get", key, deadline_s=20.0) == payload_of(key, size)
                assert client.get(key, deadline_s=20.0) == payload_of(key, size)
                used = [node.used_bytes for node in admin.nodes().values()]
                assert sum(bytes_ > 8 * MIB for bytes_ in used) >= 2
            # Everything else still fits in between, and pushes it out in the end.
            for i in range(60):
                client.put(f"small{i}", payload_of(f"small{i}", MIB))
            assert peer.call("get", "small59") == payload_of("small59", MIB)
            with pytest.raises(ObjectTooLarge):
                client.put("widest", bytes(64 * MIB))


# ---- leases -------------------------------------------------------------------------------------


def test_reading_under_another_process_lease(client: Client, peer: Peer) -> None:
    """A scheduler acquires, its worker reads without asking the master."""
    keys = fresh(count=10)
    client.put_batch(keys, [payload_of(k, 20_000) for k in keys]).raise_for_errors()
    lease = peer.call("acquire", [*keys, "missing"], 5.0)
    assert lease.present.tolist() == [True] * 10 + [False]
    assert lease.leased.tolist() == [True] * 10 + [False]
    lease = pickle.loads(pickle.dumps(lease))
    buffers = [bytearray(20_000) for _ in keys]
    results = client.get_into_batch(keys, buffers, lease=lease)
    assert results.hit_count == 10
    assert [bytes(b) for b in buffers] == [payload_of(k, 20_000) for k in keys]
    # Some of the keys, in another order.
    results = client.get_into_batch(keys[7:4:-1], buffers[:3], lease=lease)
    assert [bytes(b) for b in buffers[:3]] == [payload_of(k, 20_000) for k in keys[7:4:-1]]
    with pytest.raises(InvalidArgument, match="acquired"):
        client.get_into_batch(["other"], [bytearray(1)], lease=lease)
    with pytest.raises(InvalidArgument, match="namespace"):
        client.namespace("elsewhere").get_into_batch(keys, buffers, lease=lease)
    peer.call("release", lease)


def test_what_is_leased_stays_while_others_overwrite_the_pool(transports: tuple[str, ...]) -> None:
    size = 256 * KIB
    with (
        Cluster(stores=1, dram_bytes=32 * MIB) as cluster,
        cluster.client(transports=transports) as client,
        Peer(cluster.lane, transports=transports) as peer,
    ):
        keys = [f"leased{i}" for i in range(30)]
        client.put_batch(keys, [payload_of(k, size) for k in keys]).raise_for_errors()
        lease = peer.call("acquire", keys, 9.0)
        assert lease.leased.all()
        for i in range(0, 400, 20):
            others = [f"other{i + j}" for j in range(20)]
            client.put_batch(others, [payload_of(k, size) for k in others]).raise_for_errors()
        buffers = [bytearray(size) for _ in keys]
        assert client.get_into_batch(keys, buffers, lease=lease).hit_count == len(keys)
        assert [bytes(b) for b in buffers] == [payload_of(k, size) for k in keys]
        peer.call("release", lease)
        with admin_of(cluster) as admin:
            wait_until(lambda: admin.status().leases == 0, what="the lease to be released")
        for i in range(0, 200, 20):
            others = [f"more{i + j}" for j in range(20)]
            client.put_batch(others, [payload_of(k, size) for k in others]).raise_for_errors()
        assert not client.exists_batch(keys).any(), "they were not evicted once they could be"


def test_a_lease_that_is_over_is_never_trusted(transports: tuple[str, ...]) -> None:
    """The bytes are proven otherwise, or asked for again; never the wrong ones."""
    size = 64 * KIB
    flags = {"lease-ttl-s": 0.2, "lease-ttl-max-s": 0.3}
    with (
        Cluster(stores=1, dram_bytes=16 * MIB, master_flags=flags) as cluster,
        cluster.client(transports=transports) as client,
    ):
        keys = [f"k{i}" for i in range(20)]
        client.put_batch(keys, [payload_of(k, size) for k in keys]).raise_for_errors()
        lease = client.acquire(keys, 5.0)
        assert lease.ttl_s <= 0.3, "a longer lease was given than there may be"
        until_s = time.monotonic() + 0.4
        wait_until(lambda: time.monotonic() > until_s, what="the lease to be over")
        for i in range(0, 600, 20):
            others = [f"o{i + j}" for j in range(20)]
            client.put_batch(others, [payload_of(k, size) for k in others]).raise_for_errors()
        buffers = [bytearray(size) for _ in keys]
        results = client.get_into_batch(keys, buffers, lease=lease)
        for i, key in enumerate(keys):
            error = results.error(i)
            if error is not None:
                assert isinstance(error, LeaseExpired | StaleLocation)
            elif results[i] is not None:
                assert bytes(buffers[i]) == payload_of(key, size)


# ---- views --------------------------------------------------------------------------------------


def test_views(client: Client, peer: Peer, transports: tuple[str, ...]) -> None:
    keys = fresh(count=5)
    peer.call("put_batch", keys, [payload_of(k, 40_000) for k in keys])
    view = client.view([*keys, "missing"])
    with view as views:
        assert views[-1] is None
        for key, seen in zip(keys, views, strict=False):
            assert seen is not None
            assert seen.readonly
            assert seen == payload_of(key, 40_000)
            with pytest.raises((TypeError, ValueError)):
                np.frombuffer(seen, np.uint8)[0] = 1
        del seen
    assert view.copied_count == (0 if transports == ("shm",) else len(keys))
    if transports == ("tcp",):
        with pytest.raises(InvalidArgument), client.view(keys, copy=False):
            pass


def test_what_is_viewed_stays_as_long_as_it_is_viewed() -> None:
    """Longer than any lease: a view is protected by a claim and not by a clock."""
    size = 256 * KIB
    flags = {"lease-ttl-s": 0.2, "lease-ttl-max-s": 0.3}
    with (
        Cluster(stores=1, dram_bytes=16 * MIB, master_flags=flags) as cluster,
        cluster.client(transports=("shm",)) as client,
        cluster.client(transports=("shm",)) as other,
    ):
        keys = [f"viewed{i}" for i in range(8)]
        client.put_batch(keys, [payload_of(k, size) for k in keys]).raise_for_errors()
        with client.view(keys) as views:
            until_s = time.monotonic() + 0.6
            number = 0
            while time.monotonic() < until_s:
                others = [f"other{number + j}" for j in range(8)]
                other.put_batch(others, [payload_of(k, size) for k in others]).raise_for_errors()
                number += 8
            assert number > 100
            other.remove_batch(keys[:4])
            other.put_batch([f"more{i}" for i in range(40)], [bytes(size)] * 40).raise_for_errors()
            for key, seen in zip(keys, views, strict=True):
                assert seen is not None
                assert bytes(seen) == payload_of(key, size)
            del seen
        view = client.view(keys[4:])
        first = view.__enter__()[0]
        assert first is not None
        kept = np.frombuffer(first, np.uint8)
        del first
        with pytest.raises(BufferInUse):
            view.__exit__(None, None, None)
        assert bytes(kept) == payload_of(keys[4], size)
        del kept


# ---- cached locations ---------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["auto", "checksum"])
def test_a_cached_location_never_gives_another_object(
    transports: tuple[str, ...], verify: str, rng: random.Random
) -> None:
    """All objects are of one size, so that new ones lie exactly where evicted ones lay."""
    size, count = 4 * KIB, 600
    flags = {"location-ttl-s": 60}
    with (
        Cluster(stores=1, dram_bytes=4 * MIB, master_flags=flags) as cluster,
        cluster.client(transports=transports, verify=verify) as reader,
        Peer(cluster.lane, transports=transports) as writer,
    ):
        hits = 0
        for generation in range(12):
            keys = [f"g{generation}-{i}" for i in range(count)]
            writer.call("put_batch", keys, [payload_of(k, size) for k in keys])
            assert reader.get_batch(keys[-100:]) == [payload_of(k, size) for k in keys[-100:]]
            old = [f"g{rng.randrange(generation + 1)}-{rng.randrange(count)}" for _ in range(200)]
            for key, value in zip(old, reader.get_batch(old), strict=True):
                assert value in (None, payload_of(key, size)), f"{key} has another one's bytes"
                hits += value is not None
            for key in old[:50]:
                assert reader.get(key) in (None, payload_of(key, size))
        stats = reader.stats()
        assert hits
        assert stats.cached_reads
        assert stats.stale_locations, "no location was ever stale: this tests nothing"


def test_a_removed_key_put_anew_is_read_anew(cluster: Cluster, transports: tuple[str, ...]) -> None:
    with (
        cluster.client(transports=transports) as reader,
        cluster.client(transports=transports) as writer,
    ):
        (key,) = fresh()
        writer.put(key, b"old bytes")
        assert reader.get(key) == b"old bytes"
        writer.remove(key)
        writer.put(key, b"new bytes, longer")
        # The location may be cached for a while, and then old bytes are what may be read there.
        wait_until(lambda: reader.get(key) == b"new bytes, longer", what="the location to run out")


# ---- what a client leaves behind ----------------------------------------------------------------


def test_closing_leaves_no_thread_and_no_socket(
    cluster: Cluster, transports: tuple[str, ...]
) -> None:
    with Remote("open_and_close", cluster.lane, {"transports": transports}) as program:
        before, while_open, after = program.hear()
    assert while_open[0] > before[0]
    assert while_open[1] > before[1]
    assert after == before


def test_a_forked_child_is_refused_and_its_parent_goes_on(
    cluster: Cluster, transports: tuple[str, ...]
) -> None:
    with Remote("forked", cluster.lane, {"transports": transports}) as program:
        said, exit_code, value = program.hear()
    assert said == ["ForkedClient", "ForkedClient", "ForkedClient", "None"]
    assert exit_code == 0
    assert value == b"fork"


def test_a_killed_client_leaves_no_hole(cluster: Cluster, transports: tuple[str, ...]) -> None:
    """The next put of a dead writer's key succeeds, and is readable at once."""
    size, (key,) = 32 * MIB, fresh()
    with Remote("slow_put", cluster.lane, key, size, {"transports": transports}) as program:
        program.expect("ready")
        program.say("go")
        with admin_of(cluster) as admin:
            wait_until(lambda: admin.status().granted_bytes >= size, what="a grant")
        program.process.kill()
        program.process.wait(5.0)
    with cluster.client(transports=transports) as client:
        result = client.put(key, payload_of(key, size), deadline_s=20.0)
        assert result.stored or result.existed
        assert client.get(key, deadline_s=20.0) == payload_of(key, size)
        client.remove(key)
    with admin_of(cluster) as admin:
        # Its space comes back when its daemon has cut it off.
        wait_until(
            lambda: admin.status().granted_bytes == admin.status().quarantined_bytes == 0,
            30.0,
            what="the dead writer's space",
        )
