"""What people ask of the pool that takes longer: plain values, as those in `commands`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Drain", "DrainReply", "Rebalance", "TaskCommand"]


@dataclass(slots=True)
class Drain:
    node_id: int
    cancel: bool = False
    bandwidth: int = 0
    """Bytes a second at most; 0 = no limit."""


@dataclass(slots=True)
class DrainReply:
    remaining_bytes: int
    """Payload of what has something on that node."""


@dataclass(slots=True)
class Rebalance:
    cancel: bool = False
    bandwidth: int = 0
    """Bytes a second at most; 0 = no limit."""


TaskCommand: TypeAlias = Drain | Rebalance
