"""The budget of writes of an SSD, kept on it: 8 KiB behind the beginning, before the slots."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Final, final

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.runtime.memory import address_of
from cenote.runtime.units import format_size
from cenote.v1 import master_pb2

from .device import BLOCK_BYTES, Device
from .write_budget import RECORD_BYTES, WriteBudget

__all__ = ["Endurance"]

RECORD_AT: Final = 8 << 10

_log = get_logger(__name__)


@final
class Endurance:
    """Copies to the SSD are charged here before they are begun. Safe from threads."""

    def __init__(
        self,
        device: Device,
        daily_bytes: int,
        *,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Goes on from what the device says of its writes. Raises ResourceUnavailable."""
        self._device = device
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._page = mmap.mmap(-1, BLOCK_BYTES)
        self.budget = WriteBudget(daily_bytes, clock_s())
        self.declined = 0
        """Copies for which too little was left."""
        self._load()
        try:
            self._save()
        except OSError as error:
            raise ResourceUnavailable(
                f"can't write {device.name}: {error.strerror or error}",
                remedy="replace the device, or start without it (--ssd)",
            ) from error
        _log.info(
            "writes to the SSD have a budget",
            a_day=format_size(daily_bytes),
            written_lately=format_size(self.budget.written_bytes(clock_s())),
            may_be_written_now=format_size(self.budget.allowance_bytes(clock_s())),
        )

    def _load(self) -> None:
        now_s = self._clock_s()
        try:
            self._device.read(address_of(self._page), BLOCK_BYTES, RECORD_AT)
            self.budget.unpack(self._page[:RECORD_BYTES], now_s)
        except OSError as error:
            _log.warning("the record of the SSD's writes can't be read", why=error.strerror)
            self.budget.empty()

    def _save(self, *, is_last: bool = False) -> None:
        self._page[:RECORD_BYTES] = self.budget.pack(self._clock_s(), is_last=is_last)
        self._device.write([(address_of(self._page), BLOCK_BYTES)], RECORD_AT)

    def charge(self, size_bytes: int) -> bool:
        """Whether a copy of this size may be written; it counts as written then."""
        # What goes with it: its last block is filled up, and a page of slots is written.
        whole = size_bytes + -size_bytes % BLOCK_BYTES + BLOCK_BYTES
        with self._lock:
            if not self.budget.spend(whole, self._clock_s()):
                self.declined += 1
                return False
            if self.budget.is_due:
                try:
                    self._save()
                except OSError as error:  # who writes payloads there will see more of it
                    _log.warning("the SSD's writes can't be noted", why=error.strerror)
            return True

    def save(self) -> None:
        """At the end, so that nothing of the allowance is lost."""
        with self._lock:
            try:
                self._save(is_last=True)
            except OSError as error:
                _log.warning("the SSD's writes can't be noted", why=error.strerror)

    def tell(self, stats: master_pb2.NodeStats) -> None:
        """For a heartbeat."""
        with self._lock:
            now_s = self._clock_s()
            stats.ssd_write_budget_bytes = self.budget.daily_bytes
            stats.ssd_write_allowance_bytes = self.budget.allowance_bytes(now_s)
            stats.ssd_written_day_bytes = self.budget.written_bytes(now_s)
            stats.ssd_written_total_bytes = self.budget.total_bytes
