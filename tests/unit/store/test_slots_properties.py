"""The slot table against a dict that does the same naively, and torn records of every kind."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from cenote.api.errors import InvalidArgument, StaleLocation, Unavailable
from cenote.api.rows import KEY_INLINE_BYTES
from cenote.store import slots as slots_module
from cenote.store.slot_format import SLOT_BYTES
from slot_rows import Sealed, refs, seal, seal_arguments, table

SLOTS = 12
DATA_BYTES = 1 << 13
UNIT = 64


def in_columns() -> AbstractContextManager[object]:
    """Seal small batches the way of large ones."""
    return patch.object(slots_module, "ONE_BY_ONE_ROWS_MAX", 0)


KEYS = st.one_of(st.binary(min_size=1, max_size=66), st.binary(min_size=500, max_size=512))


@st.composite
def sealed_rows(draw: st.DrawFn) -> Sealed:
    """A row that is sound, but for its slot number, which may lie beyond the table."""
    key = draw(KEYS)
    slot = draw(st.integers(0, SLOTS + 2))
    return Sealed(
        slot=slot,
        seq=draw(st.integers(0, 4)),
        # Its own place in the data, so that a long key's bytes stay what they were.
        offset=(slot % SLOTS) * 640,
        length=draw(st.integers(len(key), 640)),
        key=key,
        checksum=draw(st.integers(0, (1 << 64) - 1)),
        object_size=draw(st.integers(1, 1 << 50)),
        digest=draw(st.binary(min_size=16, max_size=16)),
        replica=draw(st.integers(0, 255)),
    )


@st.composite
def runs(draw: st.DrawFn) -> list[Sealed]:
    """Rows that are alike, of slots that follow each other, as clients send them."""
    length = draw(st.integers(1, 66))
    first = draw(st.integers(0, SLOTS))
    size, replica = draw(st.integers(1, 1 << 50)), draw(st.integers(0, 255))
    rows = []
    for slot in range(first, draw(st.integers(first + 1, SLOTS + 2))):
        key = draw(st.binary(min_size=length, max_size=length))
        checksum = draw(st.integers(0, (1 << 64) - 1))
        digest = draw(st.binary(min_size=16, max_size=16))
        place = {"slot": slot, "seq": draw(st.integers(0, 4)), "offset": (slot % SLOTS) * 640}
        rows.append(
            Sealed(
                **place,
                length=length + 1,
                key=key,
                checksum=checksum,
                object_size=size,
                digest=digest,
                replica=replica,
            )
        )
    return rows


class SlotTableMachine(RuleBasedStateMachine):
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.table, self.memory, self.data = table(SLOTS, DATA_BYTES)
        # slot -> (version, row or None where cleared)
        self.model: dict[int, tuple[tuple[int, int], Sealed | None]] = {}

    @rule(target=batches, rows=st.lists(sealed_rows(), min_size=1, max_size=6))
    def make_batch(self, rows: list[Sealed]) -> list[Sealed]:
        return rows

    @rule(target=batches, rows=runs())
    def make_run(self, rows: list[Sealed]) -> list[Sealed]:
        return rows

    @rule(rows=batches, epoch=st.integers(1, 3), columns=st.booleans())
    def seal(self, rows: list[Sealed], epoch: int, columns: bool) -> None:
        expected = []
        for row in rows:
            version = (epoch, row.seq)
            held, holder = self.model.get(row.slot, ((0, 0), None))
            if row.slot >= SLOTS:
                expected.append(Unavailable.code)
            elif version > held:
                self.model[row.slot] = (version, row)
                expected.append(0)
            else:
                expected.append(0 if version == held and holder else StaleLocation.code)
        with in_columns() if columns else nullcontext():
            before = bytes(self.data)
            assert seal(self.table, *rows, epoch=epoch) == expected
            assert self.data == before
        for _, row in self.sealed().values():
            if len(row.key) > KEY_INLINE_BYTES:  # as its writer had done it
                end = row.offset + row.length
                self.data[end - len(row.key) : end] = row.key

    @rule(
        slots=st.lists(
            st.tuples(st.integers(0, SLOTS + 1), st.integers(1, 3), st.integers(0, 4)), max_size=8
        )
    )
    def clear(self, slots: list[tuple[int, int, int]]) -> None:
        cleared = set()
        for slot, epoch, seq in slots:
            held, holder = self.model.get(slot, ((0, 0), None))
            if held == (epoch, seq) and holder:
                self.model[slot] = (held, None)
                cleared.add(slot)
        assert self.table.clear(refs(*slots)) == len(cleared)

    @rule()
    def restart(self) -> None:
        self.table, _, _ = table(memory=self.memory)
        self.table._data = memoryview(self.data)
        assert self.table.recover() == len(self.sealed())

    def sealed(self) -> dict[int, tuple[tuple[int, int], Sealed]]:
        return {s: (version, row) for s, (version, row) in self.model.items() if row}

    @invariant()
    def the_inventory_is_the_model(self) -> None:
        found = {int(row["slot"]): row for part in self.table.inventory(0) for row in part}
        sealed = self.sealed()
        assert set(found) == set(sealed)
        assert self.table.sealed == len(sealed)
        assert self.table.broken == 0
        for slot, (version, row) in sealed.items():
            assert (found[slot]["epoch"], found[slot]["seq"]) == version
            assert (found[slot]["offset"], found[slot]["length"]) == (row.offset, row.length)
            assert found[slot]["checksum"] == row.checksum
            assert found[slot]["digest"].tobytes() == row.digest

    @invariant()
    def the_keys_are_the_models(self) -> None:
        listed = list(self.table.list_keys(5, 3, b"", SLOTS))
        sealed = [row for _, (_, row) in sorted(self.sealed().items())]
        assert [entry.digest for entry in listed] == [row.digest for row in sealed]
        assert [entry.key for entry in listed] == [row.key for row in sealed]


SlotTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestSlotTable = SlotTableMachine.TestCase


def any_row(draw: st.DrawFn) -> Sealed:
    """A row that is more likely wrong than not."""
    sound = draw(sealed_rows())
    small = st.integers(0, 3)
    wrong: dict[str, st.SearchStrategy[Any]] = {
        "offset": st.integers(0, (1 << 64) - 1) | st.sampled_from([0, 63, DATA_BYTES - 64]),
        "length": st.integers(0, (1 << 64) - 1) | st.integers(0, DATA_BYTES),
        "object_size": small,
        "extent_index": small,
        "extent_count": small | st.integers(60, 70),
        "shard_index": small,
        "shard_count": small,
        "key": st.binary(max_size=520),
    }
    names = draw(st.lists(st.sampled_from(sorted(wrong)), max_size=2, unique=True))
    changes: dict[str, Any] = {name: draw(wrong[name]) for name in names}
    return replace(sound, **changes)


def any_run(draw: st.DrawFn) -> list[Sealed]:
    """Rows that are alike and of slots that follow each other; more likely wrong than not."""
    first, count = draw(st.composite(any_row)()), draw(st.integers(2, 6))
    return [replace(first, slot=first.slot + i, seq=first.seq + i) for i in range(count)]


BATCHES = st.lists(st.composite(any_row)(), min_size=2, max_size=8) | st.composite(any_run)()


@given(rows=BATCHES, epoch=st.integers(1, 2))
def test_a_batch_does_what_its_rows_do_one_by_one(rows: list[Sealed], epoch: int) -> None:
    together, memory, data = table(SLOTS, DATA_BYTES)
    apart, memory_apart, data_apart = table(SLOTS, DATA_BYTES)
    with in_columns():
        statuses = seal(together, *rows, epoch=epoch)
    assert statuses == [seal(apart, row, epoch=epoch)[0] for row in rows]
    assert set(statuses) <= {0, StaleLocation.code, Unavailable.code, InvalidArgument.code}
    assert memory == memory_apart
    assert data == data_apart
    assert (together.sealed, together.seals) == (apart.sealed, apart.seals)


@given(
    row=sealed_rows().filter(lambda row: row.slot < SLOTS),
    older=st.none() | sealed_rows(),
    first=st.integers(0, SLOT_BYTES - 1),
    length=st.integers(1, SLOT_BYTES),
)
def test_a_record_that_was_written_in_part_never_counts(
    row: Sealed, older: Sealed | None, first: int, length: int
) -> None:
    """Any range of the record still as it was before: free, or an older record of the slot."""
    target, memory, _ = table(SLOTS, DATA_BYTES)
    at = row.slot * SLOT_BYTES
    if older is not None:
        seal(target, replace(older, slot=row.slot), epoch=1)
    before = bytes(memory[at : at + SLOT_BYTES])
    assert seal(target, row, epoch=2) == [0]
    after = bytes(memory[at : at + SLOT_BYTES])
    end = min(first + length, SLOT_BYTES)
    torn = after[:first] + before[first:end] + after[end:]
    memory[at : at + SLOT_BYTES] = torn
    again, _, _ = table(memory=memory)
    survivors = again.recover()
    if torn in (before, after):
        assert again.broken == 0
        assert survivors == (1 if torn == after or older is not None else 0)
    else:
        assert (survivors, again.broken) == (0, 1)


@given(noise=st.binary(min_size=1, max_size=2 * SLOT_BYTES), at=st.integers(0, 3 * SLOT_BYTES))
def test_noise_over_the_table_leaves_whole_records_only(noise: bytes, at: int) -> None:
    target, memory, _ = table(5)
    assert seal(target, *(Sealed(i, key=b"%d" % i) for i in range(5))) == [0] * 5
    before = bytes(memory)
    memory[at : at + len(noise)] = noise
    records = np.frombuffer(memory, f"V{SLOT_BYTES}")
    zeroed = sum(not any(record.tobytes()) for record in records)  # by noise that is all zero
    again, _, _ = table(memory=memory)
    again.recover()
    for part in again.inventory(0):
        for slot in part["slot"].tolist():
            record = slice(slot * SLOT_BYTES, (slot + 1) * SLOT_BYTES)
            assert memory[record] == before[record]
    assert again.sealed + again.broken + zeroed == 5


def test_rows_of_a_part_of_a_message_are_sealed_like_a_whole() -> None:
    """The server passes selections of one batch, whose keys are no longer back to back."""
    rows = [Sealed(i, key=bytes([65 + i]) * (i + 1)) for i in range(6)]
    packed, keys, starts = seal_arguments(rows)
    target, _, _ = table()
    picked = np.array([4, 1, 3])
    assert target.seal(1, 5, 3, packed[picked], keys, starts[picked]).tolist() == [0, 0, 0]
    with in_columns():
        assert target.seal(1, 5, 3, packed[::5], keys, starts[::5]).tolist() == [0, 0]
    listed = [entry.key for entry in target.list_keys(5, 3, b"", 9)]
    assert listed == [rows[i].key for i in (0, 1, 3, 4, 5)]
