"""The slot table of one segment: which extents hold which object, in memory of the daemon's own.

    seal        rows.SEAL become records; a higher version replaces, an equal one repeats
    clear       records that still hold a given version stop counting
    inventory   everything sealed, as rows.SLOT, for a master that wants to know
    list_keys   the full keys, for people

A batch costs one checksum per record and a few copies of whole columns; a single record takes a
path of its own, where NumPy would cost more than the work. Both do the same (a property test holds
them together). The table takes any writable memory, so that DRAM and SSD segments share it.

There is one lock, held while versions are compared and finished records copied, never while they
are made. A record's version only ever rises, also over `clear` and a restart: a seal that comes
late, or once more, can't bring back what was cleared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import InvalidArgument, StaleEpoch, StaleLocation, Unavailable
from cenote.api.rows import SLOT_SUM
from cenote.api.slot_sums import slot_hashes, sums_of_columns

from .ranges import RangeSet, pieces_below
from .slot_format import (
    RECORD_BLOCKS,
    SLOT_BYTES,
    SLOT_RECORD,
    SLOT_VERSION,
    STATE_CLEARED,
    STATE_FREE,
    STATE_SEALED,
)
from .slot_keys import SlotKey, slot_keys
from .slot_records import (
    SEAL_ROW,
    Bounds,
    SealRun,
    build_record,
    build_records,
    build_run,
    inventory_rows,
    is_malformed,
    joined,
    malformed_rows,
    run_of,
    sealed_head,
    slot_of,
    sort_out,
    taken,
    write_checksums,
)

__all__ = ["SlotTable"]

_OK: Final = 0
_INVALID: Final = InvalidArgument.code
_BEYOND: Final = Unavailable.code
_STALE: Final = StaleLocation.code
_BATCH_ROWS_MAX: Final = 4096
"""Rows built and stored at once: it bounds scratch memory and the time under the lock."""
ONE_BY_ONE_ROWS_MAX: Final = 12
"""Up to here a batch is cheaper row by row than in columns."""
_SCAN_SLOTS: Final = 1024
"""So many slots are looked at under the lock at once; they fit the processor's cache."""
INVENTORY_ROWS_MAX: Final = 32_768
"""Of one slice: 2.8 MiB. The fewer there are, the less an attach waits for other processes."""
_SUM_SLOTS: Final = 8192
"""So many slots are summed up under the lock at once."""
_SUMMED: Final = ("slot", "epoch", "seq", "offset", "replica")


