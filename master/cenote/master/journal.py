"""Durable effects as bytes, and back: the records of the journal and of snapshots. No I/O.

An effect becomes one *entry*, a batch of objects as its columns, so that a batch of 128 commits is
a handful of `tobytes`. Entries are numbered without gaps and gathered into *records* of at most
64 KiB: the unit that a metadata backend writes, and that is whole or not there.

    record: u32 magic | u64 XXH3-64 of all that follows | u32 length of the record | u16 schema
            | u16 flags | u32 epoch | u64 first entry | u64 last entry | u64 durable | entries
    entry:  u8 kind | 3 reserved bytes | u32 length of the payload | payload

`durable` is the last entry that had reached the disk when the record was made. It tells a tail torn
by a power failure (nothing after it was ever promised) from damage to what was promised.

A snapshot consists of the same records with FLAG_SNAPSHOT, its entries numbered from 1, and ends
with a SnapshotEnd that names the last journal entry it covers. docs/internals/journal.md has the
layout of every entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from struct import error as StructError
from typing import Final, NamedTuple, TypeAlias

from xxhash import xxh3_64_intdigest

from cenote.api.errors import InternalError

from .effects import DurableEffect
from .journal_decode import Merger
from .journal_encode import encode_entry, split_entry
from .journal_layout import (
    END,
    KIND_SNAPSHOT_END,
    PAYLOAD_BYTES_MAX,
    Entry,
    JournalCorrupt,
    SchemaUnknown,
    SnapshotEnd,
)

__all__ = [
    "ENTRIES_PER_RECORD_MAX",
    "FLAG_SNAPSHOT",
    "HEADER_BYTES",
    "MAGIC_BYTES",
    "RECORD_BYTES_MAX",
    "SCHEMA",
    "Entry",
    "JournalCorrupt",
    "Record",
    "RecordHeader",
    "RecordWriter",
    "SchemaUnknown",
    "SnapshotEnd",
    "entry_range",
    "parse_header",
    "read_entries",
    "snapshot_end",
    "snapshot_records",
    "verify_record",
]

Record: TypeAlias = bytes | memoryview

MAGIC_BYTES: Final = b"cnJ\xf1"
SCHEMA: Final = 1
FLAG_SNAPSHOT: Final = 1
RECORD_BYTES_MAX: Final = 64 << 10

_HEAD: Final = Struct("<4sQ")  # magic, checksum of what follows
_REST: Final = Struct("<IHHIQQQ")  # length, schema, flags, epoch, first, last, durable
_HEADER: Final = Struct("<4sQIHHIQQQ")
HEADER_BYTES: Final = _HEADER.size
_RANGE: Final = Struct("<QQ")  # first, last
_RANGE_OFFSET: Final = 24
_ENTRY: Final = Struct("<B3xI")  # kind, length
_ENTRIES_BYTES_MAX: Final = RECORD_BYTES_MAX - HEADER_BYTES
assert _ENTRIES_BYTES_MAX - _ENTRY.size >= PAYLOAD_BYTES_MAX
ENTRIES_PER_RECORD_MAX: Final = _ENTRIES_BYTES_MAX // _ENTRY.size


class RecordHeader(NamedTuple):
    """A record's header. `length` counts the whole record; `first`..`last` are entry numbers."""

    checksum: int
    length: int
    schema: int
    flags: int
    epoch: int
    first: int
    last: int
    durable: int


# ---- records --------------------------------------------------------------------------------


def parse_header(data: Record, offset: int = 0) -> RecordHeader | None:
    """The header at `offset`, or None where none can be (no magic, impossible numbers).

    A header is credible, not proven: only `verify_record` proves it.
    """
    if len(data) - offset < HEADER_BYTES:
        return None
    magic, *fields = _HEADER.unpack_from(data, offset)
    header = RecordHeader(*fields)
    if (
        magic != MAGIC_BYTES
        or not HEADER_BYTES < header.length <= RECORD_BYTES_MAX
        or not 0 < header.first <= header.last
    ):
        return None
    return header


def entry_range(record: Record) -> tuple[int, int]:
    """(first, last) entry of a whole record."""
    return _RANGE.unpack_from(record, _RANGE_OFFSET)


def verify_record(record: Record) -> RecordHeader:
    """The header of a whole record. Raises JournalCorrupt where its checksum or length is wrong."""
    header = parse_header(record)
    if header is None or header.length != len(record):
        raise JournalCorrupt("no record of a journal")
    if xxh3_64_intdigest(record[_HEAD.size :]) != header.checksum:
        raise JournalCorrupt(f"the checksum of the record of entry {header.first} is wrong")
    if header.schema != SCHEMA:
        raise SchemaUnknown(f"the journal has schema {header.schema}, this release reads {SCHEMA}")
    return header


