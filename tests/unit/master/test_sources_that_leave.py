"""A copy whose source left memory while it was made: nobody knows which bytes the device took."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.rows import EXTENT, OBJECT, CopyStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import DurableEffect, Stored
from cenote.master.object_columns import UNCOPYABLE
from cenote.master.state import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import Kit, new_node, restarted, session_id
from unit.master.tiers_kit import copy_all, ssd_node, where

DRAM, SSD, OTHER = 1, 2, 3
"""Segments: the first node's, and the second one's in memory."""
COLD = 0, 1, 2, 3


def make_kit() -> Kit:
    """The coldest keys lie on both nodes, and the first one's memory is full."""
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(ssd_node(1), new_node(2)).with_session()
    assert kit.put([*COLD], replicas=2, local_first=True) == [PutStatus.GRANTED] * len(COLD)
    elsewhere = np.array([kit.nodes[2].node_id], np.uint32)
    for key in range(100, 156):
        assert kit.put([key], avoid_node_ids=elsewhere) == [PutStatus.GRANTED]
    return kit


def order_copies(kit: Kit) -> None:
    kit.tick(0.1)
    kit.heartbeat(kit.nodes[1])
    ordered = len(pool_of(kit.state).copies.by_id)
    assert ordered == len(kit.nodes[1].copies) > len(COLD)


def leave_memory(kit: Kit, key: int) -> None:
    """A reader finds wrong bytes in the first node's memory."""
    assert where(kit, key) == {DRAM, OTHER}
    objects = np.frombuffer(kit.acquire(key, lease=False).objects, OBJECT)
    stats = kit.state.stat_objects(*kit.place, kit.digests(key), kit.now_s)
    extents = np.frombuffer(stats.extents, EXTENT)
    at = extents[extents["segment"] == DRAM]
    kit.apply(c.ReportFailure(1, session_id(1), "wrong bytes", kit.digests(key), objects, at))
    assert where(kit, key) == {OTHER}


def check_outcome(kit: Kit, status: int) -> None:
    """Of all copies that were ordered, the others count, as the second key's, and that one not."""
    segment = pool_of(kit.state).segments.by_id[SSD]
    copies = copy_all(kit, kit.nodes[1], status)
    pool_of(kit.state).tiers.disk_nodes = ()  # no more are ordered now
    kit.heartbeat(kit.nodes[1])
    assert not pool_of(kit.state).copies.by_id
    check(kit.state)
    assert where(kit, 0) == {OTHER}
    done = status == CopyStatus.DONE
    assert where(kit, 1) == ({DRAM, OTHER, SSD} if done else {DRAM, OTHER})
    assert segment.used_units == (copies - 1) * 64 * done, "a block each, and its own is free"
    rows = pool_of(kit.state).objects.lookup(kit.digests(0, 1))
    marks = pool_of(kit.state).state[rows] & np.uint8(UNCOPYABLE)
    assert marks.tolist() == [0, 0 if done else UNCOPYABLE]


@pytest.mark.parametrize("status", [CopyStatus.DONE, CopyStatus.SOURCE_CHANGED])
def test_it_does_not_count(status: int) -> None:
    kit = make_kit()
    order_copies(kit)
    leave_memory(kit, 0)
    check_outcome(kit, status)


@pytest.mark.parametrize("status", [CopyStatus.DONE, CopyStatus.SOURCE_CHANGED])
def test_nor_where_it_was_ordered_in_a_batch(status: int) -> None:
    """Batches are of objects with one extent each. The other replica comes meanwhile, with a daemon
    that brings what the journal has lost."""
    before = make_kit()
    journal: list[DurableEffect] = []
    journal += [effect for effect in before.durable() if not isinstance(effect, Stored)]
    kit = restarted(before, journal=journal, session_granted_share_max=1.0)
    kit.restart_node(before.nodes[1])
    kit.with_session()
    order_copies(kit)
    assert where(kit, 0) == {DRAM}
    for slot in before.nodes[2].segments[0].table.values():
        slot["replica"] = 2  # the copy has the number 1
    kit.restart_node(before.nodes[2])
    leave_memory(kit, 0)
    check_outcome(kit, status)
