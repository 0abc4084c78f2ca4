"""Content dedup in the master: who holds which extents, and when their space is free."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cenote.api.rows import CommitStatus, PutStatus
from cenote.master import commands as c
from cenote.master.effects import DURABLE, Digested, Stored
from cenote.master.state import MasterState, StateConfig
from unit.master.dedup_kit import (
    aliases_of,
    commit_aliases,
    content_checksum,
    put_bytes,
    start_bytes,
    tickets_of,
    used_units,
)
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, Kit, new_node, restarted, session_id

TEN = list(range(10))
END_MAY_GO = (Stored, Digested)
"""Of what was relaxed, a crash may take the end."""


@pytest.fixture
def kit() -> Kit:
    return Kit().with_nodes(new_node(1)).with_session()


def ten_copies(kit: Kit) -> None:
    assert put_bytes(kit, [0], [7]) == 0
    for key in TEN[1:]:
        assert put_bytes(kit, [key], [7]) == 1


def next_leader(kit: Kit, lost: int = 0) -> Kit:
    """What a restart or a takeover knows: the journal but for its end, and what daemons sealed."""
    journal = kit.durable()
    after = restarted(kit, journal=journal[: len(journal) - lost])
    for node in kit.nodes.values():
        after.restart_node(node)
    after.apply(c.OpenSession(session_id(1), boot_id="host-1"))
    return after


def are_there(kit: Kit, *keys: int) -> bool:
    return all(hit is not None and hit.status for hit in kit.get(*keys))


def test_ten_copies_take_the_space_of_one(kit: Kit) -> None:
    ten_copies(kit)
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == KIB // 64
    counters = kit.state.counters
    assert (counters.dedup_puts, counters.dedup_bytes) == (9, 9 * KIB)
    assert len({hit.extents[0][2] for hit in kit.get(*TEN) if hit}) == 1
    status = kit.state.status(kit.now_s)
    assert (status.used_bytes, status.logical_bytes) == (KIB, 10 * KIB)


@pytest.mark.parametrize("last", [0, 4, 9])
def test_the_last_holder_frees_the_space(kit: Kit, last: int) -> None:
    ten_copies(kit)
    for key in TEN:
        if key != last:
            assert kit.remove(key) == [1]
            check(kit.state)
    assert used_units(kit, kit.nodes[1]) == KIB // 64
    (hit,) = kit.get(last)
    assert hit is not None
    assert hit.checksum == content_checksum(7)
    assert kit.remove(last) == [1]
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == 0


def test_all_holders_at_once(kit: Kit) -> None:
    ten_copies(kit)
    kit.remove(*TEN)
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == 0


def test_a_batch_of_some_known_and_some_new(kit: Kit) -> None:
    put_bytes(kit, [0, 1], [5, 6])
    assert put_bytes(kit, [2, 3, 4, 5], [6, 8, 0, 5]) == 2
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == 4 * KIB // 64
    assert are_there(kit, *range(6))


def test_the_same_key_twice_in_a_batch_is_one_reference(kit: Kit) -> None:
    put_bytes(kit, [0], [5])
    reply = start_bytes(kit, [1, 1], [5, 5])
    assert list(reply.puts[::8]) == [PutStatus.DEDUPLICATED, PutStatus.GRANTED]
    assert commit_aliases(kit, aliases_of(reply, [1, 1], KIB), [5, 5]) == [CommitStatus.DECIDED]
    check(kit.state)


def test_without_a_ticket_nothing_is_decided(kit: Kit) -> None:
    put_bytes(kit, [0], [5])
    reply = start_bytes(kit, [1, 2], [5, 5])
    aliases = aliases_of(reply, [1, 2], KIB)
    forged = bytes(32)
    assert commit_aliases(kit, aliases, [5, 5], tickets=forged) == [CommitStatus.NOT_GRANTED] * 2
    check(kit.state)
    assert kit.exists(1, 2) == [0, 0]
    assert not pool_of(kit.state).grants.by_id
    assert kit.state.counters.dedup_unproven == 2
    reply = start_bytes(kit, [1], [5])
    short = commit_aliases(kit, aliases_of(reply, [1], KIB), [5], tickets=b"")
    assert short == [CommitStatus.NOT_GRANTED]
    check(kit.state)


def test_a_ticket_is_of_one_grant_and_place(kit: Kit) -> None:
    put_bytes(kit, [0, 1], [5, 6])
    first = aliases_of(start_bytes(kit, [2], [5]), [2], KIB)
    second = aliases_of(start_bytes(kit, [3], [6]), [3], KIB)
    stolen = tickets_of(kit, first, [0])
    assert commit_aliases(kit, second, [6], tickets=stolen) == [CommitStatus.NOT_GRANTED]
    assert commit_aliases(kit, first, [5], tickets=stolen) == [CommitStatus.DECIDED]
    check(kit.state)


def test_a_digest_of_another_size_finds_nothing(kit: Kit) -> None:
    put_bytes(kit, [0], [5], KIB)
    assert not start_bytes(kit, [1], [5], 2 * KIB).alias_grant_id


def test_a_reference_holds_what_is_removed_before_it_is_decided(kit: Kit) -> None:
    put_bytes(kit, [0], [5])
    aliases = aliases_of(start_bytes(kit, [1], [5]), [1], KIB)
    kit.remove(0)
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == KIB // 64
    assert commit_aliases(kit, aliases, [5]) == [CommitStatus.DECIDED]
    check(kit.state)
    assert are_there(kit, 1)


def test_a_writer_that_is_lost_leaves_no_reference(kit: Kit) -> None:
    put_bytes(kit, [0], [5])
    start_bytes(kit, [1], [5])
    kit.tick(3600)
    check(kit.state)
    kit.remove(0)
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == 0


def test_a_lease_on_one_holder_keeps_the_bytes(kit: Kit) -> None:
    put_bytes(kit, [0], [5])
    put_bytes(kit, [1], [5])
    lease = kit.acquire(1)
    kit.remove(0, 1)
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == KIB // 64
    kit.release(lease)
    check(kit.state)
    assert used_units(kit, kit.nodes[1]) == 0


def test_a_full_pool_evicts_until_there_is_room(kit: Kit) -> None:
    """An evicted reference frees nothing: eviction goes on."""
    for key in range(60):
        put_bytes(kit, [key], [key % 4 + 1], 4 * KIB)
    for key in range(100, 120):
        put_bytes(kit, [key], [key], 8 * KIB)
        check(kit.state)
    assert are_there(kit, 119)


def test_room_in_one_piece_is_made_of_all_holders() -> None:
    kit = Kit(StateConfig(reserve_share=0.0)).with_nodes(new_node(1)).with_session()
    for key in range(32):
        put_bytes(kit, [key], [key + 1], 2 * KIB)
        put_bytes(kit, [key + 100], [key + 1], 2 * KIB)
    put_bytes(kit, [500], [500], 40 * KIB)
    check(kit.state)
    assert are_there(kit, 500)


def test_a_next_leader_counts_the_holders(kit: Kit) -> None:
    ten_copies(kit)
    put_bytes(kit, [20], [8])
    after = next_leader(kit)
    check(after.state)
    assert used_units(after, after.nodes[1]) == 2 * KIB // 64
    assert are_there(after, *TEN, 20)
    after.remove(*TEN[:9])
    check(after.state)
    assert are_there(after, 9)
    after.remove(9)
    check(after.state)
    assert used_units(after, after.nodes[1]) == KIB // 64


def test_a_next_leader_finds_bytes_by_their_digest(kit: Kit) -> None:
    put_bytes(kit, [0], [5])
    after = next_leader(kit)
    assert put_bytes(after, [1], [5]) == 1
    check(after.state)


def test_a_snapshot_has_the_digests(kit: Kit) -> None:
    put_bytes(kit, [0, 1], [5, 6])
    put_bytes(kit, [2], [5])
    kit.remove(1)
    parts = list(kit.state.snapshot())
    assert sum(len(e.seqs) for e in parts if isinstance(e, Digested)) == 2
    copy = MasterState(StateConfig(), epoch=2)
    for effect in parts:
        assert isinstance(effect, DURABLE)
        copy.replay(effect)
    assert contents(copy) == contents(kit.state)
    assert len(pool_of(copy).blobs.entries()[2]) == 2


@pytest.mark.parametrize("heard", [0, 1, 5])
def test_an_end_of_the_journal_that_is_lost(kit: Kit, heard: int) -> None:
    """So many copies are in the journal, the others in the slot tables alone."""
    for key in TEN[:heard]:
        put_bytes(kit, [key], [7])
    before = len(kit.durable())
    for key in TEN[heard:]:
        put_bytes(kit, [key], [7])
    after = next_leader(kit, lost=len(kit.durable()) - before)
    check(after.state)
    assert are_there(after, *TEN)
    assert used_units(after, after.nodes[1]) == KIB // 64
    after.remove(*TEN)
    check(after.state)


def test_what_was_not_sealed_is_dropped_and_the_others_stay(kit: Kit) -> None:
    put_bytes(kit, [0], [7], seal=False)
    put_bytes(kit, [1], [7])
    put_bytes(kit, [2], [7], seal=False)
    after = next_leader(kit)
    check(after.state)
    assert after.exists(0, 1, 2) == [0, 1, 0]


def test_a_lost_segment_takes_all_holders(kit: Kit) -> None:
    ten_copies(kit)
    kit.nodes[1].segments[0].incarnation = b"another"
    kit.nodes[1].segments[0].table.clear()
    kit.restart_node(kit.nodes[1])
    check(kit.state)
    assert not any(kit.exists(*TEN))


def test_replicas_are_shared_each(kit: Kit) -> None:
    kit.attach(new_node(2))
    put_bytes(kit, [0], [5], replicas=2)
    assert put_bytes(kit, [1], [5], replicas=2) == 1
    check(kit.state)
    assert [used_units(kit, kit.nodes[n]) for n in (1, 2)] == [KIB // 64] * 2
    put_bytes(kit, [2], [6])
    assert put_bytes(kit, [3], [6], replicas=2) == 0
    check(kit.state)


def test_namespaces_share_nothing(kit: Kit) -> None:
    put_bytes(kit, [0], [5])
    kit.namespace = kit.apply(c.OpenNamespace("b", b"f", True, 2, 1))
    assert put_bytes(kit, [0], [5]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_at_random(seed: int) -> None:
    """Puts of few contents, removals, evictions, restarts: counted anew after each step."""
    dice = random.Random(seed)
    kit = Kit().with_nodes(new_node(1, 32 * KIB), new_node(2, 32 * KIB)).with_session()
    for step in range(150):
        action = dice.random()
        if action < 0.55:
            keys = dice.sample(range(40), dice.randint(1, 4))
            if not any(kit.exists(*keys)):
                sizes = dice.choice((KIB, 3 * KIB))
                put_bytes(
                    kit,
                    keys,
                    [dice.randint(0, 6) for _ in keys],
                    sizes,
                    replicas=dice.choice((1, 1, 2)),
                    seal=dice.random() < 0.9,
                )
        elif action < 0.85:
            kit.remove(*dice.sample(range(40), dice.randint(1, 5)))
        elif action < 0.9:
            start_bytes(kit, [100 + step], [dice.randint(1, 6)])
        elif action < 0.95:
            kit.restart_node(kit.nodes[dice.randint(1, 2)])
        else:
            journal = kit.durable()
            ends = [i for i, effect in enumerate(journal) if not isinstance(effect, END_MAY_GO)]
            end = len(journal) - 1 - max(ends) if dice.random() < 0.5 else 0
            kit = next_leader(kit, lost=min(end, dice.randint(0, 4)))
        check(kit.state)
    assert np.any([s.slots.used for s in pool_of(kit.state).segments.by_id.values()])
