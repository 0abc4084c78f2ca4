"""The slot table: what it takes, what it refuses, what it gives back.

Batches of more than a dozen rows go through columns, smaller ones row by row. What counts is tested
both ways: by size where that is natural, else with the fixture `by_rows_or_columns`.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import replace

import numpy as np
import pytest

from cenote.api.errors import InvalidArgument, StaleEpoch, StaleLocation, Unavailable
from cenote.api.rows import KEY_INLINE_BYTES, SEAL, SLOT
from cenote.api.slot_sums import slot_hashes
from cenote.store import slots as slots_module
from cenote.store.ranges import RangeSet
from cenote.store.slot_format import KEY_AT, SLOT_BYTES
from cenote.store.slot_keys import SlotKey
from cenote.store.slots import SlotTable
from slot_rows import Sealed, refs, seal, seal_arguments, table

INVALID, BEYOND, STALE = InvalidArgument.code, Unavailable.code, StaleLocation.code
LONG_KEY = bytes(range(200))


@pytest.fixture(params=["rows", "columns"])
def by_rows_or_columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "columns":
        monkeypatch.setattr(slots_module, "ONE_BY_ONE_ROWS_MAX", 0)


def inventory(target: SlotTable, index: int = 0) -> np.ndarray:
    parts = list(target.inventory(index))
    return np.concatenate(parts) if parts else np.zeros(0, SLOT)


def keys(target: SlotTable, prefix: bytes = b"", limit: int = 100) -> list[bytes]:
    return [entry.key for entry in target.list_keys(5, 3, prefix, limit)]


@pytest.mark.parametrize("others", [0, 15])
def test_everything_that_was_sealed_comes_back(others: int) -> None:
    target, _, _ = table(slots=32)
    row = Sealed(
        slot=19,
        seq=1 << 60,
        offset=640,
        length=77,
        key=b"a" * 64,
        checksum=(1 << 64) - 1,
        object_size=1 << 40,
        extent_index=63,
        extent_count=64,
        shard_index=2,
        shard_count=8,
        replica=3,
        flags=0x81,
    )
    more = [Sealed(slot=i, key=b"b" * (i + 1)) for i in range(others)]
    assert seal(target, row, *more, epoch=4_000_000_000) == [0] * (1 + others)
    (found,) = inventory(target, index=6)[-1:]
    expected = {name: getattr(row, name) for name in SEAL.names or () if hasattr(row, name)}
    expected |= {"epoch": 4_000_000_000, "namespace_id": 5, "generation": 3, "segment_index": 6}
    expected |= {"key_length": 64, "digest": row.digest, "reserved": 0}
    assert {n: found[n].tobytes() if n == "digest" else found[n] for n in expected} == expected
    assert set(expected) == set(SLOT.names or ())
    assert target.sealed == 1 + others


@pytest.mark.usefixtures("by_rows_or_columns")
def test_what_the_master_has_dropped_is_not_sealed() -> None:
    target, _, _ = table()
    assert seal(target, Sealed(1, seq=5), epoch=2) == [0]
    target.hold()
    some = [Sealed(1, seq=5), Sealed(2, seq=9), Sealed(1, seq=4), Sealed(99)]
    assert seal(target, *some, epoch=2) == [0, BEYOND, STALE, BEYOND]
    assert seal(target, Sealed(2, seq=9), epoch=2) == [BEYOND]
    assert target.sealed == 1
    target.admit(2, 6)
    late = [Sealed(2, seq=5), Sealed(3, seq=6), Sealed(4, seq=7), Sealed(1, seq=5)]
    assert seal(target, *late, epoch=2) == [STALE, STALE, 0, 0]
    assert seal(target, Sealed(2, seq=9), epoch=1) == [STALE]
    assert seal(target, Sealed(2, seq=1), epoch=3) == [0]
    assert target.sealed == 3


def test_alike_rows_of_slots_that_follow_each_other_go_as_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also in the epoch in which the table was last offered to a master."""
    target, _, _ = table(slots=100)
    target.hold()
    target.admit(2, 6)
    closer_looks: list[int] = []

    def look_closer(rows: np.ndarray, *rest: object) -> np.ndarray:
        closer_looks.append(len(rows))
        return np.zeros(len(rows), np.bool_)

    monkeypatch.setattr("cenote.store.slots.malformed_rows", look_closer)
    rows = [Sealed(10 + i, seq=7 + i, offset=128 * i) for i in range(20)]
    assert seal(target, *rows, epoch=2) == [0] * 20
    assert not closer_looks
    assert seal(target, *rows, epoch=2) == [0] * 20  # once more
    late = [replace(row, seq=row.seq - 3) for row in rows]
    assert seal(target, *late, epoch=2) == [STALE] * 20
    assert seal(target, *rows[::-1], epoch=3) == [0] * 20
    assert closer_looks == [20] * 3
    assert target.sealed == 20


