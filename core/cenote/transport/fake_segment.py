"""Segments without a store: memory with a descriptor, and seals that are only noted. For tests."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from cenote.api.contents import TICKET_KEY_BYTES
from cenote.api.errors import StaleLocation

__all__ = ["FakeSegment", "FakeSegments"]


@final
class FakeSegment:
    """`size_bytes` of a memfd. `seals` maps a slot number to its row and key."""

    def __init__(
        self, segment_id: int, size_bytes: int, *, index: int = 0, ready_bytes: int | None = None
    ) -> None:
        self.segment_id = segment_id
        self.index = index
        self.tier = 1
        self.disk = None
        self.incarnation = os.urandom(16)
        self.size_bytes = size_bytes
        self.ready_bytes = size_bytes if ready_bytes is None else ready_bytes
        self.seals: dict[int, tuple[NDArray[np.void], bytes]] = {}
        self.fd = os.memfd_create(f"cenote-fake-{segment_id}", os.MFD_CLOEXEC)
        os.posix_fallocate(self.fd, 0, size_bytes)
        self._map = mmap.mmap(self.fd, size_bytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def record(self, slot: int, epoch: int, seq: int) -> bytes | None:
        """None: it has no slots that anybody copies from."""
        return None

    def namespace_at(self, slot: int) -> int:
        """0: it knows no namespaces."""
        return 0

    def seal(
        self,
        epoch: int,
        namespace_id: int,
        generation: int,
        rows: NDArray[np.void],
        keys: memoryview,
        key_starts: NDArray[np.int64],
    ) -> NDArray[np.uint8]:
        """As `store.segment.Segment.seal`: a slot holds its highest seq."""
        statuses = np.zeros(len(rows), np.uint8)
        for i, (row, start) in enumerate(zip(rows, key_starts.tolist(), strict=True)):
            slot = int(row["slot"])
            held = self.seals.get(slot)
            if held is not None and int(held[0]["seq"]) > int(row["seq"]):
                statuses[i] = StaleLocation.code
                continue
            self.seals[slot] = row.copy(), bytes(keys[start : start + int(row["key_length"])])
        return statuses

    def close(self) -> None:
        """Let the memory go; nobody may use it any more."""
        self.view.release()
        os.close(self.fd)


@final
class FakeSegments:
    """A daemon's segments and the epoch that it follows."""

    def __init__(
        self, segments: Sequence[FakeSegment], *, node_id: int = 1, epoch: int = 1
    ) -> None:
        self.node_id = node_id
        self.epoch = epoch
        self.first_grant_id = 0
        self.ticket_key = bytes(TICKET_KEY_BYTES)
        self.disk = None
        self.namespaces: dict[int, str] = {}
        self._by_id = {segment.segment_id: segment for segment in segments}

    def by_id(self, segment_id: int) -> FakeSegment | None:
        return self._by_id.get(segment_id)

    def knows(self, namespace_id: int, generation: int) -> bool:
        return True

    def namespace_name(self, namespace_id: int) -> str:
        return self.namespaces.get(namespace_id, "")

    def all(self) -> list[FakeSegment]:
        return list(self._by_id.values())

    def add(self, segment: FakeSegment) -> None:
        """A segment that the daemon got later."""
        self._by_id[segment.segment_id] = segment

    def close(self) -> None:
        for segment in self._by_id.values():
            segment.close()
