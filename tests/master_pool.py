"""A master in process with a namespace and nodes, and the requests that tests send it most."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import cast

import numpy as np

from cenote.api.keys import digest_key
from cenote.api.rows import OBJECT, PUT, SLOT
from cenote.master.memory_backend import MemoryBackend, MemoryLog
from cenote.master.metadata import MetadataBackend
from cenote.master.service import MasterService
from cenote.master.state_config import StateConfig
from cenote.rpc.lane_server import LaneConnection
from cenote.runtime.clock import ManualClock
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

__all__ = ["MIB", "MasterPool", "attach_request", "inventory_of", "lane", "restarted", "u32", "u64"]

MIB = 1 << 20
SEED = 0x1234_5678_9ABC_DEF0


def u64(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


class _Connection:
    """As much of a lane connection as the service looks at."""

    def __init__(self, session: bytes) -> None:
        self.session = session
        self.peer = "test"
        self.principal = None


def lane(session: bytes = b"") -> LaneConnection:
    """A connection whose hello named `session`."""
    return cast(LaneConnection, _Connection(session))


def attach_request(
    number: int = 1, size_bytes: int = 4 * MIB, **fields: object
) -> pb.AttachRequest:
    """A node with one empty segment; `number` makes its uuid, name, boot id and incarnation."""
    request = pb.AttachRequest(
        node_uuid=b"%016d" % number,
        node_name=f"node-{number}",
        boot_id=f"boot-{number}",
        endpoints=[
            common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address=f"127.0.0.1:{number}")
        ],
        segments=[
            pb.SegmentInfo(
                tier=common_pb2.TIER_DRAM,
                incarnation=b"incarnation-%04d" % number,
                size_bytes=size_bytes,
                ready_bytes=size_bytes,
                unit_bytes=64,
                slots=4096,
            )
        ],
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return request


class MasterPool:
    """`nodes` nodes are attached; session and namespace are open unless `bare`."""

    session_id = b"session-session!"

    def __init__(
        self,
        backend: MetadataBackend | None = None,
        *,
        log: MemoryLog | None = None,
        nodes: int = 1,
        size_bytes: int = 4 * MIB,
        config: StateConfig | None = None,
        bare: bool = False,
    ) -> None:
        self.clock = ManualClock()
        self.backend = backend or MemoryBackend(log)
        self.service = MasterService(self.backend, config, clock=self.clock, draw_seed=lambda: SEED)
        for _ in self.service.load():
            pass
        self.requests = 0
        if bare:
            return
        self.hello()
        self.namespace = self.service.open_namespace(
            pb.OpenNamespaceRequest(name="models", fingerprint=b"f", create=True), 1.0
        )
        for number in range(1, nodes + 1):
            self.service.attach(attach_request(number, size_bytes), 1.0)

    def hello(self, session_id: bytes | None = None) -> pb.HelloResponse:
        request = pb.HelloRequest(session_id=session_id or self.session_id, boot_id="boot-1")
        return self.service.hello(request, 1.0)

    def next_request(self) -> int:
        self.requests += 1
        return self.requests

    # ---- keys -------------------------------------------------------------------------------

    def digest(self, key: bytes) -> bytes:
        return digest_key(key, self.namespace.digest_seed)

    def batch(self, *keys: bytes) -> common_pb2.KeyBatch:
        """By digests."""
        return common_pb2.KeyBatch(
            namespace_id=self.namespace.namespace_id,
            generation=self.namespace.generation,
            digests=b"".join(map(self.digest, keys)),
        )

    def full(self, *keys: bytes) -> common_pb2.KeyBatch:
        """By full keys."""
        return common_pb2.KeyBatch(
            namespace_id=self.namespace.namespace_id,
            generation=self.namespace.generation,
            keys=b"".join(keys),
            key_lengths=np.array(list(map(len, keys)), "<u2").tobytes(),
        )

    # ---- operations -------------------------------------------------------------------------

    def put_start(
        self,
        *keys: bytes,
        size: int = 100,
        batch: common_pb2.KeyBatch | None = None,
        options: pb.PutOptions | None = None,
    ) -> pb.PutStartResponse:
        request = pb.PutStartRequest(
            keys=batch or self.batch(*keys),
            sizes=struct.pack("<Q", size),
            session_id=self.session_id,
            request_id=self.next_request(),
            options=options,
        )
        return self.service.put_start(request, 1.0)

    def put_commit(
        self, started: pb.PutStartResponse, *, deadline_s: float = 1.0, sealed: bool = True
    ) -> pb.PutCommitResponse:
        granted = int(np.count_nonzero(np.frombuffer(started.puts, PUT)["status"] == 2))
        request = pb.PutCommitRequest(
            grant_id=started.grant_id,
            checksums=np.arange(granted, dtype="<u8").tobytes(),
            session_id=self.session_id,
            request_id=self.next_request(),
        )
        reply = self.service.put_commit(request, deadline_s)
        if sealed:
            self.service.renew_session(
                pb.RenewSessionRequest(
                    session_id=self.session_id, sealed_through=request.request_id
                ),
                1.0,
            )
        return reply

    def put(self, *keys: bytes, size: int = 100, options: pb.PutOptions | None = None) -> bytes:
        """Store keys; the statuses of the commit."""
        return self.put_commit(self.put_start(*keys, size=size, options=options)).statuses

    def exists(self, *keys: bytes) -> list[int]:
        return list(self.service.exists(pb.ExistsRequest(keys=self.batch(*keys)), 1.0).present)

    def acquire(self, *keys: bytes, **fields: object) -> pb.AcquireResponse:
        request = pb.AcquireRequest(
            keys=self.batch(*keys), session_id=self.session_id, lease=True, ttl_ms=5000
        )
        for name, value in fields.items():
            setattr(request, name, value)
        return self.service.acquire(request, 1.0)

    def remove(self, *keys: bytes) -> list[int]:
        return list(self.service.remove(pb.RemoveRequest(keys=self.batch(*keys)), 1.0).removed)

    @staticmethod
    def statuses(response: pb.AcquireResponse) -> Sequence[int]:
        found: list[int] = np.frombuffer(response.objects, OBJECT)["status"].tolist()
        return found


def restarted(log: MemoryLog, **config: float) -> MasterPool:
    """Another master over the same log; its session and namespace are opened."""
    pool = MasterPool(MemoryBackend(log), bare=True, config=StateConfig(**config))  # type: ignore[arg-type]
    pool.hello()
    pool.namespace = pool.service.open_namespace(
        pb.OpenNamespaceRequest(name="models", fingerprint=b"f"), 1.0
    )
    return pool


def inventory_of(found: pb.AcquireResponse, pool: MasterPool, keys: Sequence[bytes]) -> bytes:
    """Slot rows of objects of one extent each, as their daemon would have sealed them."""
    objects = np.frombuffer(found.objects, "<u8").reshape(-1, 4)
    extents = np.frombuffer(found.extents, "<u8").reshape(-1, 3)
    rows = np.zeros(len(keys), SLOT)
    rows["slot"] = np.arange(len(keys))
    rows["offset"], rows["length"] = extents[:, 1], extents[:, 2]
    rows["object_size"], rows["checksum"], rows["seq"] = objects[:, 0], objects[:, 1], objects[:, 2]
    rows["digest"] = [np.void(pool.digest(key)) for key in keys]
    rows["epoch"], rows["namespace_id"], rows["generation"] = 1, 1, 1
    rows["extent_count"] = 1
    return rows.tobytes()
