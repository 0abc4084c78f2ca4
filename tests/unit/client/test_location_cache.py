"""The cache of locations against a plain dict: it forgets, and never says what was not stored."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cenote.api.rows import EXTENT, OBJECT
from cenote.client.locations import LOCATION, LOCATION_STRUCT, LocationCache

digests = st.integers(0, 30).map(lambda i: i.to_bytes(16, "little"))


class LocationCacheMachine(RuleBasedStateMachine):
    @initialize(entries_max=st.sampled_from([0, 1, 8, 20]))
    def start(self, entries_max: int) -> None:
        self.entries_max = entries_max
        self.cache = LocationCache(entries_max)
        self.stored: dict[bytes, bytes] = {}
        """The last location of each."""
        self.last: bytes | None = None
        self.number = 0

    def _row(self, end_s: float) -> bytes:
        self.number += 1
        return LOCATION_STRUCT.pack(end_s, self.number, 1, 2, 3, 4)

    @rule(digest=digests, end_s=st.sampled_from([1.0, 5.0]))
    def store(self, digest: bytes, end_s: float) -> None:
        row = self._row(end_s)
        self.cache.store(digest, row)
        self.stored[digest] = row
        if self.entries_max:
            assert self.cache.get(digest) == row, "what was stored last is there"

    @rule(many=st.lists(digests, max_size=40, unique=True), end_s=st.sampled_from([1.0, 5.0]))
    def store_many(self, many: list[bytes], end_s: float) -> None:
        packed = [self._row(end_s) for _ in many]
        self.cache.store_many(many, np.frombuffer(b"".join(packed), LOCATION))
        self.stored.update(zip(many, packed, strict=True))

    @rule(many=st.lists(digests, min_size=1, max_size=12, unique=True))
    def store_batch(self, many: list[bytes]) -> None:
        """Entered when somebody looks for one of them; an older row may be known until then."""
        many = many[: self.entries_max]  # a longer batch is not remembered at all
        count = len(many)
        if not count:
            return
        rows = np.frombuffer(b"".join(self._row(5.0) for _ in many), LOCATION)
        objects, extents = np.zeros(count, OBJECT), np.zeros(count, EXTENT)
        for name in ("size", "checksum"):
            objects[name] = rows[name]
        for name in ("offset", "segment"):
            extents[name] = rows[name]
        self.cache.store_batch(b"".join(many), 5.0, objects, extents, int(rows["node_id"][0]))
        if self.entries_max and self.cache.may_have(many[0]):
            self.stored.update(zip(many, (row.tobytes() for row in rows), strict=True))
        else:
            for digest in many:
                self.stored.pop(digest, None)
                self.cache.forget(digest)

    @rule(digest=digests)
    def forget(self, digest: bytes) -> None:
        self.cache.forget(digest)
        self.stored.pop(digest, None)
        assert self.cache.get(digest) is None

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.stored.clear()

    @rule(many=st.lists(digests, min_size=1, max_size=10), now_s=st.sampled_from([0.5, 2.0, 9.0]))
    def find_many(self, many: list[bytes], now_s: float) -> None:
        positions, rows = self.cache.find_many(many, now_s)
        assert len(positions) == len(rows)
        assert (rows["end_s"] > now_s).all()
        for position, row in zip(positions.tolist(), rows, strict=True):
            assert row.tobytes() == self.stored[many[position]]
        missing = set(range(len(many))) - set(positions.tolist())
        for position in missing:
            known = self.cache.get(many[position])
            assert known is None or LOCATION_STRUCT.unpack(known)[0] <= now_s

    @invariant()
    def it_is_bounded_and_right(self) -> None:
        assert len(self.cache) <= self.entries_max
        for digest, row in self.stored.items():
            assert self.cache.get(digest) in (None, row)


TestLocationCache = LocationCacheMachine.TestCase


def waiting_batch(cache: LocationCache, many: list[bytes], end_s: float, offset: int) -> None:
    objects, extents = np.zeros(len(many), OBJECT), np.zeros(len(many), EXTENT)
    extents["offset"] = offset
    cache.store_batch(b"".join(many), end_s, objects, extents, 1)


MANY = [bytes([i]) * 16 for i in range(3)]


def test_what_is_forgotten_does_not_come_back_with_a_batch_that_waits() -> None:
    cache = LocationCache(100)
    waiting_batch(cache, MANY, 5.0, 1)
    cache.forget(MANY[1])
    assert cache.get(MANY[1]) is None
    assert cache.get(MANY[2]) is not None


def test_a_batch_that_waits_does_not_replace_what_was_learned_since() -> None:
    cache = LocationCache(100)
    waiting_batch(cache, MANY, 5.0, 1)
    newer = LOCATION_STRUCT.pack(6.0, 2, 1, 2, 3, 4)
    cache.store(MANY[1], newer)
    assert cache.get(MANY[2]) is not None, "the batch is entered"
    assert cache.get(MANY[1]) == newer
