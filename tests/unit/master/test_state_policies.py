"""Eviction policies other than LRU in the master's state: what they hear of, and `auto`."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.rows import PutStatus
from cenote.master import commands as c
from cenote.master.effects import Notice
from cenote.master.state import MasterState, StateConfig
from cenote.policy.base import FREQUENCY, MAIN
from cenote.policy.names import POLICIES
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, Kit, new_node
from unit.master.tiers_kit import copy_all, ssd_node


def kit_of(policy: str, keys: int = 64) -> Kit:
    kit = Kit(StateConfig(policy=policy, session_granted_share_max=1.0))
    return kit.with_nodes(new_node(1, keys * KIB)).with_session()


def flags(kit: Kit, *keys: int) -> list[int]:
    pool = pool_of(kit.state)
    rows = pool.objects.lookup(kit.digests(*keys))
    found: list[int] = (pool.stamp[rows] & np.uint64(MAIN | FREQUENCY)).tolist()
    return found


def chained(kit: Kit, *keys: int) -> None:
    """What a client tells after it put the end of a chain."""
    empty = np.zeros(0, np.uint64)
    news = c.Piggyback(*kit.place, empty, chained=kit.digests(*keys))
    kit.state.piggyback(news, kit.now_s)


@pytest.mark.parametrize("policy", [*POLICIES, "auto"])
def test_a_full_pool_goes_on_taking_what_is_put(policy: str) -> None:
    kit = kit_of(policy)
    for key in range(300):
        assert kit.put([key]) == [PutStatus.GRANTED], key
        if key % 3 == 0:
            kit.get(max(0, key - 5))
    for first in range(1000, 1300, 10):
        kit.put(list(range(first, first + 10)), chain=True)
        kit.acquire(*range(first, first + 10), chain=True, lease=False)
        kit.tick(0.02)
    assert 40 <= kit.state.object_count <= 64
    check(kit.state)


def test_a_put_chain_is_ordered_and_not_used() -> None:
    kit = kit_of("arc")
    kit.put([1, 2, 3], chain=True)
    chained(kit, 1, 2, 3)
    assert flags(kit, 1, 2, 3) == [0, 0, 0]
    pool = pool_of(kit.state)
    stamps = pool.stamp[pool.objects.lookup(kit.digests(1, 2, 3))].tolist()
    assert stamps == sorted(stamps, reverse=True)
    kit.acquire(1, 2, chain=True, lease=False)
    kit.get(3)
    assert flags(kit, 1, 2, 3) == [MAIN] * 3


def test_what_was_evicted_and_comes_back_is_known_again() -> None:
    kit = kit_of("s3fifo")
    for key in range(200):
        kit.put([key])
    gone = [key for key, there in enumerate(kit.exists(*range(200))) if not there][-3:]
    kit.put(gone)
    assert flags(kit, *gone) == [MAIN] * 3
    kit.put([900])
    assert flags(kit, 900) == [0]


def test_what_was_removed_is_not_taken_for_evicted() -> None:
    kit = kit_of("s3fifo")
    for key in range(100):
        kit.put([key])
    there = [key for key, found in enumerate(kit.exists(*range(100))) if found][:3]
    kit.apply(c.Remove(*kit.place, kit.digests(*there)))
    kit.put(there)
    assert flags(kit, *there) == [0, 0, 0]


@pytest.mark.parametrize("policy", ["lru-chain", "arc-chain", "s3fifo-chain"])
def test_the_middle_of_a_chain_stays_as_long_as_its_end(policy: str) -> None:
    kit = kit_of(policy)
    rng = np.random.default_rng(3)
    chains = [list(range(100 * n, 100 * n + 8)) for n in range(30)]
    for _ in range(200):
        chain = chains[min(29, int(rng.exponential(4)))]
        found = kit.exists(*chain)
        hits = found.index(0) if 0 in found else len(chain)
        if hits:
            kit.acquire(*chain[:hits], chain=True, lease=False)
        if hits < len(chain):
            kit.put(chain[hits:], chain=True)
            chained(kit, *chain)
        for other in chains:
            present = kit.exists(*other)
            assert sorted(present, reverse=True) == present, (other, present)
    check(kit.state)


def test_links_move_with_their_rows_and_end_with_them() -> None:
    kit = kit_of("s3fifo-chain", 2000)
    for first in range(0, 1600, 8):
        kit.put(list(range(first, first + 8)), chain=True)
    kit.apply(c.Remove(*kit.place, kit.digests(*range(0, 1200))))
    for _ in range(5):
        kit.tick(0.02)
    pool = pool_of(kit.state)
    assert pool.counters.rows_moved > 0
    rows = pool.objects.lookup(kit.digests(*range(1200, 1600)))
    parents = pool.objects.parent[rows].reshape(-1, 8)
    assert (parents[:, 0] == 0).all()
    assert (parents[:, 1:] != 0).all()
    assert np.count_nonzero(pool.objects.parent[: pool.objects.high_water]) == 350


def test_without_chains_links_take_no_memory() -> None:
    plain, linked = kit_of("lru", 4000), kit_of("arc-chain", 4000)
    for kit in (plain, linked):
        for first in range(0, 3000, 100):
            kit.put(list(range(first, first + 100)), chain=True)
    sizes = [kit.state.status(kit.now_s).metadata_memory_bytes for kit in (plain, linked)]
    assert sizes[1] - sizes[0] >= 4 * 3000
    assert not np.count_nonzero(pool_of(plain.state).objects.parent[:4000])


def test_auto_takes_another_policy_and_says_so() -> None:
    kit = kit_of("auto", 256)
    rng = np.random.default_rng(1)
    fresh = 10_000
    for step in range(700):
        hot = rng.choice(150, 12, replace=False).tolist()
        found = kit.exists(*hot)
        there = [key for key, hit in zip(hot, found, strict=True) if hit]
        if there:
            kit.acquire(*there, lease=False)
        kit.put([key for key, hit in zip(hot, found, strict=True) if not hit] or [fresh])
        kit.put(list(range(fresh + 1, fresh + 33)))
        fresh += 40
        kit.tick(0.02 if step % 50 else 1.1)
        if kit.state.status(kit.now_s).policy_switches:
            break
    status = kit.state.status(kit.now_s)
    assert status.policy_wanted == "auto"
    assert status.policy != "lru"
    assert status.policy_switches == 1
    assert f"eviction policy {status.policy} instead of lru" in kit.new(Notice)[-1].text
    told = kit.state.miss_ratios()
    assert told.policies[status.policy] > told.policies["lru"]
    assert 200 <= told.capacity_objects <= 300
    assert told.curves[0].references > 0
    assert told.curves[1].namespace == "a"
    check(kit.state)


def test_after_a_restart_a_policy_begins_with_what_is_there() -> None:
    for policy in POLICIES:
        kit = kit_of(policy)
        for first in range(0, 300, 5):
            kit.put(list(range(first, first + 5)), chain=True)
        again = MasterState(StateConfig(policy=policy), 2)
        for effect in kit.durable():
            again.replay(effect)
        assert again.object_count == kit.state.object_count
        pool = pool_of(again)
        rows, _ = pool.objects.live_rows(0, pool.objects.high_water)
        main = (pool.stamp[rows] & np.uint64(MAIN)) != 0
        assert main.all() if policy.startswith("s3fifo") else not main.any()


def test_without_sampling_nothing_is_followed() -> None:
    kit = Kit(StateConfig(sampling=False)).with_nodes(new_node(1, 64 * KIB)).with_session()
    for key in range(200):
        kit.put([key])
        kit.tick(0.5)
    found = kit.state.miss_ratios()
    assert (found.capacity_objects, found.sampling_rate) == (0, 0.0)
    assert found.curves[0].hit_rates == []


def share_found_in_memory(policy: str, *, has_ssd: bool) -> float:
    """Under skewed use and scans, once memory is full."""
    rng = np.random.default_rng(5)
    kit = Kit(StateConfig(policy=policy, session_granted_share_max=1.0))
    memory = 256 * KIB
    node = ssd_node(1, memory, 8 * memory, ssd_slots=2048) if has_ssd else new_node(1, memory)
    kit.with_nodes(node).with_session()
    weights = 1 / np.arange(1, 1_501) ** 0.8
    draws = rng.choice(1_500, (600, 12), p=weights / weights.sum())
    found = asked = 0
    for number, drawn in enumerate(draws):
        keys = list(dict.fromkeys(drawn.tolist()))
        if number % 3 == 0:
            keys = list(range(10_000 + 12 * number, 10_012 + 12 * number))
        hits = kit.get(*keys)
        if number > 200 and number % 3:
            asked += len(keys)
            first = [hit.extents[0][0] for hit in hits if hit is not None]
            found += first.count(node.segments[0].segment_id)
        absent = [key for key, hit in zip(keys, hits, strict=True) if hit is None]
        if absent:
            kit.put(absent)
        kit.tick(0.05)
        for _ in range(2):
            kit.heartbeat(node)
            copy_all(kit, node)
    check(kit.state)
    return found / asked


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_with_an_ssd_memory_keeps_what_the_policy_would_keep_without(policy: str) -> None:
    without = share_found_in_memory(policy, has_ssd=False)
    assert share_found_in_memory(policy, has_ssd=True) > 0.85 * without
