"""The ports of a pool by name, for tests that misuse them; and whether it bears that."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from cenote.client import Client
from cluster import Cluster
from payloads import payload_of

__all__ = ["SESSION", "Pool", "pool_with_canaries", "received", "say"]

TIMEOUT_S = 20.0
CANARIES = {f"canary{i}": 1 + 997 * i for i in range(20)}
SESSION = b"garbage session!"


class Pool:
    """A cluster with canaries, and its ports by name."""

    def __init__(self, cluster: Cluster, client: Client) -> None:
        self.cluster = cluster
        self.client = client
        store = cluster.stores[0].ready
        self.addresses: dict[str, str] = {
            "lane tcp": cluster.lane,
            "lane unix": f"{cluster.directory}/lane.sock",
            "master grpc": cluster.grpc,
            "data tcp": store["data"].removeprefix("tcp://"),
            "data unix": store["socket"].removeprefix("unix://"),
            "store grpc": store["grpc"],
        }

    def connect(self, port: str) -> socket.socket:
        address = self.addresses[port]
        if address.startswith("/"):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(TIMEOUT_S)
            made.connect(address)
            return made
        host, _, number = address.rpartition(":")
        return socket.create_connection((host, int(number)), TIMEOUT_S)

    def check(self) -> None:
        """Nothing was lost, nobody died."""
        values = self.client.get_batch(list(CANARIES))
        assert values == [payload_of(key, size) for key, size in CANARIES.items()]
        assert all(process.is_running for process in self.cluster.processes)


@contextmanager
def pool_with_canaries() -> Iterator[Pool]:
    """A master that serves its lane on a Unix socket, too, one node, and some objects."""
    with Cluster(stores=1, dram_bytes=32 << 20) as cluster:
        cluster.master.flags["socket"] = f"{cluster.directory}/lane.sock"
        cluster.master.restart()
        cluster.wait_alive(1)
        with cluster.client(location_cache_entries=0) as client:
            values = [payload_of(key, size) for key, size in CANARIES.items()]
            client.put_batch(list(CANARIES), values).raise_for_errors()
            yield Pool(cluster, client)


def received(sock: socket.socket, limit: int = 1 << 20) -> bytes:
    """All that the other side says until it closes (or `limit` bytes of it)."""
    parts = bytearray()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while len(parts) < limit:
            part = sock.recv(65536)
            if not part:
                break
            parts += part
    return bytes(parts)


def say(sock: socket.socket, data: bytes) -> None:
    """Send what the other side may refuse halfway."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(data)
