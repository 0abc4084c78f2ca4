"""When a leader has a snapshot made, and the process that makes it.

Standbys write snapshots from the state that they have anyway, so a leader leaves it to them. Unless
there are none, or they don't: then it starts `python -m cenote.master.compactor URL`, one at a
time, at low priority, bounded in time; a failed one is tried again later and later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Final, final

from cenote.runtime.clock import Clock
from cenote.runtime.log import get_logger

__all__ = ["CompactorCommand", "KvCompaction", "KvCompactionLimits"]

_RETRY_S_MAX: Final = 3600.0
_ERROR_BYTES_MAX: Final = 2000
_log = get_logger("cenote.master.compaction")


@dataclass(frozen=True, slots=True)
class KvCompactionLimits:
    """When to begin, and how long it may take."""

    journal_bytes_min: int = 64 << 20
    """Or as many as the newest snapshot has."""
    journal_values_max: int = 20_000
    """Keys cost the service memory, however small they are."""
    standby_factor: int = 4
    """How much longer standbys are waited for."""
    timeout_s: float = 600.0
    retry_s: float = 30.0


@dataclass(frozen=True, slots=True)
class CompactorCommand:
    """What a compactor is told; `options` are JSON, and hold a password."""

    url: str
    options: str = field(repr=False)


@final
class KvCompaction:
    """`step` is called again and again by one thread, `stop` by another."""

    def __init__(self, command: CompactorCommand, limits: KvCompactionLimits, clock: Clock) -> None:
        self._command = command
        self._limits = limits
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._child_until_s = 0.0
        self._retry_at_s = float("-inf")
        self._retry_s = limits.retry_s
        self._stopped = False
        self._asked = False

    def ask(self) -> None:
        """Make one at the next step, due or not, standbys or not."""
        self._asked = True

    def step(
        self, *, journal_bytes: int, journal_values: int, snapshot_bytes: int, has_standby: bool
    ) -> None:
        """`journal_bytes` and `journal_values`: behind the newest snapshot."""
        if self._child is not None:
            self._look_after(self._child)
            return
        limits = self._limits
        factor = limits.standby_factor if has_standby else 1
        is_due = (
            journal_bytes > factor * max(limits.journal_bytes_min, snapshot_bytes)
            or journal_values > factor * limits.journal_values_max
            or self._asked
        )
        if is_due and not self._stopped and self._clock.monotonic_s() >= self._retry_at_s:
            try:
                self._start()
            except OSError as error:
                self._failed(str(error))
            else:
                _log.info("compacting", journal_bytes=journal_bytes, journal_keys=journal_values)

    def _start(self) -> None:
        child = subprocess.Popen(
            [sys.executable, "-m", "cenote.master.compactor", self._command.url],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._child = child
        self._asked = False
        self._child_until_s = self._clock.monotonic_s() + self._limits.timeout_s
        assert child.stdin is not None
        with child.stdin as stream:  # a pipe takes it all at once
            stream.write(self._command.options.encode())

    def _look_after(self, child: subprocess.Popen[bytes]) -> None:
        code = child.poll()
        if code is None:
            if self._clock.monotonic_s() < self._child_until_s and not self._stopped:
                return
            child.kill()
            code = child.wait()
        assert child.stderr is not None
        with child.stderr as stream:  # one that has ended leaves at most a pipe's capacity
            said = stream.read(1 << 16).decode(errors="replace").strip()[-_ERROR_BYTES_MAX:]
        self._child = None
        if code and not self._stopped:
            self._failed(said or f"exit code {code}")
        else:
            # What it covers is known in a moment; a next one is not due before.
            self._retry_s = self._limits.retry_s
            self._retry_at_s = self._clock.monotonic_s() + 5.0

    def _failed(self, why: str) -> None:
        _log.error("compaction failed", why=why, retry_in_s=self._retry_s)
        self._retry_at_s = self._clock.monotonic_s() + self._retry_s
        self._retry_s = min(self._retry_s * 2, _RETRY_S_MAX)

    def stop(self) -> None:
        """After the last `step`: kill the child. What it did not finish is worthless, harmless."""
        self._stopped = True
        if self._child is not None:
            self._look_after(self._child)
