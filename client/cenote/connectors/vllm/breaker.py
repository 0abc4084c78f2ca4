"""A circuit breaker: a pool that does not answer is left alone for a while."""

from __future__ import annotations

from typing import Final

__all__ = ["CircuitBreaker"]

_FAILURES_MAX: Final = 3
"""So many in a row open it: one alone may be the machine's, not the pool's."""
_PAUSE_MIN_S: Final = 0.5
_PAUSE_MAX_S: Final = 15.0


class CircuitBreaker:
    """Closed: all may try. Open: nobody, until its pause is over; then one, which decides."""

    def __init__(self, failures_max: int = _FAILURES_MAX) -> None:
        self._failures_max = failures_max
        self._failures = 0
        self._pause_s = _PAUSE_MIN_S
        self._open_until_s = 0.0
        self._trying = False
        self.opened = 0
        """How often it opened."""

    def is_open(self, now_s: float) -> bool:
        """Whether nobody may try now."""
        return self._failures >= self._failures_max and (self._trying or now_s < self._open_until_s)

    def admit(self, now_s: float) -> bool:
        """Whether the caller may try; it says then how it went (`succeeded`, `failed`)."""
        if self._failures < self._failures_max:
            return True
        if self._trying or now_s < self._open_until_s:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        self._failures = 0
        self._trying = False
        self._pause_s = _PAUSE_MIN_S

    def failed(self, now_s: float) -> None:
        self._failures += 1
        self._trying = False
        if self._failures == self._failures_max:
            self.opened += 1
        elif self._failures > self._failures_max:
            self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
        if self._failures >= self._failures_max:
            self._open_until_s = now_s + self._pause_s
