"""How demotions are ordered: when, how many, and where they lie on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cenote.api.rows import CopyStatus, PutStatus
from cenote.master import demotion, eviction
from cenote.master.pool import Pool
from cenote.master.state import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, MIB, FakeNode, Kit, new_node
from unit.master.tiers_kit import copy_all, ssd_node


def kit_of(*nodes: FakeNode, **config: float) -> Kit:
    config.setdefault("session_granted_share_max", 1.0)
    kit = Kit(StateConfig(**config))  # type: ignore[arg-type]
    return kit.with_nodes(*nodes).with_session()


def fill(kit: Kit, keys: int, size: int = KIB) -> None:
    for key in range(keys):
        assert kit.put([key], size=size) == [PutStatus.GRANTED]


def under_way(pool: Pool, node: FakeNode) -> int:
    return sum(one.node.node_id == node.node_id for one in pool.copies.by_id.values())


def test_the_next_copies_are_ordered_when_some_have_ended_and_not_with_the_next_tick() -> None:
    kit = kit_of(ssd_node(1))
    fill(kit, 60)
    node = kit.nodes[1]
    kit.tick(0.1)
    copied = 0
    for _ in range(20):
        kit.heartbeat(node)
        done = copy_all(kit, node)
        copied += done
        if not done:
            break
        check(kit.state)
    assert copied >= 25, "half of what is in memory, a quarter of memory at a time"


def test_a_heartbeat_that_tells_of_no_copy_orders_none() -> None:
    kit = kit_of(ssd_node(1))
    node = kit.nodes[1]
    kit.tick(0.1)
    fill(kit, 60)
    kit.now_s += 1.0
    kit.heartbeat(node)
    assert not pool_of(kit.state).copies.by_id
    kit.tick(0.1)
    assert pool_of(kit.state).copies.by_id


def test_between_two_ticks_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "COPIES_PER_TICK", 7)
    kit = kit_of(ssd_node(1))
    fill(kit, 60)
    node = kit.nodes[1]
    for _ in range(3):
        kit.tick(0.1)
        copied = 0
        for _ in range(4):
            kit.heartbeat(node)
            copied += copy_all(kit, node)
        assert copied == 7


def test_what_is_ordered_together_lies_together_on_the_device() -> None:
    kit = kit_of(ssd_node(1, size_bytes=MIB, ssd_bytes=16 * MIB))
    fill(kit, 60, 16 * KIB)
    kit.tick(0.1)
    spans = np.concatenate([one.span for one in pool_of(kit.state).copies.by_id.values()])
    assert len(spans) > 10
    offsets, lengths = spans[:, 2].astype(np.int64), spans[:, 3].astype(np.int64)
    assert (offsets[1:] == (offsets + lengths)[:-1]).all()
    assert (spans[1:, 1] == spans[:-1, 1] + 1).all(), "and so do their slots"


def test_a_full_device_makes_room_for_a_batch() -> None:
    kit = kit_of(ssd_node(1, size_bytes=MIB, ssd_bytes=2 * MIB, ssd_slots=64))
    node = kit.nodes[1]
    copied = 0
    for first in range(0, 600, 8):
        for key in range(first, first + 8):
            assert kit.put([key], size=32 * KIB) == [PutStatus.GRANTED]
        for _ in range(4):
            kit.tick(0.1)
            kit.heartbeat(node)
            copied += copy_all(kit, node)
            kit.heartbeat(node)
            check(kit.state)
    assert copied > 500
    there = sum(map(bool, kit.exists(*range(600))))
    assert 60 <= there <= 96


def test_a_node_whose_device_rests_keeps_nobody_waiting_and_loses_no_turn() -> None:
    kit = kit_of(ssd_node(1), ssd_node(2))
    fill(kit, 120)
    one, other = kit.nodes[1], kit.nodes[2]
    kit.tick(0.1)
    kit.heartbeat(one)
    assert copy_all(kit, one, CopyStatus.FAILED)
    kit.heartbeat(one)  # it rests for a second
    pool, copied = pool_of(kit.state), 0
    for _ in range(20):
        kit.heartbeat(other)
        copied += copy_all(kit, other)
        kit.heartbeat(other)
        kit.tick(0.02)
        assert not under_way(pool, one)
        check(kit.state)
    assert copied >= 20
    kit.tick(1.0)
    assert under_way(pool, one)


@pytest.mark.parametrize("with_ssd", [True, False])
def test_room_for_a_batch_is_made_at_once(with_ssd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each of its runs by itself, which are a 64th of the segment."""
    kit = kit_of(ssd_node(1, size_bytes=4 * MIB) if with_ssd else new_node(1, 4 * MIB))
    fill(kit, 200, 16 * KIB)
    evictions = []
    for_real = eviction.evict

    def evict(*arguments: Any) -> int:
        evictions.append(arguments)
        return for_real(*arguments)

    monkeypatch.setattr(eviction, "evict", evict)
    pool = pool_of(kit.state)
    for first in range(1000, 1400, 100):
        keys = list(range(first, first + 100))
        assert kit.put(keys, size=16 * KIB) == [PutStatus.GRANTED] * 100
        assert kit.exists(*keys) == [1] * 100
        check(kit.state)
    # 25 runs in each of them; a queue that ends, and the reserve, add some.
    assert 0 < len(evictions) <= 4 * 8
    assert pool.counters.evicted < 400 + 40, "and not many more than that"
