"""Giving up the GIL or not: what a system call costs beside a Python thread that never rests.

A thread that gives up the GIL to copy or to receive lets others run meanwhile; but where one of
them computes in Python, it has to wait for the interpreter's switch interval (5 ms) until it goes
on. For a block in steps of some 100 KiB that would be hundreds of times 5 ms. So:

- Small messages are sent and received with the GIL held (they take microseconds), and so is the
  short wait for a reply (`DataConnection.spin`).
- Where a step that gave it up took suspiciously long, the steps of the next moment keep it. The
  interpreter then shares time fairly: after 5 ms it makes this thread give it up in between.
- A process whose main work is Python, such as an engine, would rather have the GIL than its bytes:
  there (`RELEASES.give_way`) nothing but small pieces is moved with the GIL held, ever. Steps are
  longer instead where giving it up has cost much lately.

Functions called through `ctypes.PyDLL` keep the GIL, those of `ctypes.CDLL` and `socket` don't.
"""

from __future__ import annotations

import ctypes
from time import monotonic
from typing import Any, Final, final

__all__ = [
    "HELD_BYTES_MAX",
    "LONG_STEP_BYTES",
    "RELEASES",
    "held_memmove",
    "held_poll",
    "held_recv",
    "held_send",
    "step_aside",
]

HELD_BYTES_MAX: Final = 8 << 20
"""The most that is copied with the GIL held at once: about a millisecond."""
LONG_STEP_BYTES: Final = 8 << 20
"""What is moved at once, and hashed at once, where the GIL is given up though that costs much."""
_SUSPICIOUS_S: Final = 0.004
_SLOWEST_BYTES_PER_S: Final = 1e9
_KEEP_S: Final = 0.25

# Typed as Any on purpose: the stubs would make every call a checked cast.
_libc: Final[Any] = ctypes.PyDLL(None)
held_memmove: Final[Any] = _libc.memmove
held_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
held_memmove.restype = None
held_poll: Final[Any] = _libc.poll
held_poll.argtypes = (ctypes.c_void_p, ctypes.c_ulong, ctypes.c_int)
held_recv: Final[Any] = _libc.recv
held_recv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
held_recv.restype = ctypes.c_ssize_t
held_send: Final[Any] = _libc.send
held_send.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
held_send.restype = ctypes.c_ssize_t
step_aside: Final[Any] = _libc.sched_yield
"""For every turn of a loop that looks for bytes: whoever is to send them may need this core."""
step_aside.argtypes = ()


@final
class _Releases:
    """What giving up the GIL has cost lately, in this process."""

    __slots__ = ("_gives_way", "_keep_until")

    def __init__(self) -> None:
        self._keep_until = 0.0
        self._gives_way = False

    @property
    def gives_way(self) -> bool:
        """Whether no step of this process keeps the GIL."""
        return self._gives_way

    def give_way(self, always: bool = True) -> None:
        """From now on no step of this process keeps the GIL, whatever giving it up costs."""
        self._gives_way = always

    def keeps(self, now: float) -> bool:
        """Whether a step of this moment should keep the GIL. `now` on the monotonic clock."""
        return now < self._keep_until and not self._gives_way

    def wants_long_steps(self, now: float) -> bool:
        """Whether a step of this moment gives up the GIL though that costs much."""
        return self._gives_way and now < self._keep_until

    def cost_too_much(self, now: float) -> bool:
        """Whether giving up the GIL has cost much lately: then few steps are better than many."""
        return now < self._keep_until

    def note(self, begun: float, length: int) -> None:
        """A step that gave up the GIL at `begun` and moved `length` bytes is done.

        One that waited for the network may look the same: then the network is slow, and holding the
        GIL while copying what has arrived takes nothing from anybody.
        """
        now = monotonic()
        if now - begun > _SUSPICIOUS_S + length / _SLOWEST_BYTES_PER_S:
            self._keep_until = now + _KEEP_S


RELEASES: Final = _Releases()
