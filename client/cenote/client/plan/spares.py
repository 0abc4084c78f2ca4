"""Space that the master granted ahead of need: a put that finds some is one request less.

Whoever puts small objects one after the other asks for spare extents of that size with one of its
PutStarts. Later puts take theirs from here, write, and name their keys when they commit. What is
not used for a second is given back, and not used any more where nobody takes it back. Nobody is
asked before such a write: if the master was restarted meanwhile the daemon refuses it, as it
refuses all that an earlier master granted.

It is no use where keys are mostly there already: that is then learned only after the payload moved.
So spares are asked for and taken while puts are stored, and not for a while after one existed.

Runs are taken off a deque and what is left of them is put back, so that threads need no lock: one
that finds none in between asks the master. Whoever adds to a deque looks afterwards whether it was
given up meanwhile.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import ClassVar, Final, final

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import EXTENT, EXTENT_STRUCT, UNIT_BYTES
from cenote.v1 import master_pb2 as pb

from .grants import Grant
from .seal_rows import alike_rows

__all__ = ["SPARE_BYTES_MAX", "SpareRun", "Spares", "common_length", "lie_back_to_back"]

SPARE_BYTES_MAX: Final = 64 << 10
"""Of one object. With larger ones the payload takes so long that a request less is little."""
AHEAD_BYTES_MAX: Final = 4 << 20
AHEAD_COUNT_MAX: Final = 4096
_SIZES_MAX: Final = 4
_ASK_FIRST: Final = 16
_BATCHES_AHEAD: Final = 8
_CREDIT_MAX: Final = 64
_EXISTED_COSTS: Final = 4
"""As many puts must be stored before one that found its key there is made good."""
_CREDIT_MIN: Final = -16
_AFTER_REFUSED: Final = -256
IDLE_S: Final = 1.0


@final
class SpareGrant:
    """One grant of spare extents, all in one segment."""

    __slots__ = (
        "_packed",
        "_rows",
        "_rows_of",
        "commit_head",
        "epoch",
        "extents",
        "grant_id",
        "home",
        "joined",
        "segment",
        "session_id",
        "units",
    )

    def __init__(
        self, reply: pb.PutStartResponse, session_id: bytes, home: tuple[int, int]
    ) -> None:
        """`home`: the namespace's id and generation."""
        self._packed = reply.spare_extents
        self.extents: NDArray[np.void] = np.frombuffer(self._packed, EXTENT)
        self.grant_id = reply.spare_grant_id
        self.epoch = reply.epoch
        self.session_id = session_id
        self.home = home
        self.units = units_of(int(self.extents["length"][0]))
        self.segment = int(self.extents["segment"][0])
        self.joined = lie_back_to_back(self.extents["offset"], self.units * UNIT_BYTES)
        self._rows_of = 0, 0, 0
        self._rows: NDArray[np.void] | None = None
        head = pb.PutCommitRequest(grant_id=self.grant_id, session_id=session_id, epoch=self.epoch)
        self.commit_head = head.SerializeToString()
        """What all commits of these extents say."""

    def seal_rows(self, length: int, size: int, key_length: int) -> NDArray[np.void]:
        """A SEAL row for each of the extents, for objects that are alike; see `alike_rows`."""
        wanted, rows = (length, size, key_length), self._rows
        if rows is None or self._rows_of != wanted:
            rows = alike_rows(self.extents, length, size, key_length)
            self._rows, self._rows_of = rows, wanted
        return rows

    def extent(self, position: int) -> tuple[int, int, int, int]:
        """(segment, slot, offset, length)."""
        return EXTENT_STRUCT.unpack_from(self._packed, position * EXTENT_STRUCT.size)


@final
class SpareRun:
    """Neighbouring extents of a grant that nobody else will use."""

    __slots__ = ("grant", "start", "stop")

    def __init__(self, grant: SpareGrant, start: int, stop: int) -> None:
        self.grant = grant
        self.start = start
        self.stop = stop

    def as_grant(self) -> Grant:
        """What is to be given back if it is not committed."""
        indexes = np.arange(self.start, self.stop, dtype="<u4").tobytes()
        return Grant(self.grant.grant_id, self.grant.session_id, indexes=indexes)


