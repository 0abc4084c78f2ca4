"""Page tables of mapped segments, filled in ahead of use: a page's first touch costs more than its
copy."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, final

from cenote.api.errors import CenoteError
from cenote.runtime.log import get_logger
from cenote.runtime.memory import PAGE_BYTES, populate

from .mapping import Mapping

__all__ = ["Populator"]

_POPULATE_STEP_BYTES: Final = 16 << 20
_CLOSE_WAIT_S: Final = 0.5

_log = get_logger("cenote.transport.shm")


@final
class Populator:
    """A thread that fills in page tables, in steps, until all is done or `close`."""

    def __init__(self, bytes_max: int) -> None:
        self._left_bytes = bytes_max
        self._todo: deque[tuple[Mapping, bool]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, mappings: list[Mapping], writable: bool) -> None:
        with self._lock:
            if self._closed or self._left_bytes <= 0:
                return
            self._todo.extend((mapping, writable) for mapping in mappings)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="cenote-populate", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._todo or self._left_bytes <= 0:
                    self._todo.clear()  # they keep mappings that others may have let go of
                    self._thread = None
                    return
                mapping, writable = self._todo[0]
                start = mapping.populated_bytes
                size = min(
                    _POPULATE_STEP_BYTES,
                    mapping.ready_bytes // PAGE_BYTES * PAGE_BYTES - start,
                    self._left_bytes,
                )
                if size <= 0:
                    self._todo.popleft()
                    del mapping  # nothing is left of it here when `_thread` says that we are done
                    continue
                mapping.populated_bytes += size
                self._left_bytes -= size
            try:
                can = populate(mapping.address + start, size, write=writable)
            except CenoteError as error:
                _log.warning("can't populate a mapped segment", error=error)
                can = False
            if not can:
                with self._lock:
                    self._todo.clear()
            del mapping

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._todo.clear()
            thread = self._thread
        if thread is not None:
            thread.join(_CLOSE_WAIT_S)
