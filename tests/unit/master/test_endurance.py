"""What goes to an SSD whose writes have a budget: no more than that, and what is used first."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cenote.master import commands as c
from cenote.master.node_counters import NodeCounters
from cenote.policy.endurance import BURST_SHARE, count_admitted, is_admitted, is_spared
from unit.master.state_kit import KIB, Kit
from unit.master.test_state_tiers import GRANTED
from unit.master.tiers_kit import SSD_ID, copy_all, kit_with_ssd, settle

COPY_BYTES = 2 * 4 * KIB
"""Of an object of 1 KiB: a block, and a page of slots."""


def with_budget(keys: int, copies: int, *, budget_copies: int) -> Kit:
    """A full memory beside an SSD that may be written so many copies now, of so many a day."""
    kit = kit_with_ssd(0)
    tell(kit, copies, budget_copies)
    kit.tick(0.1)
    for key in range(keys):
        assert kit.put([key]) == [GRANTED]
    return kit


def tell(kit: Kit, copies: int, budget_copies: int) -> None:
    node = kit.nodes[1]
    node.counters = NodeCounters(
        ssd_write_budget_bytes=budget_copies * COPY_BYTES,
        ssd_write_allowance_bytes=copies * COPY_BYTES,
        ssd_written_day_bytes=7,
        ssd_written_total_bytes=9,
    )
    kit.heartbeat(node)


def copied(kit: Kit) -> set[int]:
    return {int(row["seq"]) - 1 for row in kit.segments[SSD_ID].table.values()}


def test_what_is_admitted() -> None:
    assert is_admitted(100, 0, 0, was_reused=False)  # no budget
    budget = int(100 / BURST_SHARE)
    assert is_admitted(10, budget, 100, was_reused=False)
    assert not is_admitted(10, budget, 49, was_reused=False)
    assert is_admitted(10, budget, 49, was_reused=True)
    assert not is_admitted(50, budget, 49, was_reused=True)
    assert is_spared(budget, 49)
    assert not is_spared(budget, 50)
    assert not is_spared(0, 0)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=30),
    st.sampled_from([0, 800, 2000]),
    st.integers(0, 300),
)
def test_what_is_admitted_of_several(
    objects: list[tuple[int, bool]], budget: int, allowance: int
) -> None:
    expected, left = 0, allowance
    for size, was_reused in objects:
        if not is_admitted(size, budget, left, was_reused=was_reused):
            break
        expected, left = expected + 1, left - size
    sizes = np.array([size for size, _ in objects], np.int64)
    reused = np.array([was_reused for _, was_reused in objects], np.bool_)
    assert count_admitted(sizes, budget, allowance, reused) == expected


def test_with_plenty_left_everything_goes() -> None:
    kit = with_budget(60, 100, budget_copies=800)
    assert 25 <= settle(kit) <= 40
    assert copied(kit) == set(range(len(copied(kit))))


def test_a_device_that_is_spared_gets_what_was_used_again() -> None:
    kit = with_budget(60, 30, budget_copies=800)  # below half of the burst
    kit.get(3)  # one alone goes another way through the code than several
    kit.get(5, 8)
    assert kit.put([11]) != [GRANTED]
    assert kit.put([13, 14]) != [GRANTED, GRANTED]
    for key in range(60, 100):  # their turn comes
        kit.put([key])
        settle(kit)
    assert copied(kit) == {3, 5, 8, 11, 13, 14}


def test_reads_from_remembered_locations_count() -> None:
    kit = with_budget(60, 30, budget_copies=800)
    kit.apply(c.Touch(*kit.place, kit.digests(4), False))
    for key in range(60, 100):
        kit.put([key])
        settle(kit)
    assert copied(kit) == {4}


def test_no_more_is_ordered_than_may_be_written() -> None:
    kit = with_budget(60, 5, budget_copies=80)  # a burst of 10: all of half of it
    ordered = 0
    for _ in range(20):  # before the daemon has told of any
        kit.tick(0.1)
        ordered = len(kit.nodes[1].copies)
        kit.heartbeat(kit.nodes[1])
    assert 0 < ordered <= 5
    copy_all(kit, kit.nodes[1])
    tell(kit, 0, 80)
    assert settle(kit) == 0


def test_what_has_no_copy_for_the_sake_of_the_budget_goes_in_its_turn() -> None:
    kit = with_budget(60, 30, budget_copies=800)
    kit.get(50, 51)
    for key in range(100, 130):
        kit.put([key])
        settle(kit)
    # The oldest went, which had no copy, and not what was used and has one.
    assert kit.exists(*range(20)) == [0] * 20
    assert kit.exists(50, 51) == [1, 1]


def test_when_the_budget_is_gone_puts_go_on() -> None:
    kit = with_budget(60, 0, budget_copies=800)
    for key in range(100, 200):
        assert kit.put([key]) == [GRANTED]
        settle(kit)
    assert not copied(kit)


def test_it_is_reported() -> None:
    kit = with_budget(0, 3, budget_copies=80)
    status = kit.state.status(kit.now_s)
    assert status.ssd_write_budget_bytes == 80 * COPY_BYTES
    assert status.ssd_written_day_bytes == 7
    (node,) = kit.state.nodes(kit.now_s)
    assert node.ssd_write_allowance_bytes == 3 * COPY_BYTES
    assert node.ssd_written_total_bytes == 9
