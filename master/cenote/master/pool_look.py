"""One look at the pool for each scrape, taken where it is decided.

The state belongs to the loop's thread, and a scrape comes in another one. So the scrape asks the
loop for a look, waits for it for a moment, and goes on with the last one where the loop is busy
longer (`age_s` says how old that is): a scrape never holds the loop, nor the loop a scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass
from typing import Final, final

from cenote.runtime.metrics import Row
from cenote.runtime.metrics_top import TopNamespaces

from .nodes import NodeState
from .service import MasterService
from .view import NamespaceUse, PoolStatus

__all__ = ["PoolLook", "PoolLooker"]

WAIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PoolLook:
    """What there was to see at one moment."""

    at_s: float
    status: PoolStatus
    nodes: dict[NodeState, int]
    """How many there are in each state, SUSPECT where some host suspects them."""
    uses: list[NamespaceUse]
    namespaces: int


@final
class PoolLooker:
    """`refresh` before each scrape, in its thread; then `look` and the rows below.

    `leading`: the service while this master leads, else None. To be made on the running loop.
    """

    def __init__(self, leading: Callable[[], MasterService | None]) -> None:
        self._leading = leading
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._top = TopNamespaces()
        self._of: MasterService | None = None
        self.look: PoolLook | None = None
        """None while this master does not lead."""
        self.counted: dict[str, list[float]] = {}
        """By namespace: asked, found in memory, found on SSDs."""
        self.used: dict[str, list[float]] = {}
        """By namespace: objects, bytes in memory, bytes on SSDs."""

    @property
    def age_s(self) -> float:
        """How old the look is; NaN without one."""
        look = self.look
        return math.nan if look is None else max(0.0, time.monotonic() - look.at_s)

    def refresh(self) -> None:
        """Take a look, if the loop has time for it within a second."""
        with self._lock:
            found: Future[tuple[MasterService | None, PoolLook | None]] = Future()
            with contextlib.suppress(RuntimeError, NotInTime):  # RuntimeError: the loop has ended
                self._loop.call_soon_threadsafe(self._take, found)
                self._note(*found.result(WAIT_S))

    def _take(self, found: Future[tuple[MasterService | None, PoolLook | None]]) -> None:
        """On the loop."""
        if not found.set_running_or_notify_cancel():
            return
        try:
            service = self._leading()
            found.set_result((service, None if service is None else look_at(service)))
        except BaseException as error:  # whatever the bug is, it is the scrape's, not the loop's
            found.set_exception(error)

    def _note(self, service: MasterService | None, look: PoolLook | None) -> None:
        if service is not self._of:
            # Counts begin anew with each tenure, and so do those that are shown.
            self._of, self._top = service, TopNamespaces()
        self.look = look
        uses = [] if look is None else look.uses
        self.counted = self._top.fold(
            {use.name: (use.asked, use.found - use.found_ssd, use.found_ssd) for use in uses}
        )
        self.used = self._top.gather(
            {use.name: (use.objects, use.dram_bytes, use.ssd_bytes) for use in uses}
        )

    def counted_rows(self, index: int, *more: str) -> list[Row]:
        """One of the counted columns, by namespace, with further label values."""
        return [((name, *more), values[index]) for name, values in self.counted.items()]

    def used_rows(self, index: int, *more: str) -> list[Row]:
        """One of the columns of use, by namespace, with further label values."""
        return [((name, *more), values[index]) for name, values in self.used.items()]


def look_at(service: MasterService) -> PoolLook:
    """On the loop's thread; some tens of microseconds, and one for each node and namespace."""
    now_s = service.decider.clock.monotonic_s()
    state = service.state
    nodes = dict.fromkeys(NodeState, 0)
    for node in state.node_states(now_s):
        nodes[node] += 1
    uses = state.namespace_uses()
    return PoolLook(time.monotonic(), state.status(now_s), nodes, uses, len(uses))
