"""Objects over several segments: where their pieces lie, and that they stay."""

from __future__ import annotations

import pytest

from cenote.api.rows import EXTENTS_PER_OBJECT_MAX, PutStatus
from unit.master.state_checks import check
from unit.master.state_kit import KIB, MIB, Kit, new_node

GRANTED = PutStatus.GRANTED


def kit_of(*sizes_bytes: int) -> Kit:
    nodes = [new_node(number, size) for number, size in enumerate(sizes_bytes, 1)]
    return Kit().with_nodes(*nodes).with_session()


def used(kit: Kit) -> list[float]:
    return [node.used_bytes / node.capacity_bytes for node in kit.state.nodes(kit.now_s)]


@pytest.mark.parametrize("size", [17 * MIB, 30 * MIB, 40 * MIB])
def test_a_pool_with_room_does_not_evict_what_was_striped_just_now(size: int) -> None:
    """It filled two of three segments to the brim, and eviction ahead of need then evicted it."""
    kit = kit_of(16 * MIB, 16 * MIB, 16 * MIB)
    put = kit.start([1], size)
    assert put.statuses == [GRANTED]
    kit.commit(put)
    assert sum(length for *_, length in put.extents[0]) == size
    for _ in range(50):
        kit.tick(0.02)
    assert kit.exists(1) == [1]
    assert max(used(kit)) - min(used(kit)) < 0.4
    check(kit.state)


def test_every_node_carries_a_share_of_its_room() -> None:
    kit = kit_of(8 * MIB, 16 * MIB, 32 * MIB)
    assert kit.put([1], 44 * MIB) == [GRANTED]
    assert all(0.7 < ratio < 0.87 for ratio in used(kit)), used(kit)


def test_not_more_pieces_than_an_object_may_have() -> None:
    kit = kit_of(*[256 * KIB] * 80)
    put = kit.start([1], 60 * 256 * KIB)
    assert put.statuses == [GRANTED]
    assert 60 <= len(put.extents[0]) <= EXTENTS_PER_OBJECT_MAX
    kit.commit(put)
    assert kit.put([2], 10 * 256 * KIB) == [GRANTED]
    check(kit.state)


def test_a_full_pool_makes_room_for_a_large_one() -> None:
    kit = kit_of(4 * MIB, 4 * MIB, 4 * MIB)
    for number in range(100):
        assert kit.put([number], 128 * KIB) == [GRANTED]
    for number in range(1000, 1006):
        assert kit.put([number], 9 * MIB) == [GRANTED]
        assert kit.exists(number) == [1]
        check(kit.state)
