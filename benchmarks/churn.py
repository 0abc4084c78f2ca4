"""Mixed sizes churned at a full pool, in the master's state alone: what is used, what fails, what
it costs, and whether that changes over time.

    python benchmarks/churn.py [--operations 1000000] [--capacity 16GiB] [--nodes 1] [--json]

Objects of 70 % 4 KiB, 20 % 256 KiB, 10 % 3 MiB, in batches of 1 to --batch keys. Of 100 operations
(an operation is one key) about 75 are puts of new keys, 20 reads under a lease that is held for a
while, 5 removes. Several puts are under way at once, as with several clients, and what the master
tells the daemons (more slots) is done a moment later. Reported by tenth of the run: utilisation
(payload of what is present, over all the memory that the daemons were given: slot tables, free and
granted space are not counted as used), CPU microseconds of the master's state per key put (start,
commit and its share of the ticks), evictions; at the end what failed (must be 0).

The run is checked against a model: what is present adds up to what the master says, and no two
objects share a byte.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT, OBJECT, PUT, SLOT, ObjectStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import InstructionsWaiting
from cenote.master.node_counters import NodeCounters
from cenote.master.state import MasterState, StateConfig
from cenote.runtime.units import format_size, parse_size_bytes
from cenote.store.dram import plan_segments

SIZES: Final = np.array([4 << 10, 256 << 10, 3 << 20], np.uint64)
SHARES: Final = (0.7, 0.2, 0.1)
PUT_SHARE, READ_SHARE = 0.75, 0.20
SESSION: Final = b"s" * 16
DECILES: Final = 10
TICK_S: Final = 0.02
BEAT_S: Final = 1.0
KEYS_PER_S: Final = 20_000
"""How fast the state's clock runs."""
UNDER_WAY_MAX: Final = 4
LEASES_HELD_MAX: Final = 8
SAMPLE_STEPS: Final = 8

U64 = NDArray[np.uint64]


@dataclass
class Tenth:
    """One part of the run."""

    operations: int = 0
    puts: int = 0
    state_s: float = 0.0
    utilisation_min: float = 1.0
    utilisation_sum: float = 0.0
    samples: int = 0
    evicted: int = 0

    @property
    def us_per_put(self) -> float:
        return self.state_s / max(1, self.puts) * 1e6

    @property
    def utilisation_mean(self) -> float:
        return self.utilisation_sum / max(1, self.samples)


@dataclass
class Report:
    tenths: list[Tenth] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    """Keys that were not granted, by status."""
    objects: int = 0
    capacity_bytes: int = 0
    """All that the daemons were given."""

    @property
    def utilisation_min(self) -> float:
        return min(tenth.utilisation_min for tenth in self.tenths)


