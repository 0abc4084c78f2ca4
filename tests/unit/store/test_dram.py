"""DRAM segments: sizes, memory chunk by chunk, growth of the table, life after their daemon."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cenote.api.errors import (
    InvalidArgument,
    ResourceUnavailable,
    StaleEpoch,
    Unavailable,
)
from cenote.api.rows import EXTENT
from cenote.runtime.mapped_file import MappedFile
from cenote.store import dram as dram_module
from cenote.store.dram import (
    SEGMENT_BYTES_MAX,
    DramSegment,
    find_survivor,
    plan_segments,
)
from cenote.store.node_files import NodeFiles
from slot_rows import Sealed, seal_arguments

BOOT, OTHER_BOOT = b"1" * 16, b"2" * 16
MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def files(tmp_path: Path) -> Iterator[NodeFiles]:
    made = NodeFiles(tmp_path, "n1")
    yield made
    made.close()


def make(files: NodeFiles, *, ready: bool = True, size_bytes: int = 4 * MIB) -> DramSegment:
    (plan,) = plan_segments(size_bytes)
    segment = DramSegment(files, plan, BOOT)
    while ready and segment.allocate_next(MIB):
        pass
    return segment


def reopen(files: NodeFiles, boot: bytes = BOOT) -> DramSegment | None:
    survivor = find_survivor(files, 0, boot)
    if survivor is None:
        return None
    (plan,) = plan_segments(4 * MIB)
    segment = DramSegment(files, plan, boot, survivor=survivor)
    segment.recover()
    return segment


def seal(segment: DramSegment, *rows: Sealed, epoch: int = 1) -> list[int]:
    statuses = segment.seal(epoch, 5, 3, *seal_arguments(rows))
    return [int(status) for status in statuses]


def keys(segment: DramSegment) -> list[bytes]:
    return [entry.key for entry in segment.table.list_keys(5, 3, b"", 1000)]


@pytest.mark.parametrize("total", [MIB, 4 * MIB, 10**9, 4 * GIB, 256 * GIB, 257 * GIB, 1024 * GIB])
@pytest.mark.parametrize("granule", [4096, 2 * MIB])
def test_data_and_tables_fit_the_configured_size(total: int, granule: int) -> None:
    if total < 2 * granule:
        with pytest.raises(InvalidArgument, match=r"at least 4 MiB \(--dram\)"):
            plan_segments(total, granule)
        return
    plans = plan_segments(total, granule)
    taken = sum(plan.memory_bytes for plan in plans)
    assert total - len(plans) * (4096 + granule) <= taken <= total
    assert len(plans) == -(-total // SEGMENT_BYTES_MAX)
    assert len({plan.data_bytes for plan in plans}) == 1
    assert all(plan.data_bytes % granule == 0 for plan in plans)
    share = max(256 << 10, total // len(plans) // 256)
    assert share <= plans[0].table_bytes < share + 4096


def test_a_segment_is_made_without_memory_and_gets_it_in_chunks(files: NodeFiles) -> None:
    segment = make(files, ready=False)
    size = segment.size_bytes
    data = files.data_path(0)
    assert data.stat().st_size == size
    assert data.stat().st_mode & 0o777 == 0o600
    assert segment.allocated_bytes() == 0
    assert len(segment.view) == size
    assert segment.ready_bytes == 0
    assert seal(segment, Sealed(1)) == [InvalidArgument.code]
    assert segment.allocate_next(MIB) == (0, MIB)
    assert segment.ready_bytes == MIB
    assert MIB <= segment.allocated_bytes() < 2 * MIB
    assert seal(segment, Sealed(1, offset=MIB - 128, length=128)) == [0]
    assert seal(segment, Sealed(2, offset=MIB - 128, length=129)) == [InvalidArgument.code]
    while (got := segment.allocate_next(MIB)) is not None:
        assert got[0] + got[1] == segment.ready_bytes
        assert segment.touch(*got)
    assert segment.ready_bytes == size
    info = segment.info()
    assert (info.size_bytes, info.ready_bytes, info.unit_bytes) == (size, size, 64)
    assert info.slots == segment.table.slots > 1000
    assert info.incarnation == segment.incarnation
    segment.view[:3] = b"abc"
    assert os.pread(segment.fd, 3, 0) == b"abc"
    segment.close()
    segment.close()


def test_memory_that_cannot_be_had_is_an_error_and_leaves_what_there_is(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = make(files, ready=False)
    segment.allocate_next(MIB)
    real = os.posix_fallocate

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceUnavailable, match=r"cenote-n1-0.data: No space left"):
        segment.allocate_next(MIB)
    assert segment.ready_bytes == MIB
    monkeypatch.setattr(os, "posix_fallocate", real)
    assert segment.allocate_next(MIB) == (MIB, MIB)
    segment.close()


def test_huge_pages_are_asked_for_directly_and_named_where_there_is_none(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plan,) = plan_segments(8 * MIB, 2 * MIB)
    assert plan.data_bytes == 6 * MIB
    segment = DramSegment(files, plan, BOOT, granule_bytes=2 * MIB)
    monkeypatch.setattr(dram_module, "allocate_file", None)
    assert segment.allocate_next(2 * MIB) == (0, 2 * MIB)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceUnavailable, match=r"2 MiB .*-0.data: No space left"):
        segment.allocate_next(2 * MIB)
    segment.close()
    monkeypatch.undo()
    real = MappedFile
    monkeypatch.setattr(
        dram_module, "MappedFile", lambda fd, n: full() if n == 6 * MIB else real(fd, n)
    )
    with pytest.raises(ResourceUnavailable, match=r"can't map 6 MiB of .*-0.data"):
        DramSegment(files, plan, BOOT, granule_bytes=2 * MIB)
    assert files.indexes() == []


def test_contents_survive_the_daemon(files: NodeFiles) -> None:
    first = make(files)
    assert seal(first, *(Sealed(i, key=b"k%d" % i) for i in range(20))) == [0] * 20
    first.view[:5] = b"hello"
    first.attached(node_id=4, segment_id=12)
    first.fence(6)
    # Not closed: a killed daemon does not close either.
    second = reopen(files)
    assert second is not None
    assert second.reopened
    assert second.incarnation == first.incarnation
    assert (second.segment_id, second.header.node_id) == (12, 4)
    assert second.ready_bytes == second.size_bytes
    assert second.table.sealed == 20
    assert keys(second) == [b"k%d" % i for i in range(20)]
    assert bytes(second.view[:5]) == b"hello"
    with pytest.raises(StaleEpoch):
        seal(second, Sealed(1), epoch=5)
    first.close()
    second.close()


def test_memory_half_set_up_is_continued(files: NodeFiles) -> None:
    make(files, ready=False).allocate_next(MIB)
    second = reopen(files)
    assert second is not None
    assert second.ready_bytes == MIB
    assert second.allocate_next(MIB) == (MIB, MIB)
    second.close()


def test_files_that_are_not_what_they_were_do_not_survive(files: NodeFiles) -> None:
    def damaged(change: str) -> bool:
        files.remove(0)
        segment = make(files)
        segment.retire(0, 4096, grown(segment, 4096))
        segment.close()
        data, slots = files.data_path(0), files.table_path(0)
        if change == "data gone":
            data.unlink()
        elif change == "data replaced":
            copy = data.read_bytes()
            data.rename(data.with_suffix(".old"))
            data.write_bytes(copy)
        elif change == "data cut":
            os.truncate(data, 4096)
        elif change == "table gone":
            slots.unlink()
        elif change == "table cut":
            os.truncate(slots, 1000)
        elif change == "header damaged":
            with slots.open("r+b") as stream:
                stream.write(b"x" * 8192)
        elif change == "range damaged":
            with slots.open("r+b") as stream:
                stream.seek(8192 + 5)
                stream.write(b"x")
        return reopen(files) is None

    assert not damaged("nothing")
    for change in (
        "data gone",
        "data replaced",
        "data cut",
        "table gone",
        "table cut",
        "header damaged",
        "range damaged",
    ):
        assert damaged(change), change
    files.remove(0)
    make(files).close()
    assert reopen(files, OTHER_BOOT) is None


def test_a_new_segment_has_a_new_incarnation(files: NodeFiles) -> None:
    first = make(files)
    seal(first, Sealed(1))
    first.close()
    second = make(files)
    assert not second.reopened
    assert second.incarnation != first.incarnation
    assert keys(second) == []
    second.close()


def grown(segment: DramSegment, length: int) -> int:
    """How many slots the table has when it gets `length` bytes more."""
    return segment.table.slots + length // 192


def test_the_table_grows_out_of_the_segments_own_space(files: NodeFiles) -> None:
    segment = make(files)
    before = segment.table.slots
    assert seal(segment, Sealed(before)) == [Unavailable.code]
    assert seal(segment, Sealed(0, key=b"old")) == [0]
    held = files.table_path(0).stat().st_blocks * 512 + segment.allocated_bytes()
    slots = grown(segment, MIB)
    assert segment.retire(2 * MIB, MIB, slots)
    assert segment.table.slots == slots
    assert seal(segment, Sealed(slots - 1, key=b"new"), Sealed(slots)) == [0, Unavailable.code]
    assert keys(segment) == [b"old", b"new"]
    now = files.table_path(0).stat().st_blocks * 512 + segment.allocated_bytes()
    assert now <= held + 8192
    assert segment.retired_bytes == MIB
    assert seal(segment, Sealed(5, offset=2 * MIB - 64, length=65)) == [InvalidArgument.code]
    assert seal(segment, Sealed(5, offset=2 * MIB - 64, length=64)) == [0]
    ranges = np.frombuffer(segment.info().retired_extents, EXTENT)
    assert ranges[["offset", "length"]].tolist() == [(2 * MIB, MIB)]
    assert segment.info(retired=False).retired_extents == b""
    # Touching ahead leaves the hole alone.
    allocated = segment.allocated_bytes()
    assert segment.touch(0, segment.size_bytes)
    assert segment.allocated_bytes() == allocated
    # The same again changes nothing, whatever lies there.
    segment.view[:MIB] = b"x" * MIB
    segment.view[2 * MIB : 3 * MIB] = b"y" * MIB
    assert not segment.retire(2 * MIB, MIB, slots)
    assert segment.view[2 * MIB : 3 * MIB] == b"y" * MIB
    assert segment.view[:MIB] == b"x" * MIB
    segment.close()
    again = reopen(files)
    assert again is not None
    assert again.table.slots == slots
    assert again.retired_bytes == MIB
    assert keys(again) == [b"old", b"key", b"new"]
    again.close()


def test_a_file_system_without_room_is_no_obstacle_to_what_needs_none(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart, and growth, whose memory comes from the hole that it leaves."""
    make(files).close()
    real, room = os.posix_fallocate, [0]

    def scarce(fd: int, offset: int, size: int) -> None:
        held = os.fstat(fd).st_blocks * 512
        real(fd, offset, size)
        room[0] -= os.fstat(fd).st_blocks * 512 - held
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    punch = DramSegment._punch

    def giving(self: DramSegment, offset: int, length: int) -> None:
        punch(self, offset, length)
        room[0] += length

    monkeypatch.setattr(os, "posix_fallocate", scarce)
    monkeypatch.setattr(DramSegment, "_punch", giving)
    segment = reopen(files)
    assert segment is not None
    room[0] += 4 * 4096  # for what the file system itself needs
    for i in range(200):  # more than a page of ranges
        assert segment.retire(i * 8192, 4096, grown(segment, 4096))
    assert segment.retired_bytes == 200 * 4096
    segment.close()


