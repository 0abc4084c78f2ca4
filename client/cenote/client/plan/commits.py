"""Which commits of a session are sealed: told to the master with the next one, for free.

The master calls an object UNSEALED until its writer has said that it is sealed; who puts the key
meanwhile seals it once more (see `others`). What is told is one number, `through`: all commits with
lower request ids are sealed, or will never be told of.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, final

__all__ = ["Commits"]

LOST_AT_ONCE_MAX: Final = 512


@final
class Commits:
    """Those under way, and those that are to be cancelled. Safe from several threads.

    Without a lock: a commit is taken down under a `floor`, an id that was drawn before, and draws
    its own afterwards. So whoever looks either sees it, and tells no more than its floor, or it
    draws its id later, which is above all that had been drawn when he looked.

    A session that is replaced leaves its own behind: what is told to one says nothing of another.
    """

    __slots__ = ("_ids", "_lost", "_newest", "_open", "session_id")

    def __init__(self, session_id: bytes, request_ids: Iterator[int]) -> None:
        self.session_id = session_id
        self._ids = request_ids
        self._newest = 0  # some id that was drawn, mostly the last one
        self._open: dict[object, int] = {}
        """Request id, or what stands for one that is yet to be drawn -> its floor."""
        self._lost: dict[int, None] = {}

    def begin(self) -> tuple[int, int]:
        """(request id of a commit that is sent next, what may be told with it)."""
        through = self.through()
        place, floor = object(), self._newest
        self._open[place] = floor
        request_id = self._newest = next(self._ids)
        self._open[request_id] = floor
        del self._open[place]
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
        newest = self._newest  # before the look
        return min(list(self._open.values()), default=newest) if self._open else newest

    def lost(self) -> list[int]:
        """Commits of which the master is to expect nothing more; `were_told` when it knows."""
        return list(self._lost)[:LOST_AT_ONCE_MAX]

    def were_told(self, request_ids: list[int]) -> None:
        """The master knows of these lost ones."""
        for request_id in request_ids:
            self._lost.pop(request_id, None)
            self._open.pop(request_id, None)
