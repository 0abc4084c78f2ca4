"""Puts and gets of what lies on GPUs.

Straight, where a NIC reaches that memory and a lease proves what it put there (`read_direct`). Else
in turns, each as much as fits into one staging area:

    put     copy turn 0 │ put turn 0, copy turn 1 │ put turn 1, copy turn 2 │ ...
    get     get turn 0 │ copy turn 0, get turn 1 │ copy turn 1, get turn 2 │ ...

The bytes of a put always pass the host: the checksum that proves every later read is taken there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    BufferInUse,
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    NamespaceReset,
)
from cenote.api.rows import DIGEST_BYTES
from cenote.api.types import GetStatus

from .counters import LOOKUP, READ
from .device_rows import Devices, rows_of, staged_pieces, turns_of
from .options import PutOptions
from .outcomes import PutOutcome
from .pieces import Pieces
from .reads import ReadOptions, ReadOutcome, read_direct, read_objects
from .state import Call
from .steps import CopyBegin, CopyWait, Plan, StagingAreas, TakeAreas
from .writes import put_objects

__all__ = ["get_to_devices", "put_from_devices"]

T = TypeVar("T")
U64 = NDArray[np.uint64]


def put_from_devices(
    call: Call,
    keys: Sequence[bytes],
    digests: bytes,
    pieces: Pieces,
    options: PutOptions,
    area_bytes: int,
    *,
    prefix: bytes = b"",
) -> Plan[PutOutcome]:
    """As `put_objects`, from memory of which some lies on GPUs. Raises InvalidBuffer, too."""
    count = len(keys)
    outcome = PutOutcome.blank(count)
    turns = turns_of(pieces.totals(), area_bytes)
    areas = yield TakeAreas(min(2, len(turns)), _left_s(call))
    try:
        yield from _begin(areas, 0, turns, pieces)
        for turn, (first, last) in enumerate(turns):
            yield CopyWait(areas, turn, _left_s(call))
            ahead = len(areas) > 1 and turn + 1 < len(turns)
            if ahead:
                yield from _begin(areas, turn + 1, turns, pieces)
            before = digests[: first * DIGEST_BYTES] if prefix or options.chain else b""
            try:
                part = yield from _in_area(
                    areas,
                    put_objects(
                        call,
                        keys[first:last],
                        digests[first * DIGEST_BYTES : last * DIGEST_BYTES],
                        staged_pieces(pieces.totals()[first:last], areas.address(turn), areas),
                        options,
                        prefix=prefix + before,
                    ),
                )
            except (BufferInUse, ClientClosed, NamespaceReset):
                raise
            except CenoteError as error:
                if not first:
                    raise
                outcome.fail(np.arange(first, count), error)
                call.space.counters.failed += count - first
                break
            outcome.statuses[first:last] = part.statuses
            outcome.sameness[first:last] = part.sameness
            outcome.codes[first:last] = part.codes
            outcome.errors = {**part.errors, **outcome.errors}
            if not ahead and turn + 1 < len(turns):
                yield from _begin(areas, turn + 1, turns, pieces)
        return outcome
    finally:
        areas.close()


def get_to_devices(
    call: Call, digests: bytes, pieces: Pieces, options: ReadOptions, area_bytes: int
) -> Plan[ReadOutcome]:
    """As `read_objects`, into memory of which some lies on GPUs. Raises InvalidBuffer, too."""
    if options.verify != "checksum" and pieces.devices is not None and pieces.devices.direct:
        found = yield from read_direct(call, digests, pieces, options)
        if found is not None:
            return found
    count = len(pieces)
    outcome = ReadOutcome.blank(count, values=False)
    sizes = pieces.totals()
    turns = turns_of(sizes, area_bytes)
    areas = yield TakeAreas(min(2, len(turns)), _left_s(call))
    try:
        for turn, (first, last) in enumerate(turns):
            yield CopyWait(areas, turn, _left_s(call))  # of the turn that had this area before
            staged = staged_pieces(sizes[first:last], areas.address(turn), areas)
            try:
                mine = digests[first * DIGEST_BYTES : last * DIGEST_BYTES]
                part = yield from _in_area(areas, read_objects(call, mine, staged, options))
            except (BufferInUse, ClientClosed, NamespaceReset):
                raise
            except CenoteError as error:
                if not first:
                    raise
                outcome.fail(np.arange(first, count), error, LOOKUP)
                call.space.counters.failed += count - first
                call.space.counters.fail(READ, LOOKUP, error, count - last)  # others are counted
                break
            outcome.statuses[first:last] = part.statuses
            outcome.sizes[first:last] = part.sizes
            outcome.codes[first:last] = part.codes
            outcome.errors = {**part.errors, **outcome.errors}
            hits = np.flatnonzero(part.statuses == GetStatus.HIT)
            rows = rows_of(pieces, _devices(pieces), hits + first, staged, first, part.sizes[hits])
            if len(rows):
                yield CopyBegin(areas, turn, rows, pieces.keepers, to_host=False)
            if options.chain and (part.statuses == GetStatus.MISS).any():
                call.space.counters.misses += count - last
                break
        yield from _all_copied(call, areas)
        return outcome
    except CenoteError:  # nothing may be written into the caller's memory when it hears of it
        yield from _all_copied(call, areas)
        raise
    finally:
        areas.close()


def _all_copied(call: Call, areas: StagingAreas) -> Plan[None]:
    for turn in range(len(areas)):
        yield CopyWait(areas, turn, _left_s(call))


def _begin(
    areas: StagingAreas, turn: int, turns: Sequence[tuple[int, int]], pieces: Pieces
) -> Plan[None]:
    """Begin to copy a turn from the devices."""
    first, last = turns[turn]
    sizes: U64 = pieces.totals()[first:last]
    staged = staged_pieces(sizes, areas.address(turn), None)
    rows = rows_of(pieces, _devices(pieces), np.arange(first, last), staged, first, sizes)
    yield CopyBegin(areas, turn, rows, pieces.keepers, to_host=True)


def _devices(pieces: Pieces) -> Devices:
    assert pieces.devices is not None
    return pieces.devices


def _in_area(areas: StagingAreas, plan: Plan[T]) -> Plan[T]:
    """A plan over staging memory. What a transport does not let go of is ours, not the caller's."""
    try:
        return (yield from plan)
    except BufferInUse as error:
        areas.lost = True
        raise DeadlineExceeded(
            f"the transfer did not end before the deadline: {error.message}"
        ) from error


def _left_s(call: Call) -> float:
    return max(0.001, call.remaining_s())
