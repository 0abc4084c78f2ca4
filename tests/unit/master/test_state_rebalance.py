"""Evening out how full nodes are."""

from __future__ import annotations

import pytest

from cenote.api.errors import InvalidArgument
from cenote.api.rows import PutStatus
from cenote.master.effects import Gone
from cenote.master.move_tables import Cause
from cenote.master.state import StateConfig
from cenote.master.task_commands import Rebalance
from unit.master.moves_kit import nodes_of, pass_time, settle, used_on
from unit.master.state_kit import KIB, Kit, new_node

GRANTED = PutStatus.GRANTED


def uneven(keys: int = 50, replicas: int = 1) -> Kit:
    """Nodes with all there is, and an empty one."""
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(*(new_node(n + 1) for n in range(replicas))).with_session()
    for key in range(keys):
        assert kit.put([key], replicas=replicas) == [GRANTED]
    return kit.with_nodes(new_node(replicas + 1))


def is_done(kit: Kit) -> bool:
    return kit.state._pool.moves.tasks[Cause.REBALANCE, 0].done


def test_a_fresh_node_gets_its_share() -> None:
    kit = uneven()
    kit.apply(Rebalance())
    assert 20 <= settle(kit) <= 26
    assert is_done(kit)
    assert abs(used_on(kit, 1) - used_on(kit, 2)) <= 4 * KIB
    assert kit.exists(*range(50)) == [1] * 50
    assert not kit.new(Gone)
    assert settle(kit) == 0


def test_replicas_stay_on_different_nodes() -> None:
    kit = uneven(40, replicas=2)
    kit.apply(Rebalance())
    settle(kit)
    assert is_done(kit)
    assert all(len(nodes_of(kit, key)) == 2 for key in range(40))
    assert sum(3 in nodes_of(kit, key) for key in range(40)) > 20


def test_the_bandwidth_is_kept_and_can_be_changed() -> None:
    kit = uneven()
    kit.apply(Rebalance(bandwidth=2 * KIB))
    assert 3 <= pass_time(kit, 3.0) <= 9
    assert not is_done(kit)
    kit.apply(Rebalance())
    settle(kit)
    assert is_done(kit)


def test_it_can_be_ended() -> None:
    kit = uneven()
    kit.apply(Rebalance(bandwidth=2 * KIB))
    pass_time(kit, 1.0)
    kit.apply(Rebalance(cancel=True))
    assert settle(kit) <= 1
    assert used_on(kit, 1) > 40 * KIB
    with pytest.raises(InvalidArgument, match="nothing is being rebalanced"):
        kit.apply(Rebalance(cancel=True))


def test_an_even_pool_is_left_alone() -> None:
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(new_node(1), new_node(2)).with_session()
    for key in range(60):
        kit.put([key])
    kit.apply(Rebalance())
    assert settle(kit) <= 2
    assert is_done(kit)
