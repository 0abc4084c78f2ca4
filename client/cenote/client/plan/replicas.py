"""Which replicas of a put's objects are there, and whether these are enough."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .pieces import Placement

__all__ = ["are_enough", "failed_rows", "lost_replicas"]

I64 = NDArray[np.int64]
Bools = NDArray[np.bool_]


def lost_replicas(replicas: I64, placement: Placement, lost: Bools) -> Bools:
    """bool[rows, replicas]: which replicas are not (wholly) there, of so many of each row.

    `lost`: per extent.
    """
    gone = np.flatnonzero(lost)
    table: Bools = np.arange(int(replicas.max())) >= replicas[:, None]
    table[placement.owner[gone], placement.replica[gone]] = True
    return table


def are_enough(replicas: I64, lost: Bools, min_replicas: int) -> Bools:
    """bool[rows]: whether as many are there as are needed, or as were granted."""
    good = lost.shape[1] - lost.sum(axis=1)
    enough: Bools = good >= np.minimum(max(1, min_replicas), replicas)
    return enough


def failed_rows(replicas: I64, lost: Bools, positions: I64) -> bytes:
    """`failed_replicas` of a PutCommit: packed u32 pairs (position in the grant, replica)."""
    where = np.argwhere(lost & (np.arange(lost.shape[1]) < replicas[:, None]))
    table = np.empty((len(where), 2), "<u4")
    table[:, 0] = positions[where[:, 0]]
    table[:, 1] = where[:, 1]
    return table.tobytes()
