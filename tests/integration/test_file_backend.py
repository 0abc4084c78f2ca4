"""`file:DIR` against what disks, crashes and second masters do to it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cenote.api.errors import ResourceUnavailable
from cenote.master import file_syncer
from cenote.master.effects import SegmentGone
from cenote.master.file_backend import FileBackend
from cenote.master.journal import (
    JournalCorrupt,
    RecordWriter,
    read_entries,
    snapshot_records,
)
from cenote.master.journal_files import list_directory
from cenote.master.metadata import begin
from waiting import wait_until

TIMEOUT_S = 10.0
FIXTURE_OK = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entry_records(first: int, count: int, durable: int = 0) -> list[bytes]:
    writer, made = RecordWriter(1, first), []
    for number in range(first, first + count):
        writer.add(SegmentGone(number))
        made += writer.take(durable)
    return made


def write_journal(
    directory: Path, count: int, *, promised: bool, rotate_bytes: int = 1 << 20
) -> None:
    """A directory with entries 1 to `count`. `promised`: each was durable before the next."""
    backend = FileBackend(directory, rotate_bytes=rotate_bytes)
    for _ in begin(backend).records:
        pass
    for number in range(1, count + 1):
        backend.append(entry_records(number, 1, number - 1 if promised else 0))
    backend.close()


def read_back(directory: Path) -> list[int]:
    backend = FileBackend(directory)
    try:
        entries = list(read_entries(begin(backend).records))
        assert backend.append(entry_records(backend.last_entry + 1, 1)) > 0
    finally:
        backend.close()
    return [entry.segment_id for entry in entries if isinstance(entry, SegmentGone)]


def only_journal(directory: Path) -> Path:
    (file,) = list_directory(directory).journals
    return file.path


# ---- torn tails and damage ------------------------------------------------------------------


@FIXTURE_OK
@given(data=st.data(), promised=st.booleans())
def test_a_tail_cut_anywhere_loses_only_itself(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, promised: bool
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    write_journal(directory, 5, promised=promised)
    path = only_journal(directory)
    size_bytes = path.stat().st_size
    record_bytes = size_bytes // 5
    cut = data.draw(st.integers(0, size_bytes))
    os.truncate(path, cut)
    intact = cut // record_bytes
    assert read_back(directory) == list(range(1, intact + 1))
    assert read_back(directory) == list(range(1, intact + 2))


@FIXTURE_OK
@given(tail=st.one_of(st.binary(min_size=1, max_size=200), st.integers(1, 9000).map(bytes)))
def test_a_tail_of_garbage_is_cut_off(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    directory = tmp_path_factory.mktemp("journal")
    write_journal(directory, 3, promised=True)
    with only_journal(directory).open("ab") as stream:
        stream.write(tail)
    assert read_back(directory) == [1, 2, 3]


@pytest.mark.parametrize("rotate_bytes", [1 << 20, 100])
def test_damage_to_promised_entries_refuses_to_start(tmp_path: Path, rotate_bytes: int) -> None:
    write_journal(tmp_path, 6, promised=True, rotate_bytes=rotate_bytes)
    path = list_directory(tmp_path).journals[0].path
    flip_byte(path, 50)
    with pytest.raises(
        JournalCorrupt, match="damaged at byte 0: entries 1 to 5 are lost"
    ) as caught:
        read_back(tmp_path)
    assert path.name in str(caught.value)
    assert "restore" in caught.value.remedy


def test_a_refused_start_changes_no_journal(tmp_path: Path) -> None:
    write_journal(tmp_path, 6, promised=True, rotate_bytes=100)
    flip_byte(list_directory(tmp_path).journals[0].path, 50)
    before = {f.path: f.path.read_bytes() for f in list_directory(tmp_path).journals}
    for _ in range(2):
        with pytest.raises(JournalCorrupt):
            read_back(tmp_path)
    assert {f.path: f.path.read_bytes() for f in list_directory(tmp_path).journals} == before


@pytest.mark.parametrize("rotate_bytes", [1 << 20, 100])
def test_pages_lost_before_any_sync_are_a_torn_tail(tmp_path: Path, rotate_bytes: int) -> None:
    """A power failure may keep later pages, and later files, and lose earlier ones."""
    write_journal(tmp_path, 6, promised=False, rotate_bytes=rotate_bytes)
    journals = list_directory(tmp_path).journals
    flip_byte(journals[-2].path if len(journals) > 1 else journals[0].path, 50)
    kept = read_back(tmp_path)
    assert kept == list(range(1, len(kept) + 1))
    assert len(kept) < 6
    assert read_back(tmp_path) == [*kept, len(kept) + 1]


def test_a_missing_file_refuses_to_start(tmp_path: Path) -> None:
    write_journal(tmp_path, 9, promised=True, rotate_bytes=100)
    journals = list_directory(tmp_path).journals
    os.unlink(journals[3].path)
    with pytest.raises(JournalCorrupt, match="are lost"):
        read_back(tmp_path)


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def test_a_damaged_snapshot_refuses_to_start(tmp_path: Path) -> None:
    write_journal(tmp_path, 9, promised=True, rotate_bytes=100)
    backend = FileBackend(tmp_path)
    list(begin(backend).records)
    content = [SegmentGone(number) for number in range(1, 6)]
    backend.install_snapshot(snapshot_records(content, covers=5, epoch=1), 5)
    backend.close()
    snapshot = list_directory(tmp_path).snapshot
    assert snapshot is not None
    whole = snapshot.path.read_bytes()
    for broken in (whole[:-1], whole[:70], b"", whole + b"x"):
        snapshot.path.write_bytes(broken)
        with pytest.raises(JournalCorrupt, match="snapshot"):
            read_back(tmp_path)
    snapshot.path.write_bytes(whole)
    assert read_back(tmp_path) == list(range(1, 10))


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    write_journal(tmp_path, 9, promised=True, rotate_bytes=100)
    before = {file.path: file.path.read_bytes() for file in list_directory(tmp_path).journals}
    backend = FileBackend(tmp_path)
    list(begin(backend).records)
    content = [SegmentGone(number) for number in range(1, 6)]
    backend.install_snapshot(snapshot_records(content, covers=5, epoch=1), 5)
    backend.close()
    kept = {file.path for file in list_directory(tmp_path).journals}
    for path, data in before.items():  # as if the crash came before they were deleted
        path.write_bytes(data)
    (tmp_path / "snapshot-00000000000000000009.bin.tmp").write_bytes(b"half")
    assert read_back(tmp_path) == list(range(1, 10))
    listing = list_directory(tmp_path)
    assert not listing.temporary
    assert kept <= {file.path for file in listing.journals}
    assert not {path for path in before if path not in kept} & {f.path for f in listing.journals}


# ---- epoch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"seven\n", b"-3\n", b"0\n", b"99999999999\n"])
def test_without_its_epoch_a_journal_is_not_started(tmp_path: Path, content: bytes | None) -> None:
    write_journal(tmp_path, 3, promised=True)
    path = tmp_path / "epoch"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(JournalCorrupt, match="epoch") as caught:
        read_back(tmp_path)
    assert "larger than any epoch" in caught.value.remedy
    path.write_bytes(b"41\n")
    backend = FileBackend(tmp_path)
    assert begin(backend).epoch == 42
    backend.close()


# ---- locks, permissions ---------------------------------------------------------------------


def test_a_second_master_learns_the_pid_of_the_first(tmp_path: Path) -> None:
    first = FileBackend(tmp_path)
    begin(first)
    with pytest.raises(ResourceUnavailable, match=f"pid {os.getpid()}"):
        begin(FileBackend(tmp_path))
    first.close()


def test_a_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ResourceUnavailable, match="can't open"):
        begin(FileBackend(tmp_path / "file" / "journal"))


# ---- full and failing disks -----------------------------------------------------------------


class FaultyDisk:
    """`pwrite` that writes at most `room` more bytes, then fails as a full disk does."""

    def __init__(self) -> None:
        self.room = 1 << 30

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.pwrite(fd, data[: min(self.room, 7)], offset)
        self.room -= written
        return written


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def backend(tmp_path: Path, disk: FaultyDisk) -> Iterator[FileBackend]:
    backend = FileBackend(tmp_path, pwrite=disk.pwrite)
    list(begin(backend).records)
    yield backend
    backend.close()


def test_a_full_disk_takes_all_of_an_append_or_nothing(
    tmp_path: Path, disk: FaultyDisk, backend: FileBackend
) -> None:
    backend.append(entry_records(1, 2))
    disk.room = 20
    with pytest.raises(ResourceUnavailable, match="No space left") as caught:
        backend.append(entry_records(3, 2))
    assert "make room" in caught.value.remedy
    assert backend.last_entry == 2
    disk.room = 1 << 30
    assert backend.append(entry_records(3, 2)) == 4
    backend.sync(4).result(TIMEOUT_S)
    backend.close()
    assert read_back(tmp_path) == [1, 2, 3, 4]


def test_a_crash_on_a_full_disk_leaves_a_torn_tail(
    tmp_path: Path, disk: FaultyDisk, backend: FileBackend
) -> None:
    backend.append(entry_records(1, 2))
    disk.room = 70
    with pytest.raises(ResourceUnavailable):
        backend.append(entry_records(3, 2))
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for name in (only_journal(tmp_path).name, "epoch"):
        (crashed / name).write_bytes((tmp_path / name).read_bytes())
    assert read_back(crashed) == [1, 2, 3]  # 3 was written whole, though not acknowledged
    backend.close()
    assert read_back(tmp_path) == [1, 2]


def test_no_room_ahead_refuses_until_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    def reserve(fd: int, offset: int, length: int) -> bool:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True

    monkeypatch.setattr(file_syncer, "reserve", reserve)
    monkeypatch.setattr(file_syncer, "RETRY_INTERVAL_S", 0.01)
    backend = FileBackend(tmp_path)
    list(begin(backend).records)
    backend.append(entry_records(1, 1))
    refusal = wait_until(lambda: backend.refusal, what="a refusal")
    assert isinstance(refusal, ResourceUnavailable)
    assert "No space left" in str(refusal)
    assert backend.append(entry_records(2, 1)) == 2  # what must be written still is
    full = False
    wait_until(lambda: backend.refusal is None, what="room")
    backend.close()
    assert read_back(tmp_path) == [1, 2]


def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    backend = FileBackend(tmp_path)
    list(begin(backend).records)
    backend.append(entry_records(1, 1))
    backend.sync(1).result(TIMEOUT_S)
    monkeypatch.setattr(os, "fdatasync", fail)
    backend.append(entry_records(2, 1))
    with pytest.raises(ResourceUnavailable, match="Input/output"):
        backend.sync(2).result(TIMEOUT_S)
    monkeypatch.undo()
    assert isinstance(backend.refusal, ResourceUnavailable)
    with pytest.raises(ResourceUnavailable):
        backend.append(entry_records(3, 1))
    with pytest.raises(ResourceUnavailable):
        backend.sync(1).result(TIMEOUT_S)
    assert backend.durable_entry == 1
    with pytest.raises(ResourceUnavailable):
        backend.close()
    assert read_back(tmp_path) == [1, 2]


def test_reserved_room_is_given_back(tmp_path: Path) -> None:
    backend = FileBackend(tmp_path, rotate_bytes=300)
    list(begin(backend).records)
    for number in range(1, 10):
        backend.append(entry_records(number, 1))
        backend.sync(number).result(TIMEOUT_S)
    backend.close()
    for file in list_directory(tmp_path).journals:
        assert file.path.stat().st_blocks * 512 <= 8192


# ---- processes ------------------------------------------------------------------------------

APPEND_FOREVER = """
import sys
from pathlib import Path
from cenote.master.effects import SegmentGone
from cenote.master.file_backend import FileBackend
from cenote.master.journal import RecordWriter
from cenote.master.metadata import begin

