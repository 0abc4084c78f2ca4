"""Locks of files that end with the process that has them, however that ends (flock)."""

from __future__ import annotations

import fcntl
import time
from typing import Final

__all__ = ["is_locked", "lock_exclusively"]

PATIENCE_S: Final = 0.25
_POLL_S: Final = 0.005


def lock_exclusively(descriptor: int, patience_s: float | None = None) -> bool:
    """Take the lock; False where somebody else has it, and keeps it for `patience_s` (None:
    PATIENCE_S).

    Who only looks whether a file is locked (`is_locked`) has its lock for a moment: that is not to
    keep anybody from starting. Raises OSError where the file can't be locked at all.
    """
    until_s = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        else:
            return True


def is_locked(descriptor: int) -> bool:
    """Whether another open file has the lock. Raises OSError where it can't be told."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
