"""Copies of bytes that lie in their place already: a daemon makes a slot and no more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cenote.api.rows import COPY, PULL, CopyStatus
from cenote.v1 import master_pb2 as pb
from ssd_node import DRAM_ID, SSD_ID, SsdNode, payload_of
from unit.store.test_puller import TARGET_ID, Two, two

__all__ = ["two"]

KIB, MIB = 1 << 10, 1 << 20
EPOCH = 3
SIZE = 100_000


def beside(
    node: SsdNode,
    slot: int,
    seq: int,
    target: tuple[int, int],
    twin: tuple[int, int],
    *,
    promote: bool = False,
    epoch: int = EPOCH,
) -> int:
    """Order a slot for what lies at an (slot, offset) already, as another (slot, seq) says."""
    node._copies += 1
    rows = np.zeros(2, COPY)
    source, to = (SSD_ID, DRAM_ID) if promote else (DRAM_ID, SSD_ID)
    rows["copy_id"], rows["source_epoch"], rows["target_segment"] = node._copies, EPOCH, to
    rows["source_segment"] = source, to
    rows["source_slot"] = slot, twin[0]
    rows["source_seq"] = seq, twin[1]
    rows["target_slot"], rows["target_offset"] = target
    rows["target_length"], rows["target_replica"] = 128 * KIB, 0 if promote else 1
    node.copier.enqueue(rows, epoch)
    return node._copies


def with_references(node: SsdNode) -> None:
    """Two objects in the same place in memory, the first of them copied to slot 9 of the SSD."""
    data = payload_of(1, SIZE)
    for slot in range(2):
        node.put(slot, data, [(MIB, 100_032)], key=b"key-%d" % slot)
    done = node.copy([0], 9, 256 * KIB, 128 * KIB)
    assert node.results(1) == {done: CopyStatus.DONE}


def test_a_slot_is_made_and_no_payload_written(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        with_references(node)
        before = bytes(node.path.read_bytes()[node.ssd.plan.data_at :])
        one = beside(node, 1, 2, (20, 256 * KIB), (9, 1))
        assert node.results(1) == {one: CopyStatus.DONE}
        assert bytes(node.path.read_bytes()[node.ssd.plan.data_at :]) == before
        record = node.ssd.record(20, EPOCH, 2)
        assert record is not None
        assert b"key-1" in record
        assert node.copier.counters.demoted == 2
        assert node.copier.counters.demoted_bytes == 100_032
    with SsdNode(tmp_path) as node:  # it was flushed
        assert node.ssd.record(20, EPOCH, 2) is not None


@pytest.mark.parametrize(
    ("target", "twin"),
    [
        ((20, 512 * KIB), (9, 1)),
        ((20, 256 * KIB), (9, 5)),
        ((20, 256 * KIB), (8, 1)),
    ],
    ids=["another place", "another version", "an empty slot"],
)
def test_no_slot_is_made_where_the_bytes_are_not(
    tmp_path: Path, target: tuple[int, int], twin: tuple[int, int]
) -> None:
    with SsdNode(tmp_path) as node:
        with_references(node)
        one = beside(node, 1, 2, target, twin)
        assert node.results(1) == {one: CopyStatus.NO_SOURCE}
        assert node.ssd.record(20, EPOCH, 2) is None


def test_no_slot_is_made_for_other_bytes(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        with_references(node)
        node.put(5, payload_of(2, SIZE), [(2 * MIB, 100_032)])
        one = beside(node, 5, 6, (20, 256 * KIB), (9, 1))
        assert node.results(1) == {one: CopyStatus.NO_SOURCE}


def test_nor_what_an_earlier_leader_ordered(tmp_path: Path) -> None:
    with SsdNode(tmp_path, start=False) as node:
        node.copier.start()
        with_references(node)
        node.copier.fence(EPOCH + 1)
        beside(node, 1, 2, (20, 256 * KIB), (9, 1))
        later = beside(node, 1, 2, (21, 256 * KIB), (9, 1), epoch=EPOCH + 1)
        assert node.results(1) == {later: CopyStatus.DONE}
        assert node.ssd.record(20, EPOCH, 2) is None


def test_what_comes_back_is_a_slot_beside_what_is_there(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        with_references(node)
        down = beside(node, 1, 2, (20, 256 * KIB), (9, 1))
        assert node.results(1) == {down: CopyStatus.DONE}
        up = beside(node, 20, 2, (30, MIB), (0, 1), promote=True)
        wrong = beside(node, 20, 2, (31, 3 * MIB), (0, 1), promote=True)
        assert node.results(2) == {up: CopyStatus.DONE, wrong: CopyStatus.NO_SOURCE}
        assert node.dram.record(30, EPOCH, 2) is not None
        assert node.dram.record(31, EPOCH, 2) is None
        assert node.copier.counters.promoted_bytes == 0


def pull_beside(two: Two, target: tuple[int, int], twin: tuple[int, int]) -> int:
    two._copies += 1
    rows = [
        (two._copies, 2, 0, 0, EPOCH, DRAM_ID, 1, 0, 0),
        (two._copies, twin[1], 0, 0, EPOCH, TARGET_ID, twin[0], 0, 2),
        (two._copies, 2, target[1], 128 * KIB, EPOCH, TARGET_ID, target[0], 1, 1),
    ]
    source = pb.PullSource(address=two.address, segment_ids=[DRAM_ID, SSD_ID])
    two.puller.enqueue(pb.PullReplicas(sources=[source]), np.array(rows, PULL), EPOCH)
    return two._copies


def test_what_another_node_has_already_is_not_fetched(two: Two) -> None:
    data = payload_of(1, SIZE)
    for slot in range(2):
        two.source.put(slot, data, [(MIB, 100_032)], key=b"key-%d" % slot)
    two.puller.start()
    assert two.outcome(two.pull([0], 7, 256 * KIB, 128 * KIB, seq=1)) == CopyStatus.DONE
    assert two.outcome(pull_beside(two, (8, 256 * KIB), (7, 1))) == CopyStatus.DONE
    record = two.target.dram.record(8, EPOCH, 2)
    assert record is not None
    assert b"key-1" in record
    assert two.puller.counters.pulled == 2
    assert two.puller.counters.pulled_bytes == SIZE
    for target, twin in (((10, 512 * KIB), (7, 1)), ((10, 256 * KIB), (7, 4))):
        assert two.outcome(pull_beside(two, target, twin)) == CopyStatus.FAILED
    assert two.target.dram.record(10, EPOCH, 2) is None
