"""Directories of a pool that is to leave nothing behind, however it ends.

Each holds a file that is locked while its owner lives. What an owner that was killed left is
removed by the next one: files in /dev/shm are memory, which nobody would miss until it is short.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cenote.api.errors import ResourceUnavailable

__all__ = ["MEMORY_DIRECTORY", "remove_abandoned", "scratch_directory"]

MEMORY_DIRECTORY: Final = Path("/dev/shm")
_PREFIX: Final = "cenote-tmp-"
_LOCK_NAME: Final = "owner.lock"


@contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new directory in `parent` (the system's temporary directory), removed at the end.

    Raises ResourceUnavailable where it can't be made.
    """
    where = Path(tempfile.gettempdir()) if parent is None else parent
    remove_abandoned(where)
    try:
        made = Path(tempfile.mkdtemp(prefix="cenote-new-", dir=where))
    except OSError as error:
        raise ResourceUnavailable(
            f"can't make a directory in {where}: {error.strerror}",
            remedy="make it writable, or name another one (--dir, --ssd-dir, TMPDIR)",
        ) from error
    lock = os.open(made / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # It gets the name that others look for only now that it is locked.
    path = made.rename(where / made.name.replace("cenote-new-", _PREFIX))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Remove what dead owners (of this user) left in `parent`."""
    with contextlib.suppress(OSError):  # not ours to read: nothing of ours is in there
        for path in parent.glob(_PREFIX + "*"):
            # Gone meanwhile, another user's, locked by a living owner, or not locked yet.
            with contextlib.suppress(OSError):
                fd = os.open(path / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(fd)
