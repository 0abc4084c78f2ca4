"""A view that stays open over many calls, whatever happens to the pool meanwhile."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["HeldView"]

OPEN_S = (3.0, 40.0)
"""Longer than any lease, and than it takes to restart everything."""

Seen = Callable[[Any, int, int, str], int]
"""(bytes or None, client, key, how) -> the version that these bytes are, 0 for a miss."""


class HeldView:
    """An open `client.view`: `some` are its (client, key), `seen` their versions."""

    def __init__(
        self, view: Any, some: list[tuple[int, int]], rng: random.Random, bytes_seen: Seen
    ) -> None:
        self._view = view
        self._some = some
        self._bytes_seen = bytes_seen
        self._opened_s = time.monotonic()
        self.until_s = self._opened_s + rng.uniform(*OPEN_S)
        self._views: list[Any] = view.__enter__()
        self.seen = self._versions("held view")

    def _versions(self, how: str) -> list[int]:
        pairs = zip(self._views, self._some, strict=True)
        return [self._bytes_seen(view, *one, how) for view, one in pairs]

    def changes(self) -> Iterator[str]:
        """What is not as it was: nothing, or a bug."""
        open_s = time.monotonic() - self._opened_s
        again = self._versions(f"held view, open for {open_s:.1f} s")
        for one, before, now in zip(self._some, self.seen, again, strict=True):
            if before != now:
                yield f"a view of {one}, open for {open_s:.1f} s, changed: {before}, then {now}"

    def close(self) -> None:
        """Raises BufferInUse where something still exports its memory."""
        self._view.__exit__(None, None, None)
