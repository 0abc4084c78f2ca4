"""Why a put was refused, as the error of its key."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    CenoteError,
    InternalError,
    NoSpace,
    ObjectTooLarge,
    QuotaExceeded,
    ReplicasUnavailable,
)
from cenote.api.rows import PutStatus
from cenote.runtime.units import format_size

__all__ = ["FOR_LACK_OF_NODES", "refusal_of"]

FOR_LACK_OF_NODES: Final = frozenset({PutStatus.NO_SPACE, PutStatus.REPLICAS_UNAVAILABLE})
_REFUSALS: Final[dict[int, tuple[type[CenoteError], str]]] = {
    PutStatus.NO_SPACE: (NoSpace, "the pool has no room that could be freed now"),
    PutStatus.TOO_LARGE: (ObjectTooLarge, "the object is larger than the pool could ever hold"),
    PutStatus.REPLICAS_UNAVAILABLE: (
        ReplicasUnavailable,
        "min_replicas can't be placed in as many failure domains",
    ),
    PutStatus.QUOTA_EXCEEDED: (
        QuotaExceeded,
        "the share of the pool that one session may have under way is used up",
    ),
    PutStatus.INVALID: (InternalError, "the master found this key's request invalid"),
}


def refusal_of(
    status: int, sizes: NDArray[np.uint64], min_replicas: int, last: CenoteError | None
) -> CenoteError | None:
    """The error of keys with this PutStatus, None where it refuses nothing.

    `sizes`: bytes of their payloads; `last`: what went wrong before in this call.
    """
    refusal = _REFUSALS.get(status)
    if refusal is None:
        return None
    kind, what = refusal
    remedy = None
    if status == PutStatus.TOO_LARGE:
        what = f"the object of {format_size(int(sizes.max()))} is larger than the pool could ever"
        what += " hold"
        remedy = "add memory (`cenote status` shows the capacity), or split the object"
    if status == PutStatus.REPLICAS_UNAVAILABLE and min_replicas <= 1:
        what = "no store daemon that takes new objects is attached to the master"
        remedy = "start one (cenote-store); `cenote nodes` shows who is there"
    if status in FOR_LACK_OF_NODES and last is not None:
        what += f"; before that in this call: {last.message}"
    return kind(what, remedy=remedy)
