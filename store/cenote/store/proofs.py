"""Who shows that it has bytes that lie here gets a ticket, by which its master makes it a reference
to them: see `cenote.api.contents`.

The proof is taken anew from the bytes each time, so that it is of what lies there now, whatever
anybody said of it before.
"""

from __future__ import annotations

from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from cenote.api.contents import PROOF_BYTES, TICKET_BYTES, proof_key, ticket_of
from cenote.api.errors import GrantRevoked, InvalidArgument, PermissionDenied, StaleLocation
from cenote.api.rows import PROOF_STRONG

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
    for i, (segment_id, kind, offset, length, proof) in enumerate(rows.tolist()):
        strong = kind == PROOF_STRONG
        status = _judge(segments, grant_id, segment_id, offset, length, proof, strong=strong)
        statuses[i] = status
        place = grant_id, segment_id, offset, length
        given = ticket_of(segments.ticket_key, *place, strong=strong)
        tickets.append(_NO_TICKET if status else given)
    return bytes(statuses), b"".join(tickets)


def _judge(
    segments: SegmentSet,
    grant_id: int,
    segment_id: int,
    offset: int,
    length: int,
    proof: bytes,
    *,
    strong: bool,
) -> int:
    if grant_id < segments.first_grant_id:
        return GrantRevoked.code
    segment = segments.by_id(segment_id)
    if segment is None:
        return StaleLocation.code
    if segment.disk is not None or not length or offset + length > segment.ready_bytes:
        return InvalidArgument.code
    hasher: Any = xxh3_128(seed=grant_id)
    if strong:
        hasher = blake2b(digest_size=PROOF_BYTES, key=proof_key(grant_id))
    for at in range(offset, offset + length, _STEP_BYTES):
        hasher.update(segment.view[at : min(at + _STEP_BYTES, offset + length)])
    return 0 if compare_digest(hasher.digest(), proof) else PermissionDenied.code
