"""How fast an SSD is with requests as a store daemon makes them, for a second or two."""

from __future__ import annotations

import errno
import mmap
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from cenote.runtime.memory import address_of
from cenote.runtime.units import format_duration, format_size
from cenote.store.copy_writer import REQUEST_BYTES
from cenote.store.device import BLOCK_BYTES, FileDevice
from cenote.store.disk_io import BUFFER_BYTES, default_threads

from .findings import Finding, Verdict

__all__ = ["SsdSpeed", "judge_speed", "measure"]

WRITE_SLOW: Final = 200e6
READ_SLOW: Final = 500e6
"""Bytes a second: below, what is read is computed in less time by most GPUs."""
FLUSH_SLOW_S: Final = 0.02
_PHASE_S: Final = 0.6
_SHORT_PHASE_S: Final = 0.25
_FLUSHES_MIN: Final = 3
_HANGS_S: Final = 20.0
"""As a daemon sees it. Who asked has given up by then; the threads end with the process."""
_BLOCK_OF_TOKENS: Final = 2560 << 10
"""Of a large model, 16 tokens."""


@dataclass(frozen=True, slots=True)
class SsdSpeed:
    """Bytes a second with many requests under way, seconds for one alone."""

    read: float
    page_read_s: float
    """Of 4 KiB anywhere, the median."""
    write: float | None = None
    """None where nothing may be written."""
    flush_s: float | None = None
    """For what little was written before to survive a power cut, the median."""


def measure(
    path: Path, descriptor: int, size_bytes: int, deadline_s: float, *, may_write: bool
) -> SsdSpeed:
    """Of the open file, which is closed then; within about `deadline_s`. Raises OSError."""
    scale = min(1.0, deadline_s / 3.0)
    device = FileDevice(path, descriptor, size_bytes)
    try:
        write: float | None = None
        flush_s: float | None = None
        if may_write:
            os.posix_fallocate(descriptor, 0, size_bytes)  # as a daemon does
            buffers = _Buffers(min(REQUEST_BYTES, size_bytes))
            write = _stream(
                lambda at: device.write([(buffers.mine(), buffers.length)], at),
                buffers.length,
                size_bytes,
                _PHASE_S * scale,
            )
            flush_s = _flush(device, buffers.mine(), _SHORT_PHASE_S * scale)
        page_read_s = _pages(device, _SHORT_PHASE_S * scale)
        into = _Buffers(min(BUFFER_BYTES, size_bytes))
        rate = _stream(
            lambda at: device.read(into.mine(), into.length, at),
            into.length,
            size_bytes,
            _PHASE_S * scale,
        )
        return SsdSpeed(rate, page_read_s, write, flush_s)
    finally:
        device.close()


@final
class _Buffers:
    """Memory for each thread, of what no device can compress: all of it cached would flatter."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._content = os.urandom(length)
        self._local = threading.local()

    def mine(self) -> int:
        """Its address."""
        if not hasattr(self._local, "memory"):
            self._local.memory = mmap.mmap(-1, self.length)
            self._local.memory[:] = self._content
        return address_of(self._local.memory)


def _stream(move: Callable[[int], None], length: int, size_bytes: int, seconds: float) -> float:
    """Bytes a second of `move`, one place after the other, by as many threads as a daemon has."""
    places = max(1, size_bytes // length)
    lock = threading.Lock()
    began_s = time.monotonic()
    until_s = began_s + seconds
    next_place, moved, failure = 0, 0, None

    def work() -> None:
        nonlocal next_place, moved, failure
        while time.monotonic() < until_s and failure is None:
            with lock:
                place, next_place = next_place % places, next_place + 1
            try:
                move(place * length)
            except OSError as error:
                failure = error
                return
            with lock:
                moved += length

    threads = [threading.Thread(target=work, daemon=True) for _ in range(default_threads())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, until_s + _HANGS_S - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(errno.ETIMEDOUT, f"a request took more than {_HANGS_S:g} s")
    if failure is not None:
        raise failure
    return moved / (time.monotonic() - began_s)


def _flush(device: FileDevice, address: int, seconds: float) -> float:
    device.flush()  # of all that was written before
    took: list[float] = []
    until_s = time.monotonic() + seconds
    while len(took) < _FLUSHES_MIN or time.monotonic() < until_s:
        device.write([(address, BLOCK_BYTES)], 0)
        began_s = time.monotonic()
        device.flush()
        took.append(time.monotonic() - began_s)
        if time.monotonic() > until_s + seconds:
            break
    return statistics.median(took)


def _pages(device: FileDevice, seconds: float) -> float:
    memory = mmap.mmap(-1, BLOCK_BYTES)
    start = address_of(memory)
    pages = max(1, device.size_bytes // BLOCK_BYTES)
    took: list[float] = []
    until_s = time.monotonic() + seconds
    while not took or time.monotonic() < until_s:
        began_s = time.monotonic()
        device.read(start, BLOCK_BYTES, random.randrange(pages) * BLOCK_BYTES)
        took.append(time.monotonic() - began_s)
    return statistics.median(took)


def judge_speed(speed: SsdSpeed | str) -> Finding:
    """What to expect of it, or why it was not measured."""
    check = "ssd speed"
    if isinstance(speed, str):
        return Finding(check, Verdict.SKIPPED, speed)
    parts = [] if speed.write is None else [f"writes {_rate(speed.write)}"]
    if speed.flush_s is not None:
        parts.append(f"a flush takes {format_duration(speed.flush_s)}")
    parts.append(f"reads {_rate(speed.read)}, 4 KiB alone in {format_duration(speed.page_read_s)}")
    found = ", ".join(parts)
    if speed.write is None:
        found += "; writing is not tried on a block device"
    block = _BLOCK_OF_TOKENS / speed.read
    found += f". Expect {format_size(_BLOCK_OF_TOKENS)} of a batch every {format_duration(block)}"
    if speed.write is not None:
        found += f", copies from memory at {_rate(speed.write / 2)} or more"
    if speed.read < READ_SLOW:
        return Finding(
            check,
            Verdict.WARN,
            f"{found}: most GPUs compute a prefix in less time",
            "a faster disk, or none: more memory (--dram), more nodes",
        )
    if speed.write is not None and speed.write < WRITE_SLOW:
        return Finding(
            check,
            Verdict.WARN,
            f"{found}: what grows cold faster leaves the pool without a copy",
            "a faster disk; --ssd-daily-writes chooses what is worth writing",
        )
    if speed.flush_s is not None and speed.flush_s > FLUSH_SLOW_S:
        return Finding(
            check,
            Verdict.WARN,
            f"{found}: copies wait for flushes, and share one as far as they can",
            "a drive with power-loss protection, whose flushes cost nothing",
        )
    return Finding(check, Verdict.OK, found)


def _rate(bytes_per_s: float) -> str:
    return (
        f"{bytes_per_s / 1e9:.2g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.0f} MB/s"
    )
