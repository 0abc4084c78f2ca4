"""Spare extents: what may be committed to them, and what comes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cenote.api.errors import (
    InvalidArgument,
    NamespaceReset,
    SessionUnknown,
)
from cenote.api.rows import UNIT_BYTES, CommitStatus
from cenote.master import commands as c
from cenote.master.effects import Gone, Stored
from unit.master.spares_kit import (
    abort,
    facts,
    free_units,
    granted_bytes,
    grants,
    make_kit,
    pending,
    twenty_spares,
)
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, MIB, FakeSegment, Kit, checksum_of, session_id
from unit.master.state_replies import Put

DECIDED, NOT_GRANTED = CommitStatus.DECIDED, CommitStatus.NOT_GRANTED
SAME, DIFFERENT = CommitStatus.EXISTS_SAME, CommitStatus.EXISTS_DIFFERENT
UNSEALED_SAME = CommitStatus.UNSEALED_SAME
UNSEALED_DIFFERENT = CommitStatus.UNSEALED_DIFFERENT


@pytest.fixture
def kit() -> Kit:
    return make_kit()


@pytest.fixture
def spares(kit: Kit) -> Put:
    return twenty_spares(kit)


@pytest.mark.parametrize("positions", [[0], [19], [0, 1, 2], [17, 18, 19], [3, 1, 2], [0, 9, 5]])
def test_what_was_written_is_found_under_its_key(
    kit: Kit, spares: Put, positions: list[int]
) -> None:
    keys = [100 + i for i in range(len(positions))]
    first = kit.state.last_seq + 1
    assert kit.commit_spares(spares, positions, keys, 1000) == [DECIDED] * len(keys)
    assert facts(kit, *keys) == [(1000, checksum_of(key)) for key in keys]
    assert [hit and hit.seq for hit in kit.get(*keys)] == [first + i for i in range(len(keys))]
    for key, position in zip(keys, positions, strict=True):
        (hit,) = kit.get(key)
        segment, _, offset, _ = spares.extents[position][0]
        assert hit is not None
        assert hit.extents == [(segment, 0, offset, 1000)]
    assert pending(kit, spares) == sorted(set(range(20)) - set(positions))
    assert granted_bytes(kit) == (20 - len(positions)) * KIB
    assert kit.state.counters.committed == 1 + len(positions)
    check(kit.state)


def test_all_of_them_one_by_one_and_in_runs(kit: Kit, spares: Put) -> None:
    for i in range(8):
        assert kit.commit_spares(spares, [i], [100 + i]) == [DECIDED]
        check(kit.state)
    assert kit.commit_spares(spares, range(8, 20), range(108, 120)) == [DECIDED] * 12
    assert (grants(kit), granted_bytes(kit)) == (0, 0)
    assert kit.commit_spares(spares, [0], [500]) == [NOT_GRANTED]
    assert kit.commit_spares(spares, [0, 1], [500, 501]) == [NOT_GRANTED] * 2
    assert kit.exists(*range(100, 120)) == [1] * 20
    check(kit.state)


@pytest.mark.parametrize("many", [False, True])
def test_one_object_is_the_same_either_way(many: bool) -> None:
    """The short way and the long one: same table, same effects."""
    kit = make_kit()
    put, spares = kit.start_spares(4)
    kit.commit(put)
    if many:
        assert kit.commit_spares(spares, [2], [7], 1000, tails=[20], many=True) == [DECIDED]
    else:
        assert kit.commit_spares(spares, [2], [7], 1000, tails=[20]) == [DECIDED]
    stored = kit.new(Stored)[-1]
    assert (stored.sizes.tolist(), stored.tails.tolist()) == ([1000], [20])
    assert (stored.extent_counts.tolist(), stored.replicas.tolist()) == ([1], [1])
    assert stored.checksums.tolist() == [checksum_of(7)]
    assert stored.seqs.tolist() == [2]
    assert stored.digests.tolist() == kit.digests(7).tolist()
    segment, slot, offset, _ = spares.extents[2][0]
    assert stored.placed[0].tolist()[:5] == (segment, slot, offset // 64, KIB // 64, 0)
    (fact,) = contents(kit.state)[kit.digests(7).tobytes()][0:1]
    assert fact == kit.place
    check(kit.state)


def test_long_keys_have_room_behind_their_payload(kit: Kit, spares: Put) -> None:
    assert kit.commit_spares(spares, [0], [1], 900, tails=[100]) == [DECIDED]
    assert kit.commit_spares(spares, [1, 2], [2, 3], [900, 1000], tails=[100, 0]) == [DECIDED] * 2
    assert facts(kit, 1, 2, 3) == [(s, checksum_of(k)) for k, s in ((1, 900), (2, 900), (3, 1000))]
    check(kit.state)


@pytest.mark.parametrize("many", [{}, {"many": True}])
def test_a_key_that_exists_keeps_its_object(kit: Kit, spares: Put, many: dict[str, Any]) -> None:
    kit.put([1, 2], [KIB, 900])
    free = free_units(kit)
    assert kit.commit_spares(spares, [0], [1], **many) == [SAME]
    assert kit.commit_spares(spares, [1], [2], **many) == [DIFFERENT]
    assert facts(kit, 1, 2) == [(KIB, checksum_of(1)), (900, checksum_of(2))]
    assert free_units(kit) == free + 2 * KIB // UNIT_BYTES  # free at once
    assert pending(kit, spares) == list(range(2, 20))
    assert kit.commit_spares(spares, [0], [3], **many) == [NOT_GRANTED]
    assert kit.state.counters.commit_lost == 2
    check(kit.state)


def test_a_batch_with_all_that_can_happen(kit: Kit, spares: Put) -> None:
    kit.put([1])
    kit.commit_spares(spares, [5], [50])
    abort(kit, spares, 6)
    positions = [0, 1, 5, 6, 77, 2, 3]
    keys = [1, 2, 3, 4, 5, 50, 6]
    assert kit.commit_spares(spares, positions, keys, 1000) == [
        DIFFERENT, DECIDED, NOT_GRANTED, NOT_GRANTED, NOT_GRANTED, DIFFERENT, DECIDED,
    ]  # fmt: skip
    assert kit.exists(*range(1, 7)) == [1, 1, 0, 0, 0, 1]
    assert pending(kit, spares) == [4, *range(7, 20)]
    check(kit.state)


@pytest.mark.parametrize("sizes", [[1000, 1000], [1000, 1001]])
def test_a_key_twice_in_a_batch_is_stored_once(kit: Kit, spares: Put, sizes: list[int]) -> None:
    again = UNSEALED_SAME if sizes[0] == sizes[1] else UNSEALED_DIFFERENT
    first = kit.state.last_seq + 1
    statuses = kit.commit_spares(spares, [0, 1, 2, 3], [7, 8, 7, 9], [sizes[0], 999, sizes[1], 998])
    assert statuses == [DECIDED, DECIDED, again, DECIDED]
    assert facts(kit, 7, 8, 9) == [
        (sizes[0], checksum_of(7)), (999, checksum_of(8)), (998, checksum_of(9)),
    ]  # fmt: skip
    assert [hit and hit.seq for hit in kit.get(7, 8, 9)] == [first, first + 1, first + 3]
    assert kit.state.last_seq == first + 3
    assert kit.commit_spares(spares, [2, 0], [70, 71]) == [NOT_GRANTED] * 2
    check(kit.state)


def test_a_grant_that_ends_within_a_batch_with_repeats(kit: Kit) -> None:
    put, spares = kit.start_spares(2)
    kit.commit(put)
    statuses = kit.commit_spares(spares, [0, 1, 0, 5], [7, 7, 7, 7])
    assert statuses == [DECIDED, UNSEALED_SAME, NOT_GRANTED, NOT_GRANTED]
    assert grants(kit) == 0
    check(kit.state)


def test_a_position_twice_is_taken_once(kit: Kit, spares: Put) -> None:
    assert kit.commit_spares(spares, [4, 4], [1, 2]) == [DECIDED, NOT_GRANTED]
    assert kit.exists(1, 2) == [1, 0]
    check(kit.state)


@pytest.mark.parametrize("position", [20, 21, 16_383, 2**31, 2**32 - 1])
def test_positions_that_were_not_granted(kit: Kit, spares: Put, position: int) -> None:
    assert kit.commit_spares(spares, [position], [1]) == [NOT_GRANTED]
    assert kit.commit_spares(spares, [19, position], [2, 3]) == [DECIDED, NOT_GRANTED]
    assert kit.exists(1, 2, 3) == [0, 1, 0]
    check(kit.state)


@pytest.mark.parametrize("count", [1, 2, 20])
@pytest.mark.parametrize("positions", [True, False])
def test_a_commit_without_names_is_refused(
    kit: Kit, spares: Put, count: int, positions: bool
) -> None:
    """It would store an object of no bytes under no key."""
    before = contents(kit.state)
    indexes = np.arange(count, dtype=np.uint32) if positions else None
    commit = c.PutCommit(
        session_id(1), 500, spares.reply.grant_id, indexes, np.zeros(count, np.uint64)
    )
    with pytest.raises(InvalidArgument, match="names"):
        kit.apply(commit)
    assert contents(kit.state) == before
    assert pending(kit, spares) == list(range(20))
    assert kit.commit_spares(spares, [0], [1]) == [DECIDED]
    check(kit.state)


def test_a_commit_without_names_of_a_single_spare_is_refused(kit: Kit) -> None:
    put, spares = kit.start_spares(1)
    kit.commit(put)
    commit = c.PutCommit(session_id(1), 500, spares.reply.grant_id, None, np.zeros(1, np.uint64))
    with pytest.raises(InvalidArgument, match="names"):
        kit.apply(commit)
    assert kit.commit_spares(spares, [0], [1]) == [DECIDED]
    check(kit.state)


def test_names_for_keys_that_are_known_are_refused(kit: Kit) -> None:
    put = kit.start([1, 2])
    for positions in ([0], [0, 1]):
        with pytest.raises(InvalidArgument, match="names"):
            kit.commit_spares(put, positions, [7, 8][: len(positions)])
    assert kit.commit(put) == [DECIDED] * 2
    assert kit.exists(1, 2, 7, 8) == [1, 1, 0, 0]
    check(kit.state)


@pytest.mark.parametrize(
    ("sizes", "tails"),
    [
        ([960], None),
        ([1025], None),
        ([0], None),
        ([0], [1000]),
        ([1000], [25]),
        ([2**63], None),
        ([2**64 - 1], [65_535]),
        ([1000, 960], None),
        ([1000, 1025], None),
        ([1000, 0], None),
        ([1000, 0], [0, 1000]),
        ([1000, 1000], [0, 25]),
    ],
)
def test_an_object_that_does_not_fit_is_refused(
    kit: Kit, spares: Put, sizes: list[int], tails: list[int] | None
) -> None:
    """All of the batch, and nothing was changed."""
    before, seq = contents(kit.state), kit.state.last_seq
    positions, keys = [3, 4][: len(sizes)], [1, 2][: len(sizes)]
    with pytest.raises(InvalidArgument, match="does not fit"):
        kit.commit_spares(spares, positions, keys, sizes, tails=tails)
    with pytest.raises(InvalidArgument, match="does not fit"):
        kit.commit_spares(spares, positions, keys, sizes, tails=tails, many=True)
    assert (contents(kit.state), kit.state.last_seq) == (before, seq)
    assert pending(kit, spares) == list(range(20))
    assert kit.commit_spares(spares, [3], [1], 961) == [DECIDED]
    check(kit.state)


def test_one_index_for_each_name(kit: Kit, spares: Put) -> None:
    names = c.SpareNames(*kit.place, kit.digests(1, 2), np.full(2, KIB, np.uint64), None, False)
    for indexes in (None, np.zeros(1, np.uint32), np.arange(3, dtype=np.uint32)):
        with pytest.raises(InvalidArgument, match="one index for each name"):
            kit.apply(
                c.PutCommit(
                    session_id(1), 0, spares.reply.grant_id, indexes, np.zeros(2, np.uint64),
                    None, names,
                )
            )  # fmt: skip
    assert pending(kit, spares) == list(range(20))
    check(kit.state)


@pytest.mark.parametrize("count", [1, 3])
def test_another_namespace_is_refused(kit: Kit, spares: Put, count: int) -> None:
    other = kit.apply(c.OpenNamespace("b", b"f", True, 1, 77))
    place = other.namespace_id, other.generation
    positions, keys = range(count), range(1, count + 1)
    with pytest.raises(InvalidArgument, match="another namespace"):
        kit.commit_spares(spares, positions, keys, place=place)
    with pytest.raises(NamespaceReset):
        kit.commit_spares(spares, positions, keys, place=(99, 1))
    with pytest.raises(NamespaceReset):
        kit.commit_spares(spares, positions, keys, place=(kit.place[0], 9))
    assert pending(kit, spares) == list(range(20))
    check(kit.state)


@pytest.mark.parametrize("count", [1, 3])
def test_a_reset_in_between_is_told_and_changes_nothing(kit: Kit, spares: Put, count: int) -> None:
    old = kit.place
    kit.namespace = kit.apply(c.ResetNamespace("a", 99))
    positions, keys = range(count), range(1, count + 1)
    with pytest.raises(NamespaceReset):
        kit.commit_spares(spares, positions, keys, place=old)
    with pytest.raises(InvalidArgument, match="another namespace"):
        kit.commit_spares(spares, positions, keys)  # of the new one
    assert granted_bytes(kit) == 20 * KIB
    assert kit.exists(*keys) == [0] * count
    check(kit.state)
    abort(kit, spares)
    assert (grants(kit), granted_bytes(kit)) == (0, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_an_object_of_a_dead_generation_gives_way(count: int) -> None:
    """Digests of two generations are never equal; a stranger's may be anything."""
    kit = make_kit(nodes=2)
    kit.put(list(range(1, count + 1)))
    seed = kit.state.namespaces()[0].generation
    kit.namespace = kit.apply(c.ResetNamespace("a", 1))  # the same seed, as no master would
    assert kit.state.namespaces()[0].generation == seed + 1
    put, spares = kit.start_spares(5)
    kit.commit(put)
    keys = list(range(1, count + 1))
    assert kit.commit_spares(spares, range(count), keys, 1000) == [DECIDED] * count
    assert facts(kit, *keys) == [(1000, checksum_of(key)) for key in keys]
    check(kit.state)


