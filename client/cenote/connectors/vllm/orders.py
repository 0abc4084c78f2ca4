"""What the scheduler's half tells the workers with each step, and what they report."""

from __future__ import annotations

from dataclasses import dataclass, field

from cenote.api.types import AcquiredLease

from .groups import Block

__all__ = ["LoadOrder", "Orders", "Reports", "SaveOrder", "SpaceName", "StageOrder", "StageReport"]


@dataclass(frozen=True, slots=True)
class SpaceName:
    """The namespace that a model's blocks lie in."""

    name: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Bring these blocks into memory of your own, under the lease where there is one."""

    ticket: int
    blocks: tuple[Block, ...]
    hashes: tuple[bytes, ...]
    lease: AcquiredLease | None
    deadline_s: float
    """Seconds from when it is read."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy staged blocks into the engine's: `block_ids[i]` is for `blocks[i]`."""

    ticket: int
    request_id: str
    blocks: tuple[Block, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save the engine's blocks `block_ids`, which this step completes."""

    blocks: tuple[Block, ...]
    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class Orders:
    """All orders of a step."""

    space: SpaceName | None = None
    drops: list[int] = field(default_factory=list)
    """Tickets."""
    stages: list[StageOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    step: int = 0
    """Its number, to be reported when it has ended; 0: nobody wants to know."""


@dataclass(slots=True)
class StageReport:
    """How a stage order ended, at one rank or (merged) at `ranks` of them."""

    ranks: int
    missing: frozenset[Block]
    size_bytes: int = 0


@dataclass(slots=True)
class Reports:
    """What workers have to say after a step."""

    staged: dict[int, StageReport] = field(default_factory=dict)
    step: int = 0
    """The step that has ended, if that was asked for."""

    def merge(self, other: Reports) -> None:
        """Take over what another rank says of the same step."""
        self.step = max(self.step, other.step)
        for ticket, report in other.staged.items():
            mine = self.staged.get(ticket)
            if mine is None:
                self.staged[ticket] = report
            else:
                self.staged[ticket] = StageReport(
                    mine.ranks + report.ranks,
                    mine.missing | report.missing,
                    mine.size_bytes + report.size_bytes,
                )
