"""The object table: lookups, extents, handles, leases, and what misuse is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cenote.api.errors import InternalError, ResourceUnavailable
from cenote.master.objects import EXTENT, FREE, LIVE, RECORD, REMOVED, ObjectTable

Digests = npt.NDArray[np.uint64]
MAX_ROWS = 1 << 20


def random_digests(rng: np.random.Generator, count: int) -> Digests:
    return rng.integers(0, 2**64, (count, 2), dtype=np.uint64)


def make_extents(count: int, segment: int = 1) -> npt.NDArray[np.void]:
    extents = np.zeros(count, EXTENT)
    extents["segment"] = segment
    extents["slot"] = np.arange(count)
    extents["offset_units"] = np.arange(count) * 64
    extents["length_units"] = 64
    return extents


def insert(
    table: ObjectTable, digests: Digests, seq: int = 1, **more: Any
) -> npt.NDArray[np.int64]:
    given: dict[str, Any] = {
        "size_bytes": 4096,
        "checksum": 7,
        "seq": np.arange(seq, seq + len(digests)),
        "epoch": 1,
        "namespace": 2,
        "stamp": 5,
    }
    given["extents"] = make_extents(len(digests))
    return table.insert(digests, **(given | more))


def insert_one(table: ObjectTable, low: int, high: int, **more: int) -> int:
    given = {
        "size_bytes": 1 << 40,
        "checksum": 2**64 - 1,
        "seq": 9,
        "epoch": 3,
        "namespace": 4,
        "stamp": 11,
        "segment": 5,
        "slot": 6,
        "offset_units": 7,
        "length_units": 8,
    }
    return table.insert_one(low, high, **(given | more))


@pytest.fixture
def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def table() -> ObjectTable:
    return ObjectTable(MAX_ROWS, checked=True)


def remove(table: ObjectTable, rows: npt.NDArray[np.int64]) -> None:
    table.unlink(rows)
    table.free(rows)


class TestLookup:
    def test_an_empty_table_has_nothing(self, table: ObjectTable) -> None:
        assert table.lookup(np.zeros((0, 2), np.uint64)).tolist() == []
        assert table.lookup(np.zeros((100, 2), np.uint64)).tolist() == [-1] * 100
        assert table.lookup_one(0, 0) == -1
        assert table.live_count == 0

    @pytest.mark.parametrize("n", [1, 2, 10, 11, 512, 5000])
    def test_finds_what_was_inserted_and_nothing_else(
        self, table: ObjectTable, generator: np.random.Generator, n: int
    ) -> None:
        digests = random_digests(generator, n)
        rows = insert(table, digests)
        assert np.array_equal(table.lookup(digests), rows)
        assert [table.lookup_one(*pair) for pair in digests.tolist()] == rows.tolist()
        twice = np.concatenate((digests, random_digests(generator, n), digests[::-1]))
        expected = [*rows.tolist(), *[-1] * n, *rows[::-1].tolist()]
        assert table.lookup(twice).tolist() == expected
        swapped = np.ascontiguousarray(digests[:, ::-1])
        assert (table.lookup(swapped) == -1).all()
        table.check()

    def test_digests_from_a_packed_buffer(self, table: ObjectTable) -> None:
        raw = b"x" + bytes(range(160))
        digests = np.frombuffer(raw, "<u8", offset=1).reshape(-1, 2)
        rows = insert(table, digests)
        again = np.frombuffer(raw + b"y", "<u8", count=20, offset=1).reshape(-1, 2)
        assert np.array_equal(table.lookup(again), rows)
        assert np.array_equal(table.lookup(np.tile(again, (3, 1))), np.tile(rows, 3))

    @pytest.mark.parametrize("low", [0, 1, 2**63])
    def test_digests_of_zeros_are_digests(self, table: ObjectTable, low: int) -> None:
        """An empty place has tag 0 and row 0, whose digest is 0: none of it may match."""
        digests = np.array([[low, high << 48] for high in (0, 1, 2)], np.uint64)
        padded = np.concatenate((digests, np.full((20, 2), 3, np.uint64)))
        assert (table.lookup(padded) == -1).all()
        rows = insert(table, digests)
        assert table.lookup(padded).tolist() == [*rows.tolist(), *[-1] * 20]
        remove(table, rows[:1])
        assert table.lookup(padded).tolist() == [-1, *rows[1:].tolist(), *[-1] * 20]
        assert table.lookup_one(low, 0) == -1

    def test_colliding_digests_spill_and_are_found(self, table: ObjectTable) -> None:
        """Same bucket for ever, same tag: worse than chance will ever make it."""
        digests = np.zeros((2000, 2), np.uint64)
        digests[:, 0] = 5
        digests[:, 1] = np.arange(2000)
        rows = insert(table, digests)
        assert np.array_equal(table.lookup(digests), rows)
        assert table.lookup_one(5, 1999) == rows[1999]
        assert table.lookup_one(5, 2000) == -1
        table.check()
        remove(table, rows[::2])
        found = table.lookup(digests)
        assert (found[::2] == -1).all()
        assert np.array_equal(found[1::2], rows[1::2])
        remove(table, rows[1::2])
        table.check()
        assert table.live_count == 0

    def test_what_is_absent_has_vacancies(
        self, table: ObjectTable, generator: np.random.Generator
    ) -> None:
        """Also where buckets spilled: else a busy table would hardly ever have any."""
        insert(table, random_digests(generator, 60_000))
        spread = [random_digests(generator, 128) for _ in range(50)]
        assert sum(table.vacancies(digests) is not None for digests in spread) > 40

    def test_a_zero_tag_in_a_full_bucket_is_found(self, table: ObjectTable) -> None:
        digests = np.zeros((16, 2), np.uint64)
        digests[:, 1] = np.arange(16, dtype=np.uint64) << np.uint64(48)
        rows = insert(table, digests)
        assert np.array_equal(table.lookup(digests), rows)

    def test_grows_and_shrinks(self, table: ObjectTable, generator: np.random.Generator) -> None:
        digests = random_digests(generator, 60_000)
        rows = np.concatenate(
            [insert(table, digests[i : i + 1500], i + 1) for i in range(0, 60_000, 1500)]
        )
        table.check()
        assert np.array_equal(table.lookup(digests), rows)
        order = generator.permutation(60_000)
        gone, kept = order[:57_000], order[57_000:]
        for part in np.array_split(gone, 60):
            remove(table, rows[part])
        table.check()
        assert np.array_equal(table.lookup(digests[kept]), rows[kept])
        assert (table.lookup(digests[gone]) == -1).all()


class TestColumns:
    def test_batch_and_single_write_the_same(self, table: ObjectTable) -> None:
        row = insert_one(table, 1, 2, tail_bytes=100, replicas=1, shards=8, replica=1, shard=3)
        digests = np.array([[3, 4], [5, 6]], np.uint64)
        extents = np.zeros(2, EXTENT)
        extents[:] = (5, 1, 3, 6, 7, 8)
        rows = table.insert(
            digests,
            size_bytes=1 << 40,
            checksum=2**64 - 1,
            seq=[10, 11],
            epoch=3,
            namespace=4,
            stamp=11,
            extents=extents,
            tail_bytes=100,
            shards=[8, 9],
        )
        one, batch = table.record_of_one(row), table.records_of(rows)
        assert batch.dtype == RECORD
        assert batch[0].tolist() == (*one[:2], 10, *one[3:])
        assert batch["shards"].tolist() == [8, 9]
        assert table.extents_of_one(row) == [(5, 1, 3, 6, 7, 8)]
        assert table.extents_of(rows)[1].tolist() == [(5, 1, 3, 6, 7, 8)] * 2
        for name in ("stamp", "lease_count", "pin", "epoch", "namespace", "size_bytes", "extents"):
            column = getattr(table, name)
            assert len(column) == table.high_water
            assert column[row] == column[rows[0]], name
        assert table.seq[rows].tolist() == [10, 11]
        assert table.segment[row] == 5
        assert table.slot[row] == 6
        assert table.offset_units[row] == 7
        assert table.length_units[row] == 8
        assert table.tail_bytes[row] == 100
        assert table.replicas[row] == 1
        assert table.digests[row].tolist() == [1, 2]
        assert table.checksum[row] == 2**64 - 1

    def test_columns_are_writable(self, table: ObjectTable) -> None:
        rows = insert(table, np.array([[1, 1], [2, 2]], np.uint64))
        table.stamp[rows] = [77, 78]
        table.pin[rows[0]] = 1
        assert table.stamp[rows].tolist() == [77, 78]
        remove(table, rows)
        again = insert(table, np.array([[3, 3], [4, 4]], np.uint64))
        assert table.pin[again].tolist() == [0, 0]

    def test_any_bit_pattern_survives(
        self, table: ObjectTable, generator: np.random.Generator
    ) -> None:
        """Pairs travel as complex numbers: not one bit may be normalised on the way."""
        nans = np.array([0x7FF0000000000001, 0xFFF8000000000000, 0x7FF7FFFFFFFFFFFF], np.uint64)
        digests = np.stack(np.meshgrid(nans, nans), -1).reshape(-1, 2)
        extents = np.tile(digests, (2, 1)).copy().view(EXTENT).reshape(-1)
        counts = np.full(len(digests), 2)
        rows = insert(table, digests, extents=extents, counts=counts)
        assert np.array_equal(table.digests[rows], digests)
        assert table.extents_of(rows)[1].tobytes() == extents.tobytes()
        assert np.array_equal(table.lookup(np.tile(digests, (2, 1))), np.tile(rows, 2))

    def test_live_rows_in_chunks(self, table: ObjectTable, generator: np.random.Generator) -> None:
        rows = insert(table, random_digests(generator, 1000))
        remove(table, rows[::3])
        table.unlink(rows[1:2])
        seen: list[int] = []
        start, steps = table.live_rows(0, 64)[1], 1
        seen += table.live_rows(0, 64)[0].tolist()
        while start:
            part, start = table.live_rows(start, 64)
            seen += part.tolist()
            steps += 1
        assert steps == -(-table.high_water // 64)
        assert seen == np.flatnonzero(table.state & LIVE).tolist()
        assert len(seen) == table.live_count


class TestExtents:
    def test_several_extents(self, table: ObjectTable, generator: np.random.Generator) -> None:
        counts = np.array([1, 5, 2, 64, 1, 3])
        extents = make_extents(int(counts.sum()))
        rows = insert(table, random_digests(generator, 6), extents=extents, counts=counts)
        found_counts, found = table.extents_of(rows)
        assert np.array_equal(found_counts, counts)
        assert np.array_equal(found, extents)
        assert table.extra_extents == counts.sum() - 6
        starts = np.cumsum(counts) - counts
        for i in (5, 1, 0):
            part = extents[starts[i] : starts[i] + counts[i]]
            assert np.array_equal(table.extents_of(rows[[i]])[1], part)
            assert table.extents_of_one(int(rows[i])) == part.tolist()
        remove(table, rows)
        assert table.extra_extents == 0

    def test_set_extents_replaces(self, table: ObjectTable, generator: np.random.Generator) -> None:
        rows = insert(
            table,
            random_digests(generator, 4),
            extents=make_extents(10),
            counts=np.array([4, 1, 3, 2]),
        )
        fresh = make_extents(5, segment=9)
        table.set_extents(rows[[0, 1]], np.array([1, 4]), fresh, replicas=[1, 2])
        counts, extents = table.extents_of(rows)
        assert counts.tolist() == [1, 4, 3, 2]
        assert np.array_equal(extents[:5], fresh)
        assert table.extra_extents == 3 + 2 + 1
        assert table.replicas[rows[:2]].tolist() == [1, 2]
        table.check()

    def test_no_rows_no_extents(self, table: ObjectTable) -> None:
        counts, extents = table.extents_of(np.zeros(0, np.int64))
        assert len(counts) == len(extents) == 0


class TestRemoval:
    def test_removed_rows_hold_their_extents_until_freed(self, table: ObjectTable) -> None:
        digests = np.array([[1, 1]], np.uint64)
        rows = insert(table, digests, extents=make_extents(3), counts=np.array([3]))
        table.lease(rows)
        table.unlink(rows)
        assert table.lookup(digests).tolist() == [-1]
        assert table.state[rows].tolist() == [REMOVED]
        assert len(table.extents_of(rows)[1]) == 3
        again = insert(table, digests, seq=2)
        assert again.tolist() != rows.tolist()
        with pytest.raises(InternalError, match="leased"):
            table.free(rows)
        assert table.unlease(rows).tolist() == rows.tolist()
        table.free(rows)
        assert table.used_rows == 1
        assert table.live_count == 1

    def test_leases_are_counted(self, table: ObjectTable) -> None:
        rows = insert(table, np.array([[1, 1], [2, 2]], np.uint64))
        a, b = rows.tolist()
        table.lease(np.array([a, b, a]))
        assert table.unlease(np.array([a, b])).tolist() == []
        table.unlink(rows)
        assert table.unlease(np.array([a])).tolist() == [a]
        with pytest.raises(InternalError, match="released twice"):
            table.unlease(np.array([a]))
        assert table.lease_count[rows].tolist() == [0, 0]
        table.lease(np.array([a, a]))
        assert table.unlease(np.array([a, a])).tolist() == [a]

    def test_flags_of_the_caller_survive(self, table: ObjectTable) -> None:
        rows = insert(table, np.array([[1, 1]], np.uint64), flags=0x10)
        one = insert_one(table, 2, 2, flags=0x20)
        assert table.state[rows].tolist() == [LIVE | 0x10]
        table.unlink(rows)
        table.unlink_one(one)
        assert table.state[[rows[0], one]].tolist() == [REMOVED | 0x10, REMOVED | 0x20]

    def test_one_at_a_time(self, table: ObjectTable) -> None:
        row = insert_one(table, 1, 2)
        rows = np.array([row])
        table.set_extents(rows, np.array([3]), make_extents(3), replicas=1)
        table.pin[row] = 1
        table.unlink_one(row)
        table.free_one(row)
        assert table.lookup_one(1, 2) == -1
        assert table.extra_extents == 0
        assert table.state[row] & (LIVE | REMOVED) == FREE
        assert table.pin[row] == 0
        table.check()

    def test_misuse_changes_nothing(self, table: ObjectTable) -> None:
        rows = insert(table, np.array([[1, 1], [2, 2]], np.uint64))
        table.unlink(rows[:1])
        with pytest.raises(InternalError, match="not live"):
            table.unlink(rows)
        with pytest.raises(InternalError, match="not live"):
            table.unlink_one(int(rows[0]))
        with pytest.raises(InternalError, match="not removed"):
            table.free(rows)
        with pytest.raises(InternalError, match="not removed"):
            table.free_one(int(rows[1]))
        with pytest.raises(InternalError, match="twice"):
            table.free(rows[[0, 0]])
        with pytest.raises(InternalError, match="twice"):
            table.unlink(rows[[1, 1]])
        table.lease(rows)
        with pytest.raises(InternalError, match="leased"):
            table.free_one(int(rows[0]))
        table.check()
        assert table.live_count == 1

    def test_checked_tables_refuse_what_callers_guarantee(self, table: ObjectTable) -> None:
        digests = np.array([[1, 1], [2, 2]], np.uint64)
        insert(table, digests)
        with pytest.raises(InternalError, match="comes twice"):
            insert(table, digests)
        with pytest.raises(InternalError, match="comes twice"):
            insert(table, np.array([[3, 3], [3, 3]], np.uint64))
        with pytest.raises(InternalError, match="is in the table"):
            insert_one(table, 1, 1)
        with pytest.raises(InternalError, match="extents for"):
            insert(table, np.array([[3, 3]], np.uint64), extents=make_extents(2))
        with pytest.raises(InternalError, match="without an extent"):
            insert(
                table,
                np.array([[3, 3], [4, 4]], np.uint64),
                extents=make_extents(2),
                counts=np.array([0, 2]),
            )

    def test_a_full_table_is_a_typed_error(self, generator: np.random.Generator) -> None:
        table = ObjectTable(100, checked=True)
        digests = random_digests(generator, 200)
        rows = insert(table, digests[:100])
        with pytest.raises(ResourceUnavailable, match="table is full"):
            insert(table, digests[100:])
        table.check()
        assert table.live_count == 100
        remove(table, rows[:50])
        insert(table, digests[100:150])
        table.check()


class TestHandles:
    def test_a_handle_ends_with_its_object(self, table: ObjectTable) -> None:
        rows = insert(table, np.array([[1, 1], [2, 2], [3, 3]], np.uint64), seq=5)
        seqs = table.seq[rows].copy()
        assert table.rows_match(rows, seqs).all()
        assert not table.rows_match(rows, seqs + np.uint64(1)).any()
        assert not table.rows_match(np.array([-1, 0, 10**6, MAX_ROWS * 2]), seqs[0]).any()
        assert not table.rows_match(np.array([0]), np.zeros(1, np.uint64)).any()
        table.unlink(rows[:1])
        assert table.rows_match(rows, seqs).tolist() == [False, True, True]
        table.free(rows[:1])
        assert not table.rows_match(rows[:1], np.zeros(1, np.uint64)).any()
        insert(table, np.array([[4, 4]], np.uint64), seq=100)
        assert table.rows_match(rows, seqs).tolist() == [False, True, True]


class TestCompact:
    def fill(self, table: ObjectTable, count: int, seed: int) -> tuple[Digests, Any]:
        digests = random_digests(np.random.default_rng(seed), count)
        return digests, np.concatenate(
            [insert(table, digests[i : i + 1000], i + 1) for i in range(0, count, 1000)]
        )

    def test_nothing_to_do(self, table: ObjectTable, seed: int) -> None:
        _, rows = self.fill(table, 2000, seed)
        remove(table, rows[:200])
        old, new = table.compact()
        assert len(old) == len(new) == 0
        assert table.high_water == 2001

    def test_moves_a_bounded_number_and_keeps_everything(
        self, table: ObjectTable, seed: int
    ) -> None:
        digests, rows = self.fill(table, 20_000, seed)
        generator = np.random.default_rng(seed)
        order = generator.permutation(20_000)
        gone, kept = order[:18_000], order[18_000:]
        table.stamp[rows] = digests[:, 0]
        table.pin[rows[kept]] = 3
        records = table.records_of(rows)
        for part in np.array_split(gone, 20):
            remove(table, rows[part])
        where = dict(zip(rows[kept].tolist(), kept.tolist(), strict=True))
        steps = 0
        while True:
            old, new = table.compact(rows_max=100)
            assert len(old) == len(new) <= 100
            assert (new < old).all()
            for was, now in zip(old.tolist(), new.tolist(), strict=True):
                where[now] = where.pop(was)
            steps += 1
            if not len(old):
                break
        table.check()
        assert steps > 10
        assert table.high_water < 2000 * 4 / 3 + 100
        now, index = np.array(list(where)), np.array(list(where.values()))
        assert np.array_equal(table.lookup(digests[index]), now)
        assert np.array_equal(table.records_of(now), records[index])
        assert np.array_equal(table.stamp[now], digests[index, 0])
        assert (table.pin[now] == 3).all()
        assert table.rows_match(now, records[index]["seq"]).all()
        assert not table.rows_match(rows[gone], records[gone]["seq"]).any()

    def test_leased_and_removed_rows_stay(self, table: ObjectTable, seed: int) -> None:
        digests, rows = self.fill(table, 5000, seed)
        table.lease(rows[-1:])
        table.unlink(rows[-2:-1])
        remove(table, rows[100:-2])
        while len(table.compact()[0]):
            pass
        assert table.lookup(digests[-1:]).tolist() == rows[-1:].tolist()
        assert table.state[rows[-2]] == REMOVED
        assert table.high_water == rows[-1] + 1
        table.unlease(rows[-1:])
        table.free(rows[-2:-1])
        while len(table.compact()[0]):
            pass
        assert table.high_water < 200
        table.check()

    @pytest.mark.parametrize("share", [1.0, 0.9])
    def test_memory_is_given_back(self, table: ObjectTable, seed: int, share: float) -> None:
        digests, rows = self.fill(table, 100_000, seed)
        table.set_extents(rows, np.full(100_000, 2), make_extents(200_000), replicas=2)
        peak = table.memory_bytes()
        gone = np.random.default_rng(seed).permutation(100_000)[: int(100_000 * share)]
        for part in np.array_split(gone, 100):
            remove(table, rows[part])
        for _ in range(400):
            table.compact()
        table.check()
        assert table.memory_bytes() < (0.15 if share == 1.0 else 0.3) * peak
        kept = np.setdiff1d(np.arange(100_000), gone)
        found = table.lookup(digests[kept])
        assert (found > 0).all()
        slots = table.extents_of(found)[1]["slot"].reshape(-1, 2)
        assert np.array_equal(slots, np.stack((2 * kept, 2 * kept + 1), 1))