@pytest.mark.parametrize("count", [1, 2])
def test_an_object_that_nobody_can_read_gives_way(count: int) -> None:
    kit = make_kit(nodes=2)
    keys = list(range(1, count + 1))
    put = kit.start(keys, 1000)
    kit.commit(put)
    at = put.extents[0][0][0]
    # Spares on the other node.
    while True:
        _, spares = kit.start_spares(5, keys=[kit.requests + 100])
        if spares.extents[0][0][0] != at:
            break
    kit.apply(c.Detach(kit.nodes[at].node_id, True))
    assert kit.exists(*keys) == [0] * count
    assert kit.commit_spares(spares, range(count), keys) == [DECIDED] * count
    assert facts(kit, *keys) == [(KIB, checksum_of(key)) for key in keys]
    assert len(kit.new(Gone)) >= 1
    check(kit.state)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("here", [True, False])
def test_a_segment_that_went_takes_its_spares_along(count: int, here: bool) -> None:
    kit = make_kit(nodes=2)
    put, spares = kit.start_spares(6)
    kit.commit(put)
    number = spares.extents[0][0][0]
    node = kit.nodes[number if here else 3 - number]
    node.process_id += 1
    node.segments = [FakeSegment(b"another", 4 * MIB, 4 * MIB)]
    kit.attach(node)
    assert pool_of(kit.state).segments.drops == 1
    positions, keys = range(count), list(range(1, count + 1))
    expected = NOT_GRANTED if here else DECIDED
    assert kit.commit_spares(spares, positions, keys) == [expected] * count
    assert kit.exists(*keys) == [int(not here)] * count
    check(kit.state)
    abort(kit, spares)
    assert granted_bytes(kit) == 0


