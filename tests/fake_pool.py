"""A pool in this process for the SDK's tests: a master of dicts, nodes of arrays, faults on order.

It follows the borders (`MasterApi`, `Transport`) and nothing else; what a real master decides is
tested with the real one.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.api.errors import (
    CenoteError,
    FingerprintMismatch,
    InvalidArgument,
    NamespaceReset,
    SessionUnknown,
)
from cenote.api.keys import split_digests
from cenote.api.rows import EXTENT, OBJECT, PUT, CommitStatus, ObjectStatus, PutStatus
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb
from fake_nodes import FakeNode, FakeTransport

__all__ = ["FakeMaster", "FakeTransport"]

UNIT = 64


@dataclass
class FakeObject:
    size: int
    checksum: int
    seq: int
    replicas: list[list[tuple[int, int, int]]]
    """Per replica its extents: (node, offset, length)."""


@dataclass
class FakeGrant:
    digests: list[bytes]
    sizes: list[int]
    placed: list[list[list[tuple[int, int, int]]] | None]
    session_id: bytes = b""
    request_id: int = 0
    spare_units: int = 0
    """Of each extent, where it is a grant of spares."""

    @property
    def open(self) -> list[int]:
        """Positions that are neither committed nor given back."""
        return [i for i, placed in enumerate(self.placed) if placed is not None]


class FakeMaster:
    """See `cenote.api.master.MasterApi`."""

    def __init__(self, nodes: int = 1, segment_bytes: int = 1 << 20) -> None:
        self.nodes = {
            i: FakeNode(i, np.zeros(segment_bytes, np.uint8)) for i in range(1, nodes + 1)
        }
        self.extent_bytes_max = segment_bytes
        self.not_yet = 0  # so many put_starts are answered as by a master that was just restarted
        self.down: set[int] = set()  # nodes that the view calls dead, and that get nothing
        self.seed = 7
        self.generation = 1
        self.first_namespace_id = 1
        self.fingerprints: dict[str, bytes] = {}
        self.objects: dict[bytes, FakeObject] = {}
        self.grants: dict[int, FakeGrant] = {}
        self.leases: set[int] = set()
        self.pinned: set[bytes] = set()
        self.known_sessions: set[bytes] = set()
        self.touched: list[bytes] = []
        self.touched_chains, self.put_chains = list[bytes](), list[bytes]()
        self.failures: list[int] = []
        self.calls: dict[str, int] = defaultdict(int)
        self.faults: dict[str, list[CenoteError]] = defaultdict(list)
        """Method -> errors to raise, one a call."""
        self.hooks: dict[str, Callable[[], None]] = {}
        """Method -> called before it."""
        self.rival_bytes: dict[bytes, bytes] = {}
        """Digest -> what another writer commits just before we do."""
        self.lease_ttl_ms: int | None = None
        self.grants_leases = True
        self.location_ttl_ms = 60_000
        self.batch_keys_max = 16_384
        self.view_version = 1
        self.spares = 0
        """So many extents are spared at most, for each put_start that asks for some."""
        self.epoch = 1
        self.aborted: list[tuple[int, bool]] = []
        self.requests: dict[str, list[Any]] = defaultdict(list)
        self._ids = itertools.count(1)
        self._seqs = itertools.count(1)
        self._slots = itertools.count(0)
        self._lock = threading.RLock()

    # ---- plumbing ----------------------------------------------------------------------------

    def _enter(self, method: str, request: Any) -> None:
        self.calls[method] += 1
        self.requests[method].append(request)
        if method in self.hooks:
            self.hooks[method]()
        if self.faults[method]:
            raise self.faults[method].pop(0)
        news = getattr(request, "piggyback", None)
        if news is not None:
            for lease_id in np.frombuffer(news.released_lease_ids, "<u8").tolist():
                self.leases.discard(lease_id)
            self.touched += split_digests(news.touched_digests)
            self.touched_chains += filter(None, [news.touched_chain_digests])
            self.put_chains += filter(None, [news.chained_digests])

    def _digests(self, keys: common_pb2.KeyBatch) -> list[bytes]:
        if keys.generation != self.generation or keys.namespace_id < self.first_namespace_id:
            raise NamespaceReset("the namespace was reset")
        return split_digests(keys.digests)

    def reset(self) -> None:
        """As an administrator would: new generation, new seed, nothing left."""
        self.generation += 1
        self.seed += 1
        self.objects.clear()

    def rebuild(self) -> None:
        """As after its metadata were lost: another namespace of that name, and generation."""
        self.first_namespace_id += 100
        self.seed += 1
        self.objects.clear()

    def view(self) -> common_pb2.ClusterView:
        dead, alive = common_pb2.NODE_STATE_DEAD, common_pb2.NODE_STATE_ALIVE
        states = {i: dead if i in self.down else alive for i in self.nodes}
        return common_pb2.ClusterView(
            view_version=self.view_version,
            nodes=[
                common_pb2.NodeView(node_id=i, name=f"n{i}", segment_ids=[i], state=states[i])
                for i in self.nodes
            ],
            segments=[common_pb2.SegmentView(segment_id=i, node_id=i) for i in self.nodes],
        )

    # ---- sessions ----------------------------------------------------------------------------

    def hello(self, request: pb.HelloRequest, deadline_s: float) -> pb.HelloResponse:
        self._enter("hello", request)
        self.known_sessions.add(request.session_id)
        return pb.HelloResponse(
            epoch=self.epoch,
            session_ttl_ms=10_000,
            cluster_view=self.view(),
            location_ttl_ms=self.location_ttl_ms,
            lease_ttl_max_ms=10_000,
            batch_keys_max=self.batch_keys_max,
            is_leader=True,
        )

    def renew_session(
        self, request: pb.RenewSessionRequest, deadline_s: float
    ) -> pb.RenewSessionResponse:
        self._enter("renew_session", request)
        if request.session_id not in self.known_sessions:
            raise SessionUnknown("who are you")
        for request_id in np.frombuffer(request.cancelled_request_ids, "<u8").tolist():
            for grant_id, grant in list(self.grants.items()):
                if (grant.session_id, grant.request_id) == (request.session_id, request_id):
                    del self.grants[grant_id]
        return pb.RenewSessionResponse(view_version=self.view_version, epoch=self.epoch)

    def close_session(
        self, request: pb.CloseSessionRequest, deadline_s: float
    ) -> pb.CloseSessionResponse:
        self._enter("close_session", request)
        self.known_sessions.discard(request.session_id)
        for grant_id, grant in list(self.grants.items()):
            if grant.session_id == request.session_id:
                del self.grants[grant_id]
        return pb.CloseSessionResponse()

    def get_cluster_view(
        self, request: pb.GetClusterViewRequest, deadline_s: float
    ) -> pb.GetClusterViewResponse:
        self._enter("get_cluster_view", request)
        return pb.GetClusterViewResponse(cluster_view=self.view(), epoch=self.epoch)

    def open_namespace(
        self, request: pb.OpenNamespaceRequest, deadline_s: float
    ) -> pb.OpenNamespaceResponse:
        self._enter("open_namespace", request)
        known = self.fingerprints.setdefault(request.name, request.fingerprint)
        if known != request.fingerprint:
            raise FingerprintMismatch(f"namespace {request.name!r} has another fingerprint")
        return pb.OpenNamespaceResponse(
            namespace_id=self.first_namespace_id + list(self.fingerprints).index(request.name),
            generation=self.generation,
            digest_seed=self.seed + list(self.fingerprints).index(request.name) * 1000,
        )

    # ---- lookups -----------------------------------------------------------------------------

    def exists(self, request: pb.ExistsRequest, deadline_s: float) -> pb.ExistsResponse:
        self._enter("exists", request)
        digests = self._digests(request.keys)
        return pb.ExistsResponse(present=bytes(digest in self.objects for digest in digests))

    def match(self, request: pb.MatchRequest, deadline_s: float) -> pb.MatchResponse:
        self._enter("match", request)
        present = [digest in self.objects for digest in self._digests(request.keys)]
        return pb.MatchResponse(
            presence_bitmap=np.packbits(present, bitorder="little").tobytes(),
            prefix_keys=[*present, False].index(False),
        )

    def acquire(self, request: pb.AcquireRequest, deadline_s: float) -> pb.AcquireResponse:
        self._enter("acquire", request)
        if request.session_id not in self.known_sessions:
            raise SessionUnknown("who are you")
        digests = self._digests(request.keys)
        leases = self.grants_leases and request.lease
        objects = np.zeros(len(digests), OBJECT)
        extents: list[tuple[int, int, int, int]] = []
        for i, digest in enumerate(digests):
            found = self.objects.get(digest)
            if found is None:
                if request.chain:
                    break
                continue
            status = ObjectStatus.LEASED if leases else ObjectStatus.UNLEASED
            count = sum(map(len, found.replicas))
            objects[i] = (
                found.size, found.checksum, found.seq, 1, count, len(found.replicas), status,
            )  # fmt: skip
            for number, replica in enumerate(found.replicas):
                extents += [(node, number, offset, length) for node, offset, length in replica]
        reply = pb.AcquireResponse(
            objects=objects.tobytes(),
            extents=np.array(extents, EXTENT).tobytes(),
            view_version=self.view_version,
        )
        if extents and leases:
            reply.lease.lease_id = next(self._ids)
            reply.lease.ttl_ms = self.lease_ttl_ms or request.ttl_ms
            self.leases.add(reply.lease.lease_id)
        return reply

    def release(self, request: pb.ReleaseRequest, deadline_s: float) -> pb.ReleaseResponse:
        self._enter("release", request)
        return pb.ReleaseResponse()

    def touch(self, request: pb.TouchRequest, deadline_s: float) -> pb.TouchResponse:
        self._enter("touch", request)
        return pb.TouchResponse()

    # ---- writes ------------------------------------------------------------------------------

    def _place(self, size: int, avoid: set[int], replicas: int) -> list[list[tuple[int, int, int]]]:
        placed: list[list[tuple[int, int, int]]] = []
        for node in self.nodes.values():
            if len(placed) == replicas or node.node_id in avoid | self.down:
                continue
            parts, left = [], size
            while left:
                length = min(left, self.extent_bytes_max)
                if node.free_at + length > len(node.memory):
                    break
                parts.append((node.node_id, node.free_at, length))
                node.free_at += -(-length // UNIT) * UNIT
                left -= length
            if not left:
                placed.append(parts)
        return placed

    def put_start(self, request: pb.PutStartRequest, deadline_s: float) -> pb.PutStartResponse:
        with self._lock:
            self._enter("put_start", request)
            if request.session_id not in self.known_sessions:
                raise SessionUnknown("who are you")
            digests = self._digests(request.keys)
            sizes = np.frombuffer(request.sizes, "<u8")
            sizes = np.broadcast_to(sizes, len(digests)) if len(sizes) == 1 else sizes
            tails = np.frombuffer(request.tail_lengths, "<u2") if request.tail_lengths else None
            avoid = set(np.frombuffer(request.options.avoid_node_ids, "<u4").tolist())
            puts = np.zeros(len(digests), PUT)
            extents: list[tuple[int, int, int, int]] = []
            grant = FakeGrant(digests, sizes.tolist(), [None] * len(digests))
            for i, digest in enumerate(digests):
                if digest in digests[:i]:
                    puts[i]["status"] = PutStatus.DUPLICATE_IN_BATCH
                    continue
                if digest in self.objects:
                    puts[i]["status"] = PutStatus.EXISTS
                    continue
                if self.not_yet:
                    puts[i]["status"] = PutStatus.NOT_YET
                    continue
                total = int(sizes[i]) + (int(tails[i]) if tails is not None else 0)
                placed = self._place(total, avoid, request.options.replicas or 1)
                if self.nodes and not placed:
                    puts[i]["status"] = PutStatus.NO_SPACE
                elif len(placed) < max(1, request.options.min_replicas):
                    puts[i]["status"] = PutStatus.REPLICAS_UNAVAILABLE
                else:
                    puts[i] = (PutStatus.GRANTED, len(placed), sum(map(len, placed)), 0)
                    grant.placed[i] = placed
                    extents += [
                        (node, next(self._slots), offset, length)
                        for replica in placed
                        for node, offset, length in replica
                    ]
            self.not_yet = max(0, self.not_yet - 1)
            grant_id = next(self._ids)
            grant.session_id, grant.request_id = request.session_id, request.request_id
            if grant.open:
                self.grants[grant_id] = grant
            reply = pb.PutStartResponse(
                puts=puts.tobytes(),
                extents=np.array(extents, EXTENT).tobytes(),
                grant_id=grant_id,
                epoch=self.epoch,
                view_version=self.view_version,
            )
            if request.spare_count and self.spares and not self.down:
                self._spare(request, reply)
            return reply

    def _spare(self, request: pb.PutStartRequest, reply: pb.PutStartResponse) -> None:
        """Spare extents on the first node."""
        count = min(request.spare_count, self.spares)
        size = request.spare_bytes
        assert size > 0
        placed = [self._place(-(-size // UNIT) * UNIT, set(), 1) for _ in range(count)]
        reply.spare_grant_id = next(self._ids)
        self.grants[reply.spare_grant_id] = FakeGrant(
            [b""] * count,
            [0] * count,
            list(placed),
            request.session_id,
            request.request_id,
            -(-size // UNIT),
        )
        rows = [(node, next(self._slots), offset, size) for (((node, offset, _),),) in placed]
        reply.spare_extents = np.array(rows, EXTENT).tobytes()

    @property
    def spared(self) -> int:
        """Spare extents that are out."""
        return sum(len(grant.open) for grant in self.grants.values() if grant.spare_units)

    def forget_all(self) -> None:
        """As a master that was restarted: grants and sessions are gone, objects are not."""
        self.epoch += 1
        self.grants.clear()
        self.known_sessions.clear()

    def _name(self, request: pb.PutCommitRequest, grant: FakeGrant) -> None:
        """Take down what is said to be in spare extents."""
        assert grant.spare_units, "names for keys that are known"
        digests = self._digests(request.names.keys)
        indexes = np.frombuffer(request.indexes, "<u4").tolist()
        assert len(indexes) == len(digests)
        sizes = np.frombuffer(request.names.sizes, "<u8")
        tails = np.frombuffer(request.names.tail_lengths or bytes(2 * len(digests)), "<u2")
        for index, digest, size, tail in zip(
            indexes, digests, np.broadcast_to(sizes, len(digests)).tolist(), tails, strict=True
        ):
            assert -(-(size + int(tail)) // UNIT) == grant.spare_units, "it does not fit"
            grant.digests[index], grant.sizes[index] = digest, size

    def put_commit(self, request: pb.PutCommitRequest, deadline_s: float) -> pb.PutCommitResponse:
        with self._lock:
            self._enter("put_commit", request)
            if request.session_id not in self.known_sessions:
                raise SessionUnknown("who are you")
            found = self.grants.get(request.grant_id)
            if found is None or found.session_id != request.session_id:
                count = len(request.checksums) // 8
                return pb.PutCommitResponse(
                    statuses=bytes([CommitStatus.NOT_GRANTED]) * count, epoch=self.epoch
                )
            grant = found
            assert request.HasField("names") == bool(grant.spare_units)
            if grant.spare_units:
                self._name(request, grant)
            indexes = np.frombuffer(request.indexes, "<u4").tolist() or grant.open
            sums = np.frombuffer(request.checksums, "<u8").tolist()
            assert len(sums) == len(indexes)
            lost = set(map(tuple, np.frombuffer(request.failed_replicas, "<u4").reshape(-1, 2)))
            lost = {(int(a), int(b)) for a, b in lost}
            statuses = bytearray()
            first = 0
            for index, checksum in zip(indexes, sums, strict=True):
                digest, placed = grant.digests[index], grant.placed[index]
                grant.placed[index] = None
                seq = next(self._seqs)
                first = first or seq
                rival = self.rival_bytes.pop(digest, None)
                if rival is not None:
                    self.objects[digest] = FakeObject(len(rival), xxh3_64_intdigest(rival), 0, [])
                known = self.objects.get(digest)
                if placed is None:
                    statuses.append(CommitStatus.NOT_GRANTED)
                elif known is not None:
                    same = known.checksum == checksum and known.size == grant.sizes[index]
                    statuses.append(
                        CommitStatus.EXISTS_SAME if same else CommitStatus.EXISTS_DIFFERENT
                    )
                else:
                    kept = [r for n, r in enumerate(placed) if (index, n) not in lost]
                    kept = [_clipped(replica, grant.sizes[index]) for replica in kept]
                    self.objects[digest] = FakeObject(grant.sizes[index], checksum, seq, kept)
                    statuses.append(CommitStatus.DECIDED)
            if not grant.open or not grant.spare_units:
                del self.grants[request.grant_id]
            return pb.PutCommitResponse(statuses=bytes(statuses), epoch=self.epoch, seq_first=first)

    def put_abort(self, request: pb.PutAbortRequest, deadline_s: float) -> pb.PutAbortResponse:
        with self._lock:
            self._enter("put_abort", request)
            if request.unsealed_seqs:
                seqs = np.frombuffer(request.unsealed_seqs, "<u8").tolist()
                for digest, seq in zip(self._digests(request.unsealed_keys), seqs, strict=True):
                    found = self.objects.get(digest)
                    if found is not None and found.seq == seq:
                        del self.objects[digest]
                return pb.PutAbortResponse()
            self.aborted.append((request.grant_id, request.unfenced))
            grant = self.grants.get(request.grant_id)
            if grant is not None and grant.session_id == request.session_id:
                for index in np.frombuffer(request.indexes, "<u4").tolist() or grant.open:
                    grant.placed[index] = None
                if not grant.open:
                    del self.grants[request.grant_id]
        return pb.PutAbortResponse()

    def remove(self, request: pb.RemoveRequest, deadline_s: float) -> pb.RemoveResponse:
        self._enter("remove", request)
        found = [self.objects.pop(digest, None) for digest in self._digests(request.keys)]
        return pb.RemoveResponse(removed=bytes(each is not None for each in found))

    def pin(self, request: pb.PinRequest, deadline_s: float) -> pb.PinResponse:
        self._enter("pin", request)
        digests = self._digests(request.keys)
        self.pinned |= {digest for digest in digests if digest in self.objects}
        return pb.PinResponse(pinned=bytes(digest in self.objects for digest in digests))

    def unpin(self, request: pb.UnpinRequest, deadline_s: float) -> pb.UnpinResponse:
        self._enter("unpin", request)
        digests = self._digests(request.keys)
        were = bytes(digest in self.pinned for digest in digests)
        self.pinned -= set(digests)
        return pb.UnpinResponse(unpinned=were)

    def report_failure(
        self, request: pb.ReportFailureRequest, deadline_s: float
    ) -> pb.ReportFailureResponse:
        self._enter("report_failure", request)
        if request.misread_objects:
            rows = np.frombuffer(request.misread_objects, OBJECT)
            for digest, row in zip(self._digests(request.misread_keys), rows, strict=True):
                found = self.objects[digest]
                assert found.seq == row["seq"]
                found.replicas = [r for r in found.replicas if r[0][0] != request.node_id]
                if not found.replicas:
                    del self.objects[digest]
            return pb.ReportFailureResponse()
        self.failures.append(request.node_id)
        return pb.ReportFailureResponse()

    # ---- daemons (not here) ------------------------------------------------------------------

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> pb.AttachResponse:
        raise InvalidArgument("no daemons attach to this master")

    def heartbeat(self, request: pb.HeartbeatRequest, deadline_s: float) -> pb.HeartbeatResponse:
        raise InvalidArgument("no daemons attach to this master")

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> pb.DetachResponse:
        raise InvalidArgument("no daemons attach to this master")

    def drain(self, request: pb.DrainRequest, deadline_s: float) -> pb.DrainResponse:
        raise InvalidArgument("no daemons attach to this master")


def _clipped(replica: list[tuple[int, int, int]], size: int) -> list[tuple[int, int, int]]:
    """A location has the payload only, without the key's tail."""
    found, left = [], size
    for node, offset, length in replica:
        if left:
            found.append((node, offset, min(length, left)))
            left -= min(length, left)
    return found
