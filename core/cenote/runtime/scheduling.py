"""Sharing cores with others: when looking for an answer pays.

Who waits for an answer may look for it again and again (spin) or sleep until it is woken, which
takes 20 to 80 µs. Where every core has other work to do, the looks are harmful: each `sched_yield`
lets the others run for whole time slices (since Linux 6.18 it also forfeits what the thread was
still owed), while a thread that slept is given a core soon after it wakes.
"""

from __future__ import annotations

from typing import Final, final

__all__ = ["CONTENTION", "SLEEPERS", "STEP_CONTENDED_S", "CoreContention"]

STEP_CONTENDED_S: Final = 0.003
"""Who stepped aside for longer shares its core with others' work: a request is served in less, and
Linux's time slices, 1.4 to 2.8 ms by default on two cores and more, come one after the other there.
With 1 ms machines that do nothing else are taken for busy ones, for a third of the time."""
_HOLD_OFF_S_MIN: Final = 0.005
_HOLD_OFF_S_MAX: Final = 0.32


@final
class CoreContention:
    """Whether others want the cores that this process uses, judged by how long steps aside take.

    After a step that took too long nobody spins for 5 ms; where the next try shows the same, for
    10 ms, and so on up to 0.32 s: on a busy machine spinning is tried three times a second, where
    the machine is quiet again it is back at once. Times are of time.monotonic().
    """

    __slots__ = ("_hold_off_s", "until_s")

    def __init__(self) -> None:
        self.until_s = 0.0  # no spinning before
        self._hold_off_s = _HOLD_OFF_S_MIN

    def note(self, now_s: float) -> None:
        """A step aside that ended at `now_s` took longer than STEP_CONTENDED_S."""
        if now_s < self.until_s:
            return  # of another thread, at the same time
        again = now_s - self.until_s < self._hold_off_s + STEP_CONTENDED_S
        self._hold_off_s = min(2 * self._hold_off_s, _HOLD_OFF_S_MAX) if again else _HOLD_OFF_S_MIN
        self.until_s = now_s + self._hold_off_s


CONTENTION: Final = CoreContention()
"""Of this process."""

SLEEPERS: Final[set[int]] = set()
"""Threads of this process, by `threading.get_ident`, that never look for an answer: what they do
can wait. Each look takes the GIL again at once, so that a thread which wants it gets it only when
it has asked for it for 5 ms."""
