"""Refusals for want of credentials: each is counted, and logged, as far as a log can bear it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, final

from cenote.api.errors import (
    CenoteError,
    GrantRevoked,
    PermissionDenied,
    TlsFailed,
    Unauthenticated,
    Unavailable,
)
from cenote.runtime.log import StructuredLogger

__all__ = ["REASONS", "Refusals", "is_refusal"]

REASONS: Final = (Unauthenticated.__name__, PermissionDenied.__name__, GrantRevoked.__name__)
NO_KEY: Final = Unavailable.__name__
"""For a ticket whose key is not known: forged, of before, or of a leader that is to be met yet."""
NO_TLS: Final = TlsFailed.__name__
"""For a handshake that failed, or was not begun."""
LINES_PER_S: Final = 5.0
LINES_AT_ONCE: Final = 20.0


def is_refusal(error: BaseException) -> bool:
    """Whether an error is about who asks."""
    return type(error).__name__ in REASONS


@final
class Refusals:
    """Safe from several threads. `ports`: where somebody may be refused."""

    def __init__(
        self,
        log: StructuredLogger,
        ports: tuple[str, ...],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self.counts = {(port, reason): 0 for port in ports for reason in (*REASONS, NO_KEY, NO_TLS)}
        self._allowance = LINES_AT_ONCE
        self._since_s = clock()
        self._unsaid = 0

    def note(self, port: str, error: CenoteError, peer: object) -> None:
        """Somebody was refused, with this error."""
        with self._lock:
            key = (port, type(error).__name__)
            self.counts[key] = self.counts.get(key, 0) + 1
            now_s = self._clock()
            self._allowance += (now_s - self._since_s) * LINES_PER_S
            self._allowance = min(self._allowance, LINES_AT_ONCE)
            self._since_s = now_s
            if self._allowance < 1:
                self._unsaid += 1
                return
            self._allowance -= 1
            unsaid, self._unsaid = self._unsaid, 0
        more = {"unsaid_before": unsaid} if unsaid else {}
        self._log.warning("refused", port=port, peer=peer, reason=key[1], why=error.message, **more)

    @property
    def total(self) -> int:
        """Since the start."""
        return sum(self.counts.values())