def units_of(length: int) -> int:
    return -(-length // UNIT_BYTES)


def lie_back_to_back(offsets: NDArray[np.uint64], length: int) -> bool:
    """Whether extents of so many bytes each begin in the unit after the one before them."""
    stride = np.uint64(units_of(length) * UNIT_BYTES)
    return not np.count_nonzero(offsets[1:] - offsets[:-1] != stride)


def common_length(lengths: NDArray[np.int64]) -> int:
    """Bytes of each object, with what its key adds, if spares are for such and all need as much
    space; else 0."""
    length = int(lengths[0])
    most = units_of(length) * UNIT_BYTES
    if length > SPARE_BYTES_MAX or (
        np.count_nonzero(lengths != length)
        and (int(lengths.max()) > most or int(lengths.min()) <= most - UNIT_BYTES)
    ):
        return 0
    return length


@final
class Spares:
    """Of one namespace."""

    __slots__ = ("_ask", "_credit", "_runs", "_stored_s", "_used_s", "unwanted")

    credit_needed: ClassVar[int] = 8
    """Puts that are stored before any are asked for."""

    def __init__(self) -> None:
        self._runs: dict[int, deque[SpareRun]] = {}  # by units
        self._credit = 0
        self._ask = _ASK_FIRST
        self._stored_s = 0.0
        self._used_s: dict[int, float] = {}  # by units
        self.unwanted: deque[SpareRun] = deque()
        """To be given back."""

    # ---- whether it pays ---------------------------------------------------------------------

    def note_stored(self, count: int, now_s: float) -> None:
        """So many objects were stored just now."""
        if now_s - self._stored_s > IDLE_S:
            self._credit = min(self._credit, 0)
        self._stored_s = now_s
        if self._credit < _CREDIT_MAX:
            self._credit += count

    def note_existed(self) -> None:
        """A key was there already."""
        least = min(self._credit, _CREDIT_MIN)  # a refusal counts for longer
        self._credit = max(min(self._credit, _CREDIT_MAX) - _EXISTED_COSTS, least)

    def wanted(self, units: int, count: int) -> int:
        """How many to ask for, by a put of `count` objects of so many units; 0: none."""
        if self._credit < self.credit_needed or units * UNIT_BYTES > SPARE_BYTES_MAX:
            return 0
        if units not in self._runs and len(self._runs) >= _SIZES_MAX:
            self._put_off(min(list(self._runs), default=0))
        most = min(AHEAD_COUNT_MAX, AHEAD_BYTES_MAX // (units * UNIT_BYTES))
        ask = min(max(self._ask, _BATCHES_AHEAD * count if count > 1 else 0), most)
        return ask if ask >= count else 0

    # ---- taking and giving -------------------------------------------------------------------

    def add(self, grant: SpareGrant | None, count: int, now_s: float) -> None:
        """What the master granted to a put of `count` objects; None: it had none to spare."""
        if grant is None or len(grant.extents) < count:
            self._credit = _AFTER_REFUSED
            if grant is not None:  # too few for the next batch: to ask again would be in vain
                self.unwanted.append(SpareRun(grant, 0, len(grant.extents)))
            return
        units = grant.units
        self._ask = min(2 * self._ask, AHEAD_COUNT_MAX)
        runs = self._runs.setdefault(units, deque())
        runs.append(SpareRun(grant, 0, len(grant.extents)))
        self._used_s[units] = now_s
        if self._runs.get(units) is not runs:  # given up by another thread meanwhile
            self._move(runs)

    def take(
        self,
        units: int,
        count: int,
        epoch: int,
        session_id: bytes,
        home: tuple[int, int],
        now_s: float,
    ) -> SpareRun | None:
        """`count` neighbours of so many units, of this epoch, session and namespace."""
        runs = self._runs.get(units)
        if not runs or self._credit < 0:
            return None
        if now_s - self._used_s.get(units, 0.0) > IDLE_S:
            self._put_off(units)
            return None
        while True:
            try:
                run = runs.pop()
            except IndexError:
                return None
            grant = run.grant
            start = run.start
            if (
                run.stop - start < count
                or grant.epoch != epoch
                or grant.session_id != session_id
                or grant.home != home
            ):
                self.unwanted.append(run)
                continue
            stop = start + count
            if stop < run.stop:
                runs.append(SpareRun(grant, stop, run.stop))
                run.stop = stop
                if self._runs.get(units) is not runs:  # given up by another thread meanwhile
                    self._move(runs)
            self._used_s[units] = now_s
            return run

    def _put_off(self, units: int) -> None:
        runs = self._runs.pop(units, None)
        self._used_s.pop(units, None)
        if runs is not None:
            self._move(runs)

    def _move(self, runs: deque[SpareRun]) -> None:
        with suppress(IndexError):
            while True:
                self.unwanted.append(runs.pop())

    def give_up(self) -> None:
        """Use none of them: something went wrong with one."""
        for units in list(self._runs):
            self._put_off(units)
        self._ask = _ASK_FIRST

    # ---- housekeeping ------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether there is anything to look after."""
        return bool(self._runs or self.unwanted)

    def take_idle(self, now_s: float) -> list[SpareRun]:
        """What is to be given back now."""
        if self._runs:
            for units in list(self._runs):
                if now_s - self._used_s.get(units, 0.0) > IDLE_S:
                    self._put_off(units)
            if not self._runs:
                self._ask = _ASK_FIRST
                self._credit = min(self._credit, 0)
        return self._take_unwanted()

    def take_all(self) -> list[SpareRun]:
        """All that is here, to be given back."""
        self.give_up()
        return self._take_unwanted()

    def _take_unwanted(self) -> list[SpareRun]:
        found: list[SpareRun] = []
        with suppress(IndexError):  # threads may take some each
            while True:
                found.append(self.unwanted.popleft())
        return found
