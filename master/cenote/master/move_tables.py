"""What the master remembers of copies between nodes: why each is made, and how far that is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES

__all__ = ["NO_REPLICA", "Cause", "Move", "Moves", "Task"]

Rows = NDArray[np.int64]

NO_REPLICA = 255
BURST_S = 0.25
"""Of the bandwidth of a task: what may be ordered at once."""
_FAILURES_MAX = 4_096


class Cause(StrEnum):
    DRAIN = "drain"
    REPAIR = "repair"
    REBALANCE = "rebalance"
    HOT = "hot"


@dataclass(slots=True, eq=False)
class Task:
    """One reason to move objects, and what came of it."""

    cause: Cause
    node_id: int
    """That is drained, or has died; 0: no one node."""
    started_s: float
    bandwidth: int = 0
    """Bytes a second; 0 = no limit."""
    moved: int = 0
    moved_bytes: int = 0
    dropped: int = 0
    """Had as many replicas elsewhere as there can be."""
    evicted: int = 0
    """Colder than all that the others hold, which have no room left."""
    failed: int = 0
    remaining: int = 0
    remaining_bytes: int = 0
    waiting: int = 0
    """Of these, those that are read under leases: their copies are made."""
    done: bool = False
    note: str = ""
    ended_s: float = 0.0
    rows: Rows = field(default_factory=lambda: np.zeros(0, np.int64))
    """Whose turn it is next, the hottest first; checked again when it comes."""
    seqs: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))
    at: int = 0
    look_at_s: float = 0.0
    """When the next ones are looked for."""
    excess: dict[int, int] = field(default_factory=dict)
    """Node id -> units that are yet to leave it, of what is evened out."""
    ordered: int = 0
    """Of the present rows."""
    retry_at_s: float = 0.0
    """After its source could not be reached."""
    allowance: float = 0.0
    allowed_s: float = -1.0

    def allow(self, now_s: float) -> bool:
        """Whether another copy may be ordered, as far as the bandwidth goes."""
        if not self.bandwidth:
            return True
        if self.allowed_s >= 0:
            self.allowance += (now_s - self.allowed_s) * self.bandwidth
        self.allowed_s = now_s
        self.allowance = min(self.allowance, self.bandwidth * BURST_S)
        return self.allowance >= 0

    def charge(self, units: int) -> None:
        """So much was ordered. It may be more than was allowed: the next ones wait longer then."""
        if self.bandwidth:
            self.allowance -= units * UNIT_BYTES


@dataclass(slots=True, eq=False)
class Move:
    """What belongs to a copy between nodes."""

    task: Task
    source: int
    """The number of the replica that is copied."""
    leaves: int = NO_REPLICA
    """The replica that goes once the copy is there."""


@dataclass(slots=True)
class Failures:
    """Of the copies of one version."""

    seq: int
    first_s: float
    times: int = 0
    not_there: int = 0
    changed: int = 0


@final
class Moves:
    __slots__ = (
        "failures",
        "short",
        "superseded",
        "tasks",
        "turn",
        "victim_at",
        "victim_stamps",
        "victims",
    )

    def __init__(self) -> None:
        self.tasks: dict[tuple[Cause, int], Task] = {}
        self.superseded: dict[tuple[int, int], tuple[int, int]] = {}
        """Digest -> (seq, replica that goes when its readers' leases have ended)."""
        self.short: list[tuple[NDArray[np.uint64], NDArray[np.uint64]]] = []
        """Digests and seqs of objects that have a replica less than they had."""
        self.failures: dict[tuple[int, int], Failures] = {}
        self.victims: Rows = np.zeros(0, np.int64)
        """The coldest of what lies on nodes that take something up, and their stamps."""
        self.victim_stamps: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.victim_at = 0
        self.turn = 0

    def note_short(self, digests: NDArray[np.uint64], seqs: NDArray[np.uint64]) -> None:
        """These lost a replica, and have others."""
        if len(seqs):
            self.short.append((digests, seqs))

    def task(self, cause: Cause, node_id: int, now_s: float) -> Task:
        """The one there is, or a new one."""
        found = self.tasks.get((cause, node_id))
        if found is None:
            found = self.tasks[cause, node_id] = Task(cause, node_id, now_s)
        return found

    def failures_of(self, digest: tuple[int, int], seq: int, now_s: float) -> Failures:
        found = self.failures.get(digest)
        if found is None or found.seq != seq:
            if len(self.failures) >= _FAILURES_MAX:
                self.failures.clear()
            found = self.failures[digest] = Failures(seq, now_s)
        return found
