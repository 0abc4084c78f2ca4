"""How late a call may end, and what of that a busy machine took."""

from __future__ import annotations

import contextlib
from pathlib import Path

__all__ = ["LATE_MAX_S", "LATE_S", "ready_and_waiting_s"]

LATE_S = 0.1
LATE_MAX_S = 0.5
"""More than this beyond the deadline is wrong, besides what a busy machine took."""


def ready_and_waiting_s() -> float:
    """How long threads of this process were ready to run, and the machine did other things."""
    total_ns = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile, or the kernel keeps no account
            total_ns += int((task / "schedstat").read_text().split()[1])
    return total_ns / 1e9
