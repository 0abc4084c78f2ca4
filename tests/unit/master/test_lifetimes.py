"""Times to live and pins that end: renewed, over restarts, and without a trace left behind."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.master import commands as c
from cenote.master.effects import DurableEffect, Expires, Pinned
from cenote.master.state import MasterState, StateConfig
from cenote.master.timers import ObjectTimers
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import Kit, new_node, restarted


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1)).with_session()


def pin(kit: Kit, *keys: int, ttl_ms: int = 0) -> None:
    kit.apply(c.Pin(*kit.place, kit.digests(*keys), ttl_ms))


def pinned(kit: Kit) -> int:
    return kit.state.status(kit.now_s).pinned_objects


def pass_s(kit: Kit, seconds: float) -> None:
    """Time passes, and daemons are heard of."""
    kit.now_s += seconds
    kit.heartbeats()
    kit.tick()


def followed(effects: list[DurableEffect]) -> list[DurableEffect]:
    """What a standby, or the process that compacts a journal, makes of it: a snapshot."""
    state = MasterState(StateConfig(), 0)
    for effect in effects:
        state.replay(effect)
    return list(state.snapshot())


@pytest.mark.parametrize("how", ["journal", "snapshot", "snapshot by another"])
def test_another_leader_ends_objects_when_they_were_to_end(kit: Kit, how: str) -> None:
    kit.put([1, 2], ttl_ms=10_000)
    kit.put([3])
    kit.tick(4)
    past = {
        "journal": kit.durable(),
        "snapshot": list(kit.state.snapshot()),
        "snapshot by another": followed(kit.durable()),
    }[how]
    fresh = restarted(kit, journal=past)
    fresh.attach(kit.nodes[1])
    pass_s(fresh, 5.9)
    assert fresh.exists(1, 2, 3) == [1, 1, 1]
    pass_s(fresh, 0.2)
    assert fresh.exists(1, 2, 3) == [0, 0, 1]
    check(fresh.state)


@pytest.mark.parametrize("clock_s", [-1e6, 1e6])
def test_a_wall_clock_that_jumped_prolongs_nothing_beyond_the_time_to_live(
    kit: Kit, clock_s: float
) -> None:
    kit.put([1], ttl_ms=10_000)
    (told,) = kit.new(Expires)
    assert (told.until_unix_ms, told.ttl_ms) == (1_010_000, 10_000)
    state = MasterState(StateConfig(), 2)
    for effect in kit.durable():
        state.replay(effect)
    state.start(50.0, 1000.0 + clock_s)
    (timed,) = pool_of(state).expiries.entries
    assert timed.at_s == pytest.approx(60 if clock_s < 0 else 50, abs=0.02)


@pytest.mark.parametrize("by_another", [False, True])
def test_a_pin_that_ends_is_in_the_snapshot_of_whoever_writes_it(
    kit: Kit, by_another: bool
) -> None:
    kit.put([1, 2, 3])
    pin(kit, 1)
    pin(kit, 2, ttl_ms=60_000)
    kit.tick(10)
    past = followed(kit.durable()) if by_another else list(kit.state.snapshot())
    told = [(effect.ttl_ms, len(effect.digests)) for effect in past if isinstance(effect, Pinned)]
    assert told == [(0, 1), (60_000 if by_another else 50_000, 1)]


def test_a_pin_that_is_renewed_does_not_end_with_the_one_before(kit: Kit) -> None:
    """Tags of 8 bits came round: one renewal in 254 ended with the timer of another."""
    kit.put([1])
    for _ in range(600):
        pin(kit, 1, ttl_ms=300_000)
        kit.tick(1)
    assert pinned(kit) == 1
    kit.tick(298)
    assert pinned(kit) == 1
    kit.tick(2)
    assert pinned(kit) == 0
    check(kit.state)


def test_many_that_end_at_once_end_within_few_ticks() -> None:
    kit = Kit(StateConfig()).with_nodes(new_node(1, 1 << 20, slots=4096)).with_session()
    for key in range(500):
        kit.put([key], 1, ttl_ms=1000)
    kit.tick(1.1)
    assert kit.exists(*range(500)) == [0] * 500
    check(kit.state)


def test_times_of_what_went_before_are_forgotten(kit: Kit) -> None:
    for key in range(12_000):
        kit.put([key % 10], 1, ttl_ms=3_600_000)
        kit.remove(key % 10)
        if key % 100 == 0:
            kit.tick(0.02)
    timers = pool_of(kit.state).expiries
    assert len(timers) < 9000, "entries of objects that are long gone are kept"
    kit.put([1], 1, ttl_ms=3_600_000)
    pass_s(kit, 3599)
    assert kit.exists(1) == [1]
    pass_s(kit, 2)
    assert kit.exists(1) == [0]


def test_a_follower_forgets_them_too(kit: Kit) -> None:
    for key in range(9000):
        kit.put([key % 10], 1, ttl_ms=3_600_000)
        kit.remove(key % 10)
    state = MasterState(StateConfig(), 2)
    for effect in kit.durable():
        state.replay(effect)
    assert len(pool_of(state).expiries) < 8500


def test_timers_hand_out_what_is_due_in_order() -> None:
    timers = ObjectTimers()
    some = np.arange(6, dtype=np.uint64).reshape(3, 2)
    for at_s, tag in ((5.0, 1), (2.0, 2), (2.001, 3), (9.0, 4)):
        timers.add(at_s, some, some[:, 0], tag)
    assert timers.due(1.99) is None
    assert len(timers) == 12
    first = [timers.due(2.02), timers.due(2.02)]
    assert {timed.tag for timed in first if timed} == {2, 3}
    assert timers.due(4.9) is None
    found = timers.due(100)
    assert found is not None
    assert found.tag == 1
    assert [timed.tag for timed in timers.entries] == [4]
