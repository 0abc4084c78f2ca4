"""What a daemon opens at its start: new segments, surviving ones, and how much memory there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cenote.api.errors import (
    InvalidArgument,
    ResourceUnavailable,
    StaleEpoch,
    StaleLocation,
    Unavailable,
)
from cenote.store import dram as dram_module
from cenote.store import table_file
from cenote.store.node_files import NodeFiles
from cenote.store.segments import NO_GRANT, LocalSegments, open_segments
from slot_rows import Sealed, seal_arguments

BOOT = b"1" * 16
MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> Iterator[NodeFiles]:
    made = NodeFiles(tmp_path, "n1")
    yield made
    made.close()


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how much memory there is beyond what files hold already."""

    def set_bytes(size_bytes: int) -> None:
        monkeypatch.setattr(NodeFiles, "available_bytes", lambda self: (size_bytes, None))

    return set_bytes


def fill(segments: LocalSegments) -> None:
    for segment in segments.dram():
        while segment.allocate_next(MIB):
            pass


def test_new_segments_are_as_large_as_configured(files: NodeFiles) -> None:
    segments = open_segments(files, 8 * MIB, BOOT)
    (segment,) = segments.dram()
    assert (segments.epoch, segments.node_id, segments.ready) == (0, 0, False)
    assert segments.by_id(0) is None
    fill(segments)
    assert segments.ready
    held = sum(p.stat().st_blocks * 512 for p in files.directory.glob("cenote-n1-*"))
    assert 8 * MIB - 8192 <= held <= 8 * MIB + 8192
    segments.attached(3, [17])
    assert segments.by_id(17) is segment
    assert segments.node_id == 3
    segments.close()


def test_large_segments_are_split(files: NodeFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dram_module, "SEGMENT_BYTES_MAX", 4 * MIB)
    segments = open_segments(files, 10 * MIB, BOOT)
    assert [segment.index for segment in segments.dram()] == [0, 1, 2]
    assert len({segment.size_bytes for segment in segments.dram()}) == 1
    segments.close()


def test_a_restart_finds_what_was_there(files: NodeFiles) -> None:
    first = open_segments(files, 4 * MIB, BOOT)
    fill(first)
    first.fence(5)
    first.attached(3, [17])
    first.all()[0].seal(5, 1, 1, *seal_arguments([Sealed(0)]))
    first.close()
    again = open_segments(files, 4 * MIB, BOOT)
    (segment,) = again.all()
    assert segment.incarnation == first.all()[0].incarnation
    assert segment.recover() == 1
    assert (again.epoch, again.node_id, again.ready) == (5, 3, True)
    assert again.by_id(17) is segment
    assert again.first_grant_id == NO_GRANT
    (status,) = segment.seal(5, 1, 1, *seal_arguments([Sealed(1)]))
    assert status == Unavailable.code, "nothing is sealed before the master has the inventory"
    again.attached(3, [17], last_seq=1, first_grant_id=7)
    assert again.first_grant_id == 7
    (status,) = segment.seal(5, 1, 1, *seal_arguments([Sealed(1)]))
    assert status == StaleLocation.code
    assert not segment.seal(5, 1, 1, *seal_arguments([Sealed(1, seq=2)])).any()
    with pytest.raises(StaleEpoch):
        segment.seal(4, 1, 1, *seal_arguments([Sealed(1)]))
    again.close()


def test_a_lost_lock_file_does_not_make_the_node_another(files: NodeFiles) -> None:
    uuid = files.node_uuid
    open_segments(files, 4 * MIB, BOOT).close()
    files.close()
    files.lock_path.unlink()
    again = NodeFiles(files.directory, "n1")
    assert again.node_uuid != uuid
    open_segments(again, 4 * MIB, BOOT).close()
    assert (again.node_uuid, again.start_number) == (uuid, 2)
    again.close()


@pytest.mark.parametrize(("size", "boot"), [(5 * MIB, BOOT), (4 * MIB, b"2" * 16)])
def test_segments_of_another_size_or_boot_begin_anew(
    files: NodeFiles, size: int, boot: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_segments(files, 4 * MIB, BOOT)
    files.data_path(7).touch()
    first.close()
    again = open_segments(files, size, boot)
    assert again.all()[0].incarnation != first.all()[0].incarnation
    assert files.indexes() == [0]
    assert caplog.text.count("can't be used any more") == 2
    again.close()


def test_too_little_memory_is_said_at_once_with_what_there_is(
    files: NodeFiles, available: Callable[[int], None]
) -> None:
    available(3 * MIB + 4096)
    expected = r"can't get 8 MiB of memory in .*: 3 MiB \(3145728 bytes\) could be had"
    with pytest.raises(ResourceUnavailable, match=expected):
        open_segments(files, 8 * MIB, BOOT)
    assert files.indexes() == []
    available(MIB - 1)
    with pytest.raises(ResourceUnavailable, match=r"0 B \(0 bytes\)"):
        open_segments(files, 8 * MIB, BOOT, allow_less=True)
    with pytest.raises(InvalidArgument, match="too little for a segment"):
        open_segments(files, MIB - 1, BOOT)


def test_going_on_with_less_lasts_over_a_restart(
    files: NodeFiles, available: Callable[[int], None]
) -> None:
    available(3 * MIB + 4096)
    first = open_segments(files, 8 * MIB, BOOT, allow_less=True)
    (segment,) = first.all()
    assert 2 * MIB < segment.size_bytes < 3 * MIB
    fill(first)
    first.close()
    available(4096)
    again = open_segments(files, 8 * MIB, BOOT, allow_less=True)
    assert again.all()[0].incarnation == segment.incarnation
    again.close()
    # Once there is enough, it takes what it was to have.
    available(16 * MIB)
    larger = open_segments(files, 8 * MIB, BOOT, allow_less=True)
    assert larger.all()[0].size_bytes > 7 * MIB
    larger.close()


def test_memory_that_a_survivor_holds_already_is_not_asked_for_again(
    files: NodeFiles, available: Callable[[int], None]
) -> None:
    first = open_segments(files, 8 * MIB, BOOT)
    first.dram()[0].allocate_next(6 * MIB)
    first.close()
    available(2 * MIB)
    open_segments(files, 8 * MIB, BOOT).close()
    available(MIB)
    with pytest.raises(ResourceUnavailable, match=r"7 MiB \(7340032 bytes\) could be had"):
        open_segments(files, 8 * MIB, BOOT)
    less = open_segments(files, 8 * MIB, BOOT, allow_less=True)
    assert less.all()[0].ready_bytes == 6 * MIB
    less.close()


def test_a_failure_halfway_leaves_no_new_files(
    files: NodeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram_module, "SEGMENT_BYTES_MAX", 4 * MIB)
    real, calls = table_file.TableFile, []

    def fail_second(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == 2:
            raise ResourceUnavailable("no memory")
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dram_module, "TableFile", fail_second)
    with pytest.raises(ResourceUnavailable, match="no memory"):
        open_segments(files, 12 * MIB, BOOT)
    assert files.indexes() == []
