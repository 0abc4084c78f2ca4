"""A journal that lost its end, and whatever lies in daemons' memory and on their SSDs by then."""

from __future__ import annotations

import functools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cenote.api.rows import UNIT_BYTES, PutStatus
from cenote.master.effects import DurableEffect
from cenote.master.state import StateConfig
from unit.master.state_checks import check, contents
from unit.master.state_kit import Kit, restarted
from unit.master.tiers_kit import copy_all, ssd_node

KEYS = 24
KINDS = ["gone", "overwritten", "overlapped", "beside", "moved"]

Damage = list[tuple[int, int, str, int]]
"""(segment, which of its slots, what became of it, a small number)."""


@functools.cache
def before() -> tuple[Kit, list[DurableEffect]]:
    """Half of the keys lie on both nodes, and all have copies; and the journal of before these."""
    kit = Kit(StateConfig(session_granted_share_max=1.0, demote_share=1.0))
    kit.with_nodes(ssd_node(1), ssd_node(2)).with_session()
    for key in range(KEYS):
        assert kit.put([key], replicas=1 + key % 2) == [PutStatus.GRANTED]
    journal = kit.durable()
    for _ in range(20):
        kit.tick(0.1)
        kit.heartbeats()
        for node in kit.nodes.values():
            copy_all(kit, node)
        kit.heartbeats()
    assert sum(len(kit.segments[i].table) for i in (2, 4)) == KEYS
    return kit, journal


def damage(kit: Kit, segment_id: int, number: int, kind: str, small: int) -> None:
    """Something of a later time, that the journal does not know of either."""
    table = kit.segments[segment_id].table
    if not table:
        return
    slot = sorted(table)[number % len(table)]
    row = table[slot].copy()
    if kind == "gone":
        del table[slot]
        return
    row["seq"] = 1000 + small
    row["digest"] = kit.digests(1000 + small).tobytes()
    row["checksum"] += small % 3
    if kind in ("overlapped", "beside"):
        row["slot"] = 400 + small
    if kind == "beside":
        row["offset"] += small * 64
    if kind == "moved":  # the same version in another place
        row = table[slot].copy()
        target = kit.segments[2 if segment_id < 3 else 4]
        row["segment_index"], row["slot"] = 1, 300 + small
        row["offset"] = (64 + small) * 4096
        target.table[300 + small] = row
        return
    table[int(row["slot"])] = row


def check_all_sealed(kit: Kit, segments: Kit) -> None:
    pool = kit.state._pool
    for row in np.flatnonzero(pool.objects.state & 1).tolist():
        _, checksum, seq, epoch, *_ = pool.record_of(row)
        for word, slot, offset, _ in pool.spans_of(np.array([row]))[1].tolist():
            sealed = segments.segments[word & 0xFFFF].table[slot]
            assert (int(sealed["epoch"]), int(sealed["seq"])) == (epoch, seq)
            assert int(sealed["checksum"]) == checksum
            assert (int(sealed["offset"]), int(sealed["replica"])) == (
                offset * UNIT_BYTES,
                word >> 16 & 0xFF,
            )


def untouched(kit: Kit) -> set[bytes]:
    """Digests of what was put, and lies in memory where it was put, and nothing over it."""
    found = set()
    for segment_id in (1, 3):
        rows = list(kit.segments[segment_id].table.values())
        for row in rows:
            first, last = int(row["offset"]), int(row["offset"] + row["length"])
            over = [o for o in rows if first < int(o["offset"] + o["length"])]
            if [o for o in over if int(o["offset"]) < last] == [row] and row["seq"] < 1000:
                found.add(row["digest"].tobytes())
    return found


@settings(max_examples=100)
@given(
    some=st.lists(
        st.tuples(
            st.integers(1, 4), st.integers(0, 40), st.sampled_from(KINDS), st.integers(0, 40)
        ),
        max_size=30,
    ),
    rebooted=st.sets(st.integers(1, 2)),
    order=st.permutations([1, 2]),
)
def test_what_is_left_is_sound(some: Damage, rebooted: set[int], order: list[int]) -> None:
    kit, journal = before()
    saved = {i: dict(segment.table) for i, segment in kit.segments.items()}
    names = {i: segment.incarnation for i, segment in kit.segments.items()}
    try:
        for each in some:
            damage(kit, *each)
        for number in rebooted:
            memory = kit.nodes[number].segments[0]
            memory.table, memory.incarnation = {}, b"after a reboot %d" % number
        whole = untouched(kit)
        after = restarted(kit, journal=journal)
        for number in order:
            after.restart_node(kit.nodes[number])
            check(after.state)
        after.with_session()
        check_all_sealed(after, after)
        assert whole <= contents(after.state).keys()
        again = restarted(after)
        for number in order:
            again.restart_node(kit.nodes[number])
        check(again.state)
        assert contents(again.state) == contents(after.state)
        assert after.put([7000]) == [PutStatus.GRANTED]
    finally:
        for i, segment in kit.segments.items():
            segment.table, segment.incarnation = saved[i], names[i]
