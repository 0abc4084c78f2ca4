"""From a 16-byte digest to a row: linear hashing over flat columns, probed a whole batch at a time.

A bucket has 16 places. A place is a 16-bit tag (the digest's top bits, 0 = empty) and a row number;
the digest itself lies in the table's digest column, which decides. The low bits of a digest choose
its bucket, so a lookup is three gathers, whatever the batch: 32 bytes of tags, a row, a digest.

The bucket count grows bit by bit (linear hashing, W. Litwin 1980): with `half` a power of two and
half <= buckets < 2 half, each bucket b < buckets - half has been split into b and b + half. Splits
are done 128 at a time on whole slices, merges likewise: so neither growing nor shrinking ever
stalls, or needs a second index, or makes memory per object jump by a factor of two.

A full bucket overflows into `spill`, a dict of small dicts that holds less than 1 % of the keys
(buckets are split early when it is more). A uint8 per bucket says how many: without it an absent
key would always have to look there. Digests that collide on purpose end up there, too, and cost a
dict's lookup instead of a chain's walk.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cenote.api.errors import InternalError

from .columns import Reservation
from .index_places import PLACES as _PLACES
from .index_places import Vacancies, first_place

__all__ = ["DigestIndex", "Vacancies"]

_SHIFT = _PLACES.bit_length() - 1
_BUCKET_BYTES = _PLACES * 2
_BUCKETS_MIN = 1024
_STEP_BUCKETS = 128
_KEYS_PER_BUCKET_MAX = 6.0
"""Split above this."""
_KEYS_PER_BUCKET_SPILLING = 4.5
"""Split above this when more than 1/64 of the keys are in the spill."""
_SPILL_SHARE = 64
_KEYS_PER_BUCKET_MIN = 3.0
"""Merge below this."""
_SCALAR_KEYS = 10
"""Up to this many keys one at a time is faster than one batch."""
_PLACED_AT_ONCE = 4096
_DISCARD_BUCKETS_MIN = 1024

# NumPy calls are what lookups cost: constants as 0-d arrays and dtypes made once save a third.
_U16, _U64, _I64 = np.dtype(np.uint16), np.dtype(np.uint64), np.dtype(np.int64)
_BOTH_WORDS = np.array(0x0101, _U16)
_TAG_BITS = np.array(48, _U64)
_TAG_MIN = np.array(1, _U16)
_NO_PLACE = np.array(_PLACES, np.uint8)
_NO_TAG = np.array(0, _U16)
_NO_ROW = np.array(0, np.uint32)
_SIGN = np.array(63, _I64)
_PLACE_BITS = np.array(_SHIFT, _I64)


Digests = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


class DigestIndex:
    """Rows by digest. Row 0 means an empty place: its digest is zero, and it is never added."""

    __slots__ = (
        "_blind_place",
        "_buckets",
        "_digest_words",
        "_digests",
        "_half",
        "_half_array",
        "_last_array",
        "_low_words",
        "_mask",
        "_mask_array",
        "_row_words",
        "_rows",
        "_rows_flat",
        "_rows_home",
        "_spill",
        "_spill_bytes",
        "_spill_counts",
        "_spill_peak",
        "_tag_map",
        "_tag_words",
        "_tags",
        "_tags_flat",
        "_tags_home",
        "_touched",
        "count",
        "spilled",
    )

    def __init__(self, digests: Reservation, capacity: int) -> None:
        """`digests` is the table's digest column (2 x uint64 a row), `capacity` its rows."""
        buckets_max = _BUCKETS_MIN
        while (buckets_max - _STEP_BUCKETS) * _KEYS_PER_BUCKET_SPILLING < capacity:
            buckets_max *= 2
        places = buckets_max * _PLACES
        self._digests: Digests = digests.array.view(np.uint64).reshape(-1, 2)
        self._low_words = self._digests[:, 0]
        self._digest_words = digests.view.cast("Q")
        self._blind_place = places + _PLACES
        places += _PLACES + _PLACED_AT_ONCE
        self._tags_home = Reservation(np.uint16, places)
        self._tags_flat: npt.NDArray[np.uint16] = self._tags_home.array.view(np.uint16)
        self._tags = self._tags_flat.reshape(-1, _PLACES)
        self._tag_map = self._tags_home.map
        self._tag_words = self._tags_home.view.cast("H")
        self._rows_home = Reservation(np.uint32, places)
        self._rows_flat: npt.NDArray[np.uint32] = self._rows_home.array.view(np.uint32)
        self._rows = self._rows_flat.reshape(-1, _PLACES)
        self._row_words = self._rows_home.view.cast("I")
        spill_counts = Reservation(np.uint8, buckets_max)
        self._spill_counts: npt.NDArray[np.uint8] = spill_counts.array.view(np.uint8)
        self._spill_bytes = spill_counts.view
        self._spill: dict[int, dict[int, int]] = {}
        self._spill_peak = 0
        self.spilled = 0
        self.count = 0
        self._touched = _BUCKETS_MIN
        self._set_buckets(_BUCKETS_MIN, _BUCKETS_MIN)

    # ---- lookups ------------------------------------------------------------------------------

    def find(self, digests: Digests) -> Rows:
        """Rows of uint64[n, 2] digests (C-contiguous), -1 where absent."""
        n = len(digests)
        if n <= _SCALAR_KEYS:
            find_one = self.find_one
            return np.array([find_one(low, high) for low, high in digests.tolist()], np.int64)
        buckets = self._buckets_of(digests)
        tags = digests.view(_U16).reshape(n, 8)[:, 7:]
        # Where no tag is equal this is the next bucket's first place, whose digest differs.
        picked = first_place(self._tags.take(buckets, axis=0) == tags)
        places = buckets << _PLACE_BITS
        places += picked
        rows = self._rows_flat.take(places)
        same = (self._digests.take(rows, axis=0) == digests).view(_U16).reshape(n)
        rows *= same == _BOTH_WORDS
        found = rows.astype(_I64)
        absent = rows == _NO_ROW
        if np.count_nonzero(absent):
            found -= absent
            self._find_again(digests, found, buckets, picked, np.flatnonzero(absent))
        return found

    def _find_again(
        self,
        digests: Digests,
        found: Rows,
        buckets: Rows,
        picked: npt.NDArray[np.uint8],
        missed: Rows,
    ) -> None:
        """Second look at misses with an equal tag of another digest, or whose bucket spilled."""
        if len(missed) > _SCALAR_KEYS:
            # A tag of 0 is kept as 1, which the batch did not look for.
            doubtful = (picked.take(missed) != _NO_PLACE) | (digests[missed, 1] >> _TAG_BITS == 0)
            if self.spilled:
                doubtful |= self._spill_counts.take(buckets.take(missed)) != 0
            missed = missed[doubtful]
        for i in missed.tolist():
            found[i] = self.find_one(int(digests[i, 0]), int(digests[i, 1]))

    def find_one(self, low: int, high: int) -> int:
        """Row of the digest whose first 8 bytes are `low`, last 8 `high` (little-endian), or -1."""
        bucket = low & self._mask
        if bucket >= self._buckets:
            bucket -= self._half
        pattern = (high >> 48 or 1).to_bytes(2, "little")
        start = bucket * _BUCKET_BYTES
        end = start + _BUCKET_BYTES
        find = self._tag_map.find
        at = find(pattern, start, end)
        while at >= 0:
            if not at & 1:
                row = self._row_words[at >> 1]
                words = self._digest_words
                if words[2 * row] == low and words[2 * row + 1] == high:
                    return row
            at = find(pattern, at + 1, end)
        if self._spill_bytes[bucket]:
            return self._spill[bucket].get(high << 64 | low, -1)
        return -1

    # ---- changes ------------------------------------------------------------------------------

    def vacancies(self, digests: Digests) -> Vacancies | None:
        """Where these digests (C-contiguous) would go, if all are absent; None where one is there,
        or may be. With `add` it looks at each bucket once, and at no row and no digest."""
        n = len(digests)
        if not _SCALAR_KEYS < n <= _PLACED_AT_ONCE:
            return None
        self._make_room(n)
        buckets, tags = self._buckets_of(digests), self._tags_of(digests)
        held = self._tags.take(buckets, axis=0)
        if np.count_nonzero(held == tags[:, None]):
            return None
        if self.spilled:
            for i in self._spill_counts.take(buckets).nonzero()[0].tolist():
                if int(digests[i, 1]) << 64 | int(digests[i, 0]) in self._spill[int(buckets[i])]:
                    return None
        return Vacancies(buckets, tags, first_place(held == _NO_TAG), (self._buckets, self.count))

    def add(self, digests: Digests, rows: Rows, vacancies: Vacancies | None = None) -> None:
        """Enter rows under their digests: absent, distinct, already in the digest column.

        `vacancies`: what was found of the very same digests.
        """
        self._make_room(len(rows))
        if vacancies is not None and vacancies.state == (self._buckets, self.count):
            self._place(vacancies.buckets, vacancies.tags, rows, vacancies.picked)
        else:
            self._place_all(digests, rows)
        self.count += len(rows)

    def add_one(self, low: int, high: int, row: int) -> None:
        """`add` for one."""
        if self.count >= self._buckets * _KEYS_PER_BUCKET_SPILLING:
            self._make_room(1)
        self._place_one(low, high, row)
        self.count += 1

    def remove(self, rows: Rows) -> None:
        """Take rows out. Raises InternalError, at worst half-way, when one isn't in the index."""
        if not len(rows):
            return
        places, spilled = self._places_of(rows)
        self._tags_flat[places] = 0
        self._rows_flat[places] = 0
        for row in spilled:
            self._unspill(row)
        self.count -= len(rows)
        self._give_room(len(rows))

    def remove_one(self, row: int) -> None:
        """`remove` for one."""
        place = self._place_of(row)
        if place < 0:
            self._unspill(row)
        else:
            self._tag_words[place] = 0
            self._row_words[place] = 0
        self.count -= 1
        if self.count < self._buckets * _KEYS_PER_BUCKET_MIN:
            self._give_room(1)

    def move(self, rows: Rows, new_rows: Rows) -> None:
        """Rows have moved; both hold the digest. Raises InternalError when one isn't in here."""
        if not len(rows):
            return
        places, spilled = self._places_of(rows)
        moved = dict(zip(rows.tolist(), new_rows.tolist(), strict=True)) if spilled else {}
        if spilled:
            new_rows = new_rows[~np.isin(rows, spilled)]
        self._rows_flat[places] = new_rows
        for row in spilled:
            bucket, key = self._spill_key(row)
            self._spill[bucket][key] = moved[row]

    def reserve(self, count: int) -> None:
        """Split until `count` more keys fit, in one go: before a bulk load."""
        self._make_room(count)

    # ---- places -------------------------------------------------------------------------------

    def _buckets_of(self, digests: Digests) -> Rows:
        buckets: Rows = (digests[:, 0] & self._mask_array).view(_I64)
        if self._buckets != self._half:
            # The branch-free way to subtract `half` where bucket >= buckets.
            over = self._last_array - buckets
            over >>= _SIGN
            over &= self._half_array
            buckets -= over
        return buckets

    def _bucket_of(self, low: int) -> int:
        bucket = low & self._mask
        return bucket if bucket < self._buckets else bucket - self._half

    @staticmethod
    def _tags_of(digests: Digests) -> npt.NDArray[np.uint16]:
        return np.maximum(digests.view(_U16).reshape(len(digests), 8)[:, 7], _TAG_MIN)

    def _place_all(self, digests: Digests, rows: Rows) -> None:
        for start in range(0, len(rows), _PLACED_AT_ONCE):
            some = digests[start : start + _PLACED_AT_ONCE]
            self._place(
                self._buckets_of(some), self._tags_of(some), rows[start : start + _PLACED_AT_ONCE]
            )

    def _place(
        self,
        buckets: Rows,
        tags: npt.NDArray[np.uint16],
        rows: Rows,
        picked: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Put up to 4,096 (tag, row) pairs into their buckets. `picked`: their first empty places.

        All pairs choose the first empty place of their bucket at once; those that chose the same
        place as another are told by reading back who won, and choose again. Pairs that found their
        bucket full go to the spill, and write to a place that nobody reads.
        """
        while True:
            if len(rows) <= _SCALAR_KEYS:
                for row in rows.tolist():
                    self._place_one(
                        self._digest_words[2 * row], self._digest_words[2 * row + 1], row
                    )
                return
            if picked is None:
                picked = first_place(self._tags.take(buckets, axis=0) == _NO_TAG)
            places = buckets << _PLACE_BITS
            places += picked
            full = picked == _NO_PLACE
            if np.count_nonzero(full):
                for i in np.flatnonzero(full).tolist():
                    self._spill_one(int(buckets[i]), int(rows[i]))
                    places[i] = self._blind_place + i
            self._rows_flat[places] = rows
            won = self._rows_flat.take(places) == rows
            if np.count_nonzero(won) == len(rows):
                self._tags_flat[places] = tags
                return
            winners, losers = np.flatnonzero(won), np.flatnonzero(~won)
            self._tags_flat[places.take(winners)] = tags.take(winners)
            rows, tags, buckets = rows.take(losers), tags.take(losers), buckets.take(losers)
            picked = None

    def _place_one(self, low: int, high: int, row: int) -> None:
        bucket = self._bucket_of(low)
        place = self._find_place(bucket, b"\0\0")
        if place < 0:
            self._spill_one(bucket, row)
        else:
            self._tag_words[place] = high >> 48 or 1
            self._row_words[place] = row

    def _find_place(self, bucket: int, pattern: bytes) -> int:
        start = bucket * _BUCKET_BYTES
        end = start + _BUCKET_BYTES
        at = self._tag_map.find(pattern, start, end)
        while at & 1 and at > 0:
            at = self._tag_map.find(pattern, at + 1, end)
        return at >> 1 if at >= 0 else -1

    def _places_of(self, rows: Rows) -> tuple[Rows, list[int]]:
        """Places of rows, without those in the spill; and which rows are in the spill."""
        if len(rows) <= _SCALAR_KEYS:
            ones = [(row, self._place_of(row)) for row in rows.tolist()]
            return (
                np.array([place for _, place in ones if place >= 0], np.int64),
                [row for row, place in ones if place < 0],
            )
        buckets = self._buckets_of(self._digests.take(rows, axis=0))
        wanted = rows.astype(np.uint32)
        places = buckets << _PLACE_BITS
        places += first_place(self._rows.take(buckets, axis=0) == wanted[:, None])
        right = self._rows_flat.take(places) == wanted
        if np.count_nonzero(right) == len(rows):
            return places, []
        return places[right], rows[~right].tolist()

    def _place_of(self, row: int) -> int:
        start = self._bucket_of(self._digest_words[2 * row]) << _SHIFT
        try:
            return start + self._row_words[start : start + _PLACES].tolist().index(row)
        except ValueError:
            return -1

    # ---- spill --------------------------------------------------------------------------------

    def _spill_key(self, row: int) -> tuple[int, int]:
        low = self._digest_words[2 * row]
        bucket, key = self._bucket_of(low), self._digest_words[2 * row + 1] << 64 | low
        if self._spill.get(bucket, {}).get(key) != row:
            raise InternalError(f"row {row} is not in the index")
        return bucket, key

    def _spill_one(self, bucket: int, row: int) -> None:
        words = self._digest_words
        keys = self._spill.setdefault(bucket, {})
        keys[words[2 * row + 1] << 64 | words[2 * row]] = row
        self._spill_bytes[bucket] = min(len(keys), 255)
        self._spill_peak = max(self._spill_peak, len(self._spill))
        self.spilled += 1

    def _unspill(self, row: int) -> None:
        bucket, key = self._spill_key(row)
        keys = self._spill[bucket]
        del keys[key]
        self._spill_bytes[bucket] = min(len(keys), 255)
        self.spilled -= 1
        if not keys:
            del self._spill[bucket]

    def _place_spilled_again(self, first: int, stop: int) -> None:
        """Place what spilled from buckets [first, stop) anew, after a split or merge."""
        if not self.spilled:
            return
        rows: list[int] = []
        for bucket in (np.flatnonzero(self._spill_counts[first:stop]) + first).tolist():
            rows += self._spill.pop(bucket).values()
        self._spill_counts[first:stop] = 0
        self.spilled -= len(rows)
        if rows:
            places = np.array(rows, _I64)
            self._place_all(self._digests.take(places, axis=0), places)

    # ---- growing and shrinking ------------------------------------------------------------------

    def _set_buckets(self, buckets: int, half: int) -> None:
        if buckets == 2 * half:
            half = buckets
        self._buckets, self._half = buckets, half
        self._mask = half - 1 if buckets == half else 2 * half - 1
        self._mask_array = np.array(self._mask, _U64)
        self._last_array = np.array(buckets - 1, _I64)
        self._half_array = np.array(half, _I64)

    def _make_room(self, count: int) -> None:
        count += self.count
        while count > self._buckets * _KEYS_PER_BUCKET_MAX or (
            self.spilled * _SPILL_SHARE > count
            and count > self._buckets * _KEYS_PER_BUCKET_SPILLING
        ):
            self._split(_STEP_BUCKETS)

    def _give_room(self, removed: int) -> None:
        """Merge a bounded number of buckets when there are too many for what is left."""
        steps = 1 + removed // (2 * _STEP_BUCKETS)
        while (
            steps
            and self._buckets > _BUCKETS_MIN
            and self.count < (self._buckets - _STEP_BUCKETS) * _KEYS_PER_BUCKET_MIN
        ):
            self._merge(_STEP_BUCKETS)
            steps -= 1
        if self._touched - self._buckets > _DISCARD_BUCKETS_MIN + self._buckets // 8:
            first, stop = self._buckets << _SHIFT, self._touched << _SHIFT
            self._tags_home.discard(first, stop)
            self._rows_home.discard(first, stop)
            self._touched = self._buckets
        if len(self._spill) * 4 + 64 < self._spill_peak:
            self._spill = dict(self._spill)  # a dict never shrinks by itself
            self._spill_peak = len(self._spill)

    def _split(self, count: int) -> None:
        """Split the next `count` buckets (128: both counts are multiples, no level is crossed)."""
        new, old = self._buckets, self._buckets - self._half
        rows, tags = self._rows[old : old + count], self._tags[old : old + count]
        # An empty place has row 0, whose digest is zero: it stays.
        goes = (self._low_words[rows] & np.uint64(self._half)) != 0
        tags -= np.multiply(tags, goes, out=self._tags[new : new + count])
        rows -= np.multiply(rows, goes, out=self._rows[new : new + count])
        self._set_buckets(new + count, self._half)
        self._touched = max(self._touched, self._buckets)
        self._place_spilled_again(old, old + count)

    def _merge(self, count: int) -> None:
        """Undo the last `count` splits."""
        half = self._half // 2 if self._buckets == self._half else self._half
        stop, first = self._buckets, self._buckets - count
        self._set_buckets(first, half)
        tags = self._tags_flat[first << _SHIFT : stop << _SHIFT]
        used = np.flatnonzero(tags)
        rows = self._rows_flat[first << _SHIFT : stop << _SHIFT]
        moved_tags, moved_rows = tags[used], rows[used].astype(np.int64)
        tags[:] = 0
        rows[:] = 0
        self._place((used >> _SHIFT) + (first - half), moved_tags, moved_rows)
        self._place_spilled_again(first, stop)

    # ---- figures --------------------------------------------------------------------------------

    @property
    def memory_bytes(self) -> int:
        """Resident bytes, estimated."""
        return self._touched * (_PLACES * 6 + 1) + self.spilled * 350

    def check(self) -> None:
        """Raise AssertionError unless every entry is where its digest says (for tests; O(n))."""
        used = np.flatnonzero(self._tags_flat[: self._touched << _SHIFT])
        assert len(used) + self.spilled == self.count
        assert not len(used) or int(used[-1]) >> _SHIFT < self._buckets
        rows = self._rows_flat[used].astype(np.int64)
        assert np.array_equal(np.flatnonzero(self._rows_flat[: self._touched << _SHIFT]), used)
        digests = self._digests.take(rows, axis=0)
        assert np.array_equal(self._buckets_of(digests), used >> _SHIFT)
        assert np.array_equal(np.maximum(digests[:, 1] >> np.uint64(48), 1), self._tags_flat[used])
        assert self.spilled == sum(map(len, self._spill.values()))
        assert sorted(self._spill) == np.flatnonzero(self._spill_counts).tolist()
        for bucket, keys in self._spill.items():
            assert self._spill_counts[bucket] == min(len(keys), 255)
            for key, row in keys.items():
                assert self._spill_key(row) == (bucket, key)
