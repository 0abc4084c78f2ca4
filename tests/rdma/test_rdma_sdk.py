"""The SDK's integration tests over RDMA: those of `integration/test_pool.py` that one pool serves,
with clients that go over nothing else. Real devices, real daemons.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cenote.client import Client
from cluster import Cluster
from integration.test_pool import (
    test_a_chain_is_matched_up_to_its_first_gap,
    test_a_removed_key_put_anew_is_read_anew,
    test_batches_of_all_sizes,
    test_reading_under_another_process_lease,
    test_replicas_are_met_or_refused,
    test_the_first_of_two_puts_wins,
    test_two_put_the_same_key_at_once,
    test_views,
    test_what_one_puts_the_other_gets,
    test_what_one_removes_is_gone_for_the_other,
)
from payloads import payload_of
from rdma_daemon import rdma_nics
from remote import Peer

__all__ = [
    "test_a_chain_is_matched_up_to_its_first_gap",
    "test_a_removed_key_put_anew_is_read_anew",
    "test_batches_of_all_sizes",
    "test_reading_under_another_process_lease",
    "test_replicas_are_met_or_refused",
    "test_the_first_of_two_puts_wins",
    "test_two_put_the_same_key_at_once",
    "test_views",
    "test_what_one_puts_the_other_gets",
    "test_what_one_removes_is_gone_for_the_other",
]

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1800)]

MIB = 1 << 20
SLOW_S = 300.0
"""The machine is emulated; see test_paths_rdma."""
CALL_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    rdma_nics("auto").close()
    flags = {"location-ttl-s": 1, "node-dead-s": 60}
    with Cluster(stores=0, master_flags=flags, ready_timeout_s=SLOW_S) as made:
        for number in range(2):
            made.add_store(
                dram_bytes=64 * MIB, flags={"failure-domain": f"domain{number}", "rdma": "on"}
            )
        made.wait_alive(2, SLOW_S)
        yield made


@pytest.fixture(scope="module")
def transports() -> tuple[str, ...]:
    return ("rdma",)


@pytest.fixture(scope="module")
def peer(cluster: Cluster) -> Iterator[Peer]:
    with Peer(cluster.lane, transports=("rdma",), verbs="pyverbs", deadline_s=CALL_S) as made:
        yield made


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    """Nothing goes over TCP, and no healthy node counts as failed."""
    with cluster.client(transports=("rdma",), verbs="ibverbs", deadline_s=CALL_S) as made:
        yield made
        stats = made.stats()
        assert stats.rdma_read_bytes > MIB
        assert stats.rdma_written_bytes > MIB
        assert stats.rdma_calls_over_tcp == 0


def test_a_node_that_is_killed_with_a_second_copy_elsewhere(cluster: Cluster) -> None:
    """No read fails: what was on its way over RDMA is read from the other node inside the call."""
    keys = [f"twice {number}" for number in range(8)]
    with cluster.client(transports=("rdma",), deadline_s=CALL_S) as client:
        client.put_batch(
            keys, [payload_of(key, MIB) for key in keys], replicas=2, min_replicas=2
        ).raise_for_errors()
        before = client.stats().rdma_read_bytes
        assert client.get_batch(keys) == [payload_of(key, MIB) for key in keys]
        cluster.stores[1].kill()
        try:
            for key in keys:
                assert client.get(key) == payload_of(key, MIB)
        finally:
            cluster.stores[1].start()
            cluster.stores[1].wait_ready(SLOW_S)
            cluster.wait_alive(2, SLOW_S)
        assert client.stats().rdma_read_bytes - before >= 2 * len(keys) * MIB
