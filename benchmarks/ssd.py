"""Reads and writes of a pool's SSD beside fio on the same file: same block size and depth, one run.

    python benchmarks/ssd.py [--directory DIR] [--rounds N] [--cases drain,puts,reads] [--sizes ...]

A pool of its own: one daemon with little memory, so that what is put ends on its SSD. Each object
is read once, from the SSD; the page cache has nothing of it (direct I/O). Rounds are interleaved,
and medians are printed with the ratio to fio (or to raw preadv where there is no fio), which runs
before and after each case: what a shared device gives changes from one second to the next. It also
changes from one file to the other (here from 1.2 to 1.8 GB/s), so fio reads the file of the pool,
what of it is data, and writes to its end, which the daemon was not told of.
Processor time for each GB is that of the store daemon, of the master, and of this process.
"""

from __future__ import annotations

import argparse
import math
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cenote.cli.connect import Admin, open_admin
from cenote.cli.interrupts import Interrupts
from cenote.cli.local_pool import LocalPool, PoolPlan, running_pool
from cenote.client import Client
from cenote.runtime.memory import address_of

MIB = 1 << 20
BLOCK = 5 * MIB // 2
BATCH = 64
SMALL = 64 << 10
FLUSH_BYTES = 32 * MIB
"""As the daemon has it, for the second way fio writes."""
DATA_START = 64 * MIB
"""Of the file's parts behind this none is the table's."""
FIO_BYTES = 1 << 30
"""What fio writes to, behind what the daemon was told of."""
POLL_S = 0.008
"""How often the master is asked what was copied; the two cores pay for that, too."""


class Part(NamedTuple):
    """Of a file."""

    path: Path
    start: int
    size_bytes: int


class Fio:
    """What the device gives to random direct I/O of one kind, and what that costs."""

    def __init__(
        self, part: Part, mode: str, block: int, depth: int, *, flush_bytes: int = 0
    ) -> None:
        """`flush_bytes`: what was written is flushed after each so many."""
        self._part, self._mode, self._block, self._depth = part, mode, block, depth
        self._flush_every = flush_bytes // block
        self._rates: list[float] = []
        self._cpu_s_per_gb: list[float] = []

    def run(self, seconds: float = 1.0) -> None:
        if shutil.which("fio") is None:
            is_read = "read" in self._mode
            there = raw_read(self._part, self._block, self._depth, seconds) if is_read else math.nan
            self._rates.append(there)
            return
        command = [
            "fio", "--name=x", f"--filename={self._part.path}", f"--rw={self._mode}",
            f"--bs={self._block}", "--direct=1", "--ioengine=libaio", f"--iodepth={self._depth}",
            f"--runtime={seconds}", "--time_based", f"--offset={self._part.start}",
            f"--size={self._part.size_bytes}", "--output-format=terse",
        ]  # fmt: skip
        if "read" in self._mode:
            command.append("--readonly")
        if self._flush_every:
            command.append(f"--fdatasync={self._flush_every}")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        fields = out.split(";")
        at = 5 if "read" in self._mode else 46
        self._rates.append(int(fields[at + 1]) * 1024 / 1e9)
        spent_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        self._cpu_s_per_gb.append(spent_s / (int(fields[at]) * 1024 / 1e9))

    @property
    def gb_per_s(self) -> float:
        return statistics.mean(self._rates)

    @property
    def cpu_s_per_gb(self) -> float:
        return statistics.mean(self._cpu_s_per_gb) if self._cpu_s_per_gb else math.nan


