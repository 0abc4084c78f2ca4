"""What each client knows of its keys, in a file that outlives it; and which reads are right.

A key is changed by one client only, its owner; all others read the owner's ledger. The owner writes
down what it is about to do before it does it, and what was acknowledged after it was: so the next
process of a killed client knows what was acknowledged, and what nobody can know (DOUBT).

A call that ended without an answer may still take effect a moment later. Its key rests until that
can't be any more (`DOUBT_S`), and is then removed: from that acknowledgement on it is known again.
"""

from __future__ import annotations

import math
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DOUBT_S", "Ledger", "Row", "State", "judge_exists", "judge_read"]

DOUBT_S = 25.0
"""Longer than any process is ever stopped, and than a call lasts."""
SLACK_S = 0.5
_RING = 4
_ROW = np.dtype(
    [
        ("state", "u1"),
        ("pinned", "u1"),
        ("version", "u4"),
        ("size", "u4"),
        ("doubt_until", "f8"),
        ("gone", "f8", (_RING,)),
    ],
    align=True,
)


class State(IntEnum):
    ABSENT = 0
    """Never put, or its removal was acknowledged."""
    PUTTING = 1
    PRESENT = 2
    """Its put was acknowledged: it is there, unless it was evicted."""
    REMOVING = 3
    DOUBT = 4
    """Its last version is there, or not, or will be in a moment."""


class Row(NamedTuple):
    """What was known of a key at one moment. Times are of the monotonic clock."""

    state: State
    pinned: bool
    version: int
    gone: tuple[float, ...]
    """By version modulo their number: when its removal was acknowledged; infinite where it was
    not."""

    def gone_s(self, version: int) -> float:
        if version > self.version:
            return math.inf
        if version <= self.version - _RING:
            return -math.inf
        return self.gone[version % _RING]


class Ledger:
    """The keys of one client. Only its owner calls what changes it."""

    def __init__(self, path: Path, keys: int, *, owner: bool) -> None:
        if owner and not path.exists():
            path.write_bytes(bytes(keys * _ROW.itemsize))
        mode: Any = "r+" if owner else "r"
        self._rows = np.memmap(path, _ROW, mode, shape=(keys,))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, key: int) -> Row:
        r = self._rows[key]
        return Row(State(int(r["state"])), bool(r["pinned"]), int(r["version"]), tuple(r["gone"]))

    def size(self, key: int) -> int:
        return int(self._rows["size"][key])

    def where(self, *states: State, pinned: bool | None = None) -> list[int]:
        """Keys in one of these states."""
        found = np.isin(self._rows["state"], states)
        if pinned is not None:
            found &= self._rows["pinned"] == pinned
        return np.flatnonzero(found).tolist()

    def due(self, now_s: float) -> list[int]:
        """Keys in doubt that have rested long enough."""
        rows = self._rows
        return np.flatnonzero(
            (rows["state"] == State.DOUBT) & (rows["doubt_until"] < now_s)
        ).tolist()

    # ---- the owner -----------------------------------------------------------------------------

    def after_a_crash(self, now_s: float) -> None:
        """Nobody knows what came of what the process before was about to do."""
        for key in self.where(State.PUTTING, State.REMOVING):
            self.doubt(key, now_s)

    def will_put(self, key: int, size: int) -> int:
        """A new version of a key that is absent, or the same one again; its number."""
        rows = self._rows
        version = int(rows["version"][key])
        if rows["state"][key] == State.ABSENT:
            version += 1
            rows["size"][key] = size
            rows["gone"][key, version % _RING] = math.inf
            rows["version"][key] = version
        rows["state"][key] = State.PUTTING
        return version

    def was_put(self, key: int) -> None:
        self._rows["state"][key] = State.PRESENT

    def was_pinned(self, key: int) -> None:
        self._rows["pinned"][key] = 1

    def will_remove(self, key: int) -> None:
        self._rows["pinned"][key] = 0
        self._rows["state"][key] = State.REMOVING

    def was_removed(self, key: int, now_s: float) -> None:
        rows = self._rows
        rows["gone"][key, int(rows["version"][key]) % _RING] = now_s
        rows["state"][key] = State.ABSENT

    def doubt(self, key: int, now_s: float) -> None:
        self._rows["pinned"][key] = 0
        self._rows["doubt_until"][key] = now_s + DOUBT_S
        self._rows["state"][key] = State.DOUBT


# ---- judging -------------------------------------------------------------------------------------


def judge_read(
    before: Row, after: Row, seen: int, began_s: float, location_ttl_s: float, *, own: bool
) -> str:
    """What a read came to. `seen`: the version that came, 0 for a miss; `own`: by the key's owner.

    "hit", "old" (removed, and still read from a cached location, which is allowed), "miss",
    "missed" (what was acknowledged was not there), "missed pinned"; "removed key back", "from
    nowhere" are wrong.
    """
    if not seen:
        same = before.version == after.version and before.state == after.state == State.PRESENT
        if not same:
            return "miss"
        return "missed pinned" if before.pinned and after.pinned else "missed"
    if seen > after.version:
        return "from nowhere"
    late_s = began_s - before.gone_s(seen)
    if late_s <= 0:
        return "hit"
    return "old" if not own and late_s <= location_ttl_s + SLACK_S else "removed key back"


def judge_exists(before: Row, after: Row, seen: bool) -> str:
    """The same for an existence check, which asks the master, so that no cache excuses it."""
    if before.version != after.version or before.state != after.state:
        return "hit" if seen else "miss"
    if seen:
        return "removed key back" if before.state == State.ABSENT else "hit"
    if before.state != State.PRESENT:
        return "miss"
    return "missed pinned" if before.pinned else "missed"
