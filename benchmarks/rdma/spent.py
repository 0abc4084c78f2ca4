"""Processor time of processes, by the kernel's nanosecond count of each thread."""

from __future__ import annotations

import os
from collections.abc import Iterable

__all__ = ["cpu_s", "cpu_sum_s"]


def cpu_s(pid: int) -> float:
    """Of a process since its start, threads that ended left out."""
    total_ns = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total_ns += int(file.read().split()[0])
        except FileNotFoundError:  # it has just ended
            continue
    return total_ns / 1e9


def cpu_sum_s(pids: Iterable[int]) -> float:
    return sum(map(cpu_s, pids))
