"""A model of an SSD, below `cenote.store.device.Device`: what is written lies in its cache first.

Until a flush has ended a write may be lost with the power, sector by sector, in any mixture: that
is how a slot is torn. A process that is killed leaves a part of what it was writing. Requests take
their time, at times very long, and may fail: a write that does has left some of its sectors.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cenote.store.device import BLOCK_BYTES
from cenote.store.slot_format import CHECKED_BYTES, SLOT_BYTES, SLOT_RECORD, STATE_SEALED
from cenote.store.ssd import SSD_INDEX_FIRST, SsdPlan
from cenote.transport.memory_access import MEMORY
from sim.loop import Killed, Violation

if TYPE_CHECKING:
    from sim.loop import Loop

__all__ = [
    "QUICK_S",
    "SECTOR_BYTES",
    "DiskFile",
    "DiskWeather",
    "SimDisk",
    "plan_disk",
    "versions_in",
]

SECTOR_BYTES: Final = 512
_SLOTS_AT: Final = 64 << 10
QUICK_S: Final = 100e-6
_STOPS: Final = (0, 0, 1, 2)
"""How often others get on while one write lands."""
_SLICE_S: Final = 0.25
_KEPT: Final = (0.0, 0.3, 0.7, 1.0)
"""Of what was not flushed, the share that a power cut leaves."""

Version = tuple[int, int]
"""(epoch, seq)."""
Records = NDArray[np.void]


def plan_disk(data_blocks: int) -> SsdPlan:
    """One small segment, of three pages of slots or more."""
    slots = max(64, 2 * data_blocks)
    table_bytes = -(-slots * SLOT_BYTES // BLOCK_BYTES) * BLOCK_BYTES
    data_at = _SLOTS_AT + table_bytes
    return SsdPlan(SSD_INDEX_FIRST, 0, slots, data_at, data_blocks * BLOCK_BYTES)


class DiskFile:
    """What the oracle sees of an SSD segment: as `SegmentFile` is for one in memory."""

    def __init__(self, disk: SimDisk, incarnation: bytes) -> None:
        self.disk = disk
        self.name = f"{disk.host}[ssd]"
        self.incarnation = incarnation
        self.slots = disk.plan.slots
        self.segment_id = 0
        self.is_lost = False
        self.damaged: set[Version] = set()
        """Versions of which something was flipped, or could not be read."""
        self.mapped_by: Counter[bytes] = Counter()

    @property
    def table(self) -> memoryview:
        """Its slots, as whoever opens it now would find them."""
        return self.disk.table_of(self.disk.content)

    @property
    def data(self) -> NDArray[np.uint8]:
        return np.frombuffer(self.disk.content, np.uint8)[self.disk.plan.data_at :]

    def is_durable(self, slot: int, version: Version, value: bytes, offset: int) -> bool:
        """Whether this slot and these bytes survive whatever happens."""
        disk = self.disk
        start = disk.plan.data_at + offset
        record = np.frombuffer(disk.table_of(disk.durable), SLOT_RECORD, 1, slot * SLOT_BYTES)[0]
        sealed = record["state"] == STATE_SEALED
        sealed &= (int(record["epoch"]), int(record["seq"])) == version
        return bool(sealed) and bytes(disk.durable[start : start + len(value)]) == value

    def is_believable(self, slot: int, version: Version, value: bytes) -> bool:
        """Whether this slot's bytes are there, and no other one says that others are, or that it
        has these elsewhere."""
        records = np.frombuffer(self.table, SLOT_RECORD)
        own, there = records[slot], records["state"] == STATE_SEALED
        start, length = int(own["offset"]), int(own["length"])
        starts = records["offset"].astype(np.int64)
        hit = (starts < start + length) & (starts + records["length"].astype(np.int64) > start)
        hit &= (starts != start) | (records["checksum"] != own["checksum"])
        hit |= (records["epoch"] == version[0]) & (records["seq"] == version[1])
        others = hit & there
        others[slot] = False
        return not others.any() and self.data[start : start + len(value)].tobytes() == value

    def is_flipped(self, offset: int, length: int) -> bool:
        """Whether a bit of what lies there was flipped."""
        start = self.disk.plan.data_at + offset
        return any(start <= at < start + length for at in self.disk._flipped)

    def damage(self, offset: int, length: int) -> None:
        """These bytes of the device are no good: nor is what any slot has there."""
        plan = self.disk.plan
        records = np.frombuffer(self.table, SLOT_RECORD)
        starts = records["offset"].astype(np.int64) + plan.data_at
        ends = starts + records["length"].astype(np.int64)
        hit = (starts < offset + length) & (ends > offset)
        places = _SLOTS_AT + np.arange(len(records)) * SLOT_BYTES
        hit |= (places < offset + length) & (places + SLOT_BYTES > offset)
        hit &= records["state"] == STATE_SEALED
        for record in records[hit]:
            self.damaged.add((int(record["epoch"]), int(record["seq"])))


class DiskWeather:
    """What is the matter with a device at present."""

    def __init__(self, latency_s: float = QUICK_S, errors: float = 0.0) -> None:
        self.latency_s = latency_s
        self.read_errors = self.write_errors = self.flush_errors = errors
        """The share of requests that fail."""


class SimDisk:
    """See the module. Implements `Device`; it outlives the daemons that use it, one at a time."""

    def __init__(self, loop: Loop, host: str, data_blocks: int, memory_align: int) -> None:
        self._loop = loop
        self.host = host
        self.name = f"the SSD of {host}"
        self.plan = plan_disk(data_blocks)
        self.memory_align = memory_align
        self.size_bytes = self.plan.data_at + self.plan.data_bytes
        self.content = bytearray(self.size_bytes)
        """What a read finds."""
        self.durable = bytearray(self.size_bytes)
        """What a power cut leaves, at least."""
        self._loose: dict[int, int] = {}
        """Sectors in which the two may differ, and the number of the last write to each."""
        self._kept: dict[int, int] = {}
        """By sector: the number of the write that is durable. Flushes may overlap."""
        self._landed = 0
        self._flipped: list[int] = []
        self.weather = DiskWeather()
        self.file: DiskFile | None = None
        self.on_request: Callable[[str], float] = lambda what: 0.0
        """The moment before a request takes effect: faults like it. Tells how much later than
        otherwise that is."""
        self.is_held: Callable[[Version], bool] = lambda version: True
        """Whether the master has it in this host's memory. What has left that may have been
        others', and its bytes again, while the device took them from there: such a copy must not
        count (`TierOracle._check_added`)."""
        self.is_well = False
        """All faults have ended: nothing takes long any more, whatever was to."""
        self.crawl_s: dict[str, float] = {}
        """By kind of request: how much longer the next one takes."""
        self.counts = {"read": 0, "write": 0, "flush": 0, "failed": 0, "torn": 0}

    def table_of(self, image: bytearray) -> memoryview:
        end = _SLOTS_AT + self.plan.slots * SLOT_BYTES
        return memoryview(image)[_SLOTS_AT:end]

    def file_of(self, incarnation: bytes) -> DiskFile:
        """Of the segment that was just opened."""
        if self.file is None or self.file.incarnation != incarnation:
            if self.file is not None:
                self.file.is_lost = True
            self.file = DiskFile(self, incarnation)
        return self.file

    # ---- requests -----------------------------------------------------------------------------

    def _begin(self, what: str, error_share: float) -> bool:
        """Let a request take its time; whether it is to fail."""
        dice = self._loop.dice
        self.counts[what] += 1
        crawl_s = self.on_request(what) + self.crawl_s.pop(what, 0.0)
        left_s = crawl_s + dice.expovariate(1 / self.weather.latency_s)
        while left_s > 0 and not self.is_well:
            step_s = min(left_s, _SLICE_S)
            self._loop.sleep(step_s)
            left_s -= step_s
        if self.is_well:
            self._loop.sleep(QUICK_S)
        fails = dice.random() < error_share
        self.counts["failed"] += fails
        return fails

    def _error(self, what: str) -> OSError:
        return OSError(errno.EIO, f"injected: a {what} fails")

    def read(self, address: int, length: int, offset: int) -> None:
        if self._begin("read", self.weather.read_errors):
            if self.file is not None:
                self.file.damage(offset, length)
            raise self._error("read")
        MEMORY[address : address + length] = bytes(self.content[offset : offset + length])

    def write(self, parts: Sequence[tuple[int, int]], offset: int) -> None:
        dice, loop = self._loop.dice, self._loop
        pieces: list[tuple[int, int]] = []  # (where in memory, where on the device), by sector
        for address, length in parts:
            pieces += [(address + at, offset + at) for at in range(0, length, SECTOR_BYTES)]
            offset += length
        at, end = 0, len(pieces)
        try:
            if self._begin("write", self.weather.write_errors):
                self._land(pieces[: dice.randint(0, end)])
                raise self._error("write")
            stops = sorted(dice.randint(0, end) for _ in range(dice.choice(_STOPS)))
            for stop in (*stops, end):
                self._land(pieces[at:stop])
                at = stop
                if at < end:
                    loop.sleep(dice.expovariate(1 / self.weather.latency_s))
        except Killed:
            self._land(pieces[at : dice.randint(at, end)])  # it is the device's business by now
            raise

    def _land(self, pieces: list[tuple[int, int]]) -> None:
        before = bytes(self.table_of(self.content))
        first, last = len(self.content), 0
        for address, offset in pieces:
            self.content[offset : offset + SECTOR_BYTES] = MEMORY[address : address + SECTOR_BYTES]
            self._landed += 1
            self._loose[offset // SECTOR_BYTES] = self._landed
            first, last = min(first, offset), max(last, offset + SECTOR_BYTES)
        if first < self.plan.data_at and last > _SLOTS_AT:
            self._check_slots(before)

    def flush(self) -> None:
        """What was written before it began is durable when it ends."""
        held = [(sector, number, self._sector(sector)) for sector, number in self._loose.items()]
        if self._begin("flush", self.weather.flush_errors):
            raise self._error("flush")
        for sector, number, data in held:
            if number > self._kept.get(sector, 0):
                start = sector * SECTOR_BYTES
                self.durable[start : start + SECTOR_BYTES] = data
                self._kept[sector] = number
            if self._loose.get(sector) == number:
                del self._loose[sector]

    def _sector(self, number: int) -> bytes:
        return bytes(self.content[number * SECTOR_BYTES : (number + 1) * SECTOR_BYTES])

    def close(self) -> None:
        """Nothing: a daemon's end closes it."""

    def _check_slots(self, before: bytes) -> None:
        """A slot is written once its payload is durable, and never before."""
        now = self.table_of(self.content)
        old, new = np.frombuffer(before, "V192"), np.frombuffer(now, "V192")
        for slot in np.flatnonzero(old != new).tolist():
            record = np.frombuffer(now, SLOT_RECORD, 1, slot * SLOT_BYTES)[0]
            raw = record.tobytes()
            whole = int(record["crc"]) == xxh3_64_intdigest(raw[:CHECKED_BYTES])
            if record["state"] != STATE_SEALED or not whole:
                continue
            start = self.plan.data_at + int(record["offset"])
            end = start + int(record["object_size"])
            place = _SLOTS_AT + slot * SLOT_BYTES
            known = any(
                start <= at < end or place <= at < place + SLOT_BYTES for at in self._flipped
            )
            checksum = xxh3_64_intdigest(bytes(self.durable[start:end]))
            if known or checksum == int(record["checksum"]):
                continue
            version = int(record["epoch"]), int(record["seq"])
            if not self.is_held(version):
                continue
            raise Violation(
                f"{self.name} was given slot {slot} of version {version} before its payload"
                " was durable"
            )

    # ---- faults -------------------------------------------------------------------------------

    def cut_power(self) -> None:
        """Of what was not flushed some sectors are left, and some are as before."""
        dice = self._loop.dice
        kept = dice.choice(_KEPT)
        sides = [dice.random() < kept for _ in self._loose]
        for sector, stays in zip(self._loose, sides, strict=True):
            start = sector * SECTOR_BYTES
            one, other = self.content, self.durable
            source, target = (one, other) if stays else (other, one)
            target[start : start + SECTOR_BYTES] = source[start : start + SECTOR_BYTES]
        self.counts["torn"] += len(set(sides)) > 1
        self._loose.clear()

    def flip(self, wanted: int | None = None) -> Version | None:
        """A bit of a slot, or of what one has, is not what it was: then that one's version. Of
        which slot, may be `wanted`: of what it has then."""
        dice = self._loop.dice
        records = np.frombuffer(self.table_of(self.content), SLOT_RECORD)
        sealed = np.flatnonzero(records["state"] == STATE_SEALED).tolist()
        if not sealed or self.file is None:
            return None
        slot = dice.choice(sealed) if wanted not in sealed else wanted
        version = int(records["epoch"][slot]), int(records["seq"][slot])
        hits_slot = slot != wanted and dice.random() < 0.5
        if hits_slot:
            at = _SLOTS_AT + slot * SLOT_BYTES + dice.randrange(SLOT_BYTES)
        else:
            size = max(1, int(records["object_size"][slot]))
            at = self.plan.data_at + int(records["offset"][slot]) + dice.randrange(size)
            at = min(at, len(self.content) - 1)  # the slot may have been hit itself before
        del records
        self.file.damage(at, 1)
        self._flipped.append(at)
        bit = 1 << dice.randrange(8)
        for image in (self.content, self.durable):
            image[at] ^= bit
        self._loop.note(self.host, f"a bit of its SSD flips at {at}")
        return None if hits_slot else version

    def wipe(self) -> None:
        """Another one is in its place."""
        if self.file is not None:
            self.file.is_lost = True
            self.file = None
        self.content[:] = self.durable[:] = bytes(self.size_bytes)
        self._loose.clear()
        self._flipped.clear()


def versions_in(table: memoryview) -> set[Version]:
    """Of all slots that are sealed there."""
    records = cast("Records", np.frombuffer(table, SLOT_RECORD))
    sealed = records[records["state"] == STATE_SEALED]
    return set(zip(sealed["epoch"].tolist(), sealed["seq"].tolist(), strict=True))
