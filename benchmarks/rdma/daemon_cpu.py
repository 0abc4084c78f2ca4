"""What 1,000 reads and 1,000 puts over RDMA cost the store daemon's processor: nothing, and the
seals.

    PYTHONPATH=tests:benchmarks/rdma python benchmarks/rdma/daemon_cpu.py [--calls 1000]

Needs an RDMA device; in the emulated machine of `make test-rdma`: `benchmarks/rdma/in_vm.sh
daemon_cpu.py`, where only ratios count. The same calls over TCP stand beside it. What the daemon
spends in as much time when nobody calls it (heartbeats) stands beside it, too: measured after each
case, in which the machine is as busy with other things as it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from spent import cpu_s

from cenote.api.errors import DeadlineExceeded, ReplicasUnavailable, Unavailable
from cenote.client import Client
from cluster import Cluster

MIB: Final = 1 << 20
POOL_BYTES: Final = 192 * MIB
SLOW_S: Final = 300.0
_ATTEMPTS: Final = 20


@dataclass(frozen=True)
class Cost:
    """Of the store daemon, for some calls of one client."""

    calls: int
    wall_s: float
    cpu_s: float
    rdma_bytes: int


def idle_share(pid: int, seconds: float) -> float:
    """Of a processor, over some time in which nobody calls."""
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


def rdma_bytes(client: Client) -> int:
    stats = client.stats()
    return stats.rdma_read_bytes + stats.rdma_written_bytes


def _measured(client: Client, pid: int, calls: int, call: Callable[[int], Any]) -> Cost:
    call(0)  # the first one connects
    moved, before, began = rdma_bytes(client), cpu_s(pid), time.monotonic()
    for number in range(1, calls + 1):
        call(number)
    wall, spent = time.monotonic() - began, cpu_s(pid) - before
    return Cost(calls, wall, spent, rdma_bytes(client) - moved)


def cost_of_reads(client: Client, pid: int, calls: int, size_bytes: int) -> Cost:
    """One object, read again and again."""
    data = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)
    key = f"read {size_bytes} {client.config.transports}"
    client.put_from(key, data)
    target = np.zeros_like(data)
    with client.register(target):
        cost = _measured(client, pid, calls, lambda _: client.get_into(key, target))
    assert np.array_equal(target, data)
    return cost


def put_in_the_end(client: Client, key: str, data: np.ndarray) -> None:
    """On a machine so slow that its master takes the daemon for dead now and then, and back."""
    for attempt in range(_ATTEMPTS):
        try:
            client.put_from(key, data)
        except (ReplicasUnavailable, Unavailable, DeadlineExceeded):
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(0.5)
        else:
            return


def cost_of_puts(client: Client, pid: int, calls: int, size_bytes: int) -> Cost:
    """As many objects, each with a seal of its own; removed afterwards."""
    data = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)
    name = f"put {size_bytes} {client.config.transports}"
    with client.register(data):
        cost = _measured(client, pid, calls, lambda i: put_in_the_end(client, f"{name} {i}", data))
    client.remove_batch([f"{name} {i}" for i in range(calls + 1)])
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--transports", default="rdma,tcp")
    parser.add_argument("--sizes-kib", default="4,64")
    parser.add_argument("--verbs", default="auto")
    parser.add_argument("--idle-s", type=float, default=10.0, help="how long idleness is looked at")
    options = parser.parse_args()
    sizes = [int(size) << 10 for size in options.sizes_kib.split(",")]
    flags = {"rdma": "on", "verbs": options.verbs}
    with Cluster(dram_bytes=POOL_BYTES, ready_timeout_s=SLOW_S, store_flags=flags) as cluster:
        pid = cluster.stores[0].pid
        print(f"{'':28} {'CPU ms':>8} {'if idle':>8} {'wall s':>8} {'over RDMA':>12}")
        for transport in options.transports.split(","):
            with cluster.client(
                transports=(transport,), verbs=options.verbs, deadline_s=120.0
            ) as client:
                for cost_of in (cost_of_reads, cost_of_puts):
                    for size in sizes:
                        cost = cost_of(client, pid, options.calls, size)
                        idle_s = idle_share(pid, options.idle_s) * cost.wall_s
                        what = f"{cost_of.__name__[8:]} of {size >> 10} KiB over {transport}"
                        print(
                            f"{what:28} {1000 * cost.cpu_s:8.1f} {1000 * idle_s:8.1f}"
                            f" {cost.wall_s:8.1f} {cost.rdma_bytes:12}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
