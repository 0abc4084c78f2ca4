"""Objects that many read: they gain replicas by load, and lose them again."""

from __future__ import annotations

import numpy as np

from cenote.api.rows import PutStatus
from cenote.master.heat_samples import STEP, Heat
from cenote.master.move_tables import Cause
from cenote.master.state import StateConfig
from unit.master.moves_kit import drain, nodes_of, pass_time, settle
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, Kit, new_node

GRANTED = PutStatus.GRANTED
LIMIT = 200 * KIB


def three(**config: float) -> Kit:
    kit = Kit(StateConfig(hot_bytes_per_s=int(config.get("limit", LIMIT))))
    kit.with_nodes(new_node(1), new_node(2), new_node(3)).with_session()
    for key in range(30):
        assert kit.put([key]) == [GRANTED]
    return kit


def read(kit: Kit, key: int, reads_per_s: int, seconds: float) -> None:
    """Read at this pace, while daemons carry out what they are told."""
    for _ in range(round(seconds * 10)):
        for _ in range(reads_per_s // 10):
            kit.get(key)
        pass_time(kit, 0.1)


def test_it_gains_a_replica_and_loses_it_again() -> None:
    kit = three()
    read(kit, 7, 400, 6.0)
    assert len(nodes_of(kit, 7)) == 2
    check(kit.state)
    assert all(len(nodes_of(kit, key)) == 1 for key in range(30) if key != 7)
    pass_time(kit, 30.0)
    assert len(nodes_of(kit, 7)) == 1
    task = pool_of(kit.state).moves.tasks[Cause.HOT, 0]
    assert (task.moved, task.dropped) == (1, 1)
    assert not pool_of(kit.state).heat.known
    assert kit.exists(*range(30)) == [1] * 30


def test_more_load_more_replicas_as_far_as_there_are_nodes() -> None:
    kit = three()
    read(kit, 7, 2000, 8.0)
    assert nodes_of(kit, 7) == {1, 2, 3}


def test_what_is_read_little_has_what_it_was_put_with() -> None:
    kit = three()
    read(kit, 7, 100, 8.0)
    assert len(nodes_of(kit, 7)) == 1


def test_it_can_be_switched_off() -> None:
    kit = three(limit=0)
    read(kit, 7, 2000, 4.0)
    assert len(nodes_of(kit, 7)) == 1


def test_a_batch_and_touches_count_as_well() -> None:
    kit = three()
    for _ in range(60):
        kit.get(*[7] * 40)
        pass_time(kit, 0.1)
    assert len(nodes_of(kit, 7)) == 2


def test_readers_are_told_different_replicas_first() -> None:
    kit = three()
    read(kit, 7, 400, 6.0)
    assert len(nodes_of(kit, 7)) == 2
    first = set()
    for number in range(2, 12):
        kit.with_session(number, boot_id="elsewhere")
        (hit,) = kit.get(7, session=number)
        assert hit is not None
        first.add(hit.extents[0][0])
    assert len(first) == 2


def test_a_hot_object_survives_a_drain() -> None:
    kit = three()
    read(kit, 7, 400, 6.0)
    drain(kit, next(iter(nodes_of(kit, 7))))
    settle(kit)
    assert kit.exists(7) == [1]
    pass_time(kit, 30.0)
    assert len(nodes_of(kit, 7)) >= 1
    check(kit.state)


def test_one_in_so_many_is_noted_whatever_the_batches() -> None:
    heat = Heat()
    chosen = 0
    for size in (1, 5, STEP - 1, STEP, STEP + 1, 100, 3):
        chosen += len(heat.choose(np.arange(size)))
        assert 1 <= heat.left <= STEP
    total = 1 + 5 + 3 * STEP + 100 + 3
    assert chosen == total // STEP