@pytest.mark.usefixtures("by_rows_or_columns")
def test_only_a_higher_version_replaces() -> None:
    target, _, _ = table()
    assert seal(target, Sealed(1, seq=5, key=b"five"), epoch=2) == [0]
    assert seal(target, Sealed(1, seq=5, key=b"five"), epoch=2) == [0]
    assert seal(target, Sealed(1, seq=4, key=b"four"), epoch=2) == [STALE]
    assert seal(target, Sealed(1, seq=9, key=b"nine"), epoch=1) == [STALE]
    batch = [Sealed(1, seq=4), Sealed(2, seq=1, key=b"two"), Sealed(99)]
    assert seal(target, *batch, epoch=2) == [STALE, 0, BEYOND]
    assert keys(target) == [b"five", b"two"]
    assert seal(target, Sealed(1, seq=1, key=b"new"), Sealed(2, seq=1), epoch=3) == [0, 0]
    assert keys(target) == [b"new", b"key"]
    assert target.sealed == 2


@pytest.mark.usefixtures("by_rows_or_columns")
def test_a_slot_that_stands_twice_in_a_batch_keeps_the_higher_version() -> None:
    target, _, _ = table()
    rows = [Sealed(1, seq=2, key=b"b"), Sealed(1, seq=3, key=b"c"), Sealed(1, seq=1, key=b"a")]
    assert seal(target, *rows) == [0, 0, STALE]
    assert keys(target) == [b"c"]


@pytest.mark.usefixtures("by_rows_or_columns")
@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": 32},
        {"offset": 1 << 16},
        {"offset": (1 << 64) - 64},
        {"length": 0},
        {"length": (1 << 16) + 1},
        {"offset": 64, "length": (1 << 64) - 64},
        {"offset": 64, "length": (1 << 16) - 63},
        {"object_size": 0},
        {"extent_count": 0},
        {"extent_index": 1},
        {"extent_index": 64, "extent_count": 65},
        {"key": b""},
        {"key": b"x" * 513},
        {"shard_index": 1},
        {"shard_index": 2, "shard_count": 2},
        {"offset": 4096, "length": 64},
        {"offset": 3968, "length": 129},
    ],
)
def test_rows_that_cannot_be_right_are_refused_alone(wrong: dict[str, int]) -> None:
    target, memory, data = table()
    target.set_bounds(1 << 16, RangeSet([(4096, 4096)]))
    row = Sealed(3, **wrong)  # type: ignore[arg-type]
    assert seal(target, row) == [INVALID]
    assert not any(memory)
    assert not any(data)
    assert seal(target, Sealed(1), row, Sealed(2)) == [0, INVALID, 0]
    assert seal(target, row, row) == [INVALID, INVALID]
    assert [r["slot"] for r in inventory(target)] == [1, 2]


@pytest.mark.usefixtures("by_rows_or_columns")
def test_key_starts_outside_the_keys_are_refused() -> None:
    target, _, _ = table()
    rows, keys_given, starts = seal_arguments([Sealed(1), Sealed(2), Sealed(3)])
    starts[:] = [-1, 0, 7]
    assert target.seal(1, 5, 3, rows, keys_given, starts).tolist() == [INVALID, 0, INVALID]
    for i, status in enumerate((INVALID, 0, INVALID)):
        one = target.seal(1, 5, 3, rows[i : i + 1], keys_given, starts[i : i + 1])
        assert one.tolist() == [status]