class Churn:
    """A state with `nodes` daemons of one segment each, and the model of what it holds."""

    def __init__(
        self, capacity_bytes: int, nodes: int = 1, batch_max: int = 32, seed: int = 1
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._batch_max = batch_max
        self._now_s = 100.0
        self._tick_at_s = self._beat_at_s = 0.0
        self.state = MasterState(StateConfig(), 1)
        self._apply(c.OpenSession(SESSION, boot_id="host"))
        self._apply(c.OpenNamespace("churn", b"", True, 1, 7))
        self._instructed: set[int] = set()
        for number in range(nodes):
            (plan,) = plan_segments(capacity_bytes // nodes)
            report = c.SegmentReport(
                index=0,
                tier=1,
                incarnation=bytes([number]) * 16,
                size_bytes=plan.data_bytes,
                ready_bytes=plan.data_bytes,
                unit_bytes=64,
                slots=plan.slots,
                retired=np.zeros(0, EXTENT),
            )
            uuid, none = bytes([number]) * 16, np.zeros(0, SLOT)
            self._apply(c.Attach(uuid, f"n{number}", "host", f"d{number}", [], [report], none))
        self.report = Report(capacity_bytes=capacity_bytes)
        self._keys: list[tuple[U64, U64]] = []
        self._count = 0
        self._under_way: deque[tuple[int, int]] = deque()
        self._leases: deque[int] = deque()
        self._request = 0

    def _apply(self, command: c.Command) -> object:
        reply, effects = self.state.apply(command, self._now_s)
        for effect in effects:
            if type(effect) is InstructionsWaiting:
                self._instructed.add(effect.node_id)
        return reply

    # ---- the run ------------------------------------------------------------------------------

    def fill(self) -> None:
        """Until the first evictions: from there on the pool is full."""
        tenth = Tenth()
        while not self.state.counters.evicted:
            self._put(tenth)
            self._pass_time(tenth, self._batch_max)

    def run(self, operations: int) -> Report:
        """So many operations at the full pool, in ten parts."""
        for _ in range(DECILES):
            tenth = Tenth()
            self.report.tenths.append(tenth)
            evicted = self.state.counters.evicted
            step = 0
            while tenth.operations < operations // DECILES:
                tenth.operations += self._step(tenth)
                step += 1
                if step % SAMPLE_STEPS == 0:
                    self._sample(tenth)
            self._sample(tenth)
            tenth.evicted = self.state.counters.evicted - evicted
        self.report.objects = self.state.status(self._now_s).objects
        return self.report

    def _step(self, tenth: Tenth) -> int:
        kind = self._rng.random()
        if kind < PUT_SHARE:
            done = self._put(tenth)
        elif kind < PUT_SHARE + READ_SHARE:
            done = self._read()
        else:
            done = self._remove()
        self._pass_time(tenth, done)
        return done

    def _sample(self, tenth: Tenth) -> None:
        used = self.state.status(self._now_s).used_bytes / self.report.capacity_bytes
        tenth.utilisation_min = min(tenth.utilisation_min, used)
        tenth.utilisation_sum += used
        tenth.samples += 1

    def _batch(self) -> int:
        return int(self._rng.integers(1, self._batch_max + 1))

    def _put(self, tenth: Tenth) -> int:
        n = self._batch()
        digests = self._rng.integers(0, 1 << 63, (n, 2), dtype=np.uint64)
        sizes = self._rng.choice(SIZES, n, p=SHARES)
        self._keys.append((digests, sizes))
        self._count += n
        command = c.PutStart(SESSION, self._next_request(), 1, 1, digests, sizes)
        began_s = time.thread_time()
        reply = self.state.put_start(command, self._now_s)
        tenth.state_s += time.thread_time() - began_s
        tenth.puts += n
        statuses = np.frombuffer(reply.puts, PUT)["status"]
        granted = int(np.count_nonzero(statuses == PutStatus.GRANTED))
        for status in statuses[statuses != PutStatus.GRANTED].tolist():
            name = PutStatus(status).name
            self.report.failed[name] = self.report.failed.get(name, 0) + 1
        if granted:
            self._under_way.append((reply.grant_id, granted))
        while len(self._under_way) > UNDER_WAY_MAX:
            self._commit(tenth)
        return n

    def _commit(self, tenth: Tenth) -> None:
        grant_id, granted = self._under_way.popleft()
        checksums = np.zeros(granted, np.uint64)
        command = c.PutCommit(SESSION, self._next_request(), grant_id, None, checksums)
        began_s = time.thread_time()
        self.state.put_commit(command, self._now_s)
        self._take_effects()
        tenth.state_s += time.thread_time() - began_s

    def _read(self) -> int:
        digests = self._recent()
        reply = self.state.acquire(c.Acquire(SESSION, 1, 1, digests, 5000), self._now_s)
        if reply.lease_id:
            self._leases.append(reply.lease_id)
        while len(self._leases) > LEASES_HELD_MAX:
            lease = np.array([self._leases.popleft()], np.uint64)
            self.state.piggyback(c.Piggyback(released_lease_ids=lease), self._now_s)
        return len(digests)

    def _remove(self) -> int:
        digests = self._recent()
        self._apply(c.Remove(1, 1, digests))
        return len(digests)

    def _recent(self) -> U64:
        """Some keys of one of the last puts, that the pool still holds for the most part."""
        last = max(1, self.state.status(self._now_s).objects * 2 // self._batch_max)
        digests, _ = self._keys[-int(self._rng.integers(1, min(last, len(self._keys)) + 1))]
        return np.ascontiguousarray(digests[: self._batch()])

    def _pass_time(self, tenth: Tenth, operations: int) -> None:
        self._now_s += operations / KEYS_PER_S
        if self._now_s < self._tick_at_s:
            return
        self._tick_at_s = self._now_s + TICK_S
        began_s = time.thread_time()
        self._apply(c.Tick())
        tenth.state_s += time.thread_time() - began_s
        if self._now_s >= self._beat_at_s:
            self._beat_at_s = self._now_s + BEAT_S
            self._instructed.update(node.node_id for node in self.state.nodes(self._now_s))
        for node_id in list(self._instructed):
            self._obey(node_id)
        self._instructed.clear()

    def _obey(self, node_id: int) -> None:
        """What the daemon does with instructions: all of them, then say so."""

        def beat(done: int) -> c.HeartbeatReply:
            counters = NodeCounters()
            reply = self._apply(c.Heartbeat(node_id, 1, [], done, [], [], counters))
            assert isinstance(reply, c.HeartbeatReply)
            return reply

        if instructions := beat(0).instructions:
            beat(instructions[-1].number)

    def _take_effects(self) -> None:
        for effect in self.state.take_effects():
            if type(effect) is InstructionsWaiting:
                self._instructed.add(effect.node_id)

    def _next_request(self) -> int:
        self._request += 1
        return self._request

    # ---- the model ----------------------------------------------------------------------------

    def check(self) -> None:
        """What is present adds up to what the master says is used, and nothing overlaps."""
        while self._under_way:
            self._commit(Tenth())
        present_bytes, ranges = 0, []
        for digests, sizes in self._keys:
            reply = self.state.acquire(
                c.Acquire(SESSION, 1, 1, digests, 0, lease=False), self._now_s
            )
            objects = np.frombuffer(reply.objects, OBJECT)
            hits = objects["status"] != ObjectStatus.MISS
            assert (objects["size"][hits] == sizes[hits]).all(), "an object of another size"
            present_bytes += int(sizes[hits].sum())
            ranges.append(np.frombuffer(reply.extents, EXTENT))
        extents = np.concatenate(ranges)
        assert int(extents["length"].sum()) == present_bytes, "extents do not add up"
        used_bytes = self.state.status(self._now_s).used_bytes
        assert used_bytes == present_bytes, f"{used_bytes} bytes used, {present_bytes} present"
        extents = np.sort(extents, order=("segment", "offset"))
        ends = extents["offset"] + extents["length"]
        same = extents["segment"][1:] == extents["segment"][:-1]
        assert (~same | (ends[:-1] <= extents["offset"][1:])).all(), "two objects share bytes"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--capacity", type=parse_size_bytes, default=16 << 30, metavar="SIZE")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32, metavar="KEYS")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    churn = Churn(options.capacity, options.nodes, options.batch, options.seed)
    began_s = time.monotonic()
    churn.fill()
    report = churn.run(options.operations)
    churn.check()
    if options.json:
        rows = [asdict(t) | {"us_per_put": t.us_per_put} for t in report.tenths]
        print(json.dumps({"failed": report.failed, "objects": report.objects, "tenths": rows}))
    else:
        print_report(report, options, time.monotonic() - began_s)
    return 1 if report.failed else 0


def print_report(report: Report, options: argparse.Namespace, took_s: float) -> None:
    print(
        f"{options.operations} operations on {format_size(report.capacity_bytes)} in"
        f" {options.nodes} segments, {report.objects} objects at the end, {took_s:.0f} s"
    )
    print("tenth  utilisation min   mean    µs/put   evicted")
    for number, tenth in enumerate(report.tenths, 1):
        print(
            f"{number:5}  {tenth.utilisation_min:15.1%} {tenth.utilisation_mean:6.1%}"
            f" {tenth.us_per_put:9.2f} {tenth.evicted:9}"
        )
    print(f"failed: {report.failed or 0}; lowest utilisation {report.utilisation_min:.1%}")


if __name__ == "__main__":
    sys.exit(main())
