"""The journal's records: what goes in comes out, and nothing else does."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from xxhash import xxh3_64_intdigest

from cenote.api.errors import InternalError
from cenote.master.commands import EndpointInfo
from cenote.master.effects import (
    PLACED,
    Configured,
    Digested,
    DurableEffect,
    EpochStarted,
    Expires,
    Gone,
    GoneReason,
    NamespaceGone,
    NamespaceOpened,
    NodeDrains,
    NodeKnown,
    NodeServes,
    Pinned,
    QuotaSet,
    ReplicasChanged,
    SegmentGone,
    SegmentKnown,
    SegmentMet,
    SlotsGrown,
    Stored,
)
from cenote.master.journal import (
    FLAG_SNAPSHOT,
    HEADER_BYTES,
    MAGIC_BYTES,
    RECORD_BYTES_MAX,
    SCHEMA,
    Entry,
    JournalCorrupt,
    RecordWriter,
    SchemaUnknown,
    SnapshotEnd,
    parse_header,
    read_entries,
    snapshot_records,
    verify_record,
)
from cenote.master.journal_layout import KIND_POOL, KIND_SERVES, POOL, SERVES

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


def random_columns(seed: int, n: int, extents_max: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, extents_max + 1, n).astype(np.uint16)
    placed = np.zeros(int(counts.sum()), PLACED)
    for name in ("segment", "slot", "offset_units", "length_units"):
        placed[name] = rng.integers(0, 2**32, len(placed), np.uint64)
    placed["replica"] = rng.integers(0, 256, len(placed))
    return {
        "digests": rng.integers(0, 2**64, (n, 2), np.uint64),
        "sizes": rng.integers(0, 2**64, n, np.uint64),
        "checksums": rng.integers(0, 2**64, n, np.uint64),
        "seqs": rng.integers(0, 2**64, n, np.uint64),
        "tails": rng.integers(0, 2**16, n).astype(np.uint16),
        "extent_counts": counts,
        "replicas": rng.integers(0, 2**8, n).astype(np.uint8),
        "placed": placed,
    }


def stored(seed: int, n: int, *, namespace_id: int = 1, extents_max: int = 1) -> Stored:
    return Stored(namespace_id, 2, 3, **random_columns(seed, n, extents_max))


def gone(seed: int, n: int, *, reason: GoneReason = GoneReason.EVICTED) -> Gone:
    columns = random_columns(seed, n, 1)
    return Gone(7, columns["digests"], columns["seqs"], reason)


def expires(seed: int, n: int) -> Expires:
    columns = random_columns(seed, n, 1)
    return Expires(1_700_000_000_000, 60_000, columns["digests"], columns["seqs"])


@st.composite
def batches(draw: DrawFn) -> DurableEffect:
    seed, n = draw(st.integers(0, 1000)), draw(st.integers(1, 40))
    columns = random_columns(seed, n, draw(st.sampled_from([1, 3, 64])))
    match draw(st.integers(0, 5)):
        case 0:
            return Stored(draw(st.integers(1, 2)), 1, draw(st.integers(1, 2)), **columns)
        case 1:
            reason = draw(st.sampled_from(GoneReason))
            return Gone(draw(st.integers(1, 2)), columns["digests"], columns["seqs"], reason)
        case 2:
            names = ("digests", "seqs", "extent_counts", "replicas", "placed")
            return ReplicasChanged(**{name: columns[name] for name in names})
        case 3:
            return Expires(draw(U64), 5, columns["digests"], columns["seqs"])
        case 4:
            return Digested(columns["digests"], columns["seqs"], columns["digests"][::-1].copy())
        case _:
            return Pinned(draw(st.integers(1, 2)), columns["digests"], draw(st.booleans()), 5)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN = st.one_of(
    st.builds(NamespaceOpened, TEXT, U32, U32, st.binary(max_size=50), U64, U32),
    st.builds(QuotaSet, U32, U64, U64, U64, U32),
    st.builds(NodeKnown, U32, st.binary(min_size=16, max_size=16), TEXT, TEXT, TEXT),
    st.builds(
        NodeServes,
        U32,
        st.lists(st.builds(EndpointInfo, U32, TEXT, st.binary(max_size=20)), max_size=4),
    ),
    st.builds(SegmentKnown, U32, U32, U32, U32, st.binary(max_size=16), U64, U32, U32),
    st.builds(SlotsGrown, U32, U32, U32, U32),
    st.builds(SegmentMet, U32, U32),
    st.builds(NodeDrains, U32, st.booleans(), U64),
    st.builds(NamespaceGone, U32),
    st.builds(Configured, st.dictionaries(TEXT, st.floats(allow_nan=False), max_size=4)),
    st.builds(SegmentGone, U32),
    st.builds(EpochStarted, U32, U64),
    st.builds(SnapshotEnd, U64, U32),
)


def flattened(entries: Iterable[Entry]) -> list[object]:
    """Batches taken apart object by object: comparable however they were split and joined."""
    items: list[object] = []
    for entry in entries:
        if not isinstance(entry, Stored | Gone | ReplicasChanged | Pinned | Expires | Digested):
            items.append(dataclasses.astuple(entry))
            continue
        scalars, rows, extents = [], [], None
        for field in dataclasses.fields(entry):
            value = getattr(entry, field.name)
            if field.name == "placed":
                extents = iter(value.tolist())
            elif isinstance(value, np.ndarray):
                rows.append(value.tolist())
            else:
                scalars.append(value)
        for row in zip(*rows, strict=True):
            item = [type(entry), *scalars, *row]
            if extents is not None:
                count = row[2 if isinstance(entry, ReplicasChanged) else 5]
                item.append([next(extents) for _ in range(count)])
            items.append(item)
        assert extents is None or next(extents, None) is None
    return items


def records_of(effects: Iterable[Entry], *, each: bool = False) -> list[bytes]:
    writer, records = RecordWriter(3, 1), []
    for effect in effects:
        writer.add(effect)
        if each:
            records += writer.take()
    return records + writer.take()


@settings(deadline=None)
@given(st.lists(st.one_of(batches(), PLAIN), max_size=12), st.booleans())
def test_effects_survive_the_round_trip(effects: list[Entry], each: bool) -> None:
    records = records_of(effects, each=each)
    assert flattened(read_entries(records)) == flattened(effects)
    next_entry = 1
    for record in records:
        header = verify_record(record)
        assert (header.first, header.epoch) == (next_entry, 3)
        assert len(record) <= RECORD_BYTES_MAX
        next_entry = header.last + 1


@pytest.mark.parametrize(
    "effect",
    [
        stored(1, 16_384),
        stored(2, 300, extents_max=64),
        gone(3, 10_000),
        Pinned(1, random_columns(4, 9000, 1)["digests"], True, 0),
        expires(5, 9000),
    ],
)
def test_a_batch_too_large_for_a_record_is_split(effect: DurableEffect) -> None:
    records = records_of([effect])
    assert len(records) > 1
    assert max(map(len, records)) <= RECORD_BYTES_MAX
    assert min(map(len, records[:-1])) > 0.95 * RECORD_BYTES_MAX
    assert flattened(read_entries(records)) == flattened([effect])


def test_single_puts_are_joined_again() -> None:
    effects = [stored(seed, 1) for seed in range(500)]
    joined = list(read_entries(records_of(effects, each=True)))
    assert [type(entry) for entry in joined] == [Stored]
    assert flattened(joined) == flattened(effects)


def test_joining_keeps_the_order_of_different_effects() -> None:
    effects: list[Entry] = [stored(1, 1), gone(1, 1), stored(2, 1), stored(3, 2), stored(4, 1)]
    effects += [stored(5, 1, namespace_id=2), gone(2, 1), gone(3, 1, reason=GoneReason.REMOVED)]
    joined = list(read_entries(records_of(effects)))
    assert [type(entry) for entry in joined] == [Stored, Gone, Stored, Stored, Gone, Gone]
    assert flattened(joined) == flattened(effects)


def test_empty_batches_leave_no_entry() -> None:
    writer = RecordWriter(1, 1)
    for effect in (stored(1, 0), gone(1, 0)):
        writer.add(effect)
    assert not writer
    assert writer.take() == []
    assert writer.last_entry == 0


def test_columns_of_the_wrong_type_are_refused() -> None:
    effect = stored(1, 3)
    effect.tails = effect.tails.astype(np.uint32)
    with pytest.raises(InternalError, match="Stored"):
        RecordWriter(1, 1).add(effect)


def test_an_object_that_fits_no_record_is_refused() -> None:
    columns = random_columns(1, 1, 1)
    columns["extent_counts"][0] = 5000
    columns["placed"] = np.zeros(5000, PLACED)
    with pytest.raises(InternalError, match="fits no record"):
        RecordWriter(1, 1).add(Stored(1, 1, 1, **columns))


def test_writer_numbers_go_on_over_takes() -> None:
    writer = RecordWriter(9, 41)
    writer.add(SegmentGone(1))
    writer.add(SegmentGone(2))
    (one,) = writer.take(durable=17)
    writer.add(SegmentGone(3))
    assert writer
    (two,) = writer.take(durable=42)
    headers = [verify_record(record) for record in (one, two)]
    assert [(h.first, h.last, h.durable, h.epoch) for h in headers] == [
        (41, 42, 17, 9),
        (43, 43, 42, 9),
    ]
    assert writer.last_entry == 43


def test_snapshot_ends_with_what_it_covers() -> None:
    effects = [stored(seed, 2000) for seed in range(3)]
    records = list(snapshot_records(effects, covers=77, epoch=4))
    entries = list(read_entries(records))
    assert entries[-1] == SnapshotEnd(77, 4)
    assert flattened(entries[:-1]) == flattened(effects)
    assert all(verify_record(record).flags == FLAG_SNAPSHOT for record in records)


@given(st.data())
def test_a_changed_or_cut_record_is_refused(data: st.DataObject) -> None:
    (record,) = records_of([stored(1, 5)])
    position = data.draw(st.integers(0, len(record) - 1))
    if data.draw(st.booleans()):
        broken = record[:position]
    else:
        flipped = record[position] ^ (1 << data.draw(st.integers(0, 7)))
        broken = record[:position] + bytes([flipped]) + record[position + 1 :]
    with pytest.raises(JournalCorrupt):
        list(read_entries([broken]))


def sealed(entries: bytes, count: int, *, schema: int = SCHEMA) -> bytes:
    """A record with a right checksum around `entries`."""
    length = HEADER_BYTES + len(entries)
    rest = struct.pack("<IHHIQQQ", length, schema, 0, 1, 1, count, 0) + entries
    return MAGIC_BYTES + struct.pack("<Q", xxh3_64_intdigest(rest)) + rest


@given(st.binary(max_size=300), st.integers(1, 3))
def test_garbage_under_a_right_checksum_is_refused_or_read(entries: bytes, count: int) -> None:
    try:
        list(read_entries([sealed(entries, count)]))
    except JournalCorrupt as error:
        assert error.remedy  # noqa: PT017 - most inputs raise, none may raise anything else


@given(st.integers(0, 255), st.binary(max_size=200))
def test_a_garbled_entry_is_refused_or_read(kind: int, payload: bytes) -> None:
    entry = struct.pack("<B3xI", kind, len(payload)) + payload
    try:
        list(read_entries([sealed(entry, 1)]))
    except JournalCorrupt as error:
        assert error.remedy  # noqa: PT017


@given(st.integers(0, 2**20), st.sampled_from([1, 2, 3, 9]), st.data())
def test_a_garbled_batch_is_refused_or_read(seed: int, kind: int, data: st.DataObject) -> None:
    (record,) = records_of([stored(seed, 2)])
    body = bytearray(record[HEADER_BYTES:])
    body[0] = kind
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(8, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        list(read_entries([sealed(bytes(body), 1)]))
    except JournalCorrupt as error:
        assert error.remedy  # noqa: PT017


def test_a_newer_schema_names_the_remedy() -> None:
    with pytest.raises(SchemaUnknown, match="schema 2") as caught:
        verify_record(sealed(b"12345678", 1, schema=2))
    assert "release" in caught.value.remedy


def test_a_record_that_lacks_entries_is_refused() -> None:
    (record,) = records_of([SegmentGone(1)])
    with pytest.raises(JournalCorrupt, match="holds 1"):
        list(read_entries([sealed(record[HEADER_BYTES:], 2)]))


@given(st.binary(max_size=HEADER_BYTES + 20))
def test_parse_header_takes_any_bytes(data: bytes) -> None:
    header = parse_header(data)
    assert header is None or data.startswith(MAGIC_BYTES)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        # A pool whose 4 billion ancestors have no bytes each, or 64 KiB each.
        (KIND_POOL, POOL.pack(0, 0, 0, 2**32 - 1)),
        (KIND_POOL, POOL.pack(0, 0, 0xFFFF, 2**32 - 1)),
        # A node that serves at no place, and bytes behind that.
        (KIND_SERVES, SERVES.pack(1, 0) + b"more"),
    ],
)
def test_impossible_numbers_cost_neither_memory_nor_time(kind: int, payload: bytes) -> None:
    with pytest.raises(JournalCorrupt):
        list(read_entries([sealed(struct.pack("<B3xI", kind, len(payload)) + payload, 1)]))


def test_an_entry_of_a_later_release_is_no_damage() -> None:
    """Whoever goes back a release must not be told to move the journal away."""
    unknown = struct.pack("<B3xI", 254, 4) + b"more"
    with pytest.raises(SchemaUnknown, match="kind 254") as caught:
        list(read_entries([sealed(unknown, 1)]))
    assert caught.value.remedy == SchemaUnknown.default_remedy
