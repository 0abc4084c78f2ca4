"""What the agent needs of those who write to this daemon: to end them, and to know that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["WriterSessions"]


class WriterSessions(Protocol):
    """What the agent needs of `cenote.store.sessions.SessionTable`."""

    def cut(
        self, session_ids: Sequence[bytes], timeout_s: float = 1.0
    ) -> tuple[list[bytes], list[bytes]]:
        """End these sessions for good: (cut, those that may still write)."""
        ...

    def poll(self) -> list[bytes]:
        """Sessions that are cut by now and were not when `cut` returned."""
        ...

    def quarantined(self) -> list[bytes]:
        """Sessions that were to be cut and may still write."""
        ...

    def end_older_writes(self, epoch: int, timeout_s: float = 1.0) -> bool:
        """End changes of epochs below `epoch`; whether none is under way any more."""
        ...
