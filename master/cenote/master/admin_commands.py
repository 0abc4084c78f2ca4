"""What administrators tell the pool: plain values, as those in `commands`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["AdminCommand", "Configure", "DeleteNamespace", "Evict", "EvictReply"]


@dataclass(slots=True)
class Evict:
    """Let objects go that are neither pinned nor leased: those named, else the coldest."""

    namespace_id: int
    generation: int
    digests: NDArray[np.uint64] | None = None
    """uint64[n, 2]; None: coldest first, as much as is said below."""
    size_bytes: int = 0
    """Of space; 0: no limit."""
    idle_s: float = 0.0
    """Only what was not touched for so long, by the policy's stamps."""
    rows_max: int = 4096


@dataclass(slots=True)
class EvictReply:
    objects: int
    size_bytes: int
    """Of space that became free."""
    pinned: int
    """Of the named ones, those that stay for that."""
    leased: int
    absent: int


@dataclass(slots=True)
class DeleteNamespace:
    """Reply: how many objects it had."""

    name: str
    seed_if_new: int
    """Of the generation that replaces it wherever it is still known."""


@dataclass(slots=True)
class Configure:
    """Change limits while the master runs. Reply: None."""

    values: dict[str, float]
    """By name, of `dynamic_config.DYNAMIC`."""
    unset: list[str]
    """These are again what the master was started with."""


AdminCommand: TypeAlias = Evict | DeleteNamespace | Configure
