"""Steps with several nodes end by the call's deadline, however long each of them takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from cenote.api.rows import EXTENT
from cenote.client.driver import BlockingDriver
from cenote.client.plan.steps import Move, Part, SealPart, Seals
from cenote.transport.base import SealBatch

SLOW_S = 0.6


class SlowPool:
    """Nodes that take their time; a clock that only they move."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.deadlines: list[float] = []
        self.channels: dict[int, Any] = {}
        self.state = SimpleNamespace(now=lambda: self.now_s, lease_proven=set())
        self.verifies_by_lease = False

    def channel(self, node_id: int, deadline_s: float) -> SlowPool:
        self.deadlines.append(deadline_s)
        self.now_s += SLOW_S
        self.channels[node_id] = self
        return self

    def write(self, *arguments: Any) -> Any:
        self.deadlines.append(arguments[3])
        self.now_s += SLOW_S
        return np.zeros(len(arguments[0]), np.uint8)

    def seal(self, batch: SealBatch, deadline_s: float) -> Any:
        self.deadlines.append(deadline_s)
        self.now_s += SLOW_S
        return np.zeros(1, np.uint8)


def a_call(pool: SlowPool, deadline_s: float) -> Any:
    end_s = pool.now_s + deadline_s
    return SimpleNamespace(remaining_s=lambda: end_s - pool.now_s)


def test_seals_one_after_the_other_share_the_deadline() -> None:
    pool = SlowPool()
    pool.channels = {1: pool, 2: pool}
    batch = SealBatch(1, 1, 1, b"", b"")
    step = Seals([SealPart(1, batch, 1.0), SealPart(2, batch, 1.0)])
    BlockingDriver(cast("Any", pool)).seals(a_call(pool, 1.0), step)
    assert pool.deadlines[0] == 1.0
    assert pool.deadlines[1] <= 0.4 + 1e-6


def test_the_time_that_connecting_takes_is_not_there_for_the_transfer() -> None:
    pool = SlowPool()
    part = Part(
        1,
        np.zeros(1, EXTENT),
        np.zeros(1, np.uint64),
        budget_s=1.0,
        size_bytes=1,
        checksum=0,
        grant_id=7,
    )
    BlockingDriver(cast("Any", pool)).move(a_call(pool, 1.0), Move([part]))
    assert part.error is None
    assert pool.deadlines[0] == 1.0
    assert pool.deadlines[1] <= 0.4 + 1e-6
