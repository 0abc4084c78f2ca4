"""Which of a peer's NIC paths work: who failed, and when it is tried again. Pure: time is given.

A path that failed is left out at once, and probed after a pause that doubles from failure to
failure, up to a limit. When the port is reported up again it is probed at the next occasion, since
the kernel knows better than a clock. A probe that succeeds brings it back; no call waits for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

__all__ = ["FailedPath", "PathHealth"]

PAUSE_MIN_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
FORGIVEN_AFTER_S: Final = 60.0
"""So long without failure, and the next one counts as the first."""


@dataclass(frozen=True, slots=True)
class FailedPath:
    """A path that is out of use."""

    index: int
    reason: str
    probe_in_s: float
    """0: now."""


@dataclass(slots=True)
class _Path:
    reason: str = ""
    """Of its failure; "" while it works."""
    probe_s: float = 0.0
    pause_s: float = PAUSE_MIN_S
    up_since_s: float = 0.0
    probing: bool = False


@final
class PathHealth:
    """The state of `count` paths, all working at first. Not for several threads at once."""

    def __init__(self, count: int, now_s: float) -> None:
        self._paths = [_Path(up_since_s=now_s) for _ in range(count)]

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def working(self) -> list[int]:
        """Indices of the paths to use; empty: TCP."""
        return [index for index, path in enumerate(self._paths) if not path.reason]

    def failed(self, index: int, reason: str, now_s: float) -> None:
        """It broke, or its probe did. Idempotent while it is out of use and not probed."""
        path = self._paths[index]
        if path.reason and not path.probing:
            return
        if path.reason:
            path.pause_s = min(PAUSE_MAX_S, 2 * path.pause_s)
        elif now_s - path.up_since_s >= FORGIVEN_AFTER_S:
            path.pause_s = PAUSE_MIN_S
        path.reason = reason or "it failed"
        path.probing = False
        path.probe_s = now_s + path.pause_s

    def port_active(self, index: int, now_s: float) -> None:
        """The kernel says that its port is up (again): probe it now."""
        path = self._paths[index]
        if path.reason and not path.probing:
            path.probe_s = now_s

    def begin_probe(self, now_s: float) -> int | None:
        """The path to probe now, None where none is due. Ends with `failed` or `recovered`."""
        due = [
            (path.probe_s, index)
            for index, path in enumerate(self._paths)
            if path.reason and not path.probing and path.probe_s <= now_s
        ]
        if not due:
            return None
        index = min(due)[1]
        self._paths[index].probing = True
        return index

    def recovered(self, index: int, now_s: float) -> None:
        """Its probe went well: it is used again. The pause is kept for when it fails soon."""
        path = self._paths[index]
        if path.reason:
            path.pause_s = min(PAUSE_MAX_S, 2 * path.pause_s)
            path.reason = ""
            path.probing = False
            path.up_since_s = now_s

    def next_probe_s(self) -> float | None:
        """When `begin_probe` will have something to say; None: not before a failure."""
        times = [path.probe_s for path in self._paths if path.reason and not path.probing]
        return min(times) if times else None

    def out_of_use(self, now_s: float) -> Sequence[FailedPath]:
        """The paths that failed, for people."""
        return [
            FailedPath(index, path.reason, max(0.0, path.probe_s - now_s))
            for index, path in enumerate(self._paths)
            if path.reason
        ]