def test_an_empty_batch_and_one_larger_than_is_built_at_once() -> None:
    n = 5000
    target, _, _ = table(slots=n)
    assert seal(target) == []
    assert seal(target, *(Sealed(i, key=b"%d" % i) for i in range(n))) == [0] * n
    assert sorted(keys(target, limit=n)) == sorted(b"%d" % i for i in range(n))


@pytest.mark.usefixtures("by_rows_or_columns")
def test_a_slot_holds_the_first_64_bytes_of_a_long_key() -> None:
    target, memory, _ = table(slots=32)
    texts = [bytes(range(1, n + 1)) for n in (64, 65, 200)] + [b"short", b"\xff" * 63]
    assert seal(target, *(Sealed(i, key=text) for i, text in enumerate(texts))) == [0] * 5
    for i, text in enumerate(texts):
        inline = memory[i * SLOT_BYTES + KEY_AT :][:KEY_INLINE_BYTES]
        assert inline == text[:64].ljust(64, b"\0")
        assert inventory(target)["key_length"][i] == len(text)


@pytest.mark.parametrize("others", [0, 15])
def test_a_long_key_is_listed_from_behind_the_payload_of_the_last_extent(others: int) -> None:
    target, _, data = table(slots=32)
    data[:300] = b"p" * 100 + LONG_KEY
    more = [Sealed(i, offset=8192, key=b"short") for i in range(others)]
    first = Sealed(18, offset=4096, length=64, key=LONG_KEY, extent_count=2)
    last = Sealed(19, length=300, key=LONG_KEY, extent_index=1, extent_count=2)
    spread = Sealed(20, offset=640, length=100, key=b"k" * 101, extent_index=1, extent_count=2)
    assert seal(target, first, last, spread, *more) == [0] * (3 + others)
    assert keys(target, LONG_KEY[:150]) == [LONG_KEY]
    assert [e for e in target.list_keys(5, 3, b"", 99) if not e.key] == [
        SlotKey(b"", spread.digest, 100, 1, 1, 0)
    ]
    data[150] ^= 1  # another object's bytes lie there by now
    assert keys(target, LONG_KEY[:10]) == []
    assert len(keys(target)) == 1 + others


@pytest.mark.usefixtures("by_rows_or_columns")
@pytest.mark.parametrize("key_bytes", [3, 65, 200])
def test_a_late_seal_leaves_what_lies_in_its_extent_alone(key_bytes: int) -> None:
    """Between commit and seal the object may be evicted, and its extent another writer's."""
    target, _, data = table()
    data[:] = others = bytes(i * 7 % 251 for i in range(len(data)))
    late = Sealed(1, length=100 + key_bytes, key=LONG_KEY[:key_bytes])
    assert seal(target, late) == [0]
    assert seal(target, Sealed(2, seq=2)) == [0]
    assert seal(target, dataclasses.replace(late, slot=2), Sealed(3)) == [STALE, 0]
    assert data == others
    assert keys(target) == [late.key] * (key_bytes <= 64) + [b"key", b"key"]


@pytest.mark.parametrize("batch", [1, 15])
def test_seals_of_an_older_epoch_are_refused_once_fenced(batch: int) -> None:
    target, memory, _ = table()
    target.fence(3)
    target.fence(2)  # a fence is never lowered
    with pytest.raises(StaleEpoch, match="epoch 2, but this daemon follows epoch 3"):
        seal(target, *(Sealed(i) for i in range(batch)), epoch=2)
    assert not any(memory)
    assert seal(target, Sealed(1), epoch=3) == [0]
    with pytest.raises(InvalidArgument):
        seal(target, Sealed(1), epoch=0)


def test_clear_takes_only_the_version_it_names() -> None:
    target, _, _ = table()
    assert seal(target, *(Sealed(i, seq=10 + i, key=b"%d" % i) for i in range(4))) == [0] * 4
    wrong = [(0, 1, 11), (1, 2, 11), (9, 1, 0), (1 << 31, 1, 1)]
    assert target.clear(refs(*wrong)) == 0
    assert target.clear(refs((1, 1, 11), (1, 1, 11), (2, 1, 12), (3, 1, 11))) == 2
    assert keys(target) == [b"0", b"3"]
    assert target.sealed == 2
    assert target.clear(refs((1, 1, 11))) == 0


