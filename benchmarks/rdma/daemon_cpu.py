"""What 1,000 reads and 1,000 puts over RDMA cost the store daemon's processor: nothing, and the
seals.

    PYTHONPATH=tests:benchmarks/rdma python benchmarks/rdma/daemon_cpu.py [--calls 1000]

Needs an RDMA device; in the emulated machine of `make test-rdma`: `benchmarks/rdma/in_vm.sh
daemon_cpu.py`, where only ratios count. The same calls over TCP stand beside it. What the daemon
spends when nobody calls it (heartbeats) is measured before and taken off.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from spent import cpu_s

from cenote.client import Client
from cluster import Cluster

MIB: Final = 1 << 20
POOL_BYTES: Final = 192 * MIB
SLOW_S: Final = 300.0
IDLE_S: Final = 10.0


@dataclass(frozen=True)
class Cost:
    """Of the store daemon, for some calls of one client."""

    calls: int
    wall_s: float
    cpu_s: float
    idle_share: float
    """CPU seconds a second while nobody calls."""
    rdma_bytes: int

    @property
    def own_s(self) -> float:
        """What the calls cost, beyond what there is without any."""
        return self.cpu_s - self.idle_share * self.wall_s

    @property
    def own_us(self) -> float:
        return 1e6 * self.own_s / self.calls


def idle_share(pid: int, seconds: float = IDLE_S) -> float:
    """Of a processor, over some time in which nobody calls."""
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


def rdma_bytes(client: Client) -> int:
    stats = client.stats()
    return stats.rdma_read_bytes + stats.rdma_written_bytes


def _measured(client: Client, pid: int, idle: float, calls: int, call: Any) -> Cost:
    call(0)  # the first one connects
    moved, before, began = rdma_bytes(client), cpu_s(pid), time.monotonic()
    for number in range(1, calls + 1):
        call(number)
    wall, spent = time.monotonic() - began, cpu_s(pid) - before
    return Cost(calls, wall, spent, idle, rdma_bytes(client) - moved)


def cost_of_reads(client: Client, pid: int, idle: float, calls: int, size_bytes: int) -> Cost:
    """One object, read again and again."""
    data = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)
    key = f"read {size_bytes} {client.config.transports}"
    client.put_from(key, data)
    target = np.zeros_like(data)
    with client.register(target):
        cost = _measured(client, pid, idle, calls, lambda _: client.get_into(key, target))
    assert np.array_equal(target, data)
    return cost


def cost_of_puts(client: Client, pid: int, idle: float, calls: int, size_bytes: int) -> Cost:
    """As many objects, each with a seal of its own; removed afterwards."""
    data = np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)
    name = f"put {size_bytes} {client.config.transports}"
    with client.register(data):
        cost = _measured(client, pid, idle, calls, lambda i: client.put_from(f"{name} {i}", data))
    client.remove_batch([f"{name} {i}" for i in range(calls + 1)])
    return cost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--transports", default="rdma,tcp")
    parser.add_argument("--sizes-kib", default="4,64")
    parser.add_argument("--verbs", default="auto")
    options = parser.parse_args()
    sizes = [int(size) << 10 for size in options.sizes_kib.split(",")]
    flags = {"rdma": "on", "verbs": options.verbs}
    with Cluster(dram_bytes=POOL_BYTES, ready_timeout_s=SLOW_S, store_flags=flags) as cluster:
        pid = cluster.stores[0].pid
        idle = idle_share(pid)
        print(f"idle: {1000 * idle:.2f} ms of CPU a second")
        print(f"{'':28} {'CPU us a call':>14} {'wall us':>10} {'CPU ms':>8} {'over RDMA':>12}")
        for transport in options.transports.split(","):
            with cluster.client(
                transports=(transport,), verbs=options.verbs, deadline_s=120.0
            ) as client:
                for cost_of in (cost_of_reads, cost_of_puts):
                    for size in sizes:
                        cost = cost_of(client, pid, idle, options.calls, size)
                        what = f"{cost_of.__name__[8:]} of {size >> 10} KiB over {transport}"
                        print(
                            f"{what:28} {cost.own_us:14.1f} {1e6 * cost.wall_s / cost.calls:10.0f}"
                            f" {1000 * cost.cpu_s:8.1f} {cost.rdma_bytes:12}",
                            flush=True,
                        )


if __name__ == "__main__":
    main()