@pytest.mark.parametrize("step", ["punch", "table"])
def test_growth_that_was_cut_short_is_completed(
    files: NodeFiles, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = make(files)
    seal(segment, Sealed(0, key=b"old"))
    slots = grown(segment, MIB)
    before = segment.table.slots

    def fail(*_: object, **__: object) -> None:
        raise ResourceUnavailable("no memory")

    with monkeypatch.context() as patch:
        if step == "punch":
            patch.setattr(DramSegment, "_punch", fail)
        else:
            patch.setattr("cenote.store.table_file.TableFile.extend", fail)
        with pytest.raises(ResourceUnavailable):
            segment.retire(0, MIB, slots)
    assert segment.table.slots == before
    if step == "punch":
        assert segment.retire(0, MIB, slots)
    else:
        segment.close()
        again = reopen(files)
        assert again is not None
        segment = again
    assert segment.table.slots == slots
    assert segment.retired_bytes == MIB
    assert keys(segment) == [b"old"]
    segment.close()


def test_several_ranges_that_are_due_at_once_may_come_in_any_order(files: NodeFiles) -> None:
    """After a crash the master repeats all of them, each with the number of slots in the end."""
    segment = make(files)
    steps = [(MIB, 4096), (0, 8192), (2 * MIB, 4096)]
    final = segment.table.slots + sum(length // 192 for _, length in steps)
    for offset, length in steps:
        before = segment.table.slots
        assert segment.retire(offset, length, final)
        assert segment.table.slots == before + length // 192
    assert segment.table.slots == final
    for offset, length in steps:
        assert not segment.retire(offset, length, final)
    segment.close()


@pytest.mark.parametrize(
    ("offset", "length"),
    [(1, 4096), (0, 4097), (0, 0), (1 << 40, 4096), (0, 1 << 40), (2 * MIB, 8192)],
)
def test_ranges_that_cannot_be_given_up_are_refused(
    files: NodeFiles, offset: int, length: int
) -> None:
    segment = make(files)
    segment.retire(2 * MIB + 4096, 4096, grown(segment, 4096))
    slots = segment.table.slots
    segment.view[: 2 * MIB] = b"x" * (2 * MIB)
    with pytest.raises(InvalidArgument, match="can't be given up"):
        segment.retire(offset, length, grown(segment, 8192))
    assert segment.retired_bytes == 4096
    assert segment.table.slots == slots
    assert segment.view[: 2 * MIB] == b"x" * (2 * MIB)
    segment.close()


def test_ranges_given_up_are_kept_as_they_came_and_bounded(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cenote.store.table_file.RANGES_MAX", 3)
    segment = make(files)
    given = [(MIB, 4096), (8192, 4096), (4096, 4096)]
    for offset, length in given:
        assert segment.retire(offset, length, grown(segment, length))
    with pytest.raises(InvalidArgument, match="3 ranges were given up already"):
        segment.retire(0, 4096, grown(segment, 4096))
    segment.close()
    again = reopen(files)
    assert again is not None
    ranges = np.frombuffer(again.info().retired_extents, EXTENT)
    assert ranges[["offset", "length"]].tolist() == given
    again.close()


def test_memory_that_cannot_be_given_back_is_only_a_warning(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram_module, "_fallocate", lambda *_: -1)
    segment = make(files)
    assert segment.retire(0, 4096, grown(segment, 4096))
    segment.close()
