"""What the state counts adds up, whichever way objects go."""

from __future__ import annotations

import numpy as np

from cenote.api.rows import PutStatus
from cenote.master import commands as c
from cenote.master.effects import GoneReason
from cenote.master.state import StateConfig
from unit.master.state_kit import KIB, Kit, new_node, restarted

OBJECTS = 64


def kit_with_objects() -> Kit:
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(new_node(1, OBJECTS * KIB)).with_session()
    kit.tick(1.0)
    for key in range(OBJECTS):
        assert kit.put([key], KIB) == [PutStatus.GRANTED]
    return kit


def test_what_was_stored_is_there_or_gone_for_a_reason() -> None:
    kit = kit_with_objects()
    counters = kit.state.counters
    kit.remove(3, 4)
    for key in range(100, 120):
        kit.put([key], KIB)
    assert counters.gone[GoneReason.REMOVED] == 2
    assert counters.gone[GoneReason.EVICTED] == counters.evicted > 0
    assert counters.committed - sum(counters.gone) == kit.state.object_count


def test_what_goes_is_as_old_as_it_is() -> None:
    kit = kit_with_objects()
    for _ in range(50):
        kit.tick(3.0)
        kit.heartbeats()
    kit.with_session(2)  # the first one fell silent
    ages = kit.state.counters.evicted_age_s
    young, young_s = ages.count, ages.total  # ahead of need, as soon as the pool was full
    for key in range(100, 104):
        kit.put([key], KIB, session=2)
    assert ages.count == kit.state.counters.evicted > young
    assert 140 < (ages.total - young_s) / (ages.count - young) < 160


def test_readers_are_counted_by_namespace() -> None:
    kit = kit_with_objects()
    kit.acquire(1)
    kit.acquire(1, 2, 1000)
    (use,) = kit.state.namespace_uses()
    assert (use.asked, use.found, use.found_ssd) == (4, 3, 0)
    assert use.objects == OBJECTS
    assert use.dram_bytes == OBJECTS * KIB
    assert use.ssd_bytes == 0
    name = use.name
    kit.apply(c.ResetNamespace(name, 7))
    (use,) = kit.state.namespace_uses()
    assert (use.asked, use.found, use.objects) == (4, 3, 0)


def test_a_restarted_master_counts_from_the_start() -> None:
    kit = kit_with_objects()
    kit.remove(1)
    again = restarted(kit)
    assert sum(again.state.counters.gone) == 0
    assert np.count_nonzero(again.state.counters.evicted_age_s.counts) == 0


def test_writers_keys_add_up() -> None:
    kit = kit_with_objects()
    kit.put([1, 2, 500], KIB)  # two are there
    kit.put([501], 10 * OBJECTS * KIB)  # has no room anywhere
    counters = kit.state.counters
    parts = counters.put_granted + counters.put_exists + counters.put_no_space
    assert parts + counters.put_refused == counters.put_keys
    assert counters.put_exists == 2
