"""When a snapshot is due, and the process that makes it.

The master's loop never writes one. Once the closed journal files outgrow both `journal_bytes_min`
and the newest snapshot, `python -m cenote.master.compactor` reads snapshot and closed files and
writes a new snapshot; then the files it covers are deleted. One at a time, at low priority, bounded
in time; a failed one is tried again later and later. All of this happens in the journal's thread.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from cenote.api.errors import CenoteError
from cenote.runtime.log import get_logger

from .journal_files import Listing, fsync_directory, list_directory

__all__ = ["Compaction", "CompactionLimits"]

_RETRY_S_MAX: Final = 3600.0
_ERROR_BYTES_MAX: Final = 2000
_log = get_logger("cenote.master.compaction")


@dataclass(frozen=True, slots=True)
class CompactionLimits:
    """When to compact, and how long it may take."""

    journal_bytes_min: int = 64 << 20
    journal_files_max: int = 64
    """Each start of a master begins a file: many starts make many small ones."""
    timeout_s: float = 600.0
    retry_s: float = 30.0


@final
class Compaction:
    """See the module. `step` and `delete_covered` run in the journal's thread."""

    def __init__(self, directory: Path, limits: CompactionLimits) -> None:
        self._directory = directory
        self._limits = limits
        self._closed_bytes = 0
        self._closed_files = 0
        self._open_files = 0
        self._snapshot_bytes = 0
        self.covers = 0
        """Entry up to which the newest snapshot reaches."""
        self._asked = False
        self._child: subprocess.Popen[bytes] | None = None
        self._child_until_s = 0.0
        self._retry_at_s = 0.0
        self._retry_s = limits.retry_s
        self._stopped = False
        self._lock = threading.Lock()  # between `stop` and a `step` that is about to start a child

    @property
    def bytes_used(self) -> int:
        """Of snapshot and closed journal files."""
        return self._closed_bytes + self._snapshot_bytes

    @property
    def child_pid(self) -> int | None:
        """The compactor that is at work."""
        child = self._child
        return child.pid if child is not None else None

    def begin(self, listing: Listing) -> None:
        """All journal files in `listing` are closed."""
        self._count(listing)

    def rotated(self, closed_bytes: int | None) -> None:
        """A new journal file is written to; the one before, if any, was closed at that size."""
        self._open_files = 1
        if closed_bytes is not None:
            self._closed_bytes += closed_bytes
            self._closed_files += 1

    def _count(self, listing: Listing) -> None:
        closed = listing.journals[: len(listing.journals) - self._open_files]
        self._closed_bytes = sum(file.size_bytes for file in closed)
        self._closed_files = len(closed)
        self._snapshot_bytes = listing.snapshot.size_bytes if listing.snapshot else 0
        self.covers = listing.snapshot.covers if listing.snapshot else 0

    def ask(self) -> None:
        """Make one, due or not."""
        self._asked = True

    def _due(self) -> bool:
        if self._asked and self._closed_files:
            return True
        limits = self._limits
        due_bytes = max(limits.journal_bytes_min, self._snapshot_bytes)
        return self._closed_bytes > due_bytes or self._closed_files > limits.journal_files_max

    def step(self) -> bool:
        """Look after the child, or start one; True while there is something to look after."""
        if self._child is not None:
            self._look_after(self._child)
        elif self._due() and time.monotonic() >= self._retry_at_s:
            try:
                self._start()
            except (OSError, CenoteError) as error:
                self._failed(str(error))
        return self._child is not None or self._due()

    def _start(self) -> None:
        journals = list_directory(self._directory).journals
        if len(journals) < 2:  # none is closed: the only one may be written to
            return
        through = journals[-1].first - 1
        command = [sys.executable, "-m", "cenote.master.compactor", str(self._directory)]
        command += ["--through", str(through)]
        with self._lock:
            if self._stopped:
                return
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        self._child_until_s = time.monotonic() + self._limits.timeout_s
        self._asked = False
        _log.info("compacting", closed_bytes=self._closed_bytes, through_entry=through)

    def _look_after(self, child: subprocess.Popen[bytes]) -> None:
        code = child.wait() if self._stopped else child.poll()
        if code is None:
            if time.monotonic() < self._child_until_s:
                return
            child.kill()
            code = child.wait()
        assert child.stderr is not None
        with child.stderr as stream:
            # A child that has ended leaves at most a pipe's capacity.
            said = stream.read(1 << 16).decode(errors="replace").strip()[-_ERROR_BYTES_MAX:]
        self._child = None
        if self._stopped:
            return
        if code:
            self._failed(said or f"exit code {code}")
            return
        try:
            self.delete_covered()
        except CenoteError as error:
            self._failed(str(error))
            return
        self._retry_s = self._limits.retry_s
        _log.info("compacted", snapshot_bytes=self._snapshot_bytes)

    def _failed(self, why: str) -> None:
        _log.error("compaction failed", why=why, retry_in_s=self._retry_s)
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(self._retry_s * 2, _RETRY_S_MAX)

    def delete_covered(self) -> None:
        """Delete what the newest snapshot covers. Raises ResourceUnavailable."""
        covered = list_directory(self._directory).covered()
        for path in covered:
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                _log.warning("can't delete a covered file", file=path.name, error=str(error))
        if covered:
            try:
                fsync_directory(self._directory)
            except OSError as error:
                # They come back after a power failure, covered as before.
                _log.warning("can't sync the directory", error=str(error))
        self._count(list_directory(self._directory))

    def stop(self) -> None:
        """Start no more, and kill the child: what it did not finish is worthless but harmless."""
        with self._lock:
            self._stopped = True
            child = self._child
        if child is not None:
            child.kill()

    def finish(self) -> None:
        """After `stop` and the end of the thread: collect what is left of the child."""
        if self._child is not None:
            self._look_after(self._child)
