"""What connections are served with, what is counted of each, and what changes are refused with."""

from __future__ import annotations

from dataclasses import dataclass

from cenote.api.errors import StaleEpoch, StaleLocation

__all__ = ["ConnectionCounters", "ServingLimits", "epoch_error", "grant_error"]


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """How long a client may keep a thread waiting in the middle of something."""

    hello_timeout_s: float = 5.0
    stall_timeout_s: float = 10.0
    """For each MiB of a request or reply: slower clients are closed."""
    spin_s: float = 50e-6
    """How long a thread looks for a hot connection's next request before it sleeps; 0: never."""


@dataclass(slots=True)
class ConnectionCounters:
    """What went over a connection; written by its thread alone."""

    read_bytes: int = 0
    written_bytes: int = 0
    seals: int = 0


def epoch_error(epoch: int, followed: int) -> StaleEpoch:
    """For a change of an epoch before the one that this daemon follows."""
    return StaleEpoch(
        f"a change of epoch {epoch}; this daemon follows epoch {followed}",
        remedy="ask the master again",
    )


def grant_error(grant_id: int) -> StaleLocation:
    """For a write under a grant that is not valid (any more)."""
    return StaleLocation(
        f"grant {grant_id} was made before this daemon attached to its master, if it has"
    )