def raw_read(part: Part, block: int, depth: int, seconds: float) -> float:
    """GB/s of `depth` threads with preadv."""
    fd = os.open(part.path, os.O_RDONLY | os.O_DIRECT)
    end, counts = time.monotonic() + seconds, [0] * depth
    blocks = part.size_bytes // block

    def work(number: int) -> None:
        buffer, dice = mmap.mmap(-1, block), random.Random(number)
        while time.monotonic() < end:
            at = part.start + dice.randrange(blocks) * block
            os.preadv(fd, [buffer], at // 4096 * 4096)
            counts[number] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    return sum(counts) * block / seconds / 1e9


def write_all(path: Path, start: int, end: int) -> None:
    """Write this part of a file; no table of a segment is in it."""
    piece = os.urandom(16 * MIB)
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(start)
        for at in range(start, end, len(piece)):
            file.write(piece[: end - at])
        os.fsync(file.fileno())


def cpu_s(pid: int) -> float:
    """Processor time of a process and all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Spent:
    """Processor time of those who take part, since it was made."""

    def __init__(self, pool: LocalPool) -> None:
        self._pids = [pool.stores[0].pid, pool.master.pid]
        self._before = self._now()

    def _now(self) -> list[float]:
        return [*map(cpu_s, self._pids), own_cpu_s()]

    def per_gb(self, size_bytes: int) -> tuple[float, ...]:
        """Seconds for each GB: store daemon, master, this process."""
        pairs = zip(self._now(), self._before, strict=True)
        return tuple((now - before) / size_bytes * 1e9 for now, before in pairs)


class Bench:
    def __init__(self, pool: LocalPool, client: Client, path: Path, dram_bytes: int) -> None:
        self.pool, self.client, self.dram_bytes = pool, client, dram_bytes
        ssd_bytes = pool.plan.ssd_bytes
        self.read_from = Part(path, DATA_START, ssd_bytes - DATA_START)
        self.written = Part(path, ssd_bytes, FIO_BYTES)
        self.buffer = client.alloc(BATCH * BLOCK)
        self.buffer.array[:] = np.random.default_rng(1).integers(0, 255, BATCH * BLOCK, np.uint8)
        self.rows: dict[str, list[tuple[float, ...]]] = {}
        """Name -> (ours, fio's, cpu seconds per GB: daemon, master, this process, fio)."""
        self.flushed: dict[str, list[Fio]] = {}

    def fio(self, mode: str, block: int, depth: int) -> Fio:
        """Run once; to be run again after the case."""
        part = self.written if "write" in mode else self.read_from
        fio = Fio(part, mode, block, depth)
        fio.run()
        if "write" in mode:  # as a copy is: it counts when it survives a power cut
            flushed = Fio(part, mode, block, depth, flush_bytes=FLUSH_BYTES)
            flushed.run()
            self.flushed.setdefault(f"fio {block >> 10} KiB, flushed", []).append(flushed)
        return fio

    def note(self, name: str, ours: float, fio: Fio, cpu: tuple[float, ...]) -> None:
        fio.run()
        row = (ours, fio.gb_per_s, *cpu, fio.cpu_s_per_gb)
        self.rows.setdefault(name, []).append(row)
        spent = " + ".join(f"{s:.2f}" for s in cpu)
        print(f"  {name}: {ours:.2f} beside {row[1]:.2f} GB/s, {spent} cpu s/GB", flush=True)

    def put(self, keys: list[str], size: int) -> None:
        start = address_of(self.buffer.array)
        addresses = np.arange(len(keys), dtype=np.uint64) * np.uint64(size) + np.uint64(start)
        results = self.client.put_from_batch(keys, addresses=addresses, lengths=size)
        results.raise_for_errors()

    def get(self, keys: list[str], size: int) -> int:
        start = address_of(self.buffer.array)
        addresses = np.arange(len(keys), dtype=np.uint64) * np.uint64(size) + np.uint64(start)
        results = self.client.get_into_batch(keys, addresses=addresses, lengths=size)
        results.raise_for_errors()
        return int(np.count_nonzero(results.hits))

    def write(self, number: int, count: int, size: int) -> list[str]:
        """Put so much that nearly all of it is copied; the keys. What is measured is how fast it is
        copied while there always is more to copy: from the first copy on."""
        keys = [f"{size}-{number}-{i}" for i in range(count)]
        fio = self.fio("randwrite", size, 16)
        with open_admin(self.pool.lane, self.pool.grpc, 10.0) as admin:
            copied = before = at_first = admin.status().demoted_bytes
            began_s, spent = 0.0, Spent(self.pool)
            per_call = max(1, 16 * MIB // size)
            for first in range(0, count, per_call):
                self.put(keys[first : first + per_call], size)
                goal = before + (first + per_call) * size - self.dram_bytes * 7 // 10
                while copied < goal:  # as far as is known: to ask is not free either
                    copied = admin.status().demoted_bytes
                    if copied < goal:
                        time.sleep(POLL_S)
                if not began_s and copied:
                    at_first, began_s, spent = copied, time.monotonic(), Spent(self.pool)
            written = admin.status().demoted_bytes - at_first
            took_s, cpu = time.monotonic() - began_s, spent.per_gb(written)
        self.note(f"write-back {size >> 10} KiB", written / took_s / 1e9, fio, cpu)
        self.evict_memory()
        return keys

    def drain(self, number: int, size: int) -> None:
        """Fill memory while the daemon has no SSD, then start it again with one: how fast what is
        cold is copied with nobody putting meanwhile, so what the daemon makes of the device."""
        store = self.pool.stores[0]
        ssd = {name: store.spec.flags.pop(name) for name in ("ssd", "ssd-size", "ssd-object-size")}
        fio = self.fio("randwrite", size, 16)
        with open_admin(self.pool.lane, self.pool.grpc, 10.0) as admin:
            self.restart(admin)
            count = self.dram_bytes * 19 // 20 // size
            keys = [f"drain-{size}-{number}-{i}" for i in range(count)]
            per_call = max(1, 16 * MIB // size)
            for first in range(0, count, per_call):
                self.put(keys[first : first + per_call], size)
            store.spec.flags |= ssd
            self.restart(admin)  # which counts from nought again, as its node does without SSD
            changed_s = end_s = time.monotonic() + 10.0
            began_s, at_first, last, spent, cpu = 0.0, 0, 0, Spent(self.pool), (0.0,)
            while time.monotonic() < min(end_s, changed_s + 0.5):
                copied = admin.status().demoted_bytes
                if not began_s and copied:
                    began_s, at_first, spent = time.monotonic(), copied, Spent(self.pool)
                if copied != last:
                    changed_s, last = time.monotonic(), copied
                    cpu = spent.per_gb(max(1, last - at_first))
                time.sleep(POLL_S)
        written, took_s = last - at_first, changed_s - began_s
        assert written > self.dram_bytes // 4, f"no more than {written} bytes were copied"
        self.note(f"write-back {size >> 10} KiB, alone", written / took_s / 1e9, fio, cpu)

    def restart(self, admin: Admin) -> None:
        """The daemon, with its flags as they are now; what is in its memory stays."""
        store = self.pool.stores[0]
        store.stop()
        store.start()
        store.wait_ready()
        self.pool.wait_for_memory(admin)

    def evict_memory(self) -> None:
        """Fill memory with something else, so that what was put is on the SSD alone."""
        for number in range(2 * self.dram_bytes // (8 * BLOCK)):
            self.put([f"filler-{time.monotonic_ns()}-{number}-{i}" for i in range(8)], BLOCK)
            time.sleep(0.03)

    def read(self, name: str, keys: list[str], size: int, batch: int, depth: int) -> None:
        fio = self.fio("randread", size, depth)
        hits = self.client.stats().ssd_hits
        spent, began_s, got = Spent(self.pool), time.monotonic(), 0
        for first in range(0, len(keys), batch):
            got += self.get(keys[first : first + batch], size)
        took_s, cpu = time.monotonic() - began_s, spent.per_gb(got * size)
        on_ssd = self.client.stats().ssd_hits - hits
        # What was put faster than it was copied may have been evicted: what is there counts.
        assert on_ssd > 0.9 * got > 0.5 * len(keys), f"{got} were there, {on_ssd} on the SSD"
        self.note(name, got * size / took_s / 1e9, fio, cpu)

    def print(self) -> None:
        print(
            f"{'medians':28} {'pool':>10} {'fio':>10} {'ratio':>6}  cpu s/GB: daemon, master,",
            end="",
        )
        print(" this process; fio")
        for name, rows in self.rows.items():
            ours, other, *cpu = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(row[0] / row[1] for row in rows)
            shown = " ".join(f"{seconds:6.2f}" for seconds in cpu)
            print(f"{name:28} {ours:5.2f} GB/s {other:5.2f} GB/s {ratio:6.2f} {shown}")
        for name, runs in self.flushed.items():
            print(f"{name:28} {'':10} {statistics.median(r.gb_per_s for r in runs):5.2f} GB/s")


def run(options: argparse.Namespace) -> None:
    cases, sizes = options.cases.split(","), options.sizes.split(",")
    plan = PoolPlan(
        nodes=1,
        dram_bytes=options.dram_mib * MIB,
        ssd_directory=options.directory,
        ssd_bytes=5 * options.dram_mib * MIB,
        ssd_object_bytes=SMALL,
    )
    with running_pool(plan, Interrupts()) as pool:
        assert pool.ssd_directory is not None
        path = pool.ssd_directory / "node0.ssd"
        # Written once, both: what was only allocated is read without the device, and its first
        # write costs the file system more than the later ones.
        write_all(path, DATA_START, plan.ssd_bytes + FIO_BYTES)
        for kind in options.transports.split(","):
            with Client(pool.lane, transports=(kind,), deadline_s=60.0) as client:
                bench = Bench(pool, client, path, options.dram_mib * MIB)
                put_bytes = options.dram_mib * MIB * 15 // 8
                for number in range(options.rounds):
                    for name, size, count in (
                        ("large", BLOCK, put_bytes // BLOCK),
                        ("small", SMALL, put_bytes // SMALL // 512 * 512),
                    ):
                        if name not in sizes:
                            continue
                        if "drain" in cases:
                            bench.drain(number, size)
                        keys = bench.write(number, count, size) if "puts" in cases else []
                        if "reads" in cases:
                            read(bench, kind, keys, size, number)
                bench.print()


def read(bench: Bench, kind: str, keys: list[str], size: int, number: int) -> None:
    if size == BLOCK:
        bench.read(f"{kind}, 2.5 MiB x 64", keys[: 2 * BATCH], size, BATCH, 16)
        bench.read(f"{kind}, 2.5 MiB, one by one", keys[2 * BATCH : 3 * BATCH], size, 1, 1)
        return
    half = len(keys) // 2
    bench.read(f"{kind}, 64 KiB x 256, as put", keys[:half], size, 256, 16)
    rest = keys[half:]
    random.Random(number).shuffle(rest)
    bench.read(f"{kind}, 64 KiB x 256, shuffled", rest, size, 256, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--cases", default="drain,puts,reads", help="reads need puts")
    parser.add_argument("--dram-mib", type=int, default=2048, help="of memory")
    parser.add_argument("--sizes", default="large,small")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
