"""The one thread that waits for the disk, so that the master's loop never does.

It makes written bytes survive a power failure (one `fdatasync` for all who wait, and every
`SYNC_INTERVAL_S` where anything was written), reserves room ahead of the writer, so that a full
disk is known before a write needs the room, finishes files that were rotated away, and calls
`on_idle` (compaction) in between.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from cenote.api.errors import CenoteError, InternalError, ResourceUnavailable
from cenote.runtime.log import get_logger

from .journal_files import disk_error, fsync_directory
from .metadata import Backlog

__all__ = ["OpenFile", "Syncer", "give_back_room"]

SYNC_INTERVAL_S: Final = 0.1
RESERVE_STEP_BYTES: Final = 4 << 20
RESERVE_LOW_BYTES: Final = 2 << 20
"""Room that is kept for what must be written although new decisions are refused."""
RETRY_INTERVAL_S: Final = 1.0
IDLE_INTERVAL_S: Final = 0.5
WAITERS_MAX: Final = 65_536

_FALLOC_KEEP_SIZE: Final = 1
_GIVEN_BACK_FROM_BYTES: Final = 64 << 10
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_log = get_logger("cenote.master.journal")


def reserve(fd: int, offset: int, length: int) -> bool:
    """Reserve room for bytes of a file without growing it; False where the file system can't.

    Not os.posix_fallocate: where the file system can't, that writes zeros, and races the writer.
    Raises OSError.
    """
    if _libc.fallocate(fd, _FALLOC_KEEP_SIZE, offset, length) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
        return number == errno.EINTR
    raise OSError(number, os.strerror(number))


def give_back_room(path: Path, size_bytes: int) -> None:
    """What was reserved beyond a file's end by a writer that was killed. Raises CenoteError."""
    try:
        if os.stat(path).st_blocks * 512 > size_bytes + _GIVEN_BACK_FROM_BYTES:
            os.truncate(path, size_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disk_error(f"give back what is reserved in {path}", error) from error


@dataclass(slots=True)
class OpenFile:
    """A journal file that is written to. The writer changes `size`, the syncer `reserved`."""

    fd: int
    path: Path
    size: int = 0
    reserved: int = 0


@final
class Syncer:
    """See the module. `current` and `written` are the writer's to set, under no lock."""

    def __init__(self, directory: Path, on_idle: Callable[[], bool]) -> None:
        """`on_idle` returns whether it wants to be called again soon."""
        self._directory = directory
        self._on_idle = on_idle
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._current: OpenFile | None = None
        self._retired: list[OpenFile] = []
        self._names_changed = False
        self._written = 0
        self._durable = 0
        self._waiters: list[tuple[int, Future[None]]] = []
        self._closing = False
        self._poked = False
        self._syncing = False
        self._synced_at_s = 0.0
        self._no_room: ResourceUnavailable | None = None
        self._failure: ResourceUnavailable | None = None
        self._thread = threading.Thread(target=self._run, name="cenote-journal", daemon=True)

    # ---- for the writer ---------------------------------------------------------------------

    @property
    def refusal(self) -> CenoteError | None:
        """Why nothing new should be decided now."""
        return self._failure or self._no_room

    @property
    def failure(self) -> CenoteError | None:
        """Set for good once a sync has failed: what was written may be lost."""
        return self._failure

    @property
    def durable(self) -> int:
        """Newest entry that survives a power failure."""
        return self._durable

    @property
    def is_syncing(self) -> bool:
        """Whether the disk is at work: a write may have to wait for it now."""
        return self._syncing

    @property
    def backlog(self) -> Backlog:
        """Written and not durable yet; its bytes are not counted."""
        entries = max(self._written - self._durable, 0)
        return Backlog(entries, 0, time.monotonic() - self._synced_at_s if entries else 0.0)

    def start(self, durable: int) -> None:
        """Begin; everything up to entry `durable` was read from the disk."""
        self._durable = self._written = durable
        self._synced_at_s = time.monotonic()
        self._thread.start()

    def rotate(self, file: OpenFile) -> None:
        """From now on `file` is written to; the one before is finished here."""
        with self._lock:
            if self._current is not None:
                self._retired.append(self._current)
            self._current = file
            self._names_changed = True
            self._changed.notify()

    def written(self, entry: int) -> None:
        """Everything up to `entry` has been written to the current file."""
        file = self._current
        assert file is not None
        was_clean = self._written <= self._durable
        self._written = entry
        if was_clean or (file.size + RESERVE_LOW_BYTES > file.reserved and not self._poked):
            with self._lock:
                self._poked = True
                self._changed.notify()

    def sync(self, entry: int) -> Future[None]:
        """Done when everything up to `entry` survives a power failure."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # who gives up waiting must not cancel it
        with self._lock:
            if self._failure is not None:
                future.set_exception(self._failure)
            elif entry > self._written:
                future.set_exception(InternalError(f"entry {entry} was not appended yet"))
            elif entry <= self._durable:
                future.set_result(None)
            elif len(self._waiters) >= WAITERS_MAX or self._closing:
                future.set_exception(ResourceUnavailable("too many wait for the disk"))
            else:
                self._waiters.append((entry, future))
                self._changed.notify()
        return future

    def poke(self) -> None:
        """Call `on_idle` soon."""
        with self._lock:
            self._poked = True
            self._changed.notify()

    def close(self) -> None:
        """Sync and end the thread. Raises ResourceUnavailable where the sync fails."""
        with self._lock:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    # ---- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        soon = True
        while True:
            with self._lock:
                if not self._due():
                    self._changed.wait(self._wait_s(soon))
                self._poked = False
                closing = self._closing
                due = self._due() or closing
            if due:
                self._sync_once()
            self._reserve()
            if closing:
                break
            soon = self._on_idle()
        self._finish()

    def _due(self) -> bool:
        """Whether to sync at once."""
        if self._waiters or self._retired or self._closing:
            return True
        clean = self._written <= self._durable or self._failure is not None
        return not clean and time.monotonic() >= self._synced_at_s + SYNC_INTERVAL_S

    def _wait_s(self, soon: bool) -> float | None:
        if self._written > self._durable and self._failure is None:
            return max(self._synced_at_s + SYNC_INTERVAL_S - time.monotonic(), 0.001)
        if self._poked:
            return 0.0
        if self._no_room is not None:
            return RETRY_INTERVAL_S
        return IDLE_INTERVAL_S if soon else None

    def _sync_once(self) -> None:
        with self._lock:
            target, file = self._written, self._current
            retired, self._retired = self._retired, []
            names_changed, self._names_changed = self._names_changed, False
        failure = self._failure
        if failure is None:
            self._syncing = True
            try:
                for old in retired:
                    self._finish_file(old)
                if names_changed:
                    fsync_directory(self._directory)
                if file is not None:
                    os.fdatasync(file.fd)
            except OSError as error:
                # The kernel may have dropped the pages: no later sync can bring them back.
                failure = disk_error(f"make {self._directory} durable", error)
                failure.remedy = "check the disk, then restart the master"
                _log.error("the journal's disk failed; writes are refused", error=str(failure))
        self._syncing = False
        with self._lock:
            self._synced_at_s = time.monotonic()
            self._failure = failure
            if failure is None:
                self._durable = target
            waiters, self._waiters = self._waiters, []
            still = [] if failure else [w for w in waiters if w[0] > target]
            self._waiters.extend(still)
        for entry, future in waiters:
            if failure is not None:
                future.set_exception(failure)
            elif entry <= target:
                future.set_result(None)

    def _finish_file(self, file: OpenFile) -> None:
        if file.reserved > file.size:
            os.truncate(file.fd, file.size)  # gives the reserved room back
        os.fdatasync(file.fd)
        os.close(file.fd)

    def _reserve(self) -> None:
        file = self._current
        if file is None or file.size + RESERVE_LOW_BYTES <= file.reserved:
            return
        try:
            length = file.size + RESERVE_STEP_BYTES - file.reserved
            if reserve(file.fd, file.reserved, length):
                file.reserved += length
            else:  # this file system can't: a write will tell
                file.reserved = 1 << 62
        except OSError as error:
            if self._no_room is None:
                self._no_room = disk_error(f"reserve room for the journal in {file.path}", error)
                _log.error("no room for the journal; writes are refused", error=str(self._no_room))
            return
        if self._no_room is not None:
            self._no_room = None
            _log.info("there is room for the journal again")

    def _finish(self) -> None:
        file, self._current = self._current, None
        if file is not None:
            try:
                if file.size < file.reserved < 1 << 62:
                    os.truncate(file.fd, file.size)
            finally:
                os.close(file.fd)
