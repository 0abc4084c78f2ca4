"""Nodes and a transport in this process for the SDK's tests, with faults on order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.api.errors import CenoteError, GrantRevoked, Unavailable
from cenote.api.rows import EXTENT, SEAL
from cenote.runtime.memory import address_of
from cenote.transport.base import ExtentArray, Region, SealBatch, Seen, SessionIdentity
from cenote.transport.proofs import ProofBatch, refused
from cenote.v1 import common_pb2

__all__ = ["FakeChannel", "FakeNode", "FakeTransport"]


@dataclass
class FakeNode:
    """One daemon with one segment of the same id. `fault` is raised by every transfer."""

    node_id: int
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    free_at: int = 0
    fault: CenoteError | None = None
    seal_refusals: int = 0
    """So many seals answer that the slot table is still growing."""
    statuses: list[int] = field(default_factory=list)
    """Item statuses of the next transfers, one each."""
    sealed: dict[int, tuple[bytes, int, int]] = field(default_factory=dict)
    """Slot -> (key, seq, checksum)."""
    on_copy: Callable[[], None] = lambda: None
    """Called before each transfer."""
    on_seal: Callable[[], None] = lambda: None
    cut_sessions: set[bytes] = field(default_factory=set)
    """Sessions that this daemon takes nothing of any more."""
    tenure_over: bool = False
    """This daemon follows a later leader than the one that gives leases."""
    reads: int = 0
    writes: int = 0
    seals: int = 0

    def address(self, offset: int, length: int) -> int:
        assert offset + length <= len(self.memory)
        return address_of(self.memory) + offset


class FakeChannel:
    """See `cenote.transport.base.Channel`."""

    def __init__(self, node: FakeNode, by_lease: bool, session_id: bytes) -> None:
        self._node = node
        self._session_id = session_id
        self.verifies_by_lease = by_lease
        self.obstacle = ""
        self.closed = False

    @property
    def node_id(self) -> int:
        return self._node.node_id

    @property
    def route(self) -> str:
        return "a fake"

    def proves(self, lease_id: int) -> bool:
        return self.verifies_by_lease and lease_id != 0 and not self._node.tenure_over

    def _check(self) -> int:
        self._node.on_copy()
        self._check_session()
        if self._node.fault is not None:
            raise self._node.fault
        return self._node.statuses.pop(0) if self._node.statuses else 0

    def _check_session(self) -> None:
        if self._session_id in self._node.cut_sessions:
            raise GrantRevoked("this session was cut off")

    def read(
        self, extents: Any, addresses: Any, deadline_s: float, checksums: Any = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._copy(extents, addresses, checksums, read=True)

    def write(
        self,
        extents: Any,
        addresses: Any,
        grant_id: int,
        deadline_s: float,
        checksums: Any = None,
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        assert grant_id
        return self._copy(extents, addresses, checksums, read=False)

    def _copy(
        self, extents: Any, addresses: Any, checksums: Any, *, read: bool
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        status = self._check()
        node = self._node
        if read:
            node.reads += 1
        else:
            node.writes += 1
        statuses = np.full(len(extents), status, np.uint8)
        for i, (extent, local) in enumerate(zip(extents, addresses.tolist(), strict=True)):
            assert int(extent["segment"]) == node.node_id
            length = int(extent["length"])
            remote = node.address(int(extent["offset"]), length)
            if status:
                continue
            if read:
                ctypes.memmove(local, remote, length)
            else:
                ctypes.memmove(remote, local, length)
            if checksums is not None:
                checksums[i] = xxh3_64_intdigest(ctypes.string_at(local, length))
        return statuses

    def read_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        return self._copy_one(segment, offset, length, address, checksum, read=True)

    def write_one(
        self,
        segment: int,
        offset: int,
        length: int,
        address: int,
        grant_id: int,
        deadline_s: float,
        checksum: bool,
    ) -> tuple[int, int]:
        assert grant_id
        return self._copy_one(segment, offset, length, address, checksum, read=False)

    def _copy_one(
        self, segment: int, offset: int, length: int, address: int, checksum: bool, *, read: bool
    ) -> tuple[int, int]:
        extents = np.array([(segment, 0, offset, length)], EXTENT)
        sums = np.zeros(1, np.uint64) if checksum else None
        statuses = self._copy(extents, np.array([address], np.uint64), sums, read=read)
        return int(statuses[0]), 0 if sums is None else int(sums[0])

    def prove(self, batch: ProofBatch, deadline_s: float) -> Any:
        return refused(batch)

    def seal(self, batch: SealBatch, deadline_s: float) -> np.ndarray[Any, np.dtype[np.uint8]]:
        node = self._node
        node.on_seal()
        self._check_session()
        if node.fault is not None:
            raise node.fault
        node.seals += 1
        rows = np.frombuffer(batch.rows, SEAL)
        if node.seal_refusals:
            node.seal_refusals -= 1
            return np.full(len(rows), Unavailable.code, np.uint8)
        at = 0
        for row in rows:
            key = batch.keys[at : at + int(row["key_length"])]
            at += int(row["key_length"])
            node.sealed[int(row["slot"])] = (key, int(row["seq"]), int(row["checksum"]))
        assert at == len(batch.keys)
        return np.zeros(len(rows), np.uint8)

    def view(self, extents: ExtentArray, lease_id: int, deadline_s: float) -> Seen:
        if not self.verifies_by_lease:
            return Seen([None] * len(extents))
        memory = self._node.memory
        return Seen(
            [
                memoryview(memory[offset : offset + length].data).toreadonly()
                for _, _, offset, length in extents.tolist()
            ]
        )

    def close(self) -> None:
        self.closed = True


class FakeTransport:
    """See `cenote.transport.base.Transport`. `by_lease`: like shm, else like TCP."""

    def __init__(
        self,
        nodes: dict[int, FakeNode],
        *,
        by_lease: bool = True,
        kind: int = common_pb2.TRANSPORT_KIND_MEMORY,
    ) -> None:
        self.kind = kind
        self._nodes = nodes
        self._by_lease = by_lease
        self.in_the_way: str | None = None
        """Why it can't work at all now."""
        self.refusal: CenoteError | None = None
        """What connecting ends in now."""
        self.closed = False
        self.regions: list[Region] = []
        self.channels: list[FakeChannel] = []

    def obstacle(self, node: common_pb2.NodeView, identity: SessionIdentity) -> str | None:
        return self.in_the_way if node.node_id in self._nodes else "there is no such node"

    def register(self, address: int, length: int, keeper: object) -> Region:
        region = Region(address, length, keeper)
        self.regions.append(region)
        return region

    def deregister(self, region: Region) -> None:
        self.regions.remove(region)

    def connect(
        self, node: common_pb2.NodeView, identity: SessionIdentity, epoch: int, deadline_s: float
    ) -> FakeChannel:
        if self.refusal is not None:
            raise self.refusal
        channel = FakeChannel(self._nodes[node.node_id], self._by_lease, identity.session_id)
        self.channels.append(channel)
        return channel

    def close(self) -> None:
        self.closed = True
