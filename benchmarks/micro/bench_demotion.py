"""Planning copies to an SSD in process: CPU microseconds of the master for each, daemons pretended.

python benchmarks/micro/bench_demotion.py [--copies 4096] [--rounds 5]

`plan` is what orders copies out of the queue of what is cold, room on the device included; `look`
is what fills that queue.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cenote.api.rows import COPIED, EXTENT, SLOT
from cenote.master import commands as c
from cenote.master import demotion
from cenote.master.node_counters import NodeCounters
from cenote.master.state import MasterState, StateConfig

SESSION = b"s" * 16
NODE = b"n" * 16
PAYLOAD_BYTES = 64 << 10
CHAIN = 32
"""Blocks that are put together."""


@dataclass(frozen=True)
class Case:
    title: str
    namespaces: int = 1
    quota_share: float = 0.0
    """Of the SSD, for each namespace."""
    budget: bool = False
    ssd_objects: int = 1 << 18


CASES = (
    Case("no quotas"),
    Case("no quotas, 4 namespaces", 4),
    Case("no quotas, device full", 4, 0.0, False, 1 << 13),
    Case("budget of writes", 1, 0.0, True),
    Case("quotas, room", 4, 0.1),
    Case("quotas on half of a full device", 4, 0.125, False, 1 << 13),
    Case("quotas on all of a full device", 4, 0.25, False, 1 << 13),
    Case("the same, 16 namespaces", 16, 1 / 16, False, 1 << 13),
)


class Watch:
    """CPU time in some functions of a module."""

    def __init__(self, module: Any, *names: str) -> None:
        self.spent_ns = dict.fromkeys(names, 0)
        for name in names:
            setattr(module, name, self._watched(getattr(module, name), name))

    def _watched(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            start = time.process_time_ns()
            try:
                return function(*arguments)
            finally:
                self.spent_ns[name] += time.process_time_ns() - start

        return watched


class Bench:
    def __init__(self, case: Case, memory_objects: int) -> None:
        self.now_s, self.turn, self.obeyed, self.done = 100.0, 0, 0, np.zeros(0, COPIED)
        self.rng = np.random.default_rng(1)
        self.state = MasterState(StateConfig(), 1)
        self.state.apply(c.OpenSession(SESSION, boot_id="host"), self.now_s)
        reports = [
            c.SegmentReport(
                index, tier, bytes([tier]) * 16, objects * PAYLOAD_BYTES, objects * PAYLOAD_BYTES,
                unit, objects, np.zeros(0, EXTENT),
            )
            for index, tier, objects, unit in (
                (0, 1, memory_objects, 64),
                (1, 2, case.ssd_objects, 4096),
            )
        ]  # fmt: skip
        attach = c.Attach(NODE, "node", "host", "", [], reports, np.zeros(0, SLOT), 1)
        self.node_id = self.state.apply(attach, self.now_s)[0].node_id
        self.namespaces = []
        for number in range(case.namespaces):
            name = f"n{number}"
            opened = self.state.apply(c.OpenNamespace(name, b"", True, 1, 7), self.now_s)[0]
            self.namespaces.append(opened)
            if case.quota_share:
                size = int(case.ssd_objects * PAYLOAD_BYTES * case.quota_share)
                self.state.apply(c.SetQuota(name, ssd_bytes=size), self.now_s)
        day = 1 << 60 if case.budget else 0
        self.counters = NodeCounters(ssd_write_budget_bytes=day, ssd_write_allowance_bytes=day // 8)

    def put(self) -> None:
        """One chain, of the namespace whose turn it is."""
        space = self.namespaces[self.turn % len(self.namespaces)]
        self.turn += 1
        digests = self.rng.integers(0, 1 << 63, (CHAIN, 2), dtype=np.uint64)
        sizes = np.full(CHAIN, PAYLOAD_BYTES, np.uint64)
        where = space.namespace_id, space.generation
        reply = self.state.put_start(c.PutStart(SESSION, 0, *where, digests, sizes), self.now_s)
        checksums = np.arange(CHAIN, dtype=np.uint64)
        commit = c.PutCommit(SESSION, 0, reply.grant_id, None, checksums)
        self.state.put_commit(commit, self.now_s)
        self.state.take_effects()

    def heartbeat(self) -> int:
        """Tells of what was ordered before; how much is ordered now."""
        beat = c.Heartbeat(
            self.node_id, 1, [], self.obeyed, [], [], self.counters, 0, [],
            unverified=frozenset(), damaged=None, copied=self.done,
        )  # fmt: skip
        reply = self.state.apply(beat, self.now_s)[0]
        self.obeyed = max((i.number for i in reply.instructions), default=self.obeyed)
        ids = [i.copies["copy_id"] for i in reply.instructions if i.copies is not None]
        self.done = np.zeros(sum(map(len, ids)), COPIED)
        if ids:
            self.done["copy_id"] = np.concatenate(ids)
        return len(self.done)

    def copy(self, copies: int) -> int:
        """Put as much as is copied, until so much was; how much it was."""
        count = 0
        while count < copies:
            self.now_s += 0.1
            for _ in range(512 // CHAIN):
                self.put()
            self.state.apply(c.RenewSession(SESSION), self.now_s)
            self.state.apply(c.Tick(), self.now_s)
            count += self.heartbeat() + self.heartbeat()
            self.state.take_effects()
        return count


def measure(case: Case, copies: int, rounds: int, watch: Watch) -> str:
    bench = Bench(case, 1 << 13)
    for _ in range((1 << 13) // CHAIN):
        bench.put()
    bench.copy(2 * min(case.ssd_objects, 1 << 13))
    times: list[list[float]] = []
    for _ in range(rounds):
        for name in watch.spent_ns:
            watch.spent_ns[name] = 0
        count = bench.copy(copies)
        times.append([ns / 1e3 / count for ns in watch.spent_ns.values()])
    plan, look = np.median(times, axis=0).tolist()
    return f"{case.title:34} plan {plan:6.2f}, look {look:5.2f} us a copy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--copies", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="cases whose title has this")
    options = parser.parse_args()
    watch = Watch(demotion, "_demote_of", "_look_for_cold")
    for case in CASES:
        if options.only in case.title:
            print(measure(case, options.copies, options.rounds, watch), flush=True)


if __name__ == "__main__":
    main()