class RecordWriter:
    """Gathers effects into records.

    `add` encodes at once (the columns may change afterwards), `take` gives the finished records.
    """

    __slots__ = ("_entries", "_first", "_flags", "_full", "_parts", "_size", "epoch")

    def __init__(self, epoch: int, next_entry: int, *, flags: int = 0) -> None:
        self.epoch = epoch
        self._flags = flags
        self._first = next_entry
        self._entries = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._full: list[tuple[int, int, list[bytes]]] = []

    @property
    def last_entry(self) -> int:
        """Number of the newest entry, taken or not."""
        return self._first + self._entries - 1

    def __bool__(self) -> bool:
        return bool(self._parts or self._full)

    @property
    def pending_bytes(self) -> int:
        """About as many bytes as `take` would give."""
        return self._size + len(self._full) * RECORD_BYTES_MAX

    def add(self, effect: Entry) -> None:
        """Append one effect; a batch too large for one record becomes several entries."""
        kind, parts = encode_entry(effect)
        length = sum(map(len, parts))
        if length > PAYLOAD_BYTES_MAX:
            self._add_split(effect)
        elif length:
            self._append(kind, parts, length)

    def _add_split(self, effect: Entry) -> None:
        for piece in split_entry(effect):
            kind, parts = encode_entry(piece)
            length = sum(map(len, parts))
            if length > PAYLOAD_BYTES_MAX:
                raise InternalError(f"{type(effect).__name__} of {length} bytes fits no record")
            self._append(kind, parts, length)

    def _append(self, kind: int, parts: tuple[bytes, ...], length: int) -> None:
        if self._size + length + _ENTRY.size > _ENTRIES_BYTES_MAX:
            self._close()
        self._parts.append(_ENTRY.pack(kind, length))
        self._parts.extend(parts)
        self._size += length + _ENTRY.size
        self._entries += 1

    def take(self, durable: int = 0, *, only_full: bool = False) -> list[bytes]:
        """The records of all that was added since. `durable`: the last entry known to be on disk.

        `only_full`: leave the record under construction for further entries.
        """
        if not only_full:
            self._close()
        full, self._full = self._full, []
        return [self._record(first, last, durable, parts) for first, last, parts in full]

    def _close(self) -> None:
        if self._parts:
            self._full.append((self._first, self.last_entry, self._parts))
            self._first += self._entries
            self._entries = 0
            self._parts = []
            self._size = 0

    def _record(self, first: int, last: int, durable: int, parts: list[bytes]) -> bytes:
        body = b"".join(parts)
        rest = (
            _REST.pack(
                len(body) + HEADER_BYTES, SCHEMA, self._flags, self.epoch, first, last, durable
            )
            + body
        )
        return _HEAD.pack(MAGIC_BYTES, xxh3_64_intdigest(rest)) + rest


def snapshot_records(
    effects: Iterable[DurableEffect], *, covers: int, epoch: int
) -> Iterator[bytes]:
    """The records of a snapshot: `effects`, which stand for journal entries up to `covers`."""
    writer = RecordWriter(epoch, 1, flags=FLAG_SNAPSHOT)
    for effect in effects:
        writer.add(effect)
        yield from writer.take(only_full=True)
    writer.add(SnapshotEnd(covers, epoch))
    yield from writer.take()


# ---- reading --------------------------------------------------------------------------------


def read_entries(records: Iterable[Record], *, verified: bool = False) -> Iterator[Entry]:
    """The effects of `records` in order, neighbours joined where they can be one.

    Where one effect ended and the next began is therefore lost, what came of them is not.
    `verified`: the records went through `verify_record` already. Raises JournalCorrupt.
    """
    merger = Merger()
    add, unpack_entry = merger.add, _ENTRY.unpack_from
    for record in records:
        if not verified:
            verify_record(record)
        view = memoryview(record)
        _, _, end, _, _, _, first, last, _ = _HEADER.unpack_from(view)
        position, entries = HEADER_BYTES, 0
        while position < end:
            try:
                kind, length = unpack_entry(view, position)
            except StructError as error:
                raise JournalCorrupt("a record ends within an entry") from error
            start = position + _ENTRY.size
            position = start + length
            if position > end:
                raise JournalCorrupt("a record ends within an entry")
            done = add(kind, view[start:position])
            if done:
                yield from done
            entries += 1
        if entries != last - first + 1:
            raise JournalCorrupt(f"the record of entries {first} to {last} holds {entries}")
    yield from merger.flush()


def snapshot_end(record: Record) -> SnapshotEnd | None:
    """What a snapshot covers, if `record` is its last one."""
    position = len(record) - END.size - _ENTRY.size
    if position < HEADER_BYTES:
        return None
    kind, length = _ENTRY.unpack_from(record, position)
    if kind != KIND_SNAPSHOT_END or length != END.size:
        return None
    covers, epoch, _ = END.unpack_from(record, position + _ENTRY.size)
    return SnapshotEnd(covers, epoch)