def test_what_its_writer_failed_to_write_is_quarantined(kit: Kit, spares: Put) -> None:
    failed = np.array([(1, 0)], np.uint32)
    statuses = kit.commit_spares(spares, [0, 1], [1, 2], failed_replicas=failed)
    assert statuses == [DECIDED, NOT_GRANTED]
    assert kit.state.status(kit.now_s).quarantined_bytes == KIB
    assert granted_bytes(kit) == 18 * KIB
    check(kit.state)
    kit.heartbeats()
    kit.heartbeats()
    assert kit.state.status(kit.now_s).quarantined_bytes == 0
    kit.put([5])
    failed = np.array([(2, 0), (3, 0)], np.uint32)
    statuses = kit.commit_spares(spares, [2, 3, 4], [5, 6, 6], failed_replicas=failed)
    assert statuses == [SAME, NOT_GRANTED, DECIDED]
    assert kit.state.status(kit.now_s).quarantined_bytes == 2 * KIB
    check(kit.state)


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize("positions", [[0, 1, 2], [0, 2, 1]])
def test_of_a_chain_the_root_is_newest(
    kit: Kit, spares: Put, chain: bool, positions: list[int]
) -> None:
    sizes = np.full(3, KIB, np.uint64)
    names = c.SpareNames(*kit.place, kit.digests(1, 2, 3), sizes, None, chain)
    indexes, sums = np.array(positions, np.uint32), np.zeros(3, np.uint64)
    kit.apply(c.PutCommit(session_id(1), 0, spares.reply.grant_id, indexes, sums, None, names))
    pool = pool_of(kit.state)
    stamps = pool.stamp[pool.objects.lookup(kit.digests(1, 2, 3))].tolist()
    assert stamps == sorted(stamps, reverse=chain)
    assert len(set(stamps)) == 3


