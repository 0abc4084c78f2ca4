"""Giving segments their memory in the background, while the daemon serves what is there already.

A few threads do two kinds of work: backing the next chunk of a segment with memory, in turn for all
segments, since that is what makes space allocatable; and touching chunks that are backed. Neither
needs the GIL. They run at low priority: who reads or writes goes first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, final

from cenote.api.errors import CenoteError
from cenote.runtime.log import get_logger
from cenote.runtime.units import format_duration, format_size

from .dram import DramSegment

__all__ = ["Preparation"]

CHUNK_BYTES: Final = 64 << 20
CHUNK_BYTES_LARGE: Final = 256 << 20
"""For segments of 16 GiB and more, where a chunk is a header written and a heartbeat sent."""
_LARGE_SEGMENT_BYTES: Final = 16 << 30
_TOUCH_STEP_BYTES: Final = 8 << 20
HUGE_TRIES_IN_VAIN_MAX: Final = 16
"""In a row: then it is taken that this kernel has none, or no memory in pieces of that size."""
HUGE_STEP_S_MAX: Final = 0.1
"""A step that took longer was in vain, too: the kernel moves other memory about to make them. Where
it has not to, some 2 ms are enough."""
_NICENESS: Final = 10
_JOIN_S: Final = 1.0

_log = get_logger(__name__)


@final
class Preparation:
    """The background work on `segments`; starts at once, ends by itself or with `stop`.

    `on_failure` is called, from one of the threads and at most once, with the error that keeps a
    segment from getting its memory; then no more is allocated, and what is there is touched.
    """

    def __init__(
        self,
        segments: Sequence[DramSegment],
        on_failure: Callable[[CenoteError], None],
        huge_pages: bool = True,
        *,
        threads: int | None = None,
        chunk_bytes: int | None = None,
    ) -> None:
        self._on_failure = on_failure
        self._segments = tuple(segments)
        self._chunk_bytes = chunk_bytes
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._to_allocate = deque(segments)
        # What a reopened segment has already is not in this process's page table yet.
        self._to_touch = deque((s, 0, s.ready_bytes) for s in segments if s.ready_bytes)
        self._busy = 0
        self._stopping = False
        self._failed = False
        self._untouchable = False
        self._huge_tries = HUGE_TRIES_IN_VAIN_MAX if huge_pages else 0
        self._began_s = time.monotonic()
        self._told = False
        count = threads or max(1, min(4, (os.cpu_count() or 1), 1 + len(segments)))
        self._threads = [
            threading.Thread(target=self._run, name=f"cenote-prepare-{i}", daemon=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def huge_bytes(self) -> int:
        """Of the segments, what lies on huge pages."""
        return sum(segment.huge_bytes for segment in self._segments)

    def wait_first(self, timeout_s: float) -> bool:
        """Wait until there is some memory in each segment, at most so long; whether there is."""

        def has_some() -> bool:
            return all(segment.ready_bytes for segment in self._segments)

        with self._lock:
            self._changed.wait_for(lambda: self._stopping or self._failed or has_some(), timeout_s)
        return has_some()

    def wait(self, timeout_s: float) -> bool:
        """Wait until all is done, at most so long; whether it is."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return self.done

    def stop(self) -> None:
        """End soon, wherever it is: at the next step, some milliseconds away."""
        with self._lock:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        except OSError as error:  # already lower, and raising it is not for everybody
            _log.debug("can't lower a thread's priority", error=error.strerror)
        while (work := self._next()) is not None:
            try:
                work()
            finally:
                with self._lock:
                    self._busy -= 1
                    self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            while not self._stopping:
                if self._to_allocate:
                    segment = self._to_allocate.popleft()
                    self._busy += 1
                    return lambda: self._allocate(segment)
                if self._to_touch:
                    task = self._to_touch.popleft()
                    self._busy += 1
                    return lambda: self._touch(*task)
                if not self._busy:
                    self._tell()
                    return None
                self._changed.wait()
        return None

    def _tell(self) -> None:
        """Once, by the thread that finds nothing left to do first."""
        if self._told or self._failed:  # of which more was said
            return
        self._told = True
        _log.info(
            "memory is prepared",
            size=format_size(sum(segment.ready_bytes for segment in self._segments)),
            on_huge_pages=format_size(self.huge_bytes),
            took=format_duration(time.monotonic() - self._began_s),
        )

    def _allocate(self, segment: DramSegment) -> None:
        large = segment.size_bytes >= _LARGE_SEGMENT_BYTES
        chunk_bytes = self._chunk_bytes or (CHUNK_BYTES_LARGE if large else CHUNK_BYTES)
        try:
            got = segment.allocate_next(chunk_bytes)
        except CenoteError as error:
            with self._lock:
                self._to_allocate.clear()
                first = not self._failed
                self._failed = True
            if first:
                self._on_failure(error)
            return
        if got is not None:
            with self._lock:
                if not self._failed:
                    self._to_allocate.append(segment)
                self._to_touch.append((segment, *got))

    def _touch(self, segment: DramSegment, offset: int, length: int) -> None:
        for start in range(offset, offset + length, _TOUCH_STEP_BYTES):
            if self._stopping or self._untouchable:
                return
            size = min(_TOUCH_STEP_BYTES, offset + length - start)
            if self._huge_tries > 0:
                self._make_huge(segment, start, size)
            try:
                touched = segment.touch(start, size)
            except CenoteError as error:
                _log.warning("memory can't be touched ahead of use", why=error)
                touched = False
            # What failed once, as on an old kernel, will fail again; it costs only time later.
            self._untouchable = self._untouchable or not touched

    def _make_huge(self, segment: DramSegment, offset: int, length: int) -> None:
        begun_s = time.monotonic()
        made = segment.make_huge(offset, length)
        if made and time.monotonic() - begun_s < HUGE_STEP_S_MAX:
            self._huge_tries = HUGE_TRIES_IN_VAIN_MAX
            return
        self._huge_tries -= 1
        if not self._huge_tries:
            _log.info("no more huge pages can be had for memory", had=format_size(self.huge_bytes))
