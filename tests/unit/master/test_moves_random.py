"""Random work on a pool whose nodes are drained, taken up, killed and restarted all the time.

After each step all space is counted anew, and what the table says of each object is what the
daemons' slots say; in the end what was put and has not gone by a decision is there.
"""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument, QuotaExceeded, ResourceUnavailable
from cenote.api.rows import CopyStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import Gone, GoneReason
from cenote.master.state import StateConfig
from cenote.master.task_commands import Rebalance
from unit.master.moves_kit import drain, pull_all, settle
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, Kit, new_node, restarted

KEYS = 60
STEPS = 120
CONFIG = {"session_granted_share_max": 1.0, "repair_after_s": 6.0, "hot_bytes_per_s": 20 * KIB}


class Run:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.kit = Kit(StateConfig(**CONFIG))  # type: ignore[arg-type]
        self.kit.with_nodes(*(new_node(n, 48 * KIB) for n in (1, 2, 3, 4))).with_session()
        self.stored: set[int] = set()
        self.leases: list[c.AcquireReply] = []
        self.silent: set[int] = set()
        self.read = 0
        self.digests = {k: self.kit.digests(k)[0].tobytes() for k in range(KEYS)}
        self.keys = {digest: key for key, digest in self.digests.items()}

    def news(self, put: frozenset[int] = frozenset()) -> None:
        """What went, went by a decision; one that can't be read gives way to what is `put`."""
        effects = self.kit.effects[self.read :]
        self.read = len(self.kit.effects)
        for effect in effects:
            if isinstance(effect, Gone):
                raw = np.ascontiguousarray(effect.digests).tobytes()
                gone = {self.keys[raw[at : at + 16]] for at in range(0, len(raw), 16)}
                assert effect.reason != GoneReason.LOST or gone <= put, "nothing here is ever lost"
                self.stored -= gone

    # ---- steps --------------------------------------------------------------------------------

    def step(self) -> None:
        weights = {
            self.put: 8, self.get: 4, self.beat: 14, self.drain: 2, self.undrain: 1,
            self.rebalance: 1, self.remove: 1, self.pin: 1, self.restart_daemon: 1,
            self.restart_master: 1, self.fall_silent: 1, self.release: 3,
        }  # fmt: skip
        self.dice.choices(list(weights), list(weights.values()))[0]()
        self.news()
        check(self.kit.state)
        self.check_slots()

    def put(self) -> None:
        keys = self.dice.sample(range(KEYS), 3)
        size = self.dice.choice([300, KIB, 3 * KIB])
        replicas = self.dice.choice([1, 1, 2])
        statuses = self.kit.put(keys, size, replicas=replicas)
        self.news(frozenset(keys))
        for key, status in zip(keys, statuses, strict=True):
            if status == PutStatus.GRANTED and self.kit.exists(key) == [1]:
                self.stored.add(key)

    def get(self) -> None:
        key = self.dice.randrange(KEYS)
        for _ in range(self.dice.choice([1, 60])):
            self.kit.get(key)
        self.leases.append(self.kit.acquire(key, lease=True, ttl_ms=9000))

    def release(self) -> None:
        self.kit.release(*self.leases)
        self.leases = []

    def beat(self) -> None:
        self.kit.tick(self.dice.choice([0.05, 0.3, 1.0]))
        for node in self.kit.nodes.values():
            if node.number in self.silent or self.dice.random() < 0.2:
                continue
            self.kit.heartbeat(node)
            pull_all(self.kit, node, self.dice.choice([0, 0, 0, CopyStatus.UNREACHABLE]))
            if self.dice.random() < 0.7:
                self.kit.heartbeat(node)

    def drain(self) -> None:
        bandwidth = self.dice.choice([0, 0, 20 * KIB])
        with contextlib.suppress(ResourceUnavailable):  # it is the last one
            drain(self.kit, self.dice.randint(1, 4), bandwidth=bandwidth)

    def undrain(self) -> None:
        drain(self.kit, self.dice.randint(1, 4), cancel=True)

    def rebalance(self) -> None:
        with contextlib.suppress(InvalidArgument):  # there is none to be ended
            self.kit.apply(Rebalance(cancel=self.dice.random() < 0.3))

    def remove(self) -> None:
        self.kit.remove(self.dice.randrange(KEYS))

    def pin(self) -> None:
        with contextlib.suppress(QuotaExceeded):
            self.kit.apply(
                c.Pin(*self.kit.place, self.kit.digests(self.dice.randrange(KEYS)), 5000)
            )

    def restart_daemon(self) -> None:
        node = self.kit.nodes[self.dice.randint(1, 4)]
        self.silent.discard(node.number)
        node.pulls, node.copied = [], []
        self.kit.restart_node(node)

    def fall_silent(self) -> None:
        if len(self.silent) < 2:
            self.silent.add(self.dice.randint(1, 4))
        else:
            self.silent.clear()

    def restart_master(self) -> None:
        """All leases are over by then, as the new leader waits for that."""
        old = self.kit
        journal = list(old.state.snapshot()) if self.dice.random() < 0.5 else None
        new = restarted(old, journal=journal, **CONFIG).with_session()
        for node in old.nodes.values():
            node.pulls, node.copied, node.done_instruction = [], [], 0
            new.attach(node)
        self.kit, self.leases, self.silent = new, [], set()
        self.read = len(new.effects)

    # ---- what must hold -----------------------------------------------------------------------

    def check_slots(self) -> None:
        """Each extent in the table is sealed there with that version."""
        pool = pool_of(self.kit.state)
        for row in np.flatnonzero(pool.objects.state & 1).tolist():
            record = pool.record_of(row)
            for segment_id, replica, _, slot, offset, _ in pool.objects.extents_of_one(row):
                sealed = self.kit.segments[segment_id].table.get(slot)
                assert sealed is not None
                where = (sealed["offset"], sealed["replica"], sealed["seq"], sealed["epoch"])
                assert where == (offset * 64, replica, record[2], record[3])

    def end(self) -> None:
        self.silent.clear()
        self.release()
        for number in (1, 2, 3, 4):
            drain(self.kit, number, cancel=number != 2)
        settle(self.kit)
        self.kit.tick(10.0)
        for node in self.kit.nodes.values():
            self.kit.heartbeat(node)
        settle(self.kit)
        settle(self.kit)
        self.news()
        there = {key for key in range(KEYS) if self.kit.exists(key) == [1]}
        assert there == self.stored
        pool = pool_of(self.kit.state)
        assert pool.nodes.by_id[self.kit.nodes[2].node_id].drained
        assert not pool.copies.by_id
        assert not pool.moves.superseded


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_and_all_space_is_accounted_for(seed: int) -> None:
    run = Run(seed)
    for _ in range(STEPS):
        run.step()
    run.end()
