"""Who shows that it has bytes that lie here gets a ticket, by which its master makes it a reference
to them: see `cenote.api.contents`.

The proof is taken anew from the bytes each time, so that it is of what lies there now, whatever
anybody said of it before.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from cenote.api.contents import TICKET_BYTES, ticket_of
from cenote.api.errors import GrantRevoked, InvalidArgument, PermissionDenied, StaleLocation

from .segment import SegmentSet

__all__ = ["prove_rows"]

_STEP_BYTES: Final = 1 << 20
"""At a time: other connections' threads get their turn in between."""
_NO_TICKET: Final = bytes(TICKET_BYTES)


def prove_rows(segments: SegmentSet, grant_id: int, rows: NDArray[np.void]) -> tuple[bytes, bytes]:
    """For `rows.PROOF` rows: (a status for each, a ticket for each, zeros where it is refused).

    Statuses: GrantRevoked (of an earlier tenure), StaleLocation (no such segment),
    InvalidArgument (not in memory here), PermissionDenied (other bytes lie there).
    """
    statuses, tickets = bytearray(len(rows)), list[bytes]()
    for i, (segment_id, _, offset, length, proof) in enumerate(rows.tolist()):
        status = _judge(segments, grant_id, segment_id, offset, length, proof)
        statuses[i] = status
        tickets.append(
            _NO_TICKET
            if status
            else ticket_of(segments.ticket_key, grant_id, segment_id, offset, length)
        )
    return bytes(statuses), b"".join(tickets)


def _judge(
    segments: SegmentSet, grant_id: int, segment_id: int, offset: int, length: int, proof: bytes
) -> int:
    if grant_id < segments.first_grant_id:
        return GrantRevoked.code
    segment = segments.by_id(segment_id)
    if segment is None:
        return StaleLocation.code
    if segment.disk is not None or not length or offset + length > segment.ready_bytes:
        return InvalidArgument.code
    hasher = xxh3_128(seed=grant_id)
    for at in range(offset, offset + length, _STEP_BYTES):
        hasher.update(segment.view[at : min(at + _STEP_BYTES, offset + length)])
    return 0 if compare_digest(hasher.digest(), proof) else PermissionDenied.code
