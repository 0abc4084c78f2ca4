"""What is worth a write to a device whose writes are counted.

Flash wears out by what is written to it. A device with a daily budget may be written so much in any
24 hours; what of that may be written right now is its allowance, which comes back with time, up to
an eighth of the budget (`BURST_SHARE`). While more than half of that is left, everything is
admitted that would be without a budget. Below, only what was asked for since it was put: a block
that was never read again so far is the less likely to be read from the device, so what is left goes
to those that were. Pure.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["BURST_SHARE", "count_admitted", "is_admitted", "is_spared"]

BURST_SHARE: Final = 1 / 8
"""Of a daily budget: the most that may be written at once, after a time without writes."""


def is_spared(budget_bytes: int, allowance_bytes: int) -> bool:
    """Whether a device with this daily budget (0: none) gets only what was asked for again."""
    return budget_bytes > 0 and allowance_bytes < budget_bytes * BURST_SHARE / 2


def is_admitted(
    size_bytes: int, budget_bytes: int, allowance_bytes: int, *, was_reused: bool
) -> bool:
    """Whether an object that could go to a device is to be written there.

    `budget_bytes`: a day's, 0 where there is none; `allowance_bytes`: what may be written now.
    """
    if not budget_bytes:
        return True
    if size_bytes > allowance_bytes:
        return False
    return was_reused or not is_spared(budget_bytes, allowance_bytes)


def count_admitted(
    sizes_bytes: NDArray[np.int64],
    budget_bytes: int,
    allowance_bytes: int,
    was_reused: NDArray[np.bool_],
) -> int:
    """How many of these objects are to be written, one after the other, up to the first one that is
    not: `is_admitted` of each, with what those before it leave of the allowance."""
    if not budget_bytes:
        return len(sizes_bytes)
    before = allowance_bytes - (np.cumsum(sizes_bytes) - sizes_bytes)
    admitted = sizes_bytes <= before
    admitted &= was_reused | (before >= budget_bytes * BURST_SHARE / 2)
    return len(admitted) if admitted.all() else int(np.argmin(admitted))
