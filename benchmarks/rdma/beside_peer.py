"""RDMA beside the peer's RDMA transport, in one run: batch put and get, GB/s and processor time.

    PYTHONPATH=tests:benchmarks/rdma MOONCAKE_VENV=DIR python benchmarks/rdma/beside_peer.py

Needs RDMA devices. Where there are none, in the emulated machine of `make test-rdma`, in which only
ratios count:

    MOONCAKE_VENV=DIR benchmarks/rdma/in_vm.sh beside_peer.py

One store daemon (one process that holds the bytes) and one client each, all on this host, each pair
over the same devices; registered memory on both ends. A turn is the same batch put and got at each
pool, one after the other, in an order that alternates; every byte that was read is compared. Told
are medians of the turns: GB/s, and processor time of all of the pool's processes (client, daemon,
master) in ms for a GB, for the client alone in the second column. That the bytes went over the
devices is proven by their own count of packets.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from spent import cpu_sum_s

from cenote.transport.nics.choice import usable_ports
from cenote.transport.nics.facts import NicPort
from cenote.transport.nics.sysfs import read_counters, read_netdevs, read_ports
from cluster import Cluster

HERE: Final = Path(__file__).resolve().parent
MIB: Final = 1 << 20
POOL_BYTES: Final = 160 * MIB
SLOW_S: Final = 300.0
CASES: Final = ((256 << 10, 32), (2560 << 10, 8))
PACKET_BYTES_MAX: Final = 4096


class Worker:
    """A client process."""

    def __init__(self, python: str, kind: str, options: dict[str, Any], log: Path) -> None:
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(
                [python, str(HERE / "worker.py"), kind, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log
        self._hear()

    def _hear(self) -> dict[str, Any]:
        """Its next line of JSON; libraries print others."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise RuntimeError(f"a worker ended: {self._log.read_text(errors='replace')[-4000:]}")

    def do(self, **order: object) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Pool:
    """A client and the processes that serve it."""

    def __init__(self, name: str, worker: Worker, servers: list[int]) -> None:
        self.name = name
        self.worker = worker
        self.servers = servers

    def measure(self, **order: object) -> tuple[float, float, float]:
        """(seconds, the client's CPU seconds, the servers')."""
        before = cpu_sum_s(self.servers)
        told = self.worker.do(**order)
        return told["wall_s"], told["cpu_s"], cpu_sum_s(self.servers) - before


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def our_pool(stack: ExitStack, folder: Path, options: argparse.Namespace) -> Pool:
    cluster = stack.enter_context(
        Cluster(
            dram_bytes=POOL_BYTES,
            ready_timeout_s=SLOW_S,
            store_flags={"rdma": "on", "verbs": options.verbs, "rdma-devices": options.devices},
        )
    )
    told = {"master": cluster.lane, "transports": ["rdma"], "verbs": options.verbs}
    worker = Worker(sys.executable, "ours", told, folder / "ours.log")
    stack.enter_context(worker)
    return Pool("cenote", worker, [cluster.master.pid, cluster.stores[0].pid])


def peer_pool(stack: ExitStack, folder: Path, options: argparse.Namespace, venv: Path) -> Pool:
    port, metrics = free_port(), free_port()
    program = [str(venv / "bin" / "mooncake_master"), "--rpc_address=127.0.0.1"]
    program += [f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"]
    with open(folder / "peer-master.log", "wb") as log:
        master = subprocess.Popen(program, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    stack.callback(master.wait, 10)
    stack.callback(master.kill)
    until = time.monotonic() + SLOW_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            if master.poll() is not None or time.monotonic() > until:
                raise RuntimeError((folder / "peer-master.log").read_text()) from None
            time.sleep(0.2)
    told = {"host": "127.0.0.1", "devices": options.devices, "master": f"127.0.0.1:{port}"}
    python = str(venv / "bin" / "python")
    holds = {**told, "segment_bytes": POOL_BYTES, "buffer_bytes": 16 * MIB}
    node = Worker(python, "node", holds, folder / "peer-node.log")
    stack.enter_context(node)
    worker = Worker(python, "peer", {**told, "segment_bytes": 0, "buffer_bytes": 80 * MIB},
                    folder / "peer.log")  # fmt: skip
    stack.enter_context(worker)
    return Pool("peer", worker, [master.pid, node.process.pid])


def sent_packets(ports: list[NicPort]) -> int:
    counts = [read_counters(port) for port in ports]
    return sum(c.get("sent_pkts", 0) or c.get("port_xmit_packets", 0) for c in counts)


def run(pools: list[Pool], turns: int, ports: list[NicPort]) -> list[dict[str, Any]]:
    rows = []
    for size, count in CASES:
        found: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
        for turn in range(turns + 1):
            for pool in pools if turn % 2 else pools[::-1]:
                for what in ("put", "get"):
                    before = sent_packets(ports)
                    told = pool.measure(
                        what=what, size_bytes=size, count=count, turn=turn, remove=True
                    )
                    packets = sent_packets(ports) - before
                    assert packets >= size * count / PACKET_BYTES_MAX, (pool.name, what, packets)
                    if turn:  # the first one connects
                        found.setdefault((what, pool.name), []).append(told)
        for (what, name), turns_told in found.items():
            wall, client, servers = (
                statistics.median(column) for column in zip(*turns_told, strict=True)
            )
            size_gb = size * count / 1e9
            rows.append(
                {
                    "what": what,
                    "size_bytes": size,
                    "count": count,
                    "pool": name,
                    "gb_per_s": size_gb / wall,
                    "cpu_ms_per_gb": 1000 * (client + servers) / size_gb,
                    "client_cpu_ms_per_gb": 1000 * client / size_gb,
                    "server_cpu_ms_per_gb": 1000 * servers / size_gb,
                    "turns": len(turns_told),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--verbs", default="ibverbs")
    parser.add_argument("--devices", default="", help="default: the first that can be used")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    usable, refused = usable_ports(read_ports(), netdevs=read_netdevs())
    if not usable:
        sys.exit(f"no RDMA device: {'; '.join(map(str, refused)) or 'this host has none'}")
    options.devices = options.devices or usable[0].device
    ports = [port for port in usable if port.device in options.devices.split(",")]
    os.environ.setdefault("MC_GID_INDEX", str(ports[0].gids[0].index))
    venv = Path(os.environ.get("MOONCAKE_VENV", HERE.parent / "peers" / "mooncake-venv"))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pools = [our_pool(stack, folder, options)]
        if (venv / "bin" / "python").exists():
            pools.append(peer_pool(stack, folder, options, venv))
        else:
            print(f"no peer at {venv}: measuring ours alone", file=sys.stderr)
        rows = run(pools, options.turns, ports)
        moved = pools[0].worker.do(what="end")["rdma_bytes"]
        assert moved >= (options.turns + 1) * sum(2 * size * count for size, count in CASES)
    print(f"{'':26} {'GB/s':>8} {'CPU ms/GB':>10} {'client':>8} {'servers':>8}")
    for row in rows:
        case = f"{row['what']} {row['size_bytes'] >> 10} KiB x {row['count']}, {row['pool']}"
        print(
            f"{case:26} {row['gb_per_s']:8.3f} {row['cpu_ms_per_gb']:10.0f}"
            f" {row['client_cpu_ms_per_gb']:8.0f} {row['server_cpu_ms_per_gb']:8.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
