"""What a session shows a daemon that it has, too: see `cenote.api.contents`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cenote.api.contents import TICKET_BYTES
from cenote.api.errors import PermissionDenied
from cenote.api.rows import PROOF

__all__ = ["ProofBatch", "refused"]


@dataclass(frozen=True, slots=True)
class ProofBatch:
    """Of one grant, for one daemon: packed `rows.PROOF` rows."""

    grant_id: int
    rows: bytes

    def __len__(self) -> int:
        return len(self.rows) // PROOF.itemsize


def refused(batch: ProofBatch) -> tuple[NDArray[np.uint8], bytes]:
    """The answer of a daemon that gives no tickets."""
    count = len(batch)
    return np.full(count, PermissionDenied.code, np.uint8), bytes(TICKET_BYTES * count)
