"""Puts of a host that suspects its nodes."""

from __future__ import annotations

import numpy as np

from cenote.api.rows import PutStatus
from cenote.master import commands as c
from unit.master.state_kit import Kit, new_node, session_id


def test_suspects_are_used_where_nothing_else_is_left() -> None:
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session()
    kit.apply(c.ReportFailure(1, session_id(1), "slow"))
    assert kit.start([1], 64).extents[0][0][0] == 2
    kit.apply(c.ReportFailure(2, session_id(1), "slow"))
    assert kit.put([2, 3]) == [PutStatus.GRANTED] * 2
    assert kit.put([4], replicas=2, min_replicas=2) == [PutStatus.GRANTED]


def test_what_failed_in_this_very_call_is_not_used() -> None:
    kit = Kit().with_nodes(new_node(1), new_node(2)).with_session()
    for node_id in (1, 2):
        kit.apply(c.ReportFailure(node_id, session_id(1), "slow"))
    put = kit.start([1], 64, avoid_node_ids=np.array([1], np.uint32))
    assert put.extents[0][0][0] == 2
    both = kit.start([2], 64, avoid_node_ids=np.array([1, 2], np.uint32))
    assert both.statuses == [PutStatus.REPLICAS_UNAVAILABLE]
