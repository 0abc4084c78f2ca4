"""One replica only, and its node is gone: misses, not errors, and soon nobody believes in it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from cenote.api.rows import EXTENT
from cenote.client import Client
from cluster import Cluster
from loads import summary
from payloads import payload_of
from promptness import ends_within
from waiting import wait_until
from workers import Load, pass_time, pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
KEYS = {f"k{i}": 1 + i * 997 % 60_000 for i in range(200)}
SOON_S = 1.0
SLACK_S = 0.7  # what a busy machine adds to what is promised
TRANSPORTS = [pytest.param(("shm", "tcp"), id="shm"), pytest.param(("tcp",), id="tcp")]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with pool(2, dram_bytes=64 * MIB) as made:
        yield made


@pytest.fixture(params=TRANSPORTS)
def client(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Client]:
    with cluster.client(transports=request.param) as made:
        values = [payload_of(key, size) for key, size in KEYS.items()]
        made.put_batch(list(KEYS), values).raise_for_errors()
        assert made.get_batch(list(KEYS)) == values
        yield made


def keys_of(client: Client, cluster: Cluster, name: str) -> list[str]:
    """Keys that lie on this node alone."""
    lease = client.acquire(list(KEYS), 0.5)
    client.release(lease)
    peers = client.session.state.peers
    (node_id,) = (n for n, view in peers.nodes.items() if view.name == name)
    nodes = peers.nodes_of(np.frombuffer(lease.extents, EXTENT)["segment"]).tolist()
    return [key for key, node in zip(KEYS, nodes, strict=True) if node == node_id]


def check_misses(client: Client, lost: list[str]) -> None:
    """What is lost is missed within a second, everything else is right.

    Over shared memory the bytes of a daemon that is gone can still be read for as long as their
    location is known.
    """
    kept = [key for key in KEYS if key not in lost]
    values: list[bytes | None] = []
    with ends_within(SOON_S, "the first read", late_s=SLACK_S):
        values.append(client.get(lost[0]))
    with ends_within(SOON_S, f"a read of all {len(KEYS)} keys", late_s=SLACK_S):
        values.extend(client.get_batch(list(KEYS)))
    may_hit = "shm" in client.session.config.transports
    for key, value in zip([lost[0], *KEYS], values, strict=True):
        right = payload_of(key, KEYS[key])
        if key in kept or may_hit:
            assert value == right or (may_hit and key in lost and value is None), key
        else:
            assert value is None, key
    assert client.stats().failed == 0


@contextmanager
def until_absent(client: Client, lost: list[str]) -> Iterator[None]:
    """Until what is lost is missed; soon after the block has begun. Without a read, which would
    report it."""
    with ends_within(SOON_S, "until nobody believed in the node", late_s=SLACK_S):
        yield
        wait_until(lambda: not client.exists_batch(lost).any(), what="nobody to believe in it")


@pytest.mark.parametrize("reads_first", [False, True])
def test_a_killed_node_costs_misses(cluster: Cluster, client: Client, reads_first: bool) -> None:
    lost = keys_of(client, cluster, "s1")
    assert 20 < len(lost) < 180
    # An earlier read may have given the connection up (a busy machine); its end tells of the node.
    assert client.get(lost[0]) == payload_of(lost[0], KEYS[lost[0]])
    with until_absent(client, lost):
        cluster.stores[1].kill()
        if reads_first:
            check_misses(client, lost)
    assert not client.exists(lost[0])
    check_misses(client, lost)
    assert client.match(lost).prefix_keys == 0
    assert client.put(lost[0], payload_of(lost[0], KEYS[lost[0]])).stored
    assert client.get(lost[0]) == payload_of(lost[0], KEYS[lost[0]])


def test_a_stopped_node_costs_misses(cluster: Cluster, client: Client) -> None:
    """Over shared memory its bytes can be read on until it is hidden: right ones or a miss."""
    lost = keys_of(client, cluster, "s1")
    if "shm" not in client.session.config.transports:
        with until_absent(client, lost):
            cluster.stores[1].pause()
            check_misses(client, lost)
    else:
        cluster.stores[1].pause()
        for key in lost[:3]:
            assert client.get(key) == payload_of(key, KEYS[key])
    new = {f"n{i}": payload_of(f"n{i}", 1000) for i in range(20)}
    for key, value in new.items():  # of which some are to be sealed by the node that stands still
        assert client.put(key, value).stored
    assert client.get_batch(list(new)) == list(new.values())
    cluster.stores[1].resume()
    wait_until(
        lambda: client.get_batch(list(KEYS)) == [payload_of(k, n) for k, n in KEYS.items()],
        what="everything to be there again",
    )
    assert client.get_batch(list(new)) == list(new.values())


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_under_load_nothing_but_misses(seed: int, how: str) -> None:
    """Of puts, none fails: what was granted on the lost node is placed elsewhere in the call."""
    with pool(2) as cluster, ExitStack() as stack:
        load = Load(stack, cluster, seed, replicas=1, misses_are_legal=True)
        pass_time(1.0)
        fault_s = time.monotonic()
        if how == "killed":
            cluster.stores[1].kill()
        else:
            cluster.stores[1].pause()
        pass_time(2.0)
        end_s = time.monotonic()
        load.stop()
        print("just after:", summary(load.samples(fault_s, fault_s + 1)))
        print("later:", summary(load.samples(fault_s + 1, end_s)))
        assert load.failures() == []
        assert any(miss_s > fault_s for report in load.reports for miss_s in report.misses)
        assert all(miss_s > fault_s for report in load.reports for miss_s in report.misses)
