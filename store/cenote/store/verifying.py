"""Whether sealed slots still name the bytes that they were sealed for.

Contents that outlived a daemon are believed only so far: until their checksums were taken anew, the
master gives nobody a lease on them, so that every reader takes the checksum itself. The same goes,
after a change of leader, for the slots that were sealed last in the time of the old one, or of
several, since the new one may adopt them.

Threads take the work in pieces, at low priority, and rest after each: who reads or writes goes
first. A slot whose payload is not what it was is cleared and told to the master with the next
heartbeats. The daemon does not know which slots are stale (of an object that was evicted, its space
given to others): the master believes it only of versions that its own table still has there, and
those are damaged.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import xxhash
from numpy.typing import NDArray

from cenote.api.rows import SLOT, SLOT_REF
from cenote.runtime.log import get_logger
from cenote.transport.memory_access import MEMORY, checksum_at

from .agent_core import Stage
from .segments import LocalSegments

__all__ = ["Verifier"]

PIECE_BYTES: Final = 16 << 20
PIECE_SLOTS: Final = 512
"""Of one piece: two milliseconds or so."""
REST_SHARE: Final = 1.0
"""Of the time that a piece took: the pause after it."""
REST_S_MAX: Final = 0.05
LATE_SEQS: Final = 200_000
"""So many decisions before the last one of an earlier epoch a journal may be behind: seconds of
them, where it is milliseconds."""
TOLD_ROWS_MAX: Final = 4_096
TOLD_TIMES: Final = 3
TOLD_S: Final = 30.0
"""How often, and for how long, a heartbeat repeats what was found, in case one was lost."""
_POLL_S: Final = 0.05
_JOIN_S: Final = 1.0
_NICENESS: Final = 10
_HASH_STEP_BYTES: Final = 4 << 20

_log = get_logger(__name__)
Rows = NDArray[np.void]


@dataclass(slots=True)
class _Told:
    row: bytes
    until_s: float
    times: int = 0


@final
class Verifier:
    """The background work on `segments`, from `start` to `stop`.

    `stage` and `epoch` tell when a leader has taken the daemon in: only then stale slots are gone.
    """

    def __init__(
        self,
        segments: LocalSegments,
        stage: Callable[[], Stage],
        *,
        threads: int | None = None,
    ) -> None:
        self._segments = segments
        self._stage = stage
        self._count = threads or max(1, min(4, os.cpu_count() or 1))
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._everything = {s.index for s in segments.dram() if s.reopened}
        """Segments of which every slot is to be looked at, however old."""
        self._epoch = 0
        """Of the leader for which everything was looked at."""
        self._found: list[_Told] = []
        self._untold = 0
        self.verified_slots = 0
        """Whose payload was right."""
        self.damaged_slots = 0
        """Whose payload was not, stale ones included."""
        self.unverified_slots = 0
        """That are waiting for their turn."""
        self._thread = threading.Thread(target=self._run, name="cenote-verify", daemon=True)

    def start(self) -> None:
        """Begin to look for a leader to verify for."""
        self._thread.start()

    def stop(self) -> None:
        """End within some milliseconds, wherever it is."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    @property
    def has_news(self) -> bool:
        """Whether the master is soon to hear more than it did."""
        return bool(self.unverified_slots or self._untold)

    def tell(self) -> bytes:
        """For the next heartbeat: packed `rows.SLOT` of slots whose payload is not what was sealed.

        Called by one thread, after `DramSegment.info` where both go into one message.
        """
        now_s = time.monotonic()
        with self._lock:
            self._found = [
                each for each in self._found if each.until_s > now_s or each.times < TOLD_TIMES
            ]
            told = sorted(self._found, key=lambda each: each.times)[:TOLD_ROWS_MAX]
            for each in told:
                each.times += 1
            self._settle()
            return b"".join(each.row for each in told)

    def _settle(self) -> None:
        """Once all that was found was told the segments count as verified. Under the lock."""
        self._untold = sum(not each.times for each in self._found)
        if not self._untold:
            for segment in self._segments.dram():
                segment.verified_epoch = max(segment.verified_epoch, self._epoch)

    # ---- the work -----------------------------------------------------------------------------

    def _run(self) -> None:
        _lower_priority()
        while not self._stopping.wait(_POLL_S):
            epoch = self._segments.epoch
            if self._stage() is not Stage.ATTACHED or epoch == self._epoch:
                continue
            began_s = time.monotonic()
            before = self.verified_slots, self.damaged_slots
            if self._verify(epoch):
                self._everything.clear()
                with self._lock:
                    self._epoch = epoch
                    self._settle()
                verified, damaged = self.verified_slots - before[0], self.damaged_slots - before[1]
                if verified or damaged:
                    _log.info(
                        "contents verified",
                        epoch=epoch,
                        slots=verified,
                        damaged_or_stale=damaged,
                        seconds=round(time.monotonic() - began_s, 3),
                    )

    def _verify(self, epoch: int) -> bool:
        """Look at all that is due; False where it was stopped."""
        rows = self._due(epoch)
        self.unverified_slots = len(rows)
        pieces = deque(_pieces(rows))
        threads = [
            threading.Thread(
                target=self._work, args=(pieces,), name=f"cenote-verify-{i}", daemon=True
            )
            for i in range(min(self._count, len(pieces)) - 1)
        ]
        for thread in threads:
            thread.start()
        self._work(pieces)
        for thread in threads:
            thread.join()
        self.unverified_slots = 0
        return not self._stopping.is_set()

    def _due(self, epoch: int) -> Rows:
        """The slots to look at, those of one replica of one object next to each other."""
        found = [np.zeros(0, SLOT)]
        for segment in self._segments.dram():
            for rows in segment.table.inventory(segment.index):
                if segment.index in self._everything:
                    found.append(rows)
                    continue
                found += _late(rows[rows["epoch"] < epoch], self._epoch)
        rows = np.concatenate(found)
        order = np.lexsort((rows["extent_index"], rows["replica"], rows["seq"], rows["epoch"]))
        return rows[order]

    def _work(self, pieces: deque[Rows]) -> None:
        _lower_priority()
        while not self._stopping.is_set():
            try:
                piece = pieces.popleft()
            except IndexError:
                return
            began_s = time.monotonic()
            damaged = self._damaged(piece)
            self._clear(piece[damaged])
            with self._lock:
                self.verified_slots += len(piece) - int(np.count_nonzero(damaged))
                self.unverified_slots = max(0, self.unverified_slots - len(piece))
            rest_s = (time.monotonic() - began_s) * REST_SHARE
            self._stopping.wait(min(rest_s, REST_S_MAX))

    def _damaged(self, rows: Rows) -> NDArray[np.bool_]:
        """Which slots belong to a replica whose payload has another checksum."""
        damaged = np.zeros(len(rows), np.bool_)
        bases = {s.index: s.address for s in self._segments.dram()}
        columns = zip(
            rows["segment_index"].tolist(),
            rows["offset"].tolist(),
            rows["length"].tolist(),
            rows["object_size"].tolist(),
            rows["checksum"].tolist(),
            rows["extent_count"].tolist(),
            strict=True,
        )
        parts: list[tuple[int, int]] = []
        for i, (index, offset, length, size, checksum, count) in enumerate(columns):
            address = bases[index] + offset
            if count == 1:
                if size > length:
                    damaged[i] = True
                elif size <= _HASH_STEP_BYTES:
                    damaged[i] = checksum_at(address, size) != checksum
                else:
                    damaged[i] = self._hash([(address, size)], size) != checksum
                continue
            if not int(rows["extent_index"][i]):
                parts = []
            parts.append((address, length))
            if len(parts) == count and self._is_one(rows, i, count):
                damaged[i + 1 - count : i + 1] = self._hash(parts, size) != checksum
        return damaged

    def _is_one(self, rows: Rows, last: int, count: int) -> bool:
        """Whether the `count` slots up to this one are all of one replica. Those of one that lies
        on several nodes are not: it can't be verified here."""
        some = rows[last + 1 - count : last + 1]
        same = all((some[n] == some[n][0]).all() for n in ("epoch", "seq", "replica"))
        return same and some["extent_index"].tolist() == list(range(count))

    def _hash(self, parts: Sequence[tuple[int, int]], size: int) -> int:
        """XXH3-64 of the first `size` bytes of these; 0 where it was stopped."""
        hasher = xxhash.xxh3_64()
        for address, length in parts:
            end = address + min(length, size)
            size -= min(length, size)
            while address < end:
                if self._stopping.is_set():
                    return 0
                step = min(_HASH_STEP_BYTES, end - address)
                hasher.update(MEMORY[address : address + step])
                address += step
        return hasher.intdigest()

    def _clear(self, rows: Rows) -> None:
        """Damaged, or stale: these slots count no more."""
        if not len(rows) or self._stopping.is_set():
            return
        refs = np.zeros(len(rows), SLOT_REF)
        for name in ("segment_index", "slot", "epoch", "seq"):
            refs[name] = rows[name]
        for segment in self._segments.dram():
            segment.table.clear(refs[refs["segment_index"] == segment.index])
        until_s = time.monotonic() + TOLD_S
        with self._lock:
            self.damaged_slots += len(rows)
            self._found.extend(_Told(rows[i].tobytes(), until_s) for i in range(len(rows)))


