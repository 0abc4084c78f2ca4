"""Reads and writes of a pool's SSD beside fio on the same file: same block size and depth, one run.

    python benchmarks/ssd.py [--directory DIR] [--rounds N]

A pool of its own: one daemon with little memory, so that what is put ends on its SSD. Each object
is read once, from the SSD; the page cache has nothing of it (direct I/O). Rounds are interleaved,
and medians are printed with the ratio to fio (or to raw preadv where there is no fio).
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import resource
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cenote.cli.connect import open_admin
from cenote.cli.interrupts import Interrupts
from cenote.cli.local_pool import LocalPool, PoolPlan, running_pool
from cenote.client import Client
from cenote.runtime.memory import address_of

MIB = 1 << 20
BLOCK = 5 * MIB // 2
BATCH = 64
SMALL = 64 << 10
DRAM = 512 * MIB


def fio(path: Path, mode: str, block: int, depth: int, seconds: float = 2.0) -> float:
    """GB/s of random direct I/O."""
    if shutil.which("fio") is None:
        return raw_read(path, block, depth, seconds) if "read" in mode else float("nan")
    command = [
        "fio", "--name=x", f"--filename={path}", f"--rw={mode}", f"--bs={block}", "--direct=1",
        "--ioengine=libaio", f"--iodepth={depth}", f"--runtime={seconds}", "--time_based",
        f"--size={1 << 30}", "--output-format=terse",
    ]  # fmt: skip
    fields = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split(";")
    return int(fields[6 if "read" in mode else 47]) * 1024 / 1e9


def raw_read(path: Path, block: int, depth: int, seconds: float) -> float:
    """GB/s of `depth` threads with preadv."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    end, counts = time.monotonic() + seconds, [0] * depth
    blocks = path.stat().st_size // block

    def work(number: int) -> None:
        buffer, dice = mmap.mmap(-1, block), random.Random(number)
        while time.monotonic() < end:
            os.preadv(fd, [buffer], dice.randrange(blocks) * block // 4096 * 4096)
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


class Bench:
    def __init__(self, pool: LocalPool, client: Client, path: Path) -> None:
        self.pool, self.client, self.path = pool, client, path
        self.buffer = client.alloc(BATCH * BLOCK)
        self.buffer.array[:] = np.random.default_rng(1).integers(0, 255, BATCH * BLOCK, np.uint8)
        self.rows: dict[str, list[tuple[float, float, float]]] = {}
        """Name -> (ours, fio's, cpu seconds per GB)."""

    def note(self, name: str, ours: float, other: float, cpu: float) -> None:
        self.rows.setdefault(name, []).append((ours, other, cpu))
        print(f"  {name}: {ours:.2f} beside {other:.2f} GB/s, {cpu:.2f} cpu s/GB", flush=True)

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

    def write(self, number: int, count: int, size: int) -> Iterator[str]:
        """Put so much that nearly all of it is copied; the keys. What is measured is how fast it is
        copied while there always is more to copy: from the first copy on."""
        keys = [f"{size}-{number}-{i}" for i in range(count)]
        daemon = self.pool.stores[0].pid
        with open_admin(self.pool.lane, self.pool.grpc, 10.0) as admin:
            before = at_first = admin.status().demoted_bytes
            began_s, cpu = 0.0, cpu_s(daemon)
            per_call = max(1, 16 * MIB // size)
            for first in range(0, count, per_call):
                self.put(keys[first : first + per_call], size)
                goal = before + (first + per_call) * size - DRAM * 7 // 10
                while (copied := admin.status().demoted_bytes) < goal:
                    time.sleep(0.004)
                if not began_s and copied > before:
                    at_first, began_s, cpu = copied, time.monotonic(), cpu_s(daemon)
            written = admin.status().demoted_bytes - at_first
            took_s = time.monotonic() - began_s
            name = f"write-back {size >> 10} KiB"
            other = fio(self.path.with_name("fio"), "randwrite", size, 16)
            self.note(name, written / took_s / 1e9, other, (cpu_s(daemon) - cpu) / written * 1e9)
            self.evict_memory()
        yield from keys

    def drain(self, number: int, size: int) -> None:
        """Fill memory at once, then watch how fast what is cold of it is copied, with nobody
        putting meanwhile: what the daemon makes of the device."""
        count = DRAM * 9 // 10 // size
        keys = [f"drain-{size}-{number}-{i}" for i in range(count)]
        daemon, per_call = self.pool.stores[0].pid, max(1, 16 * MIB // size)
        with open_admin(self.pool.lane, self.pool.grpc, 10.0) as admin:
            for first in range(0, count, per_call):
                self.put(keys[first : first + per_call], size)
            began_s = changed_s = time.monotonic()
            before = last = admin.status().demoted_bytes
            cpu = cpu_s(daemon)
            while time.monotonic() < changed_s + 0.5:
                copied = admin.status().demoted_bytes
                if copied != last:
                    changed_s, last = time.monotonic(), copied
                time.sleep(0.002)
        spent = cpu_s(daemon) - cpu
        other = fio(self.path.with_name("fio"), "randwrite", size, 16)
        written, took_s = last - before, changed_s - began_s
        assert written > DRAM // 8, f"{written} bytes were left to copy"
        name = f"write-back {size >> 10} KiB, alone"
        self.note(name, written / took_s / 1e9, other, spent / written * 1e9)

    def evict_memory(self) -> None:
        """Fill memory with something else, so that what was put is on the SSD alone."""
        for number in range(2 * DRAM // (8 * BLOCK)):
            self.put([f"filler-{time.monotonic_ns()}-{number}-{i}" for i in range(8)], BLOCK)
            time.sleep(0.03)

    def read(self, name: str, keys: list[str], size: int, batch: int, depth: int) -> None:
        daemon = self.pool.stores[0].pid
        other = fio(self.path.with_name("fio"), "randread", size, depth)
        hits = self.client.stats().ssd_hits
        cpu, began_s, got = cpu_s(daemon) + own_cpu_s(), time.monotonic(), 0
        for first in range(0, len(keys), batch):
            got += self.get(keys[first : first + batch], size)
        took_s = time.monotonic() - began_s
        spent = cpu_s(daemon) + own_cpu_s() - cpu
        on_ssd = self.client.stats().ssd_hits - hits
        # What was put faster than it was copied may have been evicted: what is there counts.
        assert on_ssd > 0.9 * got > 0.5 * len(keys), f"{got} were there, {on_ssd} on the SSD"
        self.note(name, got * size / took_s / 1e9, other, spent / (got * size) * 1e9)

    def print(self) -> None:
        print(f"{'':26} {'pool':>10} {'fio':>10} {'ratio':>7} {'cpu s/GB':>9}")
        for name, rows in self.rows.items():
            ours, other, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(a / b for a, b, _ in rows)
            print(f"{name:26} {ours:7.2f} GB/s {other:5.2f} GB/s {ratio:6.2f} {cpu:9.2f}")


def run(directory: Path, rounds: int, transports: list[str]) -> None:
    plan = PoolPlan(
        nodes=1, dram_bytes=DRAM, ssd_directory=directory, ssd_bytes=3 << 30, ssd_object_bytes=SMALL
    )
    with running_pool(plan, Interrupts()) as pool:
        assert pool.ssd_directory is not None
        path = pool.ssd_directory / "node0.ssd"
        # Written once, both: what was only allocated is read without the device, and its first
        # write costs the file system more than the later ones.
        write_all(path, 64 * MIB, path.stat().st_size)
        write_all(path.with_name("fio"), 0, 1 << 30)
        for kind in transports:
            with Client(pool.lane, transports=(kind,), deadline_s=60.0) as client:
                bench = Bench(pool, client, path)
                for number in range(rounds):
                    bench.drain(number, BLOCK)
                    bench.drain(number, SMALL)
                    keys = list(bench.write(number, 6 * BATCH, BLOCK))
                    bench.read(f"{kind}, 2.5 MiB x 64", keys[: 2 * BATCH], BLOCK, BATCH, 16)
                    bench.read(
                        f"{kind}, 2.5 MiB, one by one", keys[2 * BATCH : 3 * BATCH], BLOCK, 1, 1
                    )
                    small = list(bench.write(number, 12_288, SMALL))
                    random.Random(number).shuffle(small)
                    bench.read(f"{kind}, 64 KiB x 256, shuffled", small, SMALL, 256, 16)
                bench.print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--transports", default="shm,tcp")
    options = parser.parse_args()
    run(options.directory, options.rounds, options.transports.split(","))


if __name__ == "__main__":
    main()