@pytest.mark.usefixtures("by_rows_or_columns")
def test_what_was_cleared_is_not_sealed_again_by_a_late_repeat() -> None:
    target, memory, _ = table()
    assert seal(target, Sealed(1, seq=5)) == [0]
    assert target.clear(refs((1, 1, 5))) == 1
    again, _, _ = table(memory=bytearray(memory))
    assert again.recover() == 0
    for slots in (target, again):
        assert seal(slots, Sealed(1, seq=5)) == [STALE]
        assert seal(slots, Sealed(1, seq=5), Sealed(2)) == [STALE, 0]
        assert seal(slots, Sealed(1, seq=6)) == [0]
        assert slots.sealed == 2


@pytest.mark.usefixtures("by_rows_or_columns")
def test_a_table_grows_in_place() -> None:
    target, memory, _ = table(slots=4)
    assert seal(target, Sealed(3), Sealed(4)) == [0, BEYOND]
    assert seal(target, Sealed(4)) == [BEYOND]
    larger = memory + bytes(4 * SLOT_BYTES)
    target.grow(memoryview(larger))
    assert target.slots == 8
    assert seal(target, Sealed(4), Sealed(7)) == [0, 0]
    assert [row["slot"] for row in inventory(target)] == [3, 4, 7]
    with pytest.raises(ValueError, match="does not shrink"):
        target.grow(memoryview(memory))


def test_keys_are_listed_by_namespace_generation_and_prefix() -> None:
    target, _, _ = table()
    assert seal(target, Sealed(0, key=b"ab"), Sealed(1, key=b"ac"), Sealed(2, key=b"b")) == [0] * 3
    assert seal(target, Sealed(3, key=b"ad"), namespace_id=6) == [0]
    assert seal(target, Sealed(4, key=b"ae"), generation=4) == [0]
    assert seal(target, Sealed(5, key=b"af", extent_index=0, extent_count=2)) == [0]
    assert keys(target) == [b"ab", b"ac", b"b"]
    assert keys(target, b"a") == [b"ab", b"ac"]
    assert keys(target, b"a", limit=1) == [b"ab"]
    assert keys(target, limit=0) == []
    assert keys(target, b"\0") == []


def test_a_table_is_recovered_from_its_memory() -> None:
    first, memory, _ = table(slots=20_000)
    rows = [Sealed(i, key=b"%d" % i) for i in (0, 8191, 8192, 19_999)]
    assert seal(first, *rows) == [0] * 4
    second, _, _ = table(memory=memory)
    assert second.recover() == 4
    assert (second.sealed, second.broken) == (4, 0)
    assert [len(part) for part in second.inventory(0)] == [4]
    assert inventory(second).tobytes() == inventory(first).tobytes()
    assert second.recover(stopping=lambda: True) == 0


def test_an_inventory_comes_in_slices_that_are_bounded_and_not_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots_module, "_SCAN_SLOTS", 4)
    monkeypatch.setattr(slots_module, "INVENTORY_ROWS_MAX", 6)
    target, _, _ = table(slots=100)
    assert list(target.inventory(0)) == []
    numbers = [0, 1, 2, 3, 4, 5, 6, 7, 8, 40, 60, 61, 99]
    assert not any(seal(target, *(Sealed(i) for i in numbers)))
    parts = [part["slot"].tolist() for part in target.inventory(0)]
    assert [number for part in parts for number in part] == numbers
    assert [len(part) for part in parts] == [4, 6, 3]


def test_an_inventory_of_ranges() -> None:
    target, _, _ = table(slots=100)
    assert not any(seal(target, *(Sealed(i) for i in (0, 3, 4, 7, 8, 40, 99))))
    parts = list(target.inventory(0, [(4, 8), (40, 44), (96, 120)]))
    assert np.concatenate(parts)["slot"].tolist() == [4, 7, 40, 99]
    assert not list(target.inventory(0, [(200, 300)]))