@final
class SlotTable:
    """Slots in `memory`, which is writable, n x 192 bytes, and not anybody else's.

    `data` is the segment's data area, which is read only: writers put keys of over 64 bytes behind
    their payloads, under their grants. A seal may come so late that the extent is another writer's
    by then, so it must not touch what the slot names. Call `recover` before anything else where
    the memory holds slots of an earlier life.
    """

    def __init__(
        self, memory: memoryview, data: memoryview, *, unit_bytes: int, limit_bytes: int
    ) -> None:
        self._lock = threading.Lock()
        self._data = data.toreadonly()
        self._fence = 0
        self._held = False
        self._after = (0, 0)
        self._bounds = Bounds(unit_bytes, limit_bytes, RangeSet())
        self._used = 0  # no slot at or above this number was ever written
        self.sealed = 0
        """Slots that are sealed now."""
        self.on_placed: Callable[[bytes], None] | None = None
        """Gets each record that `place` has written."""
        self.seals = 0
        """Slots that were written by `seal` so far."""
        self.broken = 0
        """Records that were found torn or corrupt, and zeroed."""
        self._use(memory)

    def _use(self, memory: memoryview) -> None:
        records = np.frombuffer(memory, SLOT_RECORD)
        blocks = records.view(RECORD_BLOCKS)
        self._memory = memory.cast("B")
        self._records = records
        self._whole = blocks["all"]
        self._states = records["state"]
        self._epochs = records["epoch"]
        self._seqs = records["seq"]
        self._slots = len(records)

    @property
    def slots(self) -> int:
        """Slots that the table can hold now."""
        return self._slots

    # ---- what the segment tells ---------------------------------------------------------------

    def grow(self, memory: memoryview) -> None:
        """Go on in larger memory, in which the present slots lie at the same places."""
        with self._lock:
            if len(memory) < len(self._memory):
                raise ValueError("a slot table does not shrink")
            self._use(memory)

    def set_bounds(self, limit_bytes: int, retired: RangeSet) -> None:
        """Extents must end at or below `limit_bytes` and keep off `retired` ranges."""
        with self._lock:
            self._bounds = Bounds(self._bounds.unit_bytes, limit_bytes, retired)

    def fence(self, epoch: int) -> None:
        """Refuse seals of epochs below `epoch`; when it returns, none is under way any more."""
        with self._lock:
            self._fence = max(self._fence, epoch)

    def hold(self) -> None:
        """Let what is not sealed yet wait until `admit`: the master does not have the inventory."""
        with self._lock:
            self._held = True

    def admit(self, epoch: int, last_seq: int) -> None:
        """Seal again, but nothing that was decided up to this version and is not sealed by now: the
        master, which has the inventory, dropped it."""
        with self._lock:
            self._held = False
            self._after = (epoch, last_seq)

    # ---- seal ---------------------------------------------------------------------------------

    def seal(
        self,
        epoch: int,
        namespace_id: int,
        generation: int,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """Write slots for `rows.SEAL` rows; see `Segment.seal`.

        Raises StaleEpoch where the fence has passed `epoch`; then nothing was written.
        """
        if not 0 < epoch < 1 << 32:
            raise InvalidArgument(f"{epoch} is no epoch that anything can be sealed in")
        head = sealed_head(epoch, namespace_id, generation)
        statuses = np.zeros(len(rows), np.uint8)
        if len(rows) <= ONE_BY_ONE_ROWS_MAX:
            self._seal_in_turn(epoch, head, rows, keys, key_starts, statuses)
            return statuses
        for first in range(0, len(rows), _BATCH_ROWS_MAX):
            part = slice(first, first + _BATCH_ROWS_MAX)
            self._seal_some(epoch, head, rows[part], keys, key_starts[part], statuses[part])
        return statuses

    def _seal_some(
        self,
        epoch: int,
        head: bytes,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
        statuses: NDArray[np.uint8],
    ) -> None:
        run = run_of(rows, key_starts, len(keys), self._bounds)
        if run is not None and self._seal_run(epoch, head, rows, keys, run):
            return
        bad = malformed_rows(rows, key_starts, len(keys), self._bounds)
        if bad.any():
            statuses[bad] = _INVALID
            good = np.flatnonzero(~bad)
            rows, key_starts = rows[good], key_starts[good]
            some = np.zeros(len(good), np.uint8)
            if len(good):
                self._seal_sound(epoch, head, rows, keys, key_starts, some)
            statuses[good] = some
        else:
            self._seal_sound(epoch, head, rows, keys, key_starts, statuses)

    def _seal_run(
        self, epoch: int, head: bytes, rows: NDArray[np.void], keys: memoryview, run: SealRun
    ) -> bool:
        """Seal such rows, if all are newer than what their slots hold; whether that was so."""
        records = build_run(head, rows, keys, run)
        stop = run.slot + len(rows)
        slots = slice(run.slot, stop)
        with self._lock:
            self._check_fence(epoch)
            if stop > self._slots or self._held or (epoch, run.seq_min) <= self._after:
                return False
            held_epoch = int(np.maximum.reduce(self._epochs[slots]))
            if held_epoch > epoch or (
                held_epoch == epoch and int(np.maximum.reduce(self._seqs[slots])) >= run.seq_min
            ):
                return False
            sealed = int(np.count_nonzero(self._states[slots] == STATE_SEALED))
            self._whole[slots] = records["all"]
            self._count(len(rows) - sealed, len(rows), stop - 1)
        return True

    def _seal_sound(
        self,
        epoch: int,
        head: bytes,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
        statuses: NDArray[np.uint8],
    ) -> None:
        slots = rows["slot"].astype(np.intp)
        ordered = np.sort(slots)
        if (ordered[1:] == ordered[:-1]).any():
            # The same slot twice in a batch, which is rare.
            self._seal_in_turn(epoch, head, rows, keys, key_starts, statuses)
            return
        records = build_records(head, rows, keys, key_starts)
        seqs = records.view(SLOT_RECORD)["seq"]
        with self._lock:
            self._check_fence(epoch)
            chosen: NDArray[np.intp] | None = None  # None: all
            if ordered[-1] >= self._slots:
                beyond = slots >= self._slots
                statuses[beyond] = _BEYOND
                chosen = np.flatnonzero(~beyond)
                slots, seqs = slots[chosen], seqs[chosen]
            held_epochs, held_seqs = self._epochs[slots], self._seqs[slots]
            newer = (held_epochs < epoch) | ((held_epochs == epoch) & (held_seqs < seqs))
            if epoch <= self._after[0]:
                newer &= (seqs > self._after[1]) & (epoch == self._after[0])
            if not newer.all():
                same = (held_epochs == epoch) & (held_seqs == seqs)
                same &= self._states[slots] == STATE_SEALED
                stale = np.where(newer | same, _OK, _STALE).astype(np.uint8)
                statuses[slice(None) if chosen is None else chosen] = stale
                kept = np.flatnonzero(newer)
                chosen = kept if chosen is None else chosen[kept]
                slots = slots[kept]
            if chosen is not None:
                records = records[chosen]
            if self._held:
                statuses[slice(None) if chosen is None else chosen] = _BEYOND
            elif len(slots):
                fresh = len(slots) - int(np.count_nonzero(self._states[slots] == STATE_SEALED))
                self._whole[slots] = records["all"]
                self._count(fresh, len(slots), int(slots.max()))

    def _seal_in_turn(
        self,
        epoch: int,
        head: bytes,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
        statuses: NDArray[np.uint8],
    ) -> None:
        packed, size = rows.tobytes(), rows.itemsize
        for i, start in enumerate(key_starts.tolist()):
            row = packed[i * size : (i + 1) * size]
            statuses[i] = self._seal_one(epoch, head, row, keys, start)

    def _seal_one(
        self, epoch: int, head: bytes, row: bytes, keys: memoryview, key_start: int
    ) -> int:
        fields = SEAL_ROW.unpack(row)
        slot, seq, key_length = fields[0], fields[3], fields[8]
        if is_malformed(fields, key_start, len(keys), self._bounds):
            return _INVALID
        key = keys[key_start : key_start + key_length]
        record = build_record(head, row, key)
        with self._lock:
            self._check_fence(epoch)
            if slot >= self._slots:
                return _BEYOND
            at = slot * SLOT_BYTES
            _, state, held_epoch, held_seq = SLOT_VERSION.unpack_from(self._memory, at)
            if held_epoch >= epoch and (held_epoch > epoch or held_seq >= seq):
                repeated = held_epoch == epoch and held_seq == seq and state == STATE_SEALED
                return _OK if repeated else _STALE
            if self._held:
                return _BEYOND
            if (epoch, seq) <= self._after:
                return _STALE
            self._memory[at : at + SLOT_BYTES] = record
            self._count(int(state != STATE_SEALED), 1, slot)
        return _OK

    def _check_fence(self, epoch: int) -> None:
        if epoch < self._fence:
            raise StaleEpoch(
                f"sealed in epoch {epoch}, but this daemon follows epoch {self._fence}",
                remedy="ask the master again where the object lies",
            )

    def _count(self, fresh: int, written: int, highest: int) -> None:
        self.sealed += fresh
        self.seals += written
        self._used = max(self._used, highest + 1)

    # ---- copies -------------------------------------------------------------------------------

    def record(self, slot: int, epoch: int, seq: int) -> bytes | None:
        """The record of a slot that is sealed with just this version, else None."""
        at = slot * SLOT_BYTES
        with self._lock:
            if slot >= self._slots:
                return None
            _, state, held_epoch, held_seq = SLOT_VERSION.unpack_from(self._memory, at)
            if (state, held_epoch, held_seq) != (STATE_SEALED, epoch, seq):
                return None
            return bytes(self._memory[at : at + SLOT_BYTES])

    def namespace_at(self, slot: int) -> int:
        """Whose a slot is, if it is sealed; else 0."""
        with self._lock:
            if slot >= self._slots or self._states[slot] != STATE_SEALED:
                return 0
            return int(self._records["namespace_id"][slot])

    def place(self, record: bytes) -> int:
        """Write a finished record of a copy, whatever its slot held; returns the slot's number.

        The copy may well be of an older version than what the slot held before: no client seals it,
        so there is no late repeat that the order of versions would have to keep out. Raises
        InvalidArgument for a slot that there is not.
        """
        slot = slot_of(record)
        at = slot * SLOT_BYTES
        with self._lock:
            if slot >= self._slots:
                raise InvalidArgument(f"there is no slot {slot}")
            fresh = int(self._states[slot] != STATE_SEALED)
            self._memory[at : at + SLOT_BYTES] = record
            self._count(fresh, 1, slot)
        if self.on_placed is not None:
            self.on_placed(record)
        return slot

    def unplace(self, slots: list[int]) -> None:
        """Take `place` back: these slots hold nothing."""
        with self._lock:
            for slot in slots:
                self.sealed -= int(self._states[slot] == STATE_SEALED)
                at = slot * SLOT_BYTES
                self._memory[at : at + SLOT_BYTES] = bytes(SLOT_BYTES)

    # ---- clear --------------------------------------------------------------------------------

    def clear(self, refs: NDArray[np.void]) -> int:
        """Clear the slots that still hold the version in `rows.SLOT_REF` rows; returns how many."""
        cleared = 0
        for first in range(0, len(refs), _BATCH_ROWS_MAX):
            part = refs[first : first + _BATCH_ROWS_MAX]
            with self._lock:
                cleared += self._clear_some(part)
        return cleared

    def _clear_some(self, refs: NDArray[np.void]) -> int:
        refs = refs[refs["slot"] < self._slots]
        slots = refs["slot"].astype(np.intp)
        match = (self._epochs[slots] == refs["epoch"]) & (self._seqs[slots] == refs["seq"])
        match &= self._states[slots] == STATE_SEALED
        slots = np.unique(slots[match])
        if len(slots):
            records = taken(self._records, slots)
            records["state"] = STATE_CLEARED
            blocks = records.view(RECORD_BLOCKS)
            write_checksums(blocks)
            self._whole[slots] = blocks["all"]
            self.sealed -= len(slots)
        return len(slots)

    # ---- reading --------------------------------------------------------------------------------

    def recover(self, stopping: Callable[[], bool] = lambda: False) -> int:
        """Take up slots of an earlier life; returns how many are sealed.

        Broken records are zeroed and counted in `broken`. Ends early, with what it has, where
        `stopping` says so.
        """
        self._used = self._slots
        sealed = used = 0
        for first in range(0, self._slots, _SCAN_SLOTS):
            if stopping():
                break
            block, valid = self._scan(first)
            sealed += int(np.count_nonzero(valid))
            written = np.flatnonzero(block["state"] != STATE_FREE)
            if len(written):
                used = first + int(written[-1]) + 1
        self.sealed, self._used = sealed, used
        return sealed

    def sums(self, slots_per_block: int) -> NDArray[np.void]:
        """`rows.SLOT_SUM` of what is sealed in each block of so many slots, from slot 0 on.

        What is sealed meanwhile may or may not be in it. No checksum is taken.
        """
        step = -(-_SUM_SLOTS // slots_per_block) * slots_per_block
        found = [np.zeros(0, SLOT_SUM)]
        for first in range(0, self._used, step):
            part = slice(first, min(first + step, self._used))
            with self._lock:
                records = self._records[part]
                are_sealed = records["state"] == STATE_SEALED
                # Its own number, too: a record in the wrong place must not be taken for right.
                columns = [records[name].astype(np.uint64) for name in _SUMMED]
            found.append(sums_of_columns(slot_hashes(*columns), are_sealed, slots_per_block))
        return np.concatenate(found)

    def inventory(
        self, segment_index: int, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[NDArray[np.void]]:
        """Sealed slots as `rows.SLOT` arrays of at most INVENTORY_ROWS_MAX rows, none of them
        empty; all of them, or those in `ranges` ((first slot, end), rising).

        Slots that are sealed or cleared meanwhile may or may not be in it. Broken records are
        zeroed and counted.
        """
        held: list[NDArray[np.void]] = []
        count = 0
        for first, end in pieces_below(ranges, self._used, _SCAN_SLOTS):
            block, valid = self._scan(first, end)
            found = taken(block, valid)
            if count + len(found) > INVENTORY_ROWS_MAX:
                yield inventory_rows(joined(held), segment_index)
                held, count = [], 0
            if len(found):
                held.append(found)
                count += len(found)
        if held:
            yield inventory_rows(joined(held), segment_index)

    def list_keys(
        self, namespace_id: int, generation: int, prefix: bytes, limit: int
    ) -> Iterator[SlotKey]:
        """At most `limit` objects of that namespace and generation whose key begins with `prefix`.

        In the order of slots. One entry for each replica and shard that ends in this segment. Slots
        of evicted objects stay until they are sealed again; where another object's bytes lie in
        place of a long key by now, its entry is left out.
        """
        for first in range(0, self._used, _SCAN_SLOTS):
            block, wanted = self._scan(first)
            wanted &= (block["namespace_id"] == namespace_id) & (block["generation"] == generation)
            wanted &= block["extent_index"] + np.uint16(1) == block["extent_count"]
            for entry in slot_keys(taken(block, wanted), self._data, prefix):
                if limit <= 0:
                    return
                limit -= 1
                yield entry

    def _scan(
        self, first: int, end: int | None = None
    ) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
        """A copy of the slots from `first` on (SLOT_RECORD), and which of them are sealed."""
        end = first + _SCAN_SLOTS if end is None else end
        with self._lock:
            copy = bytearray(self._memory[first * SLOT_BYTES : end * SLOT_BYTES])
        block = np.frombuffer(copy, SLOT_RECORD)
        sealed, broken = sort_out(block, first)
        for i in np.flatnonzero(broken).tolist():
            self._zero(first + i, block[i].tobytes())
        block[broken] = np.zeros(1, SLOT_RECORD)
        return block, sealed

    def _zero(self, slot: int, seen: bytes) -> None:
        at = slot * SLOT_BYTES
        with self._lock:
            if self._memory[at : at + SLOT_BYTES] == seen:
                if self._states[slot] == STATE_SEALED:
                    self.sealed = max(0, self.sealed - 1)
                self._memory[at : at + SLOT_BYTES] = bytes(SLOT_BYTES)
                self.broken += 1
