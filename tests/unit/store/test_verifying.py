"""Taking checksums of contents that outlived their daemon, or the leader that decided them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from cenote.api.rows import SEAL, SLOT, SLOT_REF
from cenote.store.agent_core import Stage
from cenote.store.node_files import NodeFiles
from cenote.store.segments import LocalSegments, open_segments
from cenote.store.verifying import TOLD_ROWS_MAX, TOLD_TIMES, Verifier
from payloads import payload_of
from waiting import wait_until

MIB = 1 << 20
BOOT = b"b" * 16


@pytest.fixture
def files(tmp_path: Path) -> Iterator[NodeFiles]:
    made = NodeFiles(tmp_path, "n", control_directory=tmp_path)
    yield made
    made.close()


def opened(files: NodeFiles) -> LocalSegments:
    segments = open_segments(files, 8 * MIB, BOOT)
    for segment in segments.dram():
        segment.recover()
        while segment.allocate_next(MIB):
            pass
    return segments


def follow(segments: LocalSegments, epoch: int) -> None:
    segments.fence(epoch)
    segments.attached(1, [1])


def seal(segments: LocalSegments, epoch: int, slot: int, extents: list[tuple[int, int]]) -> int:
    """An object in these (offset, length) extents; its slots are `slot` and those behind it."""
    segment = segments.dram()[0]
    size = sum(length for _, length in extents)
    payload = payload_of(f"{epoch}/{slot}", size)
    rows = np.zeros(len(extents), SEAL)
    at = 0
    for i, (offset, length) in enumerate(extents):
        segment.view[offset : offset + length] = payload[at : at + length]
        at += length
        rows[i]["slot"] = slot + i
        rows[i]["offset"], rows[i]["length"] = offset, length
        rows[i]["extent_index"], rows[i]["extent_count"] = i, len(extents)
    rows["segment"] = 1
    rows["seq"] = slot + 1
    rows["checksum"] = xxh3_64_intdigest(payload)
    rows["object_size"] = size
    rows["digest"] = np.void(payload_of(str(slot), 16))
    rows["key_length"] = 1
    keys = b"k" * len(extents)
    statuses = segment.seal(epoch, 1, 1, rows, memoryview(keys), np.arange(len(extents)))
    assert not statuses.any()
    return size


def verified(segments: LocalSegments, **options: Any) -> Verifier:
    """A verifier that has looked at everything; stopped."""
    verifier = Verifier(segments, lambda: Stage.ATTACHED, **options)
    verifier.start()
    wait_until(lambda: verifier._epoch == segments.epoch, what="all to be verified")
    verifier.stop()
    return verifier


def restarted(files: NodeFiles, segments: LocalSegments, epoch: int) -> LocalSegments:
    segments.close()
    again = opened(files)
    follow(again, epoch)
    return again


def slots_of(told: bytes) -> list[int]:
    rows = np.frombuffer(told, SLOT)
    return sorted(rows["slot"].tolist())


def test_what_is_damaged_is_found_and_cleared(files: NodeFiles) -> None:
    segments = opened(files)
    follow(segments, 1)
    for slot in range(40):
        seal(segments, 1, slot, [(slot * 4096, 100 + slot)])
    seal(segments, 1, 50, [(MIB, 1000), (2 * MIB, 64), (3 * MIB, 7)])
    seal(segments, 1, 60, [(4 * MIB, 500), (5 * MIB, 500)])
    segments = restarted(files, segments, 1)
    (segment,) = segments.dram()
    assert segment.info().unverified
    for offset in (3 * 4096, 7 * 4096 + 50, 5 * MIB + 499):
        segment.view[offset] ^= 1
    verifier = verified(segments, threads=2)
    assert (verifier.verified_slots, verifier.damaged_slots) == (41, 4)
    assert segment.info().unverified  # nobody was told yet
    assert slots_of(verifier.tell()) == [3, 7, 60, 61]
    assert not segment.info().unverified
    left = np.concatenate(list(segment.table.inventory(0)))
    assert sorted(left["slot"].tolist()) == [
        *(slot for slot in range(40) if slot not in (3, 7)), 50, 51, 52,
    ]  # fmt: skip
    segments.close()


def test_what_was_found_is_told_several_times(files: NodeFiles) -> None:
    segments = opened(files)
    follow(segments, 1)
    seal(segments, 1, 0, [(0, 64)])
    segments = restarted(files, segments, 1)
    segments.dram()[0].view[1] ^= 1
    verifier = verified(segments)
    for _ in range(TOLD_TIMES):
        assert slots_of(verifier.tell()) == [0]
    for told in verifier._found:
        told.until_s = 0.0
    assert verifier.tell() == b""
    segments.close()


def test_more_than_one_message_takes_is_told_before_all_counts_as_verified(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cenote.store.verifying.TOLD_ROWS_MAX", 4)
    assert TOLD_ROWS_MAX > 4
    segments = opened(files)
    follow(segments, 1)
    for slot in range(10):
        seal(segments, 1, slot, [(slot * 4096, 64)])
    segments = restarted(files, segments, 1)
    (segment,) = segments.dram()
    for slot in range(10):
        segment.view[slot * 4096] ^= 1
    verifier = verified(segments)
    told: set[int] = set()
    for _ in range(3):
        assert segment.info().unverified
        assert verifier.has_news
        told |= set(slots_of(verifier.tell()))
    assert told == set(range(10))
    assert not segment.info().unverified
    assert not verifier.has_news
    segments.close()


def test_a_fresh_segment_has_nothing_to_verify(files: NodeFiles) -> None:
    segments = opened(files)
    follow(segments, 3)
    (segment,) = segments.dram()
    assert not segment.info().unverified
    seal(segments, 3, 0, [(0, 64)])
    assert not segment.info().unverified
    segments.close()


def test_after_a_change_of_leader_the_last_slots_of_the_old_one_are_verified(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cenote.store.verifying.LATE_SEQS", 5)
    segments = opened(files)
    follow(segments, 1)
    verifier = verified(segments)
    for slot in range(20):
        seal(segments, 1, slot, [(slot * 4096, 64)])
    (segment,) = segments.dram()
    for slot in (2, 17):
        segment.view[slot * 4096] ^= 1
    follow(segments, 2)
    assert segment.info().unverified
    verifier = verified(segments)
    assert verifier.verified_slots == 4
    assert slots_of(verifier.tell()) == [17]  # 2 is long in the journal, with what was sealed
    assert not segment.info().unverified
    segments.close()


def test_the_slots_of_all_leaders_are_verified_that_came_and_went_meanwhile(
    files: NodeFiles,
) -> None:
    """A leader that loses its place before its daemons are done: the next one may adopt what was
    sealed in both their times."""
    segments = opened(files)
    follow(segments, 1)
    verifier = Verifier(segments, lambda: Stage.ATTACHED)
    seal(segments, 1, 0, [(0, 64)])
    follow(segments, 2)
    seal(segments, 2, 1, [(4096, 64)])
    follow(segments, 3)
    seal(segments, 3, 2, [(8192, 64)])
    assert verifier._due(3)["slot"].tolist() == [0, 1]
    verifier._epoch = 2  # done in the second one's time
    assert verifier._due(3)["slot"].tolist() == [1]
    verifier._epoch = 3
    assert verifier._due(5)["slot"].tolist() == [2]
    verifier._epoch = 4
    assert verifier._due(5)["slot"].tolist() == [2]
    segments.close()


def test_a_replica_that_lies_elsewhere_in_part_is_left_to_its_readers(files: NodeFiles) -> None:
    segments = opened(files)
    follow(segments, 1)
    seal(segments, 1, 0, [(0, 640), (MIB, 640)])
    (segment,) = segments.dram()
    refs = np.concatenate(list(segment.table.inventory(0)))[1:]
    ref = np.zeros(1, SLOT_REF)
    for name in ("segment_index", "slot", "epoch", "seq"):
        ref[name] = refs[name]
    segment.table.clear(ref)  # as if another daemon had the second extent
    segments = restarted(files, segments, 1)
    verifier = verified(segments)
    assert verifier.tell() == b""
    segments.close()
