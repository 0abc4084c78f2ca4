"""Bugs that the simulator found in the master's state, each in its smallest form."""

from __future__ import annotations

from cenote.api.rows import CommitStatus
from cenote.master import commands as c

from unit.master.state_checks import check
from unit.master.state_kit import Kit, new_node


def test_a_batch_with_a_present_and_a_hidden_key_replaces_the_hidden_one() -> None:
    kit = Kit().with_nodes(new_node(1)).with_session()
    kit.put([1, 2])
    kit.apply(c.Detach(kit.nodes[1].node_id, contents_survive=True))
    kit.with_nodes(new_node(2))
    kit.put([3])
    put = kit.start([3, 1])
    assert put.granted == [1]
    assert kit.commit(put) == [CommitStatus.DECIDED]
    check(kit.state)
    kit.attach(kit.nodes[1])
    assert kit.exists(1, 2, 3) == [1, 1, 1]
    check(kit.state)
