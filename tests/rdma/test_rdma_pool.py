"""A pool of real processes whose bytes go over RDMA, through the SDK."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest

from cenote.api.errors import DeadlineExceeded, ReplicasUnavailable, Unavailable
from cenote.client import Client
from cenote.client.devices import DeviceStaging
from cenote.transport.nics.sysfs import read_counters, read_ports
from cenote.transport.rdma import RdmaTransport
from cenote.transport.testing_support import payload
from cluster import Cluster
from fake_gpu import FakeGpu
from rdma_daemon import rdma_nics
from waiting import wait_until

# Of an emulated machine, which is 20 to 30 times as slow as this one.
READY_S = 300.0
DEADLINE_S = 120.0
PACKET_BYTES_MAX = 4096
BLOCKS = 16
BLOCK_BYTES = 256 << 10
CALLS = 1000

pytestmark = pytest.mark.rdma


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    rdma_nics("auto").close()
    with Cluster(
        stores=1,
        dram_bytes=96 << 20,
        ready_timeout_s=READY_S,
        store_flags={"rdma": "on", "metrics-listen": "127.0.0.1:0"},
    ) as cluster:
        yield cluster


def rdma_of(client: Client) -> RdmaTransport:
    [transport] = [t for t in client._transports if isinstance(t, RdmaTransport)]
    return transport


def sent_packets() -> int:
    counts = [read_counters(port) for port in read_ports()]
    return sum(c.get("sent_pkts", 0) or c.get("port_xmit_packets", 0) for c in counts)


def process_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def scraped(cluster: Cluster) -> dict[str, float]:
    """The store daemon's metrics, summed over segments."""
    url = str(cluster.stores[0].ready["metrics"])
    with urllib.request.urlopen(url, timeout=READY_S) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line[:1] != "#"]
    found: dict[str, float] = {}
    for name, _, value in (line.rpartition(" ") for line in lines):
        plain = name.partition("{")[0]
        found[plain] = found.get(plain, 0.0) + float(value)
    return found


def put_in_the_end(client: Client, key: str, data: np.ndarray[Any, Any]) -> None:
    """In a machine so slow that its master takes the daemon for dead now and then, and back."""

    def put() -> bool:
        try:
            client.put_from(key, data)
        except (ReplicasUnavailable, Unavailable, DeadlineExceeded):
            return False
        return True

    wait_until(put, READY_S, what=f"{key} to be put")


def seals_of(cluster: Cluster) -> int:
    return int(scraped(cluster)["cenote_store_segment_seals_total"])


def tcp_bytes_of(cluster: Cluster) -> int:
    found = scraped(cluster)
    return int(found["cenote_store_served_bytes_total"])


def client_of(cluster: Cluster, *transports: str, **options: Any) -> Client:
    return cluster.client(transports=transports, deadline_s=DEADLINE_S, **options)


@pytest.mark.parametrize("library", ["ibverbs", "pyverbs"])
def test_blocks_over_rdma(cluster: Cluster, library: str) -> None:
    """Put and got, checked, and by the devices' count it was them that moved the bytes."""
    before = sent_packets()
    with client_of(cluster, "rdma", verbs=library) as client:
        blocks = np.frombuffer(payload(BLOCKS * BLOCK_BYTES, 1), np.uint8)
        blocks = blocks.reshape(BLOCKS, BLOCK_BYTES).copy()
        keys = [f"{library} {i}" for i in range(BLOCKS)]
        with client.register(blocks):
            client.put_from_batch(keys, list(blocks)).raise_for_errors()
        target = np.zeros_like(blocks)
        with client.register(target):
            client.get_into_batch(keys, list(target)).raise_for_errors()
        assert np.array_equal(target, blocks)
        assert client.get(keys[3]) == blocks[3].tobytes()
        client.put(f"{library} small", b"x" * 1000)
        assert client.get(f"{library} small") == b"x" * 1000
        counters = rdma_of(client).counters
        assert counters.tcp_calls == 0
        moved = counters.read_bytes + counters.written_bytes
        assert moved >= 2 * BLOCKS * BLOCK_BYTES
    assert sent_packets() - before >= 2 * BLOCKS * BLOCK_BYTES / PACKET_BYTES_MAX


