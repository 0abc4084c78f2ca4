"""Sharing cores with others: when looking for an answer pays, and how soon a daemon gets a core.

Who waits for an answer may look for it again and again (spin) or sleep until it is woken, which
takes 20 to 80 µs. Where every core has other work to do, the looks are harmful: each `sched_yield`
lets the others run for whole time slices (since Linux 6.18 it also forfeits what the thread was
still owed), while a thread that slept is given a core soon after it wakes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import Final, final

__all__ = ["CONTENTION", "STEP_CONTENDED_S", "CoreContention", "shorten_time_slice"]

STEP_CONTENDED_S: Final = 0.001
"""Who stepped aside for longer shares its core with others' work: a request is served in less, and
the shortest time slice that Linux gives by default, on two cores or more, is longer (1.4 ms)."""
_HOLD_OFF_S_MIN: Final = 0.01
_HOLD_OFF_S_MAX: Final = 0.32

TIME_SLICE_NS: Final = 100_000
"""The least that Linux takes."""
# SCHED_ATTR_SIZE_VER1 of <linux/sched/types.h>: size, policy, flags, nice, priority, runtime,
# deadline, period, util_min, util_max.
_SCHED_ATTR: Final = struct.Struct("=IIQiIQQQII")
_SYSCALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275)}  # sched_setattr, sched_getattr
_SCHED_OTHER: Final = 0


@final
class CoreContention:
    """Whether others want the cores that this process uses, judged by how long steps aside take.

    After a step that took too long nobody spins for 10 ms, after the next one 20 ms, and so on up
    to 0.32 s: on a busy machine spinning is tried three times a second, where the machine is quiet
    again it is back at once. Times are of time.monotonic().
    """

    __slots__ = ("_hold_off_s", "until_s")

    def __init__(self) -> None:
        self.until_s = 0.0  # no spinning before
        self._hold_off_s = _HOLD_OFF_S_MIN

    def note(self, now_s: float) -> None:
        """A step aside that ended at `now_s` took longer than STEP_CONTENDED_S."""
        if now_s < self.until_s:
            return  # of another thread, at the same time
        again = now_s - self.until_s < 2 * self._hold_off_s
        self._hold_off_s = min(2 * self._hold_off_s, _HOLD_OFF_S_MAX) if again else _HOLD_OFF_S_MIN
        self.until_s = now_s + self._hold_off_s


CONTENTION: Final = CoreContention()
"""Of this process."""


def shorten_time_slice() -> bool:
    """Have the calling thread, and those that it starts, ask for short time slices: it gets a core
    earlier when it wakes while others compute, and gives it up earlier. Its share stays the same.

    True where the kernel was told; Linux before 6.12 takes no notice. Does nothing for a thread of
    another scheduling class (real time, batch, idle), which somebody chose on purpose.
    """
    numbers = _SYSCALLS.get(platform.machine())
    if numbers is None or not hasattr(os, "sched_getscheduler"):
        return False
    setattr_number, getattr_number = numbers
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_SCHED_ATTR.size)
    if libc.syscall(getattr_number, 0, buffer, _SCHED_ATTR.size, 0):
        return False
    size, policy, flags, nice, priority, _, deadline, period, *clamps = _SCHED_ATTR.unpack(buffer)
    if policy != _SCHED_OTHER:
        return False
    attributes = (size, policy, flags, nice, priority, TIME_SLICE_NS, deadline, period, *clamps)
    return not libc.syscall(setattr_number, 0, _SCHED_ATTR.pack(*attributes), 0)
