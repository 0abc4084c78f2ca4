"""The files of a metadata directory: their names, how they are read, and what a damaged one means.

    LOCK                            held by flock while a master runs; holds its pid
    epoch                           the newest epoch, as decimal text
    journal-<first entry>.log       records, back to back; the newest file is written to
    snapshot-<last entry>.bin       stands for all entries up to that number
    *.tmp                           under construction, worthless after a crash

Numbers in names have 20 digits. A tail that was torn by a power failure holds nothing that anybody
was promised to survive one, so it is cut off. Whether it is that or real damage is told by the
`durable` number of intact records behind it: it says what had reached the disk when they were made.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.log import get_logger

from .journal import (
    FLAG_SNAPSHOT,
    HEADER_BYTES,
    MAGIC_BYTES,
    RECORD_BYTES_MAX,
    JournalCorrupt,
    Record,
    RecordHeader,
    SchemaUnknown,
    parse_header,
    snapshot_end,
    verify_record,
)

__all__ = [
    "JournalFile",
    "JournalReader",
    "Listing",
    "SnapshotFile",
    "disk_error",
    "fsync_directory",
    "journal_path",
    "list_directory",
    "read_epoch",
    "read_snapshot",
    "replace_durably",
    "write_epoch",
    "write_snapshot",
]

_READ_BYTES: Final = 1 << 20
_EPOCH_MAX: Final = 2**32 - 1
_log = get_logger("cenote.master.journal")


def disk_error(what: str, error: OSError) -> ResourceUnavailable:
    """The typed error for what the operating system said about the metadata directory."""
    return ResourceUnavailable(
        f"can't {what}: {error.strerror or error}",
        remedy="make room on that disk, or check it and its permissions",
    )


# ---- names ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JournalFile:
    """Records from entry `first` on."""

    path: Path
    first: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SnapshotFile:
    """Stands for entries up to `covers`."""

    path: Path
    covers: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Listing:
    """What a metadata directory holds; oldest first."""

    journals: tuple[JournalFile, ...]
    snapshots: tuple[SnapshotFile, ...]
    temporary: tuple[Path, ...]

    @property
    def snapshot(self) -> SnapshotFile | None:
        """The newest snapshot."""
        return self.snapshots[-1] if self.snapshots else None

    def covered(self) -> list[Path]:
        """What the newest snapshot makes superfluous: older ones, journals that it covers."""
        if self.snapshot is None:
            return []
        paths = [snapshot.path for snapshot in self.snapshots[:-1]]
        for journal, following in zip(self.journals, self.journals[1:], strict=False):
            if following.first <= self.snapshot.covers + 1:
                paths.append(journal.path)
        return paths


def journal_path(directory: Path, first: int) -> Path:
    """Where the journal file that begins with entry `first` lies."""
    return directory / f"journal-{first:020d}.log"


def _number(name: str, prefix: str, suffix: str) -> int | None:
    digits = name.removeprefix(prefix).removesuffix(suffix)
    if name != f"{prefix}{digits}{suffix}" or len(digits) != 20 or not digits.isascii():
        return None
    return int(digits) if digits.isdigit() else None


def list_directory(directory: Path) -> Listing:
    """Raises ResourceUnavailable."""
    journals, snapshots, temporary = [], [], []
    try:
        names = os.listdir(directory)
        for name in names:
            path = directory / name
            first, covers = _number(name, "journal-", ".log"), _number(name, "snapshot-", ".bin")
            try:
                if first is not None:
                    journals.append(JournalFile(path, first, path.stat().st_size))
                elif covers is not None:
                    snapshots.append(SnapshotFile(path, covers, path.stat().st_size))
                elif name.endswith(".tmp"):
                    temporary.append(path)
            except FileNotFoundError:  # deleted meanwhile, since it is covered
                continue
    except OSError as error:
        raise disk_error(f"read the metadata directory {directory}", error) from error
    journals.sort(key=lambda file: file.first)
    snapshots.sort(key=lambda file: file.covers)
    return Listing(tuple(journals), tuple(snapshots), tuple(temporary))


# ---- durable small steps --------------------------------------------------------------------


def fsync_directory(directory: Path) -> None:
    """Make names that were added or replaced survive a power failure. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_durably(path: Path, pieces: Iterable[bytes]) -> None:
    """Write `path` so that a crash leaves either the old or the whole new file. Raises OSError."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb", buffering=_READ_BYTES) as stream:
            for piece in pieces:
                stream.write(piece)
            stream.flush()
            os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:  # whatever it was, no half-written file may stay
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_directory(path.parent)


def read_epoch(directory: Path) -> int:
    """The newest epoch, 0 in a directory that never had one. Raises JournalCorrupt."""
    path = directory / "epoch"
    try:
        with path.open("rb") as stream:
            text = stream.read(64).strip()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise disk_error(f"read {path}", error) from error
    if not text.isdigit() or not 0 < int(text) < _EPOCH_MAX:
        raise JournalCorrupt(
            f"{path} holds no epoch",
            remedy="write a number into it that is larger than any epoch in the master's log",
        )
    return int(text)


def write_epoch(directory: Path, epoch: int) -> None:
    """Raises ResourceUnavailable."""
    try:
        replace_durably(directory / "epoch", [b"%d\n" % epoch])
    except OSError as error:
        raise disk_error(f"write the epoch into {directory}", error) from error


def write_snapshot(directory: Path, records: Iterable[bytes], covers: int) -> Path:
    """A snapshot that is whole or not there. Raises ResourceUnavailable."""
    path = directory / f"snapshot-{covers:020d}.bin"
    try:
        replace_durably(path, records)
    except OSError as error:
        raise disk_error(f"write the snapshot {path}", error) from error
    return path


# ---- reading --------------------------------------------------------------------------------


@final
class _RecordStream:
    """Verified records of one file, in order; ends at the first byte that belongs to none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Where the record that was given last ends."""
        self.damaged = False
        """Whether something follows there, after iteration has ended."""

    def __iter__(self) -> Iterator[tuple[RecordHeader, memoryview]]:
        with self.path.open("rb", buffering=0) as stream:
            data, position = b"", 0
            while True:
                header = parse_header(data, position)
                if header is None or position + header.length > len(data):
                    more = stream.read(_READ_BYTES)
                    if more:
                        data, position = data[position:] + more, 0
                        if parse_header(data) is None and len(data) >= HEADER_BYTES:
                            self.damaged = True
                            return
                        continue
                    self.damaged = position < len(data)
                    return
                record = memoryview(data)[position : position + header.length]
                try:
                    verify_record(record)
                except SchemaUnknown:
                    raise
                except JournalCorrupt:
                    self.damaged = True
                    return
                position += header.length
                self.offset += header.length
                yield header, record


def _promised_after(path: Path, offset: int) -> int:
    """The highest `durable` of intact records in `path` from `offset` on, wherever they begin."""
    promised = 0
    with path.open("rb") as stream:
        stream.seek(offset)
        data = stream.read()
    position = data.find(MAGIC_BYTES)
    while position >= 0:
        header = parse_header(data, position)
        if header is not None and position + header.length <= len(data):
            with contextlib.suppress(JournalCorrupt):
                verify_record(memoryview(data)[position : position + header.length])
                promised = max(promised, header.durable)
        position = data.find(MAGIC_BYTES, position + 1)
    return promised


@final
class JournalReader:
    """Reads the records of `files` from entry `next_entry` on; `next_entry` follows.

    `cut_tail` (for the master, who holds the lock): a torn tail is cut off and files behind it,
    which then hold nothing promised, are deleted. Without it any damage is an error.
    """

    def __init__(self, files: Iterable[JournalFile], next_entry: int, *, cut_tail: bool) -> None:
        self._files = list(files)
        self._cut_tail = cut_tail
        self.next_entry = next_entry

    def __iter__(self) -> Iterator[Record]:
        """Raises JournalCorrupt and ResourceUnavailable."""
        for index, file in enumerate(self._files):
            stream = _RecordStream(file.path)
            start = 0
            try:
                for header, record in stream:
                    if header.last >= self.next_entry:
                        if header.first != self.next_entry or header.flags & FLAG_SNAPSHOT:
                            stream.damaged, stream.offset = True, start
                            break
                        self.next_entry = header.last + 1
                        yield record
                    start = stream.offset
                if stream.damaged:
                    self._mend(index, stream.offset)
                    return
            except OSError as error:
                raise disk_error(f"read {file.path}", error) from error

    def _mend(self, index: int, offset: int) -> None:
        """Entry `next_entry` is not where it should be: at `offset` of file `index`."""
        file, later = self._files[index], self._files[index + 1 :]
        promised = max(
            _promised_after(file.path, offset),
            *(_promised_after(other.path, 0) for other in later),
            0,
        )
        if promised >= self.next_entry or not self._cut_tail:
            raise JournalCorrupt(
                f"{file.path} is damaged at byte {offset}: "
                f"entries {self.next_entry} to {max(promised, self.next_entry)} are lost"
            )
        size_bytes = file.path.stat().st_size
        _log.warning(
            "cut off a torn tail of the journal: it was written shortly before a power failure",
            file=file.path.name,
            kept_bytes=offset,
            cut_bytes=size_bytes - offset,
            deleted_files=len(later),
        )
        for other in reversed(later):
            os.unlink(other.path)
        os.truncate(file.path, offset)
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        fsync_directory(file.path.parent)


def read_snapshot(file: SnapshotFile) -> Iterator[Record]:
    """The records of a snapshot. Raises JournalCorrupt unless all of it is there."""
    stream = _RecordStream(file.path)
    next_entry, end = 1, None
    try:
        for header, record in stream:
            if header.first != next_entry or not header.flags & FLAG_SNAPSHOT or end is not None:
                stream.damaged = True
                break
            next_entry = header.last + 1
            end = snapshot_end(record)
            yield record
    except OSError as error:
        raise disk_error(f"read {file.path}", error) from error
    if stream.damaged or end is None or end.covers != file.covers:
        raise JournalCorrupt(f"the snapshot {file.path} is damaged or incomplete")


assert RECORD_BYTES_MAX < _READ_BYTES, "a record must fit in what is read at once"
