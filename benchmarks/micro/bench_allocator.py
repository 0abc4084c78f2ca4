"""What the allocator costs and wastes: ns per key of each operation, and a churned pool.

    python benchmarks/micro/bench_allocator.py
    python benchmarks/micro/bench_allocator.py --churn [--order touched] [--pieces-max 8]

Churn: objects of 70 % 4 KiB, 20 % 256 KiB, 10 % 3 MiB are put into a full segment; when one fits
neither in one piece nor in a few, the oldest objects are evicted, a quarter of its size at a time,
and it is tried again. `--order
touched` spares half of the oldest, as if they had been read meanwhile, `random` evicts any.
Utilisation is what is allocated when a put has to evict. CPU time per put includes evictions and
what this script does (about 1 us), in ten equal parts of the run: it must stay flat.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque

import numpy as np

from cenote.master.allocator import SegmentAllocator

UNIT_BYTES = 64
SMALL = 4096 // UNIT_BYTES
SIZES_UNITS = [SMALL, (256 << 10) // UNIT_BYTES, (3 << 20) // UNIT_BYTES]
SHARES = [0.7, 0.2, 0.1]
Extents = list[tuple[int, int]]


class Victims:
    """What is in the pool, in the order in which it goes."""

    def __init__(self, order: str, chance: random.Random) -> None:
        self.order = order
        self.chance = chance
        self.live: deque[Extents] = deque()

    def next(self) -> Extents:
        if self.order == "touched":
            while self.chance.random() < 0.5:
                self.live.rotate(-1)
        elif self.order == "random":
            self.live.rotate(self.chance.randrange(len(self.live)))
        return self.live.popleft()


def churn(size_units: int, operations: int, order: str, pieces_max: int) -> dict[str, float]:
    """Overwrite a full segment."""
    chance = random.Random(1)
    allocator = SegmentAllocator(size_units)
    victims = Victims(order, chance)
    spent = []
    utilisation: list[float] = []
    pieces: list[int] = []
    for _ in range(10):
        started = time.thread_time_ns()
        for length in chance.choices(SIZES_UNITS, SHARES, k=operations // 10):
            full = False
            while True:
                offset = allocator.allocate(length)
                found = [(offset, length)] if offset >= 0 else None
                found = found or allocator.allocate_pieces(length, pieces_max)
                if found:
                    break
                if not full:
                    full = True
                    utilisation.append(allocator.used_units / size_units)
                freed = 0
                while freed < length // 4:
                    for at, size in victims.next():
                        allocator.free(at, size)
                        freed += size
            victims.live.append(found)
            if len(found) > 1:
                pieces.append(len(found))
        spent.append((time.thread_time_ns() - started) / (operations // 10))
    allocator.check()
    return {
        "utilisation, %, mean": 100 * float(np.mean(utilisation)),
        "utilisation, %, lowest": 100 * float(np.min(utilisation)),
        "puts in pieces, %": 100 * len(pieces) / operations,
        "pieces of those, mean": float(np.mean(pieces or [0])),
        "free runs at the end": allocator.free_runs,
    } | {f"CPU ns per put, part {i}": value for i, value in enumerate(spent)}


def fragmented(size_units: int) -> tuple[SegmentAllocator, list[int]]:
    """A full segment of 4 KiB objects of which a random half was freed, and the other half."""
    allocator = SegmentAllocator(size_units)
    offsets = list(range(0, size_units // SMALL * SMALL, SMALL))
    allocator.allocate(size_units)
    random.Random(1).shuffle(offsets)
    half = len(offsets) // 2
    for offset in offsets[:half]:
        allocator.free(offset, SMALL)
    return allocator, offsets[half:]


def singles(size_units: int) -> dict[str, float]:
    """ns per call of scalar operations."""
    clock = time.perf_counter_ns
    count = 20_000
    allocator = SegmentAllocator(size_units)
    start = clock()
    for _ in range(count):
        allocator.allocate(SMALL)
    result = {"allocate, empty segment": (clock() - start) / count}
    start = clock()
    for offset in range(0, count * SMALL, SMALL):
        allocator.free(offset, SMALL)
    result["free, in order"] = (clock() - start) / count
    allocator, used = fragmented(size_units)
    result["(free runs when fragmented)"] = allocator.free_runs
    start = clock()
    for _ in range(count):
        allocator.allocate(SMALL)
    result["allocate, fragmented"] = (clock() - start) / count
    start = clock()
    for offset in used[:count]:
        allocator.free(offset, SMALL)
    result["free, fragmented"] = (clock() - start) / count
    start = clock()
    for _ in range(100):
        allocator.allocate_pieces(SMALL * 60)
    result["allocate_pieces, fragmented, us"] = (clock() - start) / 100_000
    return result


def batches(size_units: int, n: int, rounds: int = 300) -> dict[str, float]:
    """Median ns per key of batch operations."""
    clock = time.perf_counter_ns
    lengths = np.full(n, SMALL)
    allocator = SegmentAllocator(size_units)
    times = np.zeros((2, rounds))
    for i in range(rounds):
        marks = [clock()]
        offsets = allocator.allocate_run(lengths)
        marks.append(clock())
        assert offsets is not None
        marks.append(clock())
        allocator.free_bulk(offsets, lengths)
        marks.append(clock())
        times[:, i] = np.diff(marks)[::2]
    result = {
        f"allocate_run, {n}": float(np.median(times[0])) / n,
        f"free_bulk, one run, {n}": float(np.median(times[1])) / n,
    }
    allocator, used = fragmented(size_units)
    times = np.zeros((2, rounds))
    for i in range(rounds):
        victims = np.array(used[i * n : i * n + n])
        marks = [clock()]
        allocator.allocate_many(lengths)
        marks.append(clock())
        allocator.free_bulk(victims, lengths)
        marks.append(clock())
        times[:, i] = np.diff(marks)
    result[f"allocate_many, fragmented, {n}"] = float(np.median(times[0])) / n
    result[f"free_bulk, scattered, {n}"] = float(np.median(times[1])) / n
    rest = np.array(used[rounds * n :])
    start = clock()
    allocator.free_bulk(rest, np.full(len(rest), SMALL))
    result[f"free_bulk, scattered, {len(rest)}"] = (clock() - start) / len(rest)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=4.0, help="size of the segment")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--churn", action="store_true")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--order", choices=["oldest", "touched", "random"], default="oldest")
    parser.add_argument("--pieces-max", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    size_units = int(args.gib * (1 << 30)) // UNIT_BYTES
    if args.churn:
        result = churn(size_units, args.operations, args.order, args.pieces_max)
    else:
        result = singles(size_units) | batches(size_units, args.batch)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:40s}{value:12.1f}")


if __name__ == "__main__":
    main()
