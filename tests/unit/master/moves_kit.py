"""Pretended daemons that copy from each other when they are told to."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT, CopyStatus
from cenote.master.task_commands import Drain
from unit.master.state_checks import check, pool_of
from unit.master.state_kit import FakeNode, Kit

__all__ = ["drain", "nodes_of", "pass_time", "pull_all", "settle", "used_on"]


def pull_all(kit: Kit, node: FakeNode, status: int = CopyStatus.DONE) -> int:
    """Have the daemon carry out what it was told to fetch, with this outcome; how much it was."""
    count = len(node.pulls)
    for rows in node.pulls:
        node.copied.append((int(rows[0]["copy_id"]), _pull(kit, node, rows, status)))
    node.pulls = []
    return count


def _pull(kit: Kit, node: FakeNode, rows: NDArray[np.void], status: int) -> int:
    if status != CopyStatus.DONE:
        return status
    (target,) = rows[rows["kind"] == 1]
    found = []
    for row in rows[rows["kind"] == 0]:
        slot = kit.segments[int(row["segment"])].table.get(int(row["slot"]))
        version = (row["source_seq"], row["source_epoch"])
        if slot is None or (slot["seq"], slot["epoch"]) != version:
            return CopyStatus.NO_SOURCE
        found.append(slot)
    for twin in rows[rows["kind"] == 2]:
        slot = kit.segments[int(twin["segment"])].table.get(int(twin["slot"]))
        version = (twin["source_seq"], twin["source_epoch"])
        if slot is None or (slot["seq"], slot["epoch"]) != version:
            return CopyStatus.FAILED
        same = (slot["offset"], slot["checksum"]) == (target["offset"], found[0]["checksum"])
        assert same, "what is said to have the bytes has others"
    moved = found[0].copy()
    segment = kit.segments[int(target["segment"])]
    assert segment in node.segments
    moved["segment_index"] = node.segments.index(segment)
    moved["slot"], moved["offset"] = target["slot"], target["offset"]
    moved["length"] = sum(int(slot["length"]) for slot in found)
    moved["replica"] = target["replica"]
    moved["extent_index"], moved["extent_count"] = 0, 1
    segment.table[int(target["slot"])] = moved
    return CopyStatus.DONE


def _step(kit: Kit, status: int, silent: tuple[int, ...]) -> int:
    kit.tick(0.1)
    heard = [node for node in kit.nodes.values() if node.number not in silent]
    for node in heard:
        kit.heartbeat(node)
    done = sum(pull_all(kit, node, status) for node in heard)
    for node in heard:
        kit.heartbeat(node)
    check(kit.state)
    return done


def pass_time(
    kit: Kit, seconds: float, status: int = CopyStatus.DONE, *, silent: tuple[int, ...] = ()
) -> int:
    """Plan, carry out and report for so long; how many copies there were. All nodes but the silent
    ones are heard of."""
    return sum(_step(kit, status, silent) for _ in range(round(seconds / 0.1)))


def settle(kit: Kit, status: int = CopyStatus.DONE, *, silent: tuple[int, ...] = ()) -> int:
    """`pass_time` until nothing more is ordered."""
    count = quiet = 0
    for _ in range(300):
        done = _step(kit, status, silent)
        count += done
        quiet = 0 if done else quiet + 1
        if quiet > 12:
            return count
    raise AssertionError("copies go on for ever")


def drain(kit: Kit, number: int, *, cancel: bool = False, bandwidth: int = 0) -> int:
    reply = kit.apply(Drain(kit.nodes[number].node_id, cancel, bandwidth))
    return int(reply.remaining_bytes)


def nodes_of(kit: Kit, key: int) -> set[int]:
    """Numbers of the nodes on which a key lies; without a touch."""
    stats = kit.state.stat_objects(*kit.place, kit.digests(key), kit.now_s)
    ids = set(np.frombuffer(stats.extents, EXTENT)["segment"].tolist())
    return {
        node.number for node in kit.nodes.values() for s in node.segments if s.segment_id in ids
    }


def used_on(kit: Kit, number: int) -> int:
    """Bytes taken in a node's segments, whatever for."""
    by_id = pool_of(kit.state).segments.by_id
    return sum(by_id[s.segment_id].used_units * 64 for s in kit.nodes[number].segments)