@pytest.mark.parametrize("library", ["ibverbs", "pyverbs"])
def test_what_lies_on_a_gpu(
    cluster: Cluster, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through staging memory that the devices know: no copy but those of the GPU, for which memory
    stands that no processor can touch."""
    gpu = FakeGpu()
    monkeypatch.setattr(DeviceStaging.__init__, "__defaults__", (gpu.open,))
    data = payload(BLOCKS * BLOCK_BYTES, 9)
    source, target = gpu.array(len(data), data), gpu.array(len(data))
    keys = [f"{library} on a GPU {i}" for i in range(BLOCKS)]
    with client_of(cluster, "rdma", verbs=library, device_staging_bytes=4 << 20) as client:
        client.put_from_batch(keys, source.rows(BLOCKS)).raise_for_errors()
        client.get_into_batch(keys, target.rows(BLOCKS)).raise_for_errors()
        assert target.data == data
        with client.register(target) as registration:  # no dma-buf can be had of it
            assert not registration.is_direct
            assert client.get_into(keys[3], target.part(0, BLOCK_BYTES)) == BLOCK_BYTES
        assert target.data[:BLOCK_BYTES] == data[3 * BLOCK_BYTES :][:BLOCK_BYTES]
        stats = client.stats()
        assert stats.rdma_calls_over_tcp == stats.rdma_staged_bytes == 0
        assert stats.device_staged_bytes == (2 * BLOCKS + 1) * BLOCK_BYTES
        assert stats.rdma_read_bytes + stats.rdma_written_bytes >= stats.device_staged_bytes
    assert not gpu.pinned


def test_the_order_of_transports(cluster: Cluster) -> None:
    """On this host shared memory is preferred; without it RDMA; TCP where it is forced."""
    for transports, kind in (
        (("shm", "rdma", "tcp"), "ShmChannel"),
        (("rdma", "tcp"), "RdmaChannel"),
        (("tcp",), "TcpChannel"),
    ):
        with client_of(cluster, *transports) as client:
            client.put(f"by {kind}", b"value")
            assert client.get(f"by {kind}") == b"value"
            [channel] = client._session.channels.values()
            assert type(channel).__name__ == kind


def test_the_daemon_spends_nothing_on_reads(cluster: Cluster) -> None:
    pid = cluster.stores[0].pid
    with client_of(cluster, "rdma") as client:
        data = np.frombuffer(payload(64 << 10, 5), np.uint8).copy()
        client.put_from("read often", data)
        target = np.zeros_like(data)
        with client.register(target):
            assert client.get_into("read often", target) == len(data)
            moved = client.stats().rdma_read_bytes
            before, began_s = process_cpu_s(pid), monotonic()
            for _ in range(CALLS):
                client.get_into("read often", target)
            spent_s, took_s = process_cpu_s(pid) - before, monotonic() - began_s
        assert client.stats().rdma_read_bytes - moved == CALLS * len(data)
        assert np.array_equal(target, data)
    # Heartbeats and the like go on: as much in a time without reads is theirs.
    assert spent_s < 0.1 * took_s + 0.1, f"{spent_s} s of processor time in {took_s} s"


def test_the_daemon_spends_the_seals_on_puts(cluster: Cluster) -> None:
    """As much for objects of 32 KiB as for those of 1 KiB: nothing by the byte."""
    pid, over_tcp = cluster.stores[0].pid, tcp_bytes_of(cluster)
    spent_s = {}
    with client_of(cluster, "rdma") as client:
        client.put("first", b"connects")
        for size_bytes in (1 << 10, 32 << 10):
            data = np.frombuffer(payload(size_bytes, 6), np.uint8).copy()
            with client.register(data):
                moved = client.stats().rdma_written_bytes
                before, seals = process_cpu_s(pid), seals_of(cluster)
                for number in range(CALLS):
                    put_in_the_end(client, f"put {size_bytes} {number}", data)
                spent_s[size_bytes] = process_cpu_s(pid) - before
            assert client.stats().rdma_written_bytes - moved >= CALLS * size_bytes
            wait_until(lambda at=seals: seals_of(cluster) >= at + CALLS, READY_S, what="the seals")  # type: ignore[misc]
            client.remove_batch([f"put {size_bytes} {number}" for number in range(CALLS)])
    assert tcp_bytes_of(cluster) == over_tcp
    small, large = spent_s.values()
    assert large < 1.5 * small + 0.1, spent_s
