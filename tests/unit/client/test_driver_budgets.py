"""Steps with several nodes end by the call's deadline, however long each of them takes."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cenote.api.errors import CenoteError, DeadlineExceeded, SessionUnknown, Unavailable
from cenote.api.rows import EXTENT, EXTENT_STRUCT, PUT_STRUCT, PutStatus
from cenote.client.driver import BlockingDriver
from cenote.client.plan.asking import ask_master
from cenote.client.plan.options import PutOptions
from cenote.client.plan.pieces import Pieces
from cenote.client.plan.singles import ask_packed
from cenote.client.plan.space import Space
from cenote.client.plan.state import Call, ClientState
from cenote.client.plan.steps import Ask, AskRaw, Move, Part, Pause, Reopen, SealPart, Seals
from cenote.client.plan.writes import put_objects
from cenote.transport.base import SealBatch
from cenote.v1.master_pb2 import PutAbortResponse, PutStartRequest, PutStartResponse

SLOW_S = 0.6
GRANTED = PUT_STRUCT.pack(PutStatus.GRANTED, 1, 1, 0)
EXTENT_BYTES = EXTENT_STRUCT.pack(1, 0, 0, 1)


class SlowPool:
    """Nodes that take their time; a clock that only they move."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.deadlines: list[float] = []
        self.channels: dict[int, Any] = {}
        moved = defaultdict(lambda: [0, 0])  # type: ignore[var-annotated]
        self.state = SimpleNamespace(now=lambda: self.now_s, lease_proven=set(), moved=moved)
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


def played(plan: Any, clock: SlowPool) -> None:
    """Drive a put whose grants lie on a node that nobody knows; only pauses take time."""
    step = next(plan)
    while True:
        if isinstance(step, Pause):
            clock.now_s += step.duration_s
            step = plan.send(None)
        elif isinstance(step, Ask) and step.method == "put_start":
            step = plan.send(PutStartResponse(puts=GRANTED, extents=EXTENT_BYTES, grant_id=1))
        else:
            step = plan.send(PutAbortResponse() if isinstance(step, Ask) else None)


def test_pauses_between_attempts_end_with_the_deadline() -> None:
    clock = SlowPool()
    state = ClientState(b"s" * 16, lambda: clock.now_s)
    call = Call(state, Space("a", b"", 0), 0.3)
    pieces = Pieces(np.zeros(1, np.uint64), np.ones(1, np.uint64), None)
    with pytest.raises(DeadlineExceeded):
        played(put_objects(call, [b"key"], bytes(16), pieces, PutOptions()), clock)
    assert clock.now_s <= call.end_s + 1e-6


def test_a_session_is_opened_anew_in_what_is_left_of_the_deadline() -> None:
    """Not in what was left before the answer came that said so."""
    pool = SlowPool()
    plan = ask_master(a_call(pool, 1.0), "put_start", PutAbortResponse(), PutAbortResponse)
    assert isinstance(next(plan), Ask)
    pool.now_s += SLOW_S
    step = plan.throw(SessionUnknown("it ran out"))
    assert isinstance(step, Reopen)
    assert step.deadline_s == pytest.approx(0.4)
    assert isinstance(plan.send(None), Ask)
    pool.now_s += SLOW_S
    with pytest.raises(DeadlineExceeded, match="it ran out"):
        plan.throw(SessionUnknown("it ran out"))


@pytest.mark.parametrize("refused", [SessionUnknown("it ran out"), Unavailable("it is gone")])
def test_a_single_key_is_late_as_a_batch_is_when_the_deadline_is_over(
    refused: CenoteError,
) -> None:
    """It ended with what the master happened to say: a session that the user knows nothing of."""
    pool = SlowPool()
    call = a_call(pool, 1.0)
    plan = ask_packed(call, "put_start", b"", PutStartRequest, PutStartResponse)
    assert isinstance(next(plan), AskRaw)
    pool.now_s += 2.0
    with pytest.raises(DeadlineExceeded, match=refused.message):
        plan.throw(refused)
