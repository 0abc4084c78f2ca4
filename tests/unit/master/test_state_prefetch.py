"""What will be read soon is brought back from the SSD, as far as there is room and time."""

from __future__ import annotations

from cenote.master import commands as c
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import Kit, new_node
from unit.master.tiers_kit import DRAM_ID, SSD_ID, kit_with_ssd, settle, where


def test_what_will_be_read_soon_is_brought_back_before_it_is_read() -> None:
    kit = kit_with_ssd(50)
    for key in range(50, 100):
        settle(kit)
        kit.put([key])
    cold = [key for key in range(100) if where(kit, key) == {SSD_ID}][:8]
    assert len(cold) == 8
    kit.state.prefetch(c.Exists(*kit.place, kit.digests(*cold, 99, 12345)))
    settle(kit)
    assert all(DRAM_ID in where(kit, key) for key in cold)
    assert kit.exists(*cold) == [1] * 8


def test_a_hint_is_bounded_and_costs_nothing_without_an_ssd() -> None:
    kit = kit_with_ssd(20)
    for _ in range(300):
        kit.state.prefetch(c.Exists(*kit.place, kit.digests(*range(20))))
    assert not pool_of(kit.state).tiers.wanted
    bare = Kit().with_nodes(new_node(1)).with_session()
    bare.put([1])
    bare.state.prefetch(c.Exists(*bare.place, bare.digests(1)))
    check(bare.state)


def test_what_will_be_read_soon_waits_while_enough_is_under_way() -> None:
    """A quarter of memory may be, when promotions are ordered: the others come after it."""
    kit = kit_with_ssd(60)
    settle(kit)
    for key in range(100, 160):
        kit.put([key])
        settle(kit)
    cold = [key for key in range(60) if where(kit, key) == {SSD_ID}][:24]
    assert len(cold) == 24  # of 1 KiB, with 64 KiB of memory
    kit.state.prefetch(c.Exists(*kit.place, kit.digests(*cold)))
    settle(kit)
    assert [key for key in cold if DRAM_ID not in where(kit, key)] == []
    assert not pool_of(kit.state).tiers.wanted
