"""What the master remembers of tiers: copies under way, and whose turn it is next. Data alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .move_tables import Move
from .nodes import Node
from .segments import DRAM, Segment
from .spans import Spans

__all__ = ["NO_SOURCE", "ColdQueue", "Copies", "Copy", "Tiers", "source_of"]

Rows = NDArray[np.int64]
NO_SOURCE = -1


def source_of(segments: NDArray[Any], slots: NDArray[Any]) -> NDArray[np.int64]:
    """What an extent in memory is told by, as the source of a copy: its segment and its slot."""
    sources: NDArray[np.int64] = segments.astype(np.int64) << 32 | slots.astype(np.int64)
    return sources


@dataclass(slots=True, eq=False)
class Copy:
    copy_id: int
    node: Node
    low: int
    high: int
    """The two words of the object's digest."""
    epoch: int
    seq: int
    target: Segment
    span: Spans
    is_promotion: bool
    owner: int
    """The object's incarnation of a namespace."""
    move: Move | None = None
    """Where it is from another node."""
    given_up: bool = False
    """Nothing comes of it, whatever is told: only its space is still held."""
    shares: tuple[int, int] | None = None
    """Where it only takes a slot, since others have its bytes there already (`twins`): segment and
    offset of the source that this was noted of."""
    source: int = NO_SOURCE
    """Of a demotion: `source_of` its first extent in memory."""

    @property
    def units(self) -> int:
        return int(self.span[0, 3])

    @property
    def replica(self) -> int:
        return int(self.span[0, 0]) >> 16 & 0xFF


@final
class Copies:
    """Those under way."""

    __slots__ = ("_next_id", "by_id", "retry_at_s", "ssd_units_by_owner", "units_by_node")

    def __init__(self, epoch: int) -> None:
        self.by_id: dict[int, Copy] = {}
        self.units_by_node: dict[int, int] = {}
        self.ssd_units_by_owner: dict[int, int] = {}
        """Incarnation -> what its copies to SSDs under way will take there."""
        self.retry_at_s: dict[int, float] = {}
        """Node id -> when its device is tried again after a failure."""
        self._next_id = (epoch & 0xFFFFFF) << 40 | 1

    def new_ids(self, count: int) -> int:
        """The first of so many."""
        copy_id = self._next_id
        self._next_id += count
        return copy_id

    def add(self, one: Copy) -> None:
        units, node_id = one.units, one.node.node_id
        self.by_id[one.copy_id] = one
        self.units_by_node[node_id] = self.units_by_node.get(node_id, 0) + units
        if one.target.tier != DRAM:
            by_owner = self.ssd_units_by_owner
            by_owner[one.owner] = by_owner.get(one.owner, 0) + units

    def pop(self, copy_id: int) -> Copy | None:
        one = self.by_id.pop(copy_id, None)
        if one is not None:
            units = one.units
            self.units_by_node[one.node.node_id] -= units
            if one.target.tier != DRAM:
                left = self.ssd_units_by_owner.pop(one.owner) - units
                if left:
                    self.ssd_units_by_owner[one.owner] = left
        return one

    @property
    def units(self) -> int:
        """Space that is held for them, and nothing else."""
        return sum(one.units for one in self.by_id.values() if one.shares is None)


@final
class ColdQueue:
    """Objects of one node that are to be demoted, coldest first."""

    __slots__ = ("at", "rows", "stamps")

    def __init__(self, rows: Rows, stamps: NDArray[np.uint64]) -> None:
        """`stamps`: what they had when they were queued. What has another one was used since."""
        self.rows = rows
        self.stamps = stamps
        self.at = 0

    @property
    def is_empty(self) -> bool:
        return self.at >= len(self.rows)

    def take(self, count: int) -> tuple[Rows, NDArray[np.uint64]]:
        """The next so many, and their stamps."""
        some = slice(self.at, self.at + count)
        rows = self.rows[some]
        self.at += len(rows)
        return rows, self.stamps[some]

    def put_back(self, rows: Rows, stamps: NDArray[np.uint64]) -> None:
        """These, of what was taken, are the next ones again."""
        end, self.at = self.at, self.at - len(rows)
        self.rows[self.at : end], self.stamps[self.at : end] = rows, stamps

    def clear(self) -> None:
        self.at = len(self.rows)


@final
class Tiers:
    """Whose turn it is next; checked again when it comes."""

    __slots__ = (
        "allowances",
        "cold",
        "cold_until",
        "disk_nodes",
        "fruitless",
        "has_budgets",
        "left",
        "looked_at_s",
        "victims",
        "wanted",
    )

    def __init__(self) -> None:
        self.cold: dict[int, ColdQueue] = {}
        """Node id -> what is to be demoted there."""
        self.disk_nodes: tuple[int, ...] = ()
        """Those with an SSD, at the last tick."""
        self.left = 0
        """Demotions that may still be ordered before the next tick."""
        self.cold_until = 0
        """What has no later stamp is to have a copy, where the policy goes by age."""
        self.looked_at_s = -1.0
        self.fruitless: tuple[float, int, bytes] = (-1.0, 0, b"")
        """When nothing was found on an SSD that may go, on which, and which namespaces' it was to
        be."""
        self.victims: dict[tuple[int, int], tuple[Rows, NDArray[np.uint64]]] = {}
        """What is to be evicted on an SSD next, and its stamps; the business of `ssd_room`."""
        self.allowances: dict[int, int] = {}
        """Node id -> bytes that may be written to its device in this tick, where writes there have
        a budget."""
        self.has_budgets = False
        """Whether there is any such node."""
        self.wanted: list[tuple[int, int]] = []
        """To be promoted: (row, seq)."""

    def is_idle(self, node_id: int) -> bool:
        """Whether nothing of a node is known that is to be demoted."""
        queue = self.cold.get(node_id)
        return queue is None or queue.is_empty