@pytest.mark.parametrize("durability", [1, 2])
def test_a_commit_is_as_durable_as_its_namespace(kit: Kit, durability: int) -> None:
    """The service waits for the disk where the reply says so."""
    kit.namespace = kit.apply(c.OpenNamespace("j", b"f", True, durability, 5))
    _, spares = kit.start_spares(5)
    one = c.CommitSpare(
        session_id(1), 0, spares.reply.grant_id, 0, 1, *kit.place, kit.digests(1).tobytes(), KIB, 0
    )
    assert kit.apply(one).durability == durability
    one.position, one.digest = 1, kit.digests(2).tobytes()
    assert kit.apply(one.as_commit()).durability == durability
    assert kit.commit_spares(spares, [4, 2], [3, 4]) == [DECIDED] * 2
    assert kit.exists(1, 2, 3, 4) == [1] * 4


def test_another_session_has_no_part_in_them(kit: Kit, spares: Put) -> None:
    assert kit.commit_spares(spares, [0], [1], session=2) == [NOT_GRANTED]
    assert kit.commit_spares(spares, [0, 1], [1, 2], session=2) == [NOT_GRANTED] * 2
    abort(kit, spares, session=2)
    assert pending(kit, spares) == list(range(20))
    with pytest.raises(SessionUnknown):
        kit.commit_spares(spares, [0], [1], session=9)
