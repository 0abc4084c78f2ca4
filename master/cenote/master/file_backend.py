"""`file:DIR`: the journal in a directory of one master. The embedded default: no other service.

`append` is a plain write: what was acknowledged survives the process at once and a power failure
after at most a tenth of a second, or before `sync` says so. A journal file is closed at 64 MiB;
when closed files outgrow the snapshot a process of its own makes a new one (`compactor.py`).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, final

from cenote.api.errors import CenoteError, InternalError, NotLeader, ResourceUnavailable
from cenote.runtime.log import get_logger

from .compaction import Compaction, CompactionLimits
from .file_syncer import OpenFile, Syncer, give_back_room
from .journal import JournalCorrupt, Record, entry_range
from .journal_files import (
    JournalReader,
    Listing,
    disk_error,
    journal_path,
    list_directory,
    read_epoch,
    read_snapshot,
    write_epoch,
    write_snapshot,
)
from .metadata import ALONE, Backlog, Followed, Leader, MasterRow, Opened

__all__ = ["FileBackend"]

ROTATE_BYTES: Final = 64 << 20
_log = get_logger("cenote.master.journal")


@final
class FileBackend:
    """See `MetadataBackend`."""

    def __init__(
        self,
        directory: Path,
        *,
        rotate_bytes: int = ROTATE_BYTES,
        compaction: CompactionLimits | None = None,
        first_epoch: int = 1,
        pwrite: Callable[[int, memoryview, int], int] = os.pwrite,
    ) -> None:
        """`first_epoch`: of a directory that begins. `pwrite`: what writes, so that a test can have
        it fail."""
        self._directory = directory
        self._rotate_bytes = rotate_bytes
        self._pwrite = pwrite
        self._first_epoch = first_epoch
        self._lock_fd = -1
        self._row = ALONE
        self._epoch = 0
        self._last_entry = 0
        self._ready = False
        self._file: OpenFile | None = None
        self._listing = Listing((), (), ())
        self._compaction = Compaction(directory, compaction or CompactionLimits())
        self._syncer = Syncer(directory, self._compaction.step)

    @property
    def name(self) -> str:
        return f"file:{self._directory}"

    # ---- one master: nobody stands by -------------------------------------------------------

    def join(self, row: MasterRow) -> None:
        self._row = row

    @property
    def shared(self) -> bool:
        return False

    @property
    def leader(self) -> Leader | None:
        return Leader(self._epoch, self._row) if self._epoch else None

    @property
    def masters(self) -> Sequence[MasterRow]:
        return (self._row,)

    def follow(self, timeout_s: float) -> Followed:
        return Followed(caught_up=True)

    @property
    def vacant(self) -> bool:
        return not self._epoch

    @property
    def tenure_end_s(self) -> float:
        return math.inf if self._epoch else -math.inf

    @property
    def lost(self) -> NotLeader | None:
        return None

    def publish(self, rows: Mapping[str, str | None]) -> None:
        pass

    # ---- opening ----------------------------------------------------------------------------

    def campaign(self, timeout_s: float) -> bool:
        if self._lock_fd >= 0:
            raise InternalError(f"{self.name} is open already")
        self._lock()
        try:
            self._listing = self._clean(list_directory(self._directory))
            epoch = read_epoch(self._directory)
            if not epoch and (self._listing.journals or self._listing.snapshots):
                raise JournalCorrupt(
                    f"{self._directory / 'epoch'} is missing",
                    remedy="write a number into it that is larger than any epoch in the "
                    "master's log",
                )
            epoch = epoch or self._first_epoch - 1
            write_epoch(self._directory, epoch + 1)
        except BaseException:  # whatever it was, the directory is somebody else's to take
            self._unlock()
            raise
        self._epoch = epoch + 1
        return True

    def open(self) -> Opened:
        if not self._epoch:
            raise InternalError(f"{self.name} was not campaigned for")
        return Opened(self._epoch, self._read(self._listing))

    def raise_epoch(self, above: int) -> int:
        write_epoch(self._directory, above + 1)
        return above + 1

    def _lock(self) -> None:
        path = self._directory / "LOCK"
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(f"open {path}", error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BlockingIOError as error:
            holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise ResourceUnavailable(
                f"the metadata directory {self._directory} is in use by the master with pid "
                f"{holder}",
                remedy="stop that master, or give this one a directory of its own",
            ) from error
        except OSError as error:
            os.close(fd)
            raise disk_error(f"lock {path}", error) from error
        self._lock_fd = fd

    def _unlock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _clean(self, listing: Listing) -> Listing:
        """Finish what a crash interrupted: delete what is covered or was under construction."""
        superfluous = [*listing.covered(), *listing.temporary]
        for path in superfluous:
            try:
                os.unlink(path)
            except OSError as error:
                raise disk_error(f"delete {path}", error) from error
        return list_directory(self._directory) if superfluous else listing

    def _read(self, listing: Listing) -> Iterator[Record]:
        covers = 0
        if listing.snapshot is not None:
            yield from read_snapshot(listing.snapshot)
            covers = listing.snapshot.covers
        reader = JournalReader(listing.journals, covers + 1, cut_tail=True)
        yield from reader
        # Empty ones (a start that decided nothing, a tail cut at its beginning) free their names,
        # the last one of a master that was killed the room that it had reserved.
        for file in list_directory(self._directory).journals:
            with contextlib.suppress(FileNotFoundError):
                if file.size_bytes:
                    give_back_room(file.path, file.size_bytes)
                else:
                    os.unlink(file.path)
        self._last_entry = reader.next_entry - 1
        self._compaction.begin(list_directory(self._directory))
        self._syncer.start(self._last_entry)
        self._ready = True

    # ---- appending --------------------------------------------------------------------------

    @property
    def last_entry(self) -> int:
        return self._last_entry

    @property
    def durable_entry(self) -> int:
        return self._syncer.durable

    @property
    def is_syncing(self) -> bool:
        return self._syncer.is_syncing

    @property
    def backlog(self) -> Backlog:
        return self._syncer.backlog

    @property
    def refusal(self) -> CenoteError | None:
        return self._syncer.refusal

    @property
    def bytes_used(self) -> int:
        return self._compaction.bytes_used + (self._file.size if self._file is not None else 0)

    @property
    def compactor_pid(self) -> int | None:
        """The process that makes a snapshot just now."""
        return self._compaction.child_pid

    def append(self, records: Sequence[bytes]) -> int:
        if not self._ready:
            raise InternalError("append to a journal that was not read to its end, or is closed")
        if not records:
            return self._last_entry
        if self._syncer.failure is not None:
            raise self._syncer.failure
        first, last = entry_range(records[0])
        if len(records) > 1:
            _, last = entry_range(records[-1])
        if first != self._last_entry + 1:
            raise InternalError(f"entry {first} was appended after {self._last_entry}")
        data = records[0] if len(records) == 1 else b"".join(records)
        file = self._file
        if file is None or file.size + len(data) > self._rotate_bytes:
            file = self._rotate(first)
        try:
            self._write(file, data)
        except OSError as error:
            # What was written of it is overwritten by the next append, or is a torn tail.
            raise disk_error(f"write the journal {file.path}", error) from error
        self._last_entry = last
        self._syncer.written(last)
        return last

    def _write(self, file: OpenFile, data: bytes) -> None:
        rest = memoryview(data)
        offset = file.size
        while rest:
            written = self._pwrite(file.fd, rest, offset)
            offset += written
            rest = rest[written:]
        file.size = offset

    def _rotate(self, first_entry: int) -> OpenFile:
        file = self._file
        if file is not None and not file.size:  # nothing in it yet: a record larger than the limit
            return file
        path = journal_path(self._directory, first_entry)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_error(f"create {path}", error) from error
        self._compaction.rotated(None if file is None else file.size)
        self._file = OpenFile(fd, path)
        self._syncer.rotate(self._file)
        return self._file

    def sync(self, entry: int) -> Future[None]:
        return self._syncer.sync(entry)

    def request_snapshot(self) -> int:
        self._rotate(self._last_entry + 1)
        self._compaction.ask()
        self._syncer.poke()
        return self._last_entry

    @property
    def snapshot_entry(self) -> int:
        return self._compaction.covers

    def install_snapshot(self, records: Iterable[bytes], covers: int) -> None:
        write_snapshot(self._directory, records, covers)
        self._compaction.delete_covered()

    def close(self) -> None:
        if self._lock_fd < 0:
            return
        self._ready = False
        try:
            self._compaction.stop()
            self._syncer.close()
        finally:
            self._compaction.finish()
            self._file = None
            self._epoch = 0
            self._unlock()
