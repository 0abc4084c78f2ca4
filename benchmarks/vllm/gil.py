"""How long the connector's threads hold the GIL for each block that they load or save.

    PYTHONPATH=tests .venv-vllm/bin/python benchmarks/vllm/gil.py [--rounds 7]

Runs in vLLM's environment, without an engine: the connector's worker half over a KV cache in host
memory, and a pool of real processes. While its threads work, the main thread does nothing but spin
in Python, as an engine that needs the GIL all the time would. It is at each moment in one of three
states: it runs (its processor time), it waits for a processor (the kernel counts that), or it
sleeps; and the only thing that it sleeps for is the GIL, held by another thread. So

    held = wall time - processor time - time in the run queue

is what others held the GIL for, and what waking up took besides. It is told by block; `alone` is
the same spin with the connector idle. `copy` is what the engine's own thread takes to copy a block
out at the end of a step: it waits for that, GIL or not.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from cenote.client import Client
from cenote.connectors.vllm.blocks import BlockMemory
from cenote.connectors.vllm.counters import Counters
from cenote.connectors.vllm.keys import RankShard, object_keys
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import LoadOrder, Orders, SaveOrder, SpaceName, StageOrder
from cenote.connectors.vllm.worker import StoreWorker
from cluster import Cluster
from waiting import wait_until

LAYERS: Final = 8
SPIN: Final = 500
LIMIT_S: Final = 20.0
SPACE: Final = SpaceName("gil", b"gil")
LEASE_S: Final = 60.0


class Spun:
    """One spin: seconds by state."""

    def __init__(self, done: Callable[[], bool]) -> None:
        began_s, began_cpu_s, began_queued_s = time.perf_counter(), time.thread_time(), queued_s()
        end_s = began_s + LIMIT_S
        self.finished = False
        while time.perf_counter() < end_s:
            for _ in range(SPIN):
                pass
            if done():
                self.finished = True
                break
        self.queued_s = queued_s() - began_queued_s
        self.cpu_s = time.thread_time() - began_cpu_s
        self.wall_s = time.perf_counter() - began_s
        self.held_s = max(0.0, self.wall_s - self.cpu_s - self.queued_s)


def queued_s() -> float:
    """For how long this thread has been runnable without a processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


class Bench:
    """The worker's half, and the orders that vLLM's scheduler would send it."""

    def __init__(self, cluster: Cluster, transport: str, block_bytes: int, batch: int) -> None:
        self.batch = batch
        part = block_bytes // LAYERS
        layers = torch.randint(0, 255, (LAYERS, 2 * batch, part), dtype=torch.uint8)
        memory = BlockMemory(
            {f"layer{i}": layers[i] for i in range(LAYERS)},
            {0: [f"layer{i}" for i in range(LAYERS)]},
            2 * batch,
        )
        options = make_options(
            {
                "master": cluster.lane,
                "transports": [transport],
                "staging_bytes": 4 * batch * block_bytes,
                "load_deadline_s": "20s",
                "save_deadline_s": "20s",
            }
        )
        self.counters = Counters()
        self.worker = StoreWorker(options, RankShard(0, 0, 1), "gil", self.counters)
        self.worker.start(memory)
        self.client = Client(cluster.lane, name="gil-scheduler", transports=[transport])
        self.space = self.client.namespace(SPACE.name, fingerprint=SPACE.fingerprint)
        self.blocks = tuple((0, index) for index in range(batch))
        self.ids = tuple(range(batch))
        self._number = 0
        self._totals: dict[str, float] = {}
        wait_until(lambda: self.save() is not None, 30, what="the worker to meet the pool")

    def total(self, name: str) -> float:
        for key, value in self.counters.take().items():
            if not isinstance(value, list):
                self._totals[key] = self._totals.get(key, 0) + value
        return self._totals.get(name, 0)

    def fresh(self) -> tuple[bytes, ...]:
        self._number += 1
        return tuple(
            self._number.to_bytes(16, "big") + index.to_bytes(16, "big")
            for index in range(self.batch)
        )

    def save(self) -> tuple[tuple[bytes, ...], float, Spun] | None:
        """A batch to the pool: its hashes, what copying it took, the spin meanwhile. None: it was
        not saved."""
        hashes = self.fresh()
        before = self.total("saved_blocks")
        orders = Orders(space=SPACE, saves=[SaveOrder(self.blocks, hashes, self.ids)])
        began_s = time.perf_counter()
        self.worker.save(orders)
        copy_s = time.perf_counter() - began_s
        spun = Spun(
            lambda: (
                self.total("saved_blocks") >= before + self.batch
                or bool(self._totals.get("unsaved_blocks"))
            )
        )
        self._totals.pop("unsaved_blocks", None)
        return (hashes, copy_s, spun) if self.total("saved_blocks") > before else None

    def stage(self, hashes: tuple[bytes, ...]) -> Spun:
        """The batch from the pool into staging memory."""
        keys = object_keys(list(hashes), [0] * self.batch, [0])
        lease = self.space.acquire(keys, LEASE_S)
        ticket = self._number
        order = StageOrder(ticket, self.blocks, hashes, lease, LIMIT_S)
        self.worker.begin(Orders(space=SPACE, stages=[order]))

        def done() -> bool:
            reports = self.worker.take_reports()
            if reports is None:
                return False
            missing = reports.staged[ticket].missing
            assert not missing, f"{len(missing)} blocks did not arrive"
            return True

        spun = Spun(done)
        self.space.release(lease)
        return spun

    def load(self) -> Spun:
        """The batch from staging memory into the KV cache."""
        ids = tuple(range(self.batch, 2 * self.batch))
        self.worker.begin(
            Orders(space=SPACE, loads=[LoadOrder(self._number, "r", self.blocks, ids)])
        )
        return Spun(lambda: bool(self.worker.take_loaded()[0]))

    def close(self) -> None:
        self.worker.close()
        self.client.close()


