"""The connector's worker half beside a thread that spins: see `gil.py`. Runs in vLLM's environment.

The one argument is JSON: `master`, `transport`, `block_bytes`, `batch`, `rounds`. It
prints rows of a table.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
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
from waiting import wait_until

LAYERS: Final = 8
SPIN: Final = 500
WARM_UP: Final = 2
OWN_CORE: Final = min(os.sched_getaffinity(0))
LIMIT_S: Final = 20.0
STEP_S: Final = 0.002
"""Between two steps of the engine: less than any model takes."""
SPACE: Final = SpaceName("gil", b"gil")
LEASE_S: Final = 60.0


class Spun:
    """One spin until `done`, which is what an engine's step asks the connector: seconds."""

    def __init__(self, begin: Callable[[], None], done: Callable[[], bool]) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        began_all_s = time.process_time()
        end_s = began_s + LIMIT_S
        self.finished = False
        begin()
        self.steps_cpu_s = time.thread_time() - began_cpu_s
        """What the connector took of this thread."""
        step_s = began_s
        while (now_s := time.perf_counter()) < end_s:
            for _ in range(SPIN):
                pass
            if now_s < step_s:
                continue
            step_s = now_s + STEP_S
            step_cpu_s = time.thread_time()
            self.finished = done()
            self.steps_cpu_s += time.thread_time() - step_cpu_s
            if self.finished:
                break
        self.cpu_s = time.thread_time() - began_cpu_s
        self.others_cpu_s = time.process_time() - began_all_s - self.cpu_s
        self.wall_s = time.perf_counter() - began_s
        self.held_s = self.wall_s - self.cpu_s + self.steps_cpu_s


class Bench:
    """The worker's half, and the orders that vLLM's scheduler would send it."""

    def __init__(self, master: str, transport: str, block_bytes: int, batch: int) -> None:
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
                "master": master,
                "transports": [transport],
                "staging_bytes": 4 * batch * block_bytes,
                "load_deadline_s": "20s",
                "save_deadline_s": "20s",
            }
        )
        self.counters = Counters()
        self.worker = StoreWorker(options, RankShard(0, 0, 1), "gil", self.counters)
        self.worker.start(memory)
        self.client = Client(master, name="gil-scheduler", transports=[transport])
        self.space = self.client.namespace(SPACE.name, fingerprint=SPACE.fingerprint)
        self.blocks = tuple((0, index) for index in range(batch))
        self.ids = tuple(range(batch))
        self._number = 0
        self._totals: dict[str, float] = {}
        self._copied_s = 0.0
        """What copying out took, of which `save` is told."""
        wait_until(lambda: self.save() is not None, 30, what="the worker to meet the pool")

    def total(self, name: str) -> float:
        for key, value in self.counters.take().items():
            if not isinstance(value, list):
                self._totals[key] = self._totals.get(key, 0) + value
            elif key == "copy_s":
                self._copied_s += sum(value)
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
        self._copied_s = 0.0
        orders = Orders(space=SPACE, saves=[SaveOrder(self.blocks, hashes, self.ids)])

        def saved() -> bool:
            self.worker.take_loaded()
            return self.total("saved_blocks") >= before + self.batch or bool(
                self._totals.get("unsaved_blocks")
            )

        spun = Spun(lambda: self.worker.save(orders), saved)
        copy_s = self._copied_s
        spun.steps_cpu_s -= copy_s
        spun.held_s -= copy_s
        self._totals.pop("unsaved_blocks", None)
        return (hashes, copy_s, spun) if self.total("saved_blocks") > before else None

    def stage(self, hashes: tuple[bytes, ...]) -> Spun:
        """The batch from the pool into staging memory."""
        keys = object_keys(list(hashes), [0] * self.batch, [0])
        lease = self.space.acquire(keys, LEASE_S)
        ticket = self._number
        order = StageOrder(ticket, self.blocks, hashes, lease, LIMIT_S)

        def done() -> bool:
            self.worker.take_loaded()
            reports = self.worker.take_reports()
            if reports is None:
                return False
            missing = reports.staged[ticket].missing
            assert not missing, f"{len(missing)} blocks did not arrive"
            return True

        orders = Orders(space=SPACE, stages=[order])
        spun = Spun(lambda: self.worker.begin(orders), done)
        self.space.release(lease)
        return spun

    def load(self) -> float:
        """The batch from staging memory into the KV cache: the seconds that it takes."""
        ids = tuple(range(self.batch, 2 * self.batch))
        began_s = time.perf_counter()
        self.worker.begin(
            Orders(space=SPACE, loads=[LoadOrder(self._number, "r", self.blocks, ids)])
        )
        assert self.worker.take_loaded()[0], "on CPUs it is done in the engine's thread"
        return time.perf_counter() - began_s

    def close(self) -> None:
        self.worker.close()
        self.client.close()


def per_block_us(spins: list[Spun], batch: int) -> str:
    assert all(spun.finished for spun in spins)
    held = [1e6 * spun.held_s / batch for spun in spins]
    threads = [1e6 * spun.others_cpu_s / batch for spun in spins]
    worked = [1e6 * (spun.others_cpu_s + spun.steps_cpu_s) / batch for spun in spins]
    wall_ms = statistics.median(1e3 * spun.wall_s for spun in spins)
    return (
        f"{statistics.median(threads):.1f} | {statistics.median(worked):.1f} | {max(worked):.1f}"
        f" | {statistics.median(held):.1f} | {min(held):.1f} | {wall_ms:.1f}"
    )


def alone() -> str:
    end_s = time.perf_counter() + 0.2
    spun = Spun(lambda: None, lambda: time.perf_counter() > end_s)
    share = 1e6 / spun.wall_s
    lost_us = share * (spun.held_s - spun.steps_cpu_s)
    return f"{lost_us:.0f} us lost, {share * spun.others_cpu_s:.0f} worked, a second"


def main() -> None:
    given = json.loads(sys.argv[1])
    transport, block_bytes, batch = given["transport"], given["block_bytes"], given["batch"]
    torch.set_num_threads(1)
    others = os.sched_getaffinity(0) - {OWN_CORE}
    if not others:
        raise SystemExit("two cores are needed: one is the spinning thread's own")
    os.sched_setaffinity(0, others)  # what threads begin with
    bench = Bench(given["master"], transport, block_bytes, batch)
    os.sched_setaffinity(0, {OWN_CORE})
    spins: dict[str, list[Spun]] = {"save": [], "stage": []}
    copies_us: list[float] = []
    loads_us: list[float] = []
    for number in range(given["rounds"] + WARM_UP):
        saved = bench.save()
        assert saved is not None
        hashes, copy_s, spun = saved
        found = {"save": spun, "stage": bench.stage(hashes)}
        load_s = bench.load()
        if number < WARM_UP:
            continue
        copies_us.append(1e6 * copy_s / batch)
        loads_us.append(1e6 * load_s / batch)
        for name, each in found.items():
            spins[name].append(each)
    idle = alone()
    bench.close()
    size = f"{batch} x {block_bytes >> 10} KiB"
    for name, each in spins.items():
        print(f"| {transport} | {size} | {name} | {per_block_us(each, batch)} |")
    copy_us, load_us = statistics.median(copies_us), statistics.median(loads_us)
    print(f"| | | copy, load | {copy_us:.0f}, {load_us:.0f} us/block; alone {idle} | | | | | |")


if __name__ == "__main__":
    main()
