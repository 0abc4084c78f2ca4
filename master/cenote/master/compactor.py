"""`python -m cenote.master.compactor DIR --through ENTRY`: a new snapshot from the old one and the
closed journal files. A process of its own, so that no lookup ever waits for it.

With the URL of a shared backend instead of DIR it reads all there is of the journal, and puts its
snapshot in force. Standbys do that from the state that they have anyway; this is for a leader that
has none. Options that are no part of the URL come as JSON on standard input: they hold a password.

It reads entries up to ENTRY, the last one of a closed file, into a state of its own, and writes
what that state says about itself: `snapshot-<ENTRY>.bin`, under a temporary name until it is on the
disk. It deletes nothing; whoever started it does, or the next start of the master. So a crash at
any point leaves either the old snapshot and all files, or the new one as well.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import final

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.runtime.harness import EXIT_FAILED, EXIT_OK, exit_code_of

from .effects import EpochStarted
from .journal import JournalCorrupt, Record, SnapshotEnd, read_entries, snapshot_records
from .journal_files import (
    JournalReader,
    disk_error,
    list_directory,
    read_snapshot,
    write_snapshot,
)
from .metadata import MetadataBackend, MetadataOptions, open_backend
from .state import MasterState
from .state_config import StateConfig

__all__ = ["compact", "compact_shared", "main"]

NICENESS = 10
FOLLOW_TIMEOUT_S = 120.0
OPTIONS_BYTES_MAX = 1 << 16


def _nothing(_step: str) -> None:
    pass


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """No second compactor at work, such as one that outlived its master."""
    path = directory / "COMPACTOR"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise disk_error(f"open {path}", error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ResourceUnavailable(f"another compactor is at work in {directory}") from error
    finally:
        os.close(fd)


def _records(directory: Path, through: int) -> Iterator[Record]:
    """Those of the newest snapshot and of closed files, up to entry `through`."""
    listing = list_directory(directory)
    covers = 0
    if listing.snapshot is not None:
        covers = listing.snapshot.covers
        if covers >= through:
            raise ResourceUnavailable(f"{listing.snapshot.path} covers entry {through} already")
        yield from read_snapshot(listing.snapshot)
    closed = [file for file in listing.journals if file.first <= through]
    reader = JournalReader(closed, covers + 1, cut_tail=False)
    yield from reader
    if reader.next_entry != through + 1:
        raise JournalCorrupt(
            f"entry {through} is not the last one of a closed journal file in {directory}",
            remedy="this is a bug, please report it; the journal itself is untouched",
        )


@final
class _Replay:
    """A state of one's own, and the newest epoch in it."""

    def __init__(self) -> None:
        self.state = MasterState(StateConfig(), epoch=0)
        self.epoch = 0

    def add(self, records: Iterable[Record]) -> None:
        for entry in read_entries(records, verified=True):
            if isinstance(entry, SnapshotEnd):
                self.epoch = max(self.epoch, entry.epoch)
                continue
            if isinstance(entry, EpochStarted):
                self.epoch = max(self.epoch, entry.epoch)
            self.state.replay(entry)

    def snapshot(self, covers: int) -> Iterator[bytes]:
        return snapshot_records(self.state.snapshot(), covers=covers, epoch=self.epoch)


def compact_shared(backend: MetadataBackend) -> None:
    """Follow `backend` to its end, and install a snapshot of that.

    Raises JournalCorrupt and ResourceUnavailable.
    """
    until_s = time.monotonic() + FOLLOW_TIMEOUT_S
    replay = _Replay()
    while True:
        followed = backend.follow(0.5)
        if followed.anew:
            replay = _Replay()
        replay.add(followed.records)
        if followed.caught_up:
            break
        if time.monotonic() > until_s:
            raise backend.refusal or ResourceUnavailable(f"{backend.name} can't be read")
    if backend.last_entry:
        backend.install_snapshot(replay.snapshot(backend.last_entry), backend.last_entry)


def compact(directory: Path, through: int, *, on_step: Callable[[str], None] = _nothing) -> Path:
    """Write the snapshot of entries up to `through`; returns its path.

    `on_step` is told each step's name before it is done (tests crash there). Raises JournalCorrupt
    and ResourceUnavailable; then nothing has changed.
    """
    with _alone(directory):
        on_step("read")
        replay = _Replay()
        replay.add(_records(directory, through))
        on_step("write")

        def watched() -> Iterator[bytes]:
            for record in replay.snapshot(through):
                yield record
                on_step("written")
            on_step("rename")

        path = write_snapshot(directory, watched(), through)
        on_step("done")
        return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cenote.master.compactor")
    parser.add_argument("place", metavar="DIR|URL")
    parser.add_argument("--through", type=int, metavar="ENTRY", help="with DIR")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        if "://" in options.place:
            given = json.loads(sys.stdin.read(OPTIONS_BYTES_MAX))
            backend = open_backend(options.place, MetadataOptions(**given))
            try:
                compact_shared(backend)
            finally:
                backend.close()
        elif options.through is None:
            parser.error("--through is missing")
        else:
            compact(Path(options.place), options.through)
    except CenoteError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return exit_code_of(error) or EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