def test_sums_tell_of_what_is_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "_SUM_SLOTS", 16)
    target, _, _ = table(slots=100)
    assert not len(target.sums(8))
    sealed = [Sealed(i, seq=100 + i, offset=i * 64) for i in (0, 3, 4, 7, 8, 40)]
    assert not any(seal(target, *sealed))
    sums = target.sums(8)
    assert sums["count"].tolist() == [4, 1, 0, 0, 0, 1]
    rows = inventory(target)
    hashes = slot_hashes(
        rows["slot"].astype(np.uint64),
        rows["epoch"].astype(np.uint64),
        rows["seq"].copy(),
        rows["offset"].copy(),
        rows["replica"].astype(np.uint64),
    )
    assert len(set(hashes.tolist())) == len(rows)
    expected = np.zeros(6, np.uint64)
    np.add.at(expected, rows["slot"] // 8, hashes)
    assert sums["sum"].tolist() == expected.tolist()
    # What is cleared is not in it; a higher version changes it.
    assert target.clear(refs((3, 1, 103))) == 1
    assert target.sums(8)["count"].tolist() == [3, 1, 0, 0, 0, 1]
    assert not any(seal(target, Sealed(8, seq=300, offset=8 * 64)))
    assert (target.sums(8)["sum"] != sums["sum"]).tolist() == [True, True, *[False] * 4]


@pytest.mark.parametrize("at", range(0, SLOT_BYTES, 7))
def test_a_garbled_record_is_ignored_counted_and_zeroed(at: int) -> None:
    first, memory, _ = table()
    assert seal(first, Sealed(1, key=b"one"), Sealed(2, key=b"two"), Sealed(3)) == [0] * 3
    memory[2 * SLOT_BYTES + at] ^= 0x40
    second, _, _ = table(memory=memory)
    assert second.recover() == 2
    assert second.broken == 1
    assert keys(second) == [b"one", b"key"]
    assert not any(memory[2 * SLOT_BYTES : 3 * SLOT_BYTES])
    assert seal(second, Sealed(2)) == [0]
    # The table that is in use finds it, too, and does not list it.
    memory[1 * SLOT_BYTES + at] ^= 0x40
    assert keys(second) == [b"key", b"key"]
    assert second.broken == 2


def test_many_threads_seal_clear_and_look_at_once() -> None:
    """The highest version of each slot stays, and the counts add up."""
    target, memory, _ = table(slots=64)
    failures: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(40):
                rows = [Sealed(s, seq=i * 8 + thread + 1, key=b"%d" % s) for s in range(32)]
                assert set(seal(target, *rows)) <= {0, STALE}
                assert set(seal(target, Sealed(40 + thread, seq=i + 1))) == {0}
                target.clear(refs((thread, 1, i)))
                list(target.list_keys(5, 3, b"", 10))
                inventory(target)
        except BaseException as error:  # told in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert target.broken == 0
    rows = inventory(target)
    assert target.sealed == len(rows)
    assert set(rows["seq"][rows["slot"] >= 40].tolist()) == {40}
    again, _, _ = table(memory=memory)
    assert again.recover() == len(rows)


def test_no_seal_of_an_older_epoch_ends_after_the_fence() -> None:
    target, _, _ = table(slots=4096)
    rows, keys_given, starts = seal_arguments([Sealed(i) for i in range(4096)])
    begun, stop = threading.Event(), threading.Event()

    def work() -> None:
        seq = 0
        while not stop.is_set():
            seq += 1
            rows["seq"] = seq
            try:
                target.seal(1, 5, 3, rows, keys_given, starts)
            except StaleEpoch:
                return
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert begun.wait(30)
    target.fence(2)
    after = inventory(target).tobytes()
    thread.join(30)
    stop.set()
    assert not thread.is_alive()
    assert inventory(target).tobytes() == after


def test_a_record_in_the_place_of_another_is_not_valid() -> None:
    first, memory, _ = table()
    assert seal(first, Sealed(1), Sealed(2)) == [0, 0]
    memory[3 * SLOT_BYTES : 4 * SLOT_BYTES] = memory[2 * SLOT_BYTES : 3 * SLOT_BYTES]
    second, _, _ = table(memory=memory)
    assert second.recover() == 2
    assert second.broken == 1