def per_block_us(spins: list[Spun], batch: int) -> str:
    assert all(spun.finished for spun in spins)
    held = [1e6 * spun.held_s / batch for spun in spins]
    queued = [1e6 * spun.queued_s / batch for spun in spins]
    return (
        f"{statistics.median(held):.1f} ({max(held):.1f}) | {statistics.median(queued):.1f}"
        f" | {statistics.median(1e3 * spun.wall_s for spun in spins):.1f}"
    )


def alone() -> str:
    for thread in threading.enumerate():
        assert not thread.name.startswith("cenote-"), thread.name
    end_s = time.perf_counter() + 0.2
    spun = Spun(lambda: time.perf_counter() > end_s)
    return f"{100 * spun.held_s / spun.wall_s:.2f} % of the time asleep"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--batches", default="16,64")
    parser.add_argument("--block-kib", default="256,1024")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"alone: {alone()}")
    print("| | blocks | | GIL held by others, us/block: median (worst) | queued | ms |")
    print("|---|---|---|---|---|---|")
    for transport in options.transports.split(","):
        for kib in map(int, options.block_kib.split(",")):
            for batch in map(int, options.batches.split(",")):
                measure(transport, kib, batch, options.rounds)


def measure(transport: str, kib: int, batch: int, rounds: int) -> None:
    size_bytes = max(256 << 20, (rounds + 4) * batch * (kib << 10) * 5 // 4)
    with Cluster(stores=1, dram_bytes=size_bytes) as cluster:
        bench = Bench(cluster, transport, kib << 10, batch)
        spins: dict[str, list[Spun]] = {"save": [], "stage": [], "load": []}
        copies_us: list[float] = []
        for number in range(rounds + 2):
            saved = bench.save()
            assert saved is not None
            hashes, copy_s, spun = saved
            found = {"save": spun, "stage": bench.stage(hashes), "load": bench.load()}
            if number < 2:
                continue  # warm-up
            copies_us.append(1e6 * copy_s / batch)
            for name, each in found.items():
                spins[name].append(each)
        bench.close()
    for name, each in spins.items():
        print(f"| {transport} | {batch} x {kib} KiB | {name} | {per_block_us(each, batch)} |")
    print(f"| | | copy | {statistics.median(copies_us):.0f} us/block in the engine's thread | | |")


if __name__ == "__main__":
    main()
