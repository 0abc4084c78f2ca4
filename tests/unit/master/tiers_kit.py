"""Pretended daemons with an SSD: they copy when they are told to."""

from __future__ import annotations

from typing import Any

import numpy as np

from cenote.api.rows import EXTENT, CopyStatus, PutStatus
from cenote.master.state import StateConfig
from unit.master.state_checks import check
from unit.master.state_kit import KIB, MIB, FakeNode, FakeSegment, Kit, new_node

__all__ = ["DRAM_ID", "SSD_ID", "copy_all", "kit_with_ssd", "settle", "ssd_node", "where"]

DRAM_ID, SSD_ID = 1, 2
"""Of the segments of `kit_with_ssd`."""


def ssd_node(
    number: int, size_bytes: int = 64 * KIB, ssd_bytes: int = MIB, *, ssd_slots: int = 512
) -> FakeNode:
    """One with a segment in memory and one on an SSD."""
    node = new_node(number, size_bytes)
    incarnation = f"inc-{number}-ssd".encode()
    node.segments.append(
        FakeSegment(incarnation, ssd_bytes, ssd_bytes, unit_bytes=4096, slots=ssd_slots, tier=2)
    )
    return node


def copy_all(kit: Kit, node: FakeNode, status: int = CopyStatus.DONE) -> int:
    """Have the daemon carry out what it was told to copy, with this outcome; how much it was.

    The next heartbeat reports it. A source that is not there any more is told as changed.
    """
    for every in node.copies:
        shares = every["source_segment"] == every["target_segment"]
        rows = every[~shares]
        source = [
            kit.segments[int(row["source_segment"])].table.get(int(row["source_slot"]))
            for row in rows
        ]
        there = all(
            slot is not None
            and (slot["seq"], slot["epoch"]) == (row["source_seq"], row["source_epoch"])
            for slot, row in zip(source, rows, strict=True)
        )
        first = rows[0]
        outcome = status if there else CopyStatus.SOURCE_CHANGED
        if shares.any() and outcome == CopyStatus.DONE and not _is_there(kit, every[-1], source[0]):
            outcome = CopyStatus.NO_SOURCE
        if outcome == CopyStatus.DONE:
            assert source[0] is not None
            moved = source[0].copy()
            target = kit.segments[int(first["target_segment"])]
            moved["segment_index"] = node.segments.index(target)
            moved["slot"], moved["offset"] = first["target_slot"], first["target_offset"]
            moved["length"] = sum(int(slot["length"]) for slot in source if slot is not None)
            moved["replica"] = first["target_replica"]
            moved["extent_index"], moved["extent_count"] = 0, 1
            target.table[int(first["target_slot"])] = moved
        node.copied.append((int(first["copy_id"]), outcome))
    count = len(node.copies)
    node.copies = []
    return count


def _is_there(kit: Kit, twin: Any, source: Any) -> bool:
    """Whether a slot in the target says that it has the source's bytes in the target's place."""
    slot = kit.segments[int(twin["source_segment"])].table.get(int(twin["source_slot"]))
    return (
        slot is not None
        and (slot["seq"], slot["epoch"]) == (twin["source_seq"], twin["source_epoch"])
        and slot["offset"] == twin["target_offset"]
        and slot["checksum"] == source["checksum"]
    )


def kit_with_ssd(keys: int = 0, *, ssd_bytes: int = 1 << 20, **config: float) -> Kit:
    """64 KiB of memory, as many objects of 1 KiB as said."""
    config.setdefault("session_granted_share_max", 1.0)
    kit = Kit(StateConfig(**config))  # type: ignore[arg-type]
    kit.with_nodes(ssd_node(1, ssd_bytes=ssd_bytes)).with_session()
    for key in range(keys):
        assert kit.put([key]) == [PutStatus.GRANTED]
    return kit


def settle(kit: Kit, status: int = CopyStatus.DONE) -> int:
    """Plan, carry out and report copies until none is left; how many there were."""
    node, count = kit.nodes[1], 0
    for _ in range(100):
        kit.tick(0.1)
        kit.heartbeat(node)
        done = copy_all(kit, node, status)
        kit.heartbeat(node)
        check(kit.state)
        count += done
        if not done:
            return count
    raise AssertionError("copies go on for ever")


def where(kit: Kit, key: int) -> set[int]:
    """Segments that it lies in, without a touch."""
    stats = kit.state.stat_objects(*kit.place, kit.digests(key), kit.now_s)
    return set(np.frombuffer(stats.extents, EXTENT)["segment"].tolist())
