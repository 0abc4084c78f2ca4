"""`python -m cenote.master.compactor DIR --through ENTRY`: a new snapshot from the old one and the
closed journal files. A process of its own, so that no lookup ever waits for it.

It reads entries up to ENTRY, the last one of a closed file, into a state of its own, and writes
what that state says about itself: `snapshot-<ENTRY>.bin`, under a temporary name until it is on the
disk. It deletes nothing; whoever started it does, or the next start of the master. So a crash at
any point leaves either the old snapshot and all files, or the new one as well.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.runtime.harness import EXIT_FAILED, EXIT_OK, exit_code_of

from .effects import DurableEffect, EpochStarted
from .journal import JournalCorrupt, Record, SnapshotEnd, read_entries, snapshot_records
from .journal_files import (
    JournalReader,
    disk_error,
    list_directory,
    read_snapshot,
    write_snapshot,
)
from .state import MasterState
from .state_config import StateConfig

__all__ = ["compact", "main"]

NICENESS = 10


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


def compact(directory: Path, through: int, *, on_step: Callable[[str], None] = _nothing) -> Path:
    """Write the snapshot of entries up to `through`; returns its path.

    `on_step` is told each step's name before it is done (tests crash there). Raises JournalCorrupt
    and ResourceUnavailable; then nothing has changed.
    """
    with _alone(directory):
        on_step("read")
        state = MasterState(StateConfig(), epoch=0)
        epoch = 0
        for entry in read_entries(_records(directory, through), verified=True):
            if isinstance(entry, SnapshotEnd):
                epoch = max(epoch, entry.epoch)
                continue
            if isinstance(entry, EpochStarted):
                epoch = max(epoch, entry.epoch)
            state.replay(entry)
        on_step("write")
        effects: Iterator[DurableEffect] = state.snapshot()

        def watched() -> Iterator[bytes]:
            for record in snapshot_records(effects, covers=through, epoch=epoch):
                yield record
                on_step("written")
            on_step("rename")

        path = write_snapshot(directory, watched(), through)
        on_step("done")
        return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cenote.master.compactor")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--through", type=int, required=True, metavar="ENTRY")
    options = parser.parse_args(arguments)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    try:
        compact(options.directory, options.through)
    except CenoteError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return exit_code_of(error) or EXIT_FAILED
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
