"""How long the connector's threads hold the GIL for each block that they load or save.

    PYTHONPATH=tests .venv-vllm/bin/python benchmarks/vllm/gil.py [--rounds 7]

Runs in vLLM's environment, without an engine: the connector's worker half over a KV cache in host
memory, and a pool of real processes. While its threads work, the main thread does nothing but spin
in Python, as an engine that needs the GIL all the time would. It has a core of its own (all else
shares the others), so that it runs whenever it has the GIL:

    held = wall time - the spinning thread's processor time

is what others held the GIL for, and what being woken took besides. (How long a thread was runnable
can't be told from the kernel: since Linux 6.6 sleeping threads may stay in the run queue.) Told by
block; `alone` is the same spin with the connector idle. `copy` is what the engine's own thread
takes to copy a block out at the end of a step: it waits for that, GIL or not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
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
OWN_CORE: Final = min(os.sched_getaffinity(0))
LIMIT_S: Final = 20.0
SPACE: Final = SpaceName("gil", b"gil")
LEASE_S: Final = 60.0


class Spun:
    """One spin until `done`: seconds."""

    def __init__(self, done: Callable[[], bool]) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        end_s = began_s + LIMIT_S
        self.finished = False
        while time.perf_counter() < end_s:
            for _ in range(SPIN):
                pass
            if done():
                self.finished = True
                break
        self.cpu_s = time.thread_time() - began_cpu_s
        self.wall_s = time.perf_counter() - began_s
        self.held_s = self.wall_s - self.cpu_s


class Bench:
    """The worker's half, and the orders that vLLM's scheduler would send it."""

    def __init__(
        self, cluster: Cluster, transport: str, block_bytes: int, batch: int, gives_way: bool
    ) -> None:
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
                "gives_way": gives_way,
            }
        )
        self.counters = Counters()
        self.worker = StoreWorker(options, RankShard(0, 0, 1), "gil", self.counters)
        self.worker.start(memory)
        self.client = Client(
            cluster.lane, name="gil-scheduler", transports=[transport], gives_way=gives_way
        )
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
    wall_ms = statistics.median(1e3 * spun.wall_s for spun in spins)
    return f"{statistics.median(held):.1f} | {min(held):.1f} | {max(held):.1f} | {wall_ms:.1f}"


def alone() -> str:
    end_s = time.perf_counter() + 0.2
    spun = Spun(lambda: time.perf_counter() > end_s)
    return f"{1e6 * spun.held_s / spun.wall_s:.0f} us a second"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--batches", default="16,64")
    parser.add_argument("--block-kib", default="256,1024")
    parser.add_argument("--keep", action="store_true", help="without the option gives_way")
    options = parser.parse_args()
    torch.set_num_threads(1)
    others = os.sched_getaffinity(0) - {OWN_CORE}
    if not others:
        parser.error("two cores are needed: one is the spinning thread's own")
    os.sched_setaffinity(0, others)  # what threads and processes begin with
    print("| | blocks | | GIL held, us/block: median | least | most | ms |")
    print("|---|---|---|---|---|---|---|")
    for transport in options.transports.split(","):
        for kib in map(int, options.block_kib.split(",")):
            for batch in map(int, options.batches.split(",")):
                measure(transport, kib, batch, options.rounds, not options.keep)


def measure(transport: str, kib: int, batch: int, rounds: int, gives_way: bool) -> None:
    size_bytes = max(256 << 20, (rounds + 4) * batch * (kib << 10) * 5 // 4)
    with Cluster(stores=1, dram_bytes=size_bytes) as cluster:
        bench = Bench(cluster, transport, kib << 10, batch, gives_way)
        shared_cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {OWN_CORE})
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
        idle = alone()
        bench.close()
        os.sched_setaffinity(0, shared_cores)
    for name, each in spins.items():
        print(f"| {transport} | {batch} x {kib} KiB | {name} | {per_block_us(each, batch)} |")
    copy_us = statistics.median(copies_us)
    print(f"| | | copy | {copy_us:.0f} us/block in the engine's thread; alone {idle} | | | |")


if __name__ == "__main__":
    main()
