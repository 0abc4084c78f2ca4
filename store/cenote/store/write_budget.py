"""How much a device may be written, and what was: a budget for any 24 hours. Pure.

The allowance grows with time and is spent by writes. It holds an eighth of the budget at most, and
the other seven eighths come back over a day: so in no 24 hours more is written than the budget. It
outlives restarts (`pack`, `unpack`), by the clock on the wall; should that be set back or forward
the allowance is never more than that eighth. A record says what is left if all is spent that may be
before the next record: a process that is killed can't spend anything twice.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, final

from xxhash import xxh3_64_intdigest

from cenote.policy.endurance import BURST_SHARE

__all__ = ["RECORD_BYTES", "WriteBudget"]

DAY_S: Final = 86_400.0
HOURS: Final = 24
RECORD_BYTES: Final = 512
SAVES_PER_BURST: Final = 64
"""A record is due whenever so much of the burst was spent."""
_MAGIC: Final = b"CENOTEWB"
_HEAD: Final = Struct("<8sQdQQ")
"""magic, allowance, time on the wall, total, hour of the newest count."""
_COUNTS: Final = Struct(f"<{HOURS}Q")
_CRC: Final = Struct("<Q")


@final
class WriteBudget:
    """`now_s` is always the clock on the wall, in seconds. For one thread at a time."""

    def __init__(self, daily_bytes: int, now_s: float) -> None:
        """Of a device that was not written yet: its allowance is full."""
        self.daily_bytes = daily_bytes
        self.burst_bytes = int(daily_bytes * BURST_SHARE)
        self.total_bytes = 0
        """Since the device was taken into use with a budget."""
        self._allowance = float(self.burst_bytes)
        self._at_s = now_s
        self._hour = int(now_s // 3600)
        self._counts = [0] * HOURS
        """Bytes of each of the last hours, that of `_hour` first."""
        self._unsaved = 0

    @property
    def step_bytes(self) -> int:
        """What may be spent between two records."""
        return self.burst_bytes // SAVES_PER_BURST

    def allowance_bytes(self, now_s: float) -> int:
        """What may be written now."""
        self._advance(now_s)
        return int(self._allowance)

    def spend(self, size_bytes: int, now_s: float) -> bool:
        """Take so much of the allowance; False, and nothing is taken, where there is not so much
        left."""
        if size_bytes > self.allowance_bytes(now_s):
            return False
        self._allowance -= size_bytes
        self._counts[0] += size_bytes
        self.total_bytes += size_bytes
        self._unsaved += size_bytes
        return True

    def written_bytes(self, now_s: float) -> int:
        """In this hour and the 23 before it."""
        self._advance(now_s)
        return sum(self._counts)

    def _advance(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = now_s
        grown = self.daily_bytes * (1 - BURST_SHARE) * passed_s / DAY_S
        self._allowance = min(float(self.burst_bytes), self._allowance + grown)
        hours = int(now_s // 3600) - self._hour
        if hours > 0:
            self._counts = ([0] * min(hours, HOURS) + self._counts)[:HOURS]
        self._hour += max(0, hours)

    # ---- records ------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a record is to be written before more is spent."""
        return self._unsaved >= self.step_bytes

    def pack(self, now_s: float, *, is_last: bool = False) -> bytes:
        """A record of RECORD_BYTES; the budget counts as saved. `is_last`: no more is spent."""
        self._advance(now_s)
        self._unsaved = 0
        left = max(0, int(self._allowance) - (0 if is_last else self.step_bytes))
        body = _HEAD.pack(_MAGIC, left, now_s, self.total_bytes, self._hour)
        body += _COUNTS.pack(*self._counts)
        return (body + _CRC.pack(xxh3_64_intdigest(body))).ljust(RECORD_BYTES, b"\0")

    def unpack(self, record: bytes, now_s: float) -> None:
        """Go on from a record. Nothing changes where it is none at all; where it was written only
        in part, nothing may be written before time has passed: what was written is not known."""
        size = _HEAD.size + _COUNTS.size
        body, (crc,) = record[:size], _CRC.unpack_from(record.ljust(RECORD_BYTES, b"\0"), size)
        if not body.startswith(_MAGIC):
            return
        if crc != xxh3_64_intdigest(body):
            self.empty()
            return
        _, left, at_s, total, hour = _HEAD.unpack_from(body)
        self._allowance, self._at_s = float(min(left, self.burst_bytes)), at_s
        self.total_bytes, self._hour = total, hour
        self._counts = list(_COUNTS.unpack_from(body, _HEAD.size))
        self._advance(now_s)

    def empty(self) -> None:
        """Nothing may be written before time has passed."""
        self._allowance = 0.0
