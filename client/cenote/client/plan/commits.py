"""Which commits of a session are sealed: told to the master with the next one, for free.

The master calls an object UNSEALED until its writer has said that it is sealed; who puts the key
meanwhile seals it once more (see `others`). What is told is one number, `through`: all commits with
lower request ids are sealed, or will never be told of.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final, final

__all__ = ["Commits"]

LOST_AT_ONCE_MAX: Final = 512


@final
class Commits:
    """Those under way, and those that are to be cancelled. Safe from several threads.

    A session that is replaced leaves its own behind: what is told to one says nothing of another.
    """

    __slots__ = ("_ids", "_lock", "_lost", "_open", "session_id")

    def __init__(self, session_id: bytes, request_ids: Iterator[int]) -> None:
        self.session_id = session_id
        self._ids = request_ids
        self._lock = threading.Lock()
        self._open: dict[int, None] = {}  # ids rise: they are drawn under the lock
        self._lost: dict[int, None] = {}

    def begin(self) -> tuple[int, int]:
        """(request id of a commit that is sent next, what may be told with it)."""
        with self._lock:
            request_id = next(self._ids)
            through = next(iter(self._open), request_id) - 1
            self._open[request_id] = None
        return request_id, through

    def end(self, request_id: int) -> None:
        """All that it decided is sealed, or it decided nothing."""
        self._open.pop(request_id, None)

    def lose(self, request_id: int) -> None:
        """It may have decided something, even later on, that is not sealed: it stays open until the
        master was told to expect nothing more of it (`lost`)."""
        self._lost[request_id] = None

    def through(self) -> int:
        """What may be told now."""
        with self._lock:
            return next(iter(self._open), 0) - 1 if self._open else next(self._ids)

    def lost(self) -> list[int]:
        """Commits that the master is to be told not to expect anything more of; `end` them then."""
        return list(self._lost)[:LOST_AT_ONCE_MAX]

    def were_told(self, request_ids: list[int]) -> None:
        """The master knows of these lost ones."""
        for request_id in request_ids:
            self._lost.pop(request_id, None)
            self._open.pop(request_id, None)
