"""What goes when room is needed, in which order, and from where."""

from __future__ import annotations

import numpy as np
import pytest

from cenote.api.rows import PutStatus
from cenote.master import commands as c
from cenote.master.effects import Gone, GoneReason
from cenote.master.state import StateConfig
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import KIB, MIB, Kit, new_node

GRANTED = PutStatus.GRANTED


def full_kit(keys: int = 64, size: int = KIB, **config: float) -> Kit:
    config.setdefault("session_granted_share_max", 1.0)
    kit = Kit(StateConfig(**config))  # type: ignore[arg-type]
    kit.with_nodes(new_node(1, keys * size)).with_session()
    for key in range(keys):
        assert kit.put([key], size) == [GRANTED]
    return kit


def left(kit: Kit, keys: int = 64) -> list[int]:
    return [key for key, there in enumerate(kit.exists(*range(keys))) if there]


def test_the_coldest_go_first() -> None:
    kit = full_kit()
    kit.get(0, 1, 2)
    kit.get(5)
    kit.apply(c.Touch(*kit.place, kit.digests(7), False))
    kit.put([9])
    assert kit.put([100, 101, 102]) == [GRANTED] * 3
    assert set(range(64)) - set(left(kit)) == {3, 4, 6}
    gone = kit.new(Gone)
    assert {effect.reason for effect in gone} == {GoneReason.EVICTED}
    check(kit.state)


def test_looking_does_not_keep_an_object() -> None:
    kit = full_kit()
    for _ in range(3):
        kit.exists(0, 1, 2, 3)
    assert kit.put([100, 101]) == [GRANTED] * 2
    assert {0, 1}.isdisjoint(left(kit))


def test_tails_of_a_chain_go_before_its_root() -> None:
    kit = full_kit(64)
    chain = list(range(100, 132))
    assert kit.put(chain, chain=True) == [GRANTED] * 32
    for key in range(200, 232):
        kit.put([key])  # everything older goes first
    for key in range(300, 310):
        kit.put([key])
    present = kit.exists(*chain)
    kept = sum(present)
    assert 0 < kept <= 22
    assert present == [1] * kept + [0] * (32 - kept)


def test_reading_a_chain_renews_its_root_most() -> None:
    kit = full_kit(64)
    chain = list(range(32))
    kit.get(*range(32, 64))
    kit.acquire(*chain, chain=True, lease=False)
    for key in range(200, 250):
        kit.put([key])
    present = kit.exists(*chain)
    kept = sum(present)
    assert 0 < kept < 32
    assert present == [1] * kept + [0] * (32 - kept)


def test_a_reserve_is_kept_free_ahead_of_need() -> None:
    kit = full_kit(64, reserve_share=0.1)
    assert kit.state.segments(0)[0].largest_free_bytes == 0
    kit.tick()
    free = 64 * KIB - kit.state.status(kit.now_s).used_bytes
    assert 6 * KIB <= free <= 10 * KIB
    ahead = kit.state.counters.evictions_ahead
    kit.tick()
    assert kit.state.counters.evictions_ahead == ahead > 0
    check(kit.state)


def test_reset_namespaces_make_room_first() -> None:
    kit = full_kit(32)
    kit.namespace = kit.apply(c.OpenNamespace("b", b"", True, 1, 99))
    assert kit.put(list(range(100, 110))) == [GRANTED] * 10
    old = kit.apply(c.ResetNamespace("a", 5))
    assert old.generation == 2
    assert kit.put(list(range(200, 220))) == [GRANTED] * 20
    assert kit.exists(*range(100, 110)) == [1] * 10
    assert kit.new(Gone)[-1].reason == GoneReason.RESET
    check(kit.state)


def test_sweeping_is_bounded_and_ends() -> None:
    kit = full_kit(64, tick_sweep_rows_max=10)
    kit.namespace = kit.apply(c.ResetNamespace("a", 5))
    assert kit.exists(*range(64)) == [0] * 64
    assert kit.state.status(kit.now_s).stale_objects == 64
    kit.tick()
    assert 50 <= kit.state.status(kit.now_s).stale_objects < 64
    for _ in range(10):
        kit.tick()
    status = kit.state.status(kit.now_s)
    assert (status.stale_objects, status.objects, status.used_bytes) == (0, 0, 0)
    assert pool_of(kit.state).sweep_at == 0
    check(kit.state)


