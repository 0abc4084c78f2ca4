"""Where objects were a moment ago: reads of small objects that need not ask the master.

Digest -> one packed row of what a read needs, for objects of one extent. A row is valid until its
`end_s`; the bytes read under it are verified by their checksum, so a stale row costs a round trip
and never wrong bytes. Packed rows make a batch of hits one `join` and the cache 250 bytes an entry.

What a batch learned is kept as it came until somebody looks for one of its keys: most batches are
never read again in time, and to enter every key costs more than a quarter of reading them. Whether
a batch is among those is told by its first key, since what is read again begins alike.
"""

from __future__ import annotations

from itertools import islice
from struct import Struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cenote.api.keys import split_digests
from cenote.api.rows import DIGEST_BYTES

__all__ = ["LOCATION", "LOCATION_STRUCT", "LocationCache"]

LOCATION = np.dtype(
    [
        ("end_s", "<f8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("checksum", "<u8"),
        ("segment", "<u4"),
        ("node_id", "<u4"),
    ]
)
LOCATION_STRUCT: Final = Struct("<dQQQII")
_END: Final = Struct("<d")

_EVICT_SHARE: Final = 8
_BATCHES_MAX: Final = 64
"""That wait to be entered; then the oldest is forgotten."""

Batch = tuple[bytes, float, NDArray[np.void], NDArray[np.void], int]
"""(digests, end_s, OBJECT rows, EXTENT rows of one each, node id)."""


class LocationCache:
    """Bounded by entries; when full, the eighth that was stored first goes."""

    __slots__ = ("_batches", "_rows", "_waiting", "entries_max")

    def __init__(self, entries_max: int) -> None:
        self.entries_max = entries_max
        self._rows: dict[bytes, bytes] = {}
        self._batches: dict[bytes, Batch] = {}  # by first digest
        self._waiting = 0  # keys of them; threads that race may leave it a little wrong

    def __len__(self) -> int:
        return len(self._rows) + sum(len(batch[2]) for batch in list(self._batches.values()))

    def __bool__(self) -> bool:
        return bool(self._rows or self._batches)

    def get(self, digest: bytes) -> bytes | None:
        """Packed row of a digest, or None."""
        row = self._rows.get(digest)
        if row is None and self._batches:
            self._enter(list(self._batches))
            row = self._rows.get(digest)
        return row

    def may_have(self, first: bytes) -> bool:
        """Whether a batch that begins with this digest is worth looking for."""
        if first in self._batches:
            self._enter([first])
        return first in self._rows

    def store_batch(
        self,
        digests: bytes,
        end_s: float,
        objects: NDArray[np.void],
        extents: NDArray[np.void],
        node_id: int,
    ) -> None:
        """Remember where a batch is: OBJECT rows, and one EXTENT row each, all on one node."""
        count = len(objects)
        if count > self.entries_max:
            return
        batches = self._batches
        first = digests[:DIGEST_BYTES]
        self._drop(first)
        batches[first] = (digests, end_s, objects, extents, node_id)
        self._waiting += count
        while len(batches) > _BATCHES_MAX or self._waiting > self.entries_max:
            try:
                self._drop(next(iter(batches)))
            except (StopIteration, RuntimeError):  # another thread is at it
                break

    def _drop(self, first: bytes) -> Batch | None:
        batch = self._batches.pop(first, None)
        if batch is not None:
            self._waiting -= len(batch[2])
        return batch

    def _enter(self, firsts: list[bytes]) -> None:
        for first in firsts:
            batch = self._drop(first)
            if batch is None:  # another thread was faster
                continue
            digests, end_s, objects, extents, node_id = batch
            rows = np.empty(len(objects), LOCATION)
            rows["end_s"] = end_s
            rows["offset"] = extents["offset"]
            rows["size"] = objects["size"]
            rows["checksum"] = objects["checksum"]
            rows["segment"] = extents["segment"]
            rows["node_id"] = node_id
            names = split_digests(digests)
            newer = {i for i, name in enumerate(names) if self._knows_newer(name, end_s)}
            if newer:
                rows = np.delete(rows, sorted(newer))
                names = [name for i, name in enumerate(names) if i not in newer]
            self.store_many(names, rows)

    def _knows_newer(self, digest: bytes, end_s: float) -> bool:
        row = self._rows.get(digest)
        return row is not None and _END.unpack_from(row)[0] > end_s

    def store(self, digest: bytes, row: bytes) -> None:
        """Remember one location."""
        if not self.entries_max:
            return
        rows = self._rows
        rows.pop(digest, None)  # so that it counts as stored last
        rows[digest] = row
        if len(rows) > self.entries_max:
            self._evict()

    def store_many(self, digests: list[bytes], rows: NDArray[np.void]) -> None:
        """Remember one location (LOCATION row) for each digest."""
        if not self.entries_max:
            return
        if len(digests) > self.entries_max:
            for digest in digests[: -self.entries_max]:  # what is known of them is older
                self._rows.pop(digest, None)
            digests, rows = digests[-self.entries_max :], rows[-self.entries_max :]
        packed: list[bytes] = rows.view(f"V{LOCATION.itemsize}").tolist()
        self._rows.update(zip(digests, packed, strict=True))
        if len(self._rows) > self.entries_max:
            self._evict()

    def find_many(
        self, digests: list[bytes], now_s: float
    ) -> tuple[NDArray[np.int64], NDArray[np.void]]:
        """(positions that are known, their LOCATION rows)."""
        found = list(map(self._rows.get, digests))
        if None in found:
            positions = [i for i, row in enumerate(found) if row is not None]
            if not positions:
                return np.zeros(0, np.int64), np.zeros(0, LOCATION)
            where = np.array(positions, np.int64)
            rows = np.frombuffer(b"".join([r for r in found if r is not None]), LOCATION)
        else:
            where = np.arange(len(found), dtype=np.int64)
            rows = np.frombuffer(b"".join(found), LOCATION)  # type: ignore[arg-type]
        fresh = rows["end_s"] > now_s
        if fresh.all():
            return where, rows
        return where[fresh], rows[fresh]

    def forget(self, digest: bytes) -> None:
        """This one was wrong, or is going to be."""
        if self._batches:  # one of these may have it, and would bring it back
            self._enter(list(self._batches))
        self._rows.pop(digest, None)

    def clear(self) -> None:
        """Forget all."""
        self._batches.clear()
        self._waiting = 0
        self._rows.clear()

    def _evict(self) -> None:
        excess = len(self._rows) - self.entries_max + self.entries_max // _EVICT_SHARE
        try:
            oldest = list(islice(self._rows, excess))
        except RuntimeError:  # another thread stored something meanwhile: it evicts, too
            return
        for digest in oldest:
            self._rows.pop(digest, None)