backend = FileBackend(Path(sys.argv[1]), rotate_bytes=4000)
opened = begin(backend)
for _ in opened.records:
    pass
writer = RecordWriter(opened.epoch, backend.last_entry + 1)
while True:
    writer.add(SegmentGone(writer.last_entry + 1))
    backend.append(writer.take(backend.durable_entry))
    sys.stdout.write(f"{writer.last_entry}\\n")
    sys.stdout.flush()
"""


@pytest.mark.integration
def test_what_a_killed_process_acknowledged_is_there(tmp_path: Path) -> None:
    acknowledged = 0
    for wanted in (50, 400):
        with subprocess.Popen(
            [sys.executable, "-c", APPEND_FOREVER, str(tmp_path)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                acknowledged = int(line)
                if acknowledged >= wanted:
                    break
            with pytest.raises(ResourceUnavailable, match=f"pid {child.pid}"):
                begin(FileBackend(tmp_path))
            child.send_signal(signal.SIGKILL)
            lines = child.stdout.read().split()
            acknowledged = int(lines[-1]) if lines else acknowledged
        backend = FileBackend(tmp_path)
        entries = list(read_entries(begin(backend).records))
        for file in list_directory(tmp_path).journals:  # the room that it had reserved is free
            assert file.path.stat().st_blocks * 512 <= 8192
        backend.close()
        numbers = [entry.segment_id for entry in entries if isinstance(entry, SegmentGone)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) >= acknowledged