def test_room_in_one_piece_is_made_where_free_space_is_in_crumbs() -> None:
    config = StateConfig(session_granted_share_max=1.0, tick_evict_rows_max=64)
    kit = Kit(config).with_nodes(new_node(1, 256 * KIB, slots=4096)).with_session()
    keys = list(range(1024))
    assert kit.put(keys, 256) == [GRANTED] * 1024
    kit.apply(c.Pin(*kit.place, kit.digests(*keys[:512:2]), 0))
    kit.remove(*keys[1:512:2])
    assert kit.put([5000], 60 * KIB) == [GRANTED]
    check(kit.state)
    assert kit.exists(*keys[:512:2]) == [1] * 256


def test_nodes_of_different_size_fill_evenly() -> None:
    kit = Kit().with_nodes(new_node(1, 4 * MIB), new_node(2, 16 * MIB)).with_session()
    for start in range(0, 5120, 64):
        kit.put(list(range(start, start + 64)), 3 * KIB)
        small, large = (
            s.used_bytes / (s.ready_bytes - s.retired_bytes) for s in kit.state.segments(0)
        )
        assert abs(small - large) < 0.10
        for node in kit.nodes.values():
            kit.heartbeat(node)
    assert kit.state.counters.evicted == 0
    check(kit.state)


@pytest.mark.parametrize("batch", [1, 40])
def test_puts_never_fail_while_anything_can_go(batch: int) -> None:
    kit = Kit().with_nodes(*(new_node(i, 256 * KIB) for i in (1, 2, 3))).with_session()
    rng = np.random.default_rng(batch)
    keys = 0
    for _ in range(2000 // batch):
        sizes = rng.choice([64, 500, 4 * KIB, 30 * KIB], batch, p=[0.4, 0.3, 0.2, 0.1])
        sizes = sizes[np.cumsum(sizes) < 300 * KIB]
        keys += len(sizes)
        statuses = kit.put(list(range(keys, keys + len(sizes))), sizes.tolist())
        assert statuses == [GRANTED] * len(sizes)
    kit.heartbeats()
    check(kit.state)
    assert kit.state.status(0).used_bytes > 0.6 * kit.state.status(0).capacity_bytes


def test_room_for_a_batch_of_large_objects_is_made_in_few_steps_and_no_more_than_it_needs() -> None:
    """One step for each object took a pool that was full 50 us an object."""
    kit = full_kit(256, 4 * MIB)
    assert kit.put(list(range(1000, 1064)), 4 * MIB) == [GRANTED] * 64
    gone = kit.new(Gone)
    assert {effect.reason for effect in gone} == {GoneReason.EVICTED}
    assert len(gone) <= 8
    assert 64 <= sum(len(effect.digests) for effect in gone) <= 72
    check(kit.state)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_room_for_the_runs_of_a_batch_is_made_together_wherever_it_is_short(nodes: int) -> None:
    """One step for each run took a pool of several full nodes four times as long as one of one."""
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(*(new_node(i, 256 * MIB // nodes, slots=8192) for i in range(1, nodes + 1)))
    kit.with_session()
    for start in range(0, 4096, 64):
        kit.put(list(range(start, start + 64)), 64 * KIB)
    wanted = 256
    assert kit.put(list(range(5000, 5000 + wanted)), 64 * KIB) == [GRANTED] * wanted
    gone = kit.new(Gone)
    assert {effect.reason for effect in gone} == {GoneReason.EVICTED}
    assert len(gone) <= 24  # 320 on two nodes and more, before
    assert sum(len(effect.digests) for effect in gone) <= 1.25 * wanted
    check(kit.state)


def test_a_full_node_beside_an_empty_one_gives_room_for_its_own_share_alone() -> None:
    kit = Kit(StateConfig(session_granted_share_max=1.0))
    kit.with_nodes(new_node(1, 16 * MIB, slots=4096)).with_session()
    for start in range(0, 256, 32):
        kit.put(list(range(start, start + 32)), 64 * KIB)
    kit.with_nodes(new_node(2, 64 * MIB, slots=4096))
    wanted = 192
    assert kit.put(list(range(5000, 5000 + wanted)), 64 * KIB) == [GRANTED] * wanted
    placed = [s.used_bytes // (64 * KIB) for s in kit.state.segments(0)]
    gone = sum(len(effect.digests) for effect in kit.new(Gone))
    assert gone <= placed[0] - (256 - gone) + 32
    assert gone < wanted // 2
    check(kit.state)
