"""Quotas and priorities: who makes room, and what is kept from whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cenote.api.errors import NamespaceNotFound, QuotaExceeded
from cenote.api.rows import UNIT_BYTES, PutStatus
from cenote.master import commands as c
from cenote.master import demotion
from cenote.master.effects import QuotaSet
from cenote.master.segments import DRAM
from cenote.master.state import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, FakeNode, Kit, new_node, restarted
from unit.master.tiers_kit import copy_all, ssd_node

GRANTED = PutStatus.GRANTED
LOW, NORMAL, HIGH = 1, 2, 3


class Tenants(Kit):
    """A pool of 64 KiB with several namespaces, of which `within` chooses one."""

    def __init__(
        self, *names: str, config: StateConfig | None = None, node: FakeNode | None = None
    ) -> None:
        super().__init__(config or StateConfig())
        self.with_nodes(node or new_node(1)).with_session()
        self.all: dict[str, c.NamespaceReply] = {}
        for name in names:
            self.all[name] = self.apply(c.OpenNamespace(name, b"", True, 1, ord(name[0])))

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        before, self.namespace = self.namespace, self.all[name]
        yield
        self.namespace = before

    def quota(self, name: str, **what: int) -> None:
        self.apply(c.SetQuota(name, **what))

    def fill(self, name: str, keys: range, size: int = KIB, **options: Any) -> list[int]:
        with self.within(name):
            return [self.put([key], size, **options)[0] for key in keys]

    def there(self, name: str, keys: range) -> int:
        with self.within(name):
            return sum(self.exists(*keys))


@pytest.mark.parametrize("flooder", ["without a quota", "with a quota", "in batches", "low"])
def test_a_flood_leaves_what_is_within_a_quota_alone(flooder: str) -> None:
    kit = Tenants("quiet", "flood")
    kit.quota("quiet", dram_bytes=24 * KIB)
    if flooder in ("with a quota", "in batches"):
        kit.quota("flood", dram_bytes=40 * KIB)
    if flooder == "low":
        kit.quota("flood", priority=LOW)
    kit.fill("quiet", range(20))
    if flooder == "in batches":
        with kit.within("flood"):
            for start in range(1000, 2000, 16):
                assert kit.put(list(range(start, start + 16))) == [GRANTED] * 16
    else:
        assert set(kit.fill("flood", range(1000, 2000))) == {GRANTED}
    kit.tick(0.1)
    assert kit.there("quiet", range(20)) == 20
    assert 35 <= kit.there("flood", range(1000, 2000)) <= 44
    check(kit.state)


def test_who_is_beyond_its_quota_gives_its_own_first() -> None:
    kit = Tenants("small", "large")
    kit.quota("small", dram_bytes=16 * KIB)
    kit.quota("large", dram_bytes=48 * KIB)
    kit.fill("large", range(40))
    kit.fill("small", range(100))  # beyond, as long as there is room
    assert kit.there("small", range(100)) > 16
    kit.fill("large", range(40, 46))
    assert kit.there("large", range(46)) == 46
    kit.fill("small", range(200, 300))
    assert kit.there("large", range(46)) == 46
    assert kit.there("small", range(200, 300)) >= 14
    check(kit.state)


def test_beyond_a_quota_no_more_goes_than_is_beyond() -> None:
    kit = Tenants("a1", "b1")
    kit.quota("a1", dram_bytes=16 * KIB)
    kit.fill("a1", range(40))
    kit.fill("b1", range(1000, 1300))
    assert kit.there("a1", range(40)) in (15, 16)
    kit.fill("b1", range(2000, 2300))
    assert kit.there("a1", range(40)) in (15, 16)
    check(kit.state)


def test_objects_count_as_bytes_do() -> None:
    kit = Tenants("few", "many")
    kit.quota("few", objects=10)
    kit.fill("few", range(30))
    kit.fill("many", range(1000, 1200))
    assert kit.there("few", range(30)) == 10
    check(kit.state)


def test_where_quotas_promise_more_than_there_is_age_and_priority_decide() -> None:
    kit = Tenants("old", "new")
    for name in ("old", "new"):
        kit.quota(name, dram_bytes=1 << 20)
    kit.fill("old", range(60))
    assert set(kit.fill("new", range(100, 150))) == {GRANTED}
    assert kit.there("new", range(100, 150)) == 50
    kit.quota("new", priority=LOW)
    kit.fill("new", range(200, 230))
    assert kit.there("old", range(60)) < 20
    before = kit.there("old", range(60))
    kit.fill("new", range(300, 350))
    assert kit.there("old", range(60)) == before, "a lower priority pushed out a higher one"
    check(kit.state)


def test_a_higher_priority_stays_and_a_quota_bounds_it() -> None:
    kit = Tenants("vip", "any")
    kit.quota("vip", priority=HIGH)
    kit.fill("vip", range(40))
    kit.fill("any", range(1000, 1200))
    assert kit.there("vip", range(40)) == 40
    kit.quota("vip", dram_bytes=8 * KIB)
    kit.fill("any", range(2000, 2200))
    assert kit.there("vip", range(40)) in (7, 8)
    check(kit.state)


def test_what_others_are_promised_can_fill_the_pool() -> None:
    """Then there is no room for who is promised nothing: not by a fault, and it says so."""
    kit = Tenants("all", "none")
    kit.quota("all", dram_bytes=64 * KIB)
    assert set(kit.fill("all", range(64))) == {GRANTED}
    assert kit.fill("none", range(1000, 1003)) == [PutStatus.NO_SPACE] * 3
    assert kit.there("all", range(64)) >= 62
    assert set(kit.fill("all", range(100, 110))) == {GRANTED}
    check(kit.state)


def test_what_is_granted_counts() -> None:
    kit = Tenants("a1", "b1")
    kit.quota("a1", dram_bytes=16 * KIB)
    kit.quota("b1", dram_bytes=48 * KIB)
    kit.fill("a1", range(12))
    kit.fill("b1", range(100, 145))
    with kit.within("a1"):
        puts = [kit.start([key]) for key in range(50, 56)]
        assert [put.statuses for put in puts] == [[GRANTED]] * 6
        for put in puts:
            kit.commit(put)
    assert kit.there("b1", range(100, 145)) == 45
    check(kit.state)


def test_objects_in_one_piece_are_made_of_what_may_go() -> None:
    """Room in one neighbourhood is not made of what is kept either."""
    kit = Tenants("kept", "loose")
    kit.quota("kept", dram_bytes=40 * KIB)
    for number in range(32):
        kit.fill("kept", range(number, number + 1))
        kit.fill("loose", range(1000 + number, 1001 + number))
    kit.fill("loose", range(3000, 3010), 8 * KIB)
    assert kit.there("kept", range(32)) == 32
    check(kit.state)


@pytest.mark.parametrize("snapshot", [False, True])
def test_quotas_outlive_leaders_and_resets(snapshot: bool) -> None:
    kit = Tenants("a1", "b1")
    kit.quota("a1", dram_bytes=1 << 20, objects=7, priority=HIGH)
    kit.quota("a1", ssd_bytes=5)
    kit.quota("b1", objects=3)
    kit.quota("b1", objects=0)
    kit.apply(c.ResetNamespace("a1", 77))
    past = list(kit.state.snapshot()) if snapshot else kit.durable()
    fresh = restarted(kit, journal=past)
    assert pool_of(fresh.state).quotas.by_id == {
        kit.all["a1"].namespace_id: QuotaSet(kit.all["a1"].namespace_id, 1 << 20, 5, 7, HIGH)
    }
    found = {one.name: one for one in fresh.state.namespaces()}
    assert (found["a1"].dram_quota_bytes, found["a1"].priority) == (1 << 20, HIGH)
    assert (found["b1"].objects_quota, found["b1"].priority) == (0, NORMAL)


def test_a_quota_needs_a_namespace() -> None:
    kit = Tenants("a1")
    with pytest.raises(NamespaceNotFound):
        kit.quota("nobody", objects=1)


def test_pins_take_nothing_that_others_are_promised() -> None:
    kit = Tenants("a1", "b1", config=StateConfig(pinned_share_max=0.5))
    kit.quota("b1", dram_bytes=48 * KIB)
    kit.fill("a1", range(12))
    kit.fill("b1", range(100, 130))

    def pin(name: str, keys: range) -> None:
        with kit.within(name):
            kit.apply(c.Pin(*kit.place, kit.digests(*keys), 0))

    pin("a1", range(7))
    with pytest.raises(QuotaExceeded, match="of what no quota promises"):
        pin("a1", range(12))
    pin("b1", range(100, 124))
    with pytest.raises(QuotaExceeded, match="of the capacity"):
        pin("b1", range(100, 130))
    with kit.within("b1"):
        kit.apply(c.Unpin(*kit.place, kit.digests(*range(100, 124))))
    kit.quota("a1", dram_bytes=UNIT_BYTES)
    with pytest.raises(QuotaExceeded, match="its quota"):
        pin("a1", range(12))
    check(kit.state)


def test_without_quotas_nothing_is_looked_at() -> None:
    kit = Tenants("a1", "b1")
    kit.fill("a1", range(200))
    assert list(pool_of(kit.state).victim_queues) == [-1]


def demote(kit: Kit, ticks: int = 1) -> None:
    """Copies to the SSD are planned, carried out and reported."""
    for _ in range(ticks):
        kit.tick(0.1)
        kit.heartbeat(kit.nodes[1])
        copy_all(kit, kit.nodes[1])
        kit.heartbeat(kit.nodes[1])


@pytest.mark.parametrize("flooders_quota", [0, 256 * KIB])
def test_a_flood_leaves_what_is_within_a_quota_on_the_ssd_alone(flooders_quota: int) -> None:
    node = ssd_node(1, ssd_bytes=512 * KIB)  # 128 objects, 4 KiB each there
    kit = Tenants("quiet", "flood", node=node)
    kit.quota("quiet", ssd_bytes=300 * KIB)
    if flooders_quota:
        kit.quota("flood", ssd_bytes=flooders_quota)
    for number in range(60):
        kit.fill("quiet", range(number, number + 1))
        demote(kit)
    for number in range(1000, 1600, 2):
        kit.fill("flood", range(number, number + 2))
        demote(kit)
    used = {one.name: one for one in kit.state.namespaces()}
    assert 30 * 4 * KIB <= used["quiet"].ssd_used_bytes <= 300 * KIB
    assert used["flood"].ssd_used_bytes > 200 * KIB
    # Those that had a copy when their place in memory went.
    assert kit.there("quiet", range(60)) >= 30
    before = kit.there("quiet", range(60))
    for number in range(2000, 2300, 2):
        kit.fill("flood", range(number, number + 2))
        demote(kit)
    assert kit.there("quiet", range(60)) == before
    check(kit.state)


def used_on_ssd(kit: Tenants, name: str) -> int:
    """Blocks of 4 KiB."""
    return {one.name: one for one in kit.state.namespaces()}[name].ssd_used_bytes // (4 * KIB)


def test_who_gets_no_room_on_the_ssd_keeps_nobody_waiting_who_does() -> None:
    kit = Tenants("kept", "loose", node=ssd_node(1, ssd_bytes=128 * KIB))
    kit.quota("kept", ssd_bytes=128 * KIB)
    for number in range(0, 120, 10):
        kit.fill("kept", range(number, number + 10))
        demote(kit)
    (ssd,) = (s for s in pool_of(kit.state).segments.by_id.values() if s.tier != DRAM)
    assert ssd.free_units == 0
    kit.fill("loose", range(1000, 1010))
    demoted = pool_of(kit.state).counters.demoted
    for number in range(200, 260, 10):  # those of `loose` are the coldest ones soon
        kit.fill("kept", range(number, number + 10))
        demote(kit, 2)
    assert pool_of(kit.state).counters.demoted >= demoted + 60
    assert used_on_ssd(kit, "loose") == 0
    check(kit.state)


def test_who_gets_no_room_on_the_ssd_is_not_looked_for_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, look_for_real = [], demotion._look_for_cold

    def look(*arguments: Any) -> None:
        looks.append(arguments)
        look_for_real(*arguments)

    monkeypatch.setattr(demotion, "_look_for_cold", look)
    monkeypatch.setattr(demotion, "REFUSED_ROW_S", 0.01)  # as if there were 20,000 for each
    kit = Tenants("kept", "loose", node=ssd_node(1, ssd_bytes=128 * KIB))
    kit.quota("kept", ssd_bytes=128 * KIB)
    for number in range(0, 120, 10):
        kit.fill("kept", range(number, number + 10))
        demote(kit)
    for number in range(1000, 1100, 10):
        kit.fill("loose", range(number, number + 10))
        demote(kit, 2)
    looks.clear()
    demote(kit, 40)
    assert 2 <= len(looks) <= 8  # of 80 turns
    assert used_on_ssd(kit, "loose") == 0
    check(kit.state)


def test_copies_under_way_count() -> None:
    """Those of one tick are not each within a quota that they are beyond together."""
    kit = Tenants("quiet", "busy", node=ssd_node(1, 256 * KIB, ssd_bytes=256 * KIB))
    kit.quota("quiet", ssd_bytes=40 * 4 * KIB)
    kit.quota("busy", ssd_bytes=24 * 4 * KIB)
    kit.fill("quiet", range(40))
    kit.fill("busy", range(1000, 1200))
    demote(kit, 6)  # 40 of them, and 24
    kit.fill("busy", range(2000, 2200))  # those leave memory
    assert used_on_ssd(kit, "quiet") == 40
    demote(kit, 3)
    assert used_on_ssd(kit, "quiet") == 40
    assert used_on_ssd(kit, "busy") == 24
    check(kit.state)


def test_on_an_ssd_too_no_more_goes_than_is_beyond() -> None:
    config = StateConfig(reserve_share=0.25)  # of which much is made at once
    kit = Tenants("a1", "b1", config=config, node=ssd_node(1, ssd_bytes=256 * KIB))
    kit.quota("a1", ssd_bytes=20 * 4 * KIB)
    for number in range(0, 100, 10):
        kit.fill("a1", range(number, number + 10))
        demote(kit)
    assert used_on_ssd(kit, "a1") > 40
    for number in range(1000, 1400, 5):
        kit.fill("b1", range(number, number + 5))
        demote(kit)
    assert used_on_ssd(kit, "a1") in (19, 20)
    check(kit.state)


def test_what_is_kept_in_memory_is_not_pushed_out_by_a_promotion() -> None:
    kit = Tenants("kept", "loose", node=ssd_node(1, ssd_bytes=2 << 20))
    kit.quota("kept", dram_bytes=40 * KIB)
    kit.fill("loose", range(1000, 1040))
    demote(kit, 3)
    kit.fill("kept", range(38))
    demote(kit, 3)
    before = {one.name: one for one in kit.state.namespaces()}["kept"]
    in_memory = before.used_bytes - before.ssd_used_bytes
    for _ in range(4):
        with kit.within("loose"):
            kit.get(*range(1000, 1040))
        demote(kit, 2)
    after = {one.name: one for one in kit.state.namespaces()}["kept"]
    assert after.used_bytes - after.ssd_used_bytes == in_memory
    assert kit.there("kept", range(38)) == 38
    check(kit.state)
