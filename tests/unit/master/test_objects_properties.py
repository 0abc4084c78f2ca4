"""The object table against a dict, with digests that collide far more often than by chance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cenote.master.objects import EXTENT, LIVE, REMOVED, ObjectTable

Digest = tuple[int, int]
KINDS = ["random", "random", "one bucket", "few buckets", "few tags", "zeros"]


@dataclass
class Entry:
    row: int
    seq: int
    stamp: int
    extents: list[tuple[int, ...]]
    leases: int = 0


class ObjectTableMachine(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1 << 30))
    def start(self, seed: int) -> None:
        self.table = ObjectTable(1 << 16, checked=True)
        self.random = np.random.default_rng(seed)
        self.live: dict[Digest, Entry] = {}
        self.removed: list[Entry] = []
        self.seq = 0

    # ---- helpers --------------------------------------------------------------------------

    def fresh(self, kind: str, count: int) -> list[Digest]:
        digests = self.random.integers(0, 2**64, (count, 2), dtype=np.uint64)
        low_mask = {"one bucket": 1 << 63, "few buckets": 0b111 << 20, "zeros": 0b11}
        if kind in low_mask:
            digests[:, 0] &= np.uint64(low_mask[kind])
        if kind == "few tags":
            digests[:, 1] &= np.uint64((1 << 48) - 1 | 0b11 << 48)
        if kind == "zeros":
            digests[:, 1] &= np.uint64(0b1111 | 0b11 << 48)
        pairs = dict.fromkeys((low, high) for low, high in digests.tolist())
        return [pair for pair in pairs if pair not in self.live]

    def some(self, share: float) -> list[Digest]:
        keys = list(self.live)
        chosen = self.random.permutation(len(keys))[: int(np.ceil(len(keys) * share))]
        return [keys[i] for i in chosen.tolist()]

    def new_extents(self, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.void]:
        raw = self.random.integers(0, 256, (int(counts.sum()), 16), dtype=np.uint8)
        return raw.view(EXTENT).reshape(-1)

    @staticmethod
    def split(
        extents: npt.NDArray[np.void], counts: npt.NDArray[np.int64]
    ) -> list[list[tuple[int, ...]]]:
        parts = np.split(extents, np.cumsum(counts)[:-1])
        return [part.tolist() for part in parts]

    # ---- rules ----------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(KINDS),
        count=st.sampled_from([1, 3, 12, 100, 2000]),
        extents_max=st.sampled_from([1, 1, 4]),
        looked=st.sampled_from(["not", "just before", "before another"]),
    )
    def insert(self, kind: str, count: int, extents_max: int, looked: str) -> None:
        keys = self.fresh(kind, count)
        if not keys or len(self.live) + len(keys) > 20_000:
            return
        counts = self.random.integers(1, extents_max + 1, len(keys))
        extents = self.new_extents(counts)
        digests = np.array(keys, np.uint64)
        vacancies = None if looked == "not" else self.table.vacancies(digests)
        if looked == "before another":
            self.insert_one(kind)
            if any(key in self.live for key in keys):
                return
        seqs = np.arange(self.seq + 1, self.seq + 1 + len(keys))
        self.seq += len(keys)
        rows = self.table.insert(
            digests,
            size_bytes=1,
            checksum=2,
            seq=seqs,
            epoch=3,
            namespace=4,
            stamp=seqs * 7,
            extents=extents,
            counts=None if extents_max == 1 else counts,
            vacancies=vacancies,
        )
        taken = {entry.row for entry in [*self.live.values(), *self.removed]}
        assert not taken & set(rows.tolist())
        entries = zip(keys, rows.tolist(), seqs.tolist(), self.split(extents, counts), strict=True)
        for key, row, seq, parts in entries:
            self.live[key] = Entry(row, seq, seq * 7, parts)

    @rule(kind=st.sampled_from(KINDS))
    def insert_one(self, kind: str) -> None:
        for key in self.fresh(kind, 1):
            self.seq += 1
            row = self.table.insert_one(
                *key,
                size_bytes=1,
                checksum=2,
                seq=self.seq,
                epoch=3,
                namespace=4,
                stamp=self.seq * 7,
                segment=1,
                slot=2,
                offset_units=self.seq,
                length_units=4,
            )
            self.live[key] = Entry(row, self.seq, self.seq * 7, [(1, 0, 0, 2, self.seq, 4)])

    @rule(share=st.sampled_from([0.001, 0.1, 1.0]), absent=st.sampled_from([0, 1, 50]))
    def lookup(self, share: float, absent: int) -> None:
        keys = self.some(share)
        keys += keys[:3]
        for kind in KINDS:
            keys += self.fresh(kind, absent)
        self.random.shuffle(keys)
        expected = [self.live[key].row if key in self.live else -1 for key in keys]
        digests = np.array(keys, np.uint64).reshape(-1, 2)
        assert self.table.lookup(digests).tolist() == expected
        assert [self.table.lookup_one(*key) for key in keys[:50]] == expected[:50]

    @precondition(lambda self: self.live)
    @rule(kind=st.sampled_from(KINDS), count=st.sampled_from([12, 100]))
    def no_vacancies_where_one_is_there(self, kind: str, count: int) -> None:
        keys = [*self.fresh(kind, count), *self.some(0.0001)[:1]]
        self.random.shuffle(keys)
        if any(key in self.live for key in keys):
            assert self.table.vacancies(np.array(keys, np.uint64)) is None

    @precondition(lambda self: self.live)
    @rule(share=st.sampled_from([0.001, 0.1, 0.5]))
    def lease(self, share: float) -> None:
        entries = [self.live[key] for key in self.some(share)]
        entries += entries[:2]
        for entry in entries:
            entry.leases += 1
        self.table.lease(np.array([entry.row for entry in entries]))

    @rule(share=st.sampled_from([0.5, 1.0]))
    def unlease(self, share: float) -> None:
        leased = [e for e in [*self.live.values(), *self.removed] if e.leases]
        chosen = self.random.permutation(len(leased))[: int(len(leased) * share)]
        entries = [leased[i] for i in chosen.tolist()]
        for entry in entries:
            entry.leases -= 1
        over = self.table.unlease(np.array([entry.row for entry in entries], np.int64))
        expected = [e for e in entries if not e.leases and e in self.removed]
        assert sorted(over.tolist()) == sorted(entry.row for entry in expected)
        self.table.free(over)
        gone = {id(entry) for entry in expected}
        self.removed = [entry for entry in self.removed if id(entry) not in gone]

    @rule(share=st.sampled_from([0.001, 0.1, 0.9, 1.0]), singly=st.booleans())
    def remove(self, share: float, singly: bool) -> None:
        entries = [self.live.pop(key) for key in self.some(share)]
        kept = [entry for entry in entries if entry.leases]
        gone = [entry.row for entry in entries if not entry.leases]
        self.removed += kept
        if singly:
            for entry in entries:
                self.table.unlink_one(entry.row)
            for row in gone:
                self.table.free_one(row)
        else:
            self.table.unlink(np.array([entry.row for entry in entries], np.int64))
            self.table.free(np.array(gone, np.int64))

    @precondition(lambda self: self.live)
    @rule(share=st.sampled_from([0.001, 0.1]), extents_max=st.sampled_from([1, 8]))
    def set_extents(self, share: float, extents_max: int) -> None:
        entries = [self.live[key] for key in self.some(share)]
        counts = self.random.integers(1, extents_max + 1, len(entries))
        extents = self.new_extents(counts)
        rows = np.array([entry.row for entry in entries])
        self.table.set_extents(rows, counts, extents, replicas=2)
        for entry, parts in zip(entries, self.split(extents, counts), strict=True):
            entry.extents = parts

    @rule(rows_max=st.sampled_from([1, 50, 5000]), steps=st.integers(1, 5))
    def compact(self, rows_max: int, steps: int) -> None:
        by_row = {entry.row: entry for entry in self.live.values()}
        for _ in range(steps):
            old, new = self.table.compact(rows_max)
            assert len(old) == len(new) <= rows_max
            for was, now in zip(old.tolist(), new.tolist(), strict=True):
                entry = by_row.pop(was)
                assert not entry.leases
                entry.row = now
                by_row[now] = entry

    # ---- invariants -----------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        table.check()
        assert table.live_count == len(self.live)
        assert table.used_rows == len(self.live) + len(self.removed)
        entries = [*self.live.values(), *self.removed]
        rows = np.array([entry.row for entry in entries], np.int64)
        seqs = np.array([entry.seq for entry in entries], np.uint64)
        assert table.seq[rows].tolist() == seqs.tolist()
        assert table.stamp[rows].tolist() == [entry.stamp for entry in entries]
        assert table.lease_count[rows].tolist() == [entry.leases for entry in entries]
        states = [LIVE] * len(self.live) + [REMOVED] * len(self.removed)
        assert table.state[rows].tolist() == states
        assert table.rows_match(rows, seqs).tolist() == [state == LIVE for state in states]
        counts, extents = table.extents_of(rows)
        assert counts.tolist() == [len(entry.extents) for entry in entries]
        assert extents.tolist() == [extent for entry in entries for extent in entry.extents]


ObjectTableMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None
)
TestObjectTableMachine = ObjectTableMachine.TestCase
