"""Counters and orders that all processes of a soak share: a file that outlives each of them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from cenote.api.errors import ERRORS_BY_CODE

__all__ = ["Board", "write_line"]

_ORDERS = ("stop", "healthy")
"""`healthy`: 0, or the number of the quiet time in which all has been well for a while."""
_CALLS = (
    *("put", "put_batch", "put_again", "get", "get_into", "get_batch", "get_into_batch", "view"),
    *("lease", "hold", "exists", "remove", "pin", "connect"),
)
_SEEN = (
    *("hit", "old", "miss", "missed", "missed pinned", "hit_bytes", "stored", "stored_bytes"),
    *("existed", "removed", "in doubt", "missed after put", "checks"),
)
_BAD = (
    *("wrong bytes", "removed key back", "from nowhere", "existed though removed"),
    *("pinned lost", "late", "missed after put when well"),
)
_STATE = ("in_call", "stops", "checked", "late_ms_max")
_ERRORS = tuple(sorted(kind.__name__ for kind in ERRORS_BY_CODE.values()))
_NAMES = (
    *(_STATE + _BAD + _SEEN),
    *(f"call {name}" for name in _CALLS),
    *(f"error {name}" for name in _ERRORS),
    *(f"well {name}" for name in _ERRORS),  # errors while all was well
)
_COLUMN = {name: number for number, name in enumerate(_NAMES)}


class Board:
    """uint64 by client and name; each cell has one writer."""

    BAD = _BAD

    def __init__(self, path: Path, clients: int) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * (clients + 1) * len(_NAMES)))
        self._cells = np.memmap(path, np.uint64, "r+", shape=(clients + 1, len(_NAMES)))
        self._orders = self._cells[-1]
        self.clients = clients

    def order(self, name: str) -> int:
        return int(self._orders[_ORDERS.index(name)])

    def give(self, name: str, value: int) -> None:
        self._orders[_ORDERS.index(name)] = value

    def add(self, client: int, name: str, count: int = 1) -> None:
        self._cells[client, _COLUMN[name]] += np.uint64(count)

    def set(self, client: int, name: str, value: int) -> None:
        self._cells[client, _COLUMN[name]] = value

    def get(self, client: int, name: str) -> int:
        return int(self._cells[client, _COLUMN[name]])

    def totals(self) -> Counter[str]:
        """Sums over all clients."""
        sums = self._cells[:-1].sum(axis=0)
        return Counter({name: int(sums[column]) for name, column in _COLUMN.items()})


def write_line(path: Path, text: str) -> None:
    """Append one line at once, whatever happens to this process next."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text.replace("\n", " ").encode() + b"\n")
    finally:
        os.close(fd)
