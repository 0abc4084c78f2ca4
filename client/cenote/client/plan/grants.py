"""What calls hold at the master: granted space, and leases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Grant", "LeaseHold", "Transfer"]


class Transfer(Protocol):
    """What a grant needs to know of a transfer; see `steps.Part` and `steps.MoveOne`."""

    unfenced: bool


@dataclass(slots=True)
class Grant:
    """Space that was granted to a put and is neither committed nor given back."""

    grant_id: int
    session_id: bytes
    indexes: bytes = b""
    """Which of its extents (packed u32); empty = all."""
    unfenced: bool = False
    """A transfer did not end in order: its bytes may still arrive."""
    moving: Sequence[Transfer] = ()
    """Transfers under way, which may end the same way."""

    def is_unfenced(self) -> bool:
        """Whether bytes may still arrive in what was granted."""
        return self.unfenced or any(transfer.unfenced for transfer in self.moving)


@dataclass(slots=True)
class LeaseHold:
    """A lease that is renewed for as long as it is held. `end_s` moves on with each renewal."""

    lease_id: int
    ttl_ms: int
    end_s: float