def _late(older: Rows, verified_epoch: int) -> Iterator[Rows]:
    """The last slots of each epoch that has ended since all was verified for `verified_epoch`: the
    leaders between may have come and gone before that was done again."""
    epochs = np.unique(older["epoch"])
    for epoch in epochs[epochs >= np.minimum(epochs[-1:], verified_epoch)].tolist():
        part = older[older["epoch"] == epoch]
        yield part[part["seq"] + np.uint64(LATE_SEQS) > int(part["seq"].max())]


def _pieces(rows: Rows) -> Iterator[Rows]:
    """Cut rows where a piece has enough, and never within one replica."""
    if not len(rows):
        return
    begins = rows["extent_index"] == 0
    sizes = np.cumsum(np.minimum(rows["length"], np.uint64(1 << 40)).astype(np.int64))
    first = 0
    while first < len(rows):
        done = int(sizes[first - 1]) if first else 0
        last = int(np.searchsorted(sizes, done + PIECE_BYTES, "right"))
        last = min(max(last, first + 1), first + PIECE_SLOTS)
        while last < len(rows) and not begins[last]:
            last += 1
        yield rows[first:last]
        first = last


def _lower_priority() -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError as error:  # already lower, and raising it is not for everybody
        _log.debug("can't lower a thread's priority", error=error.strerror)
