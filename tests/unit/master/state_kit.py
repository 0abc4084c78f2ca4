"""A master's state with pretended daemons and clients, for its tests: slot tables are dicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import (
    CLAIM,
    COPIED,
    EXTENT,
    SLOT,
    SLOT_REF,
    UNIT_BYTES,
    CommitStatus,
)
from cenote.master import commands as c
from cenote.master.effects import DURABLE, DurableEffect, Effect, Stored
from cenote.master.instructions import Instruction
from cenote.master.node_counters import NodeCounters
from cenote.master.state import MasterState, StateConfig
from unit.master.state_replies import Hit, Put, read_hits, read_put, read_spares

KIB = 1 << 10
MIB = 1 << 20
E = TypeVar("E")

Digests = NDArray[np.uint64]


def session_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


def digests_of(*keys: int, seed: int = 1) -> Digests:
    """Digests of small numbers; the low words differ, too."""
    return np.array(
        [((k * 0x9E37_79B9_7F4A_7C15 + seed) % 2**64, (k + (seed << 32)) % 2**64) for k in keys],
        np.uint64,
    ).reshape(-1, 2)


def checksum_of(key: int) -> int:
    return key * 7919 + 13


@dataclass
class FakeSegment:
    incarnation: bytes
    size_bytes: int
    ready_bytes: int
    unit_bytes: int = UNIT_BYTES
    slots: int = 4096
    retired: list[tuple[int, int]] = field(default_factory=list)
    table: dict[int, np.void] = field(default_factory=dict)
    """Slot number -> SLOT row."""
    segment_id: int = 0
    unverified: bool = False
    tier: int = 1

    def report(self, index: int) -> c.SegmentReport:
        retired = np.zeros(len(self.retired), EXTENT)
        for i, (offset, length) in enumerate(self.retired):
            retired[i]["offset"], retired[i]["length"] = offset, length
        return c.SegmentReport(
            index,
            self.tier,
            self.incarnation,
            self.size_bytes,
            self.ready_bytes,
            self.unit_bytes,
            self.slots,
            retired,
            self.unverified,
        )


@dataclass
class FakeNode:
    number: int
    segments: list[FakeSegment]
    boot_id: str = ""
    domain: str = ""
    process_id: int = 1
    start_number: int = 0
    name: str = ""
    node_id: int = 0
    done_instruction: int = 0
    cut: list[bytes] = field(default_factory=list)
    """Sessions to report as cut in the next heartbeat."""
    withdrawn: list[bytes] = field(default_factory=list)
    """Sessions whose claims are over."""
    claims: list[tuple[bytes, int, int, int]] = field(default_factory=list)
    views: list[tuple[bytes, int, int, int]] = field(default_factory=list)
    """(session id, segment index, offset, length)."""

    copies: list[NDArray[np.void]] = field(default_factory=list)
    """Ordered, and not carried out: COPY rows of one copy each. See `tiers_kit`."""
    pulls: list[NDArray[np.void]] = field(default_factory=list)
    """Likewise, PULL rows. See `moves_kit`."""
    copied: list[tuple[int, int]] = field(default_factory=list)
    """(copy id, status) to report in the next heartbeat."""

    counters: NodeCounters = field(default_factory=NodeCounters)
    """What its heartbeats tell."""

    @property
    def uuid(self) -> bytes:
        return self.number.to_bytes(16, "big")

    def inventory(self) -> NDArray[np.void]:
        rows = [row for segment in self.segments for row in segment.table.values()]
        return np.array(rows, SLOT) if rows else np.zeros(0, SLOT)


def new_node(
    number: int, size_bytes: int = 64 * KIB, *, slots: int = 512, boot_id: str | None = None
) -> FakeNode:
    incarnation = f"inc-{number}-1".encode()
    segment = FakeSegment(incarnation, size_bytes, size_bytes, slots=slots)
    return FakeNode(number, [segment], f"host-{number}" if boot_id is None else boot_id)


class Kit:
    """One master, its daemons, one namespace `a` and the effects since the beginning."""

    def __init__(self, config: StateConfig | None = None, epoch: int = 1) -> None:
        self.state = MasterState(config or StateConfig(), epoch)
        self.now_s = 1000.0
        self.effects: list[Effect] = []
        self.nodes: dict[int, FakeNode] = {}
        self.segments: dict[int, FakeSegment] = {}
        self.requests = 0
        self.namespace: c.NamespaceReply | None = None

    def apply(self, command: c.Command) -> Any:
        reply, effects = self.state.apply(command, self.now_s)
        self.effects += effects
        return reply

    def new(self, kind: type[E]) -> list[E]:
        """Effects of one kind so far, oldest first."""
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def durable(self) -> list[DurableEffect]:
        return [effect for effect in self.effects if isinstance(effect, DURABLE)]

    # ---- set-up -------------------------------------------------------------------------------

    def with_nodes(self, *nodes: FakeNode) -> Kit:
        list(map(self.attach, nodes))
        return self

    def with_session(self, number: int = 1, boot_id: str = "host-1") -> Kit:
        self.apply(c.OpenSession(session_id(number), boot_id=boot_id))
        if self.namespace is None:
            self.namespace = self.apply(c.OpenNamespace("a", b"f", True, 1, 1))
        return self

    def attach_command(self, node: FakeNode) -> c.Attach:
        views = [(s, i, 1, o, n) for s, i, o, n in node.views]
        claims = np.array([(s, i, 0, o, n) for s, i, o, n in node.claims] + views, CLAIM)
        return c.Attach(
            node.uuid,
            node.name or f"node-{node.number}",
            node.boot_id,
            node.domain,
            [c.EndpointInfo(1, f"127.0.0.1:{7000 + node.number}")],
            [segment.report(i) for i, segment in enumerate(node.segments)],
            node.inventory(),
            node.process_id,
            start_number=node.start_number,
            claims=claims,
            ticket_key=node.uuid,
        )

    def restart_node(self, node: FakeNode) -> c.AttachReply:
        """Another process attaches."""
        node.process_id += 1
        node.start_number += 1
        return self.attach(node)

    def attach(self, node: FakeNode) -> c.AttachReply:
        reply: c.AttachReply = self.apply(self.attach_command(node))
        node.node_id = reply.node_id
        self.nodes[node.number] = node
        for segment, segment_id in zip(node.segments, reply.segment_ids, strict=True):
            segment.segment_id = segment_id
            self.segments[segment_id] = segment
        for ref in np.frombuffer(reply.clear_slots, SLOT_REF):
            table = node.segments[int(ref["segment_index"])].table
            row = table.get(int(ref["slot"]))
            if row is not None and row["seq"] == ref["seq"] and row["epoch"] == ref["epoch"]:
                del table[int(ref["slot"])]
        return reply

    def heartbeat(self, node: FakeNode, *, obey: bool = True, damaged: Any = None) -> list[Any]:
        """A heartbeat; with `obey` instructions are carried out, and reported by the next one."""
        reply: c.HeartbeatReply = self.apply(
            c.Heartbeat(
                node.node_id,
                self.state.epoch,
                [(i, s.ready_bytes) for i, s in enumerate(node.segments)],
                node.done_instruction,
                list(node.cut),
                [],
                node.counters,
                node.start_number,
                list(node.withdrawn),
                unverified=frozenset(i for i, s in enumerate(node.segments) if s.unverified),
                damaged=damaged,
                copied=np.array([(*one, 0) for one in node.copied], COPIED),
            )
        )
        node.copied.clear()
        node.cut.clear()
        node.withdrawn.clear()
        if obey:
            for instruction in reply.instructions:
                self._obey(node, instruction)
                node.done_instruction = instruction.number
        return reply.instructions

    def _obey(self, node: FakeNode, instruction: Instruction) -> None:
        if instruction.cut_sessions:
            node.cut += instruction.cut_sessions
        if instruction.grow_slots:
            segment_id, offset, length, slots = instruction.grow_slots
            segment = self.segments[segment_id]
            if (offset, length) not in segment.retired:
                segment.retired.append((offset, length))
            segment.slots = max(segment.slots, slots)
        if instruction.copies is not None:
            rows = instruction.copies
            starts = np.flatnonzero(np.r_[True, rows["copy_id"][1:] != rows["copy_id"][:-1]])
            node.copies += np.split(rows, starts[1:])
        if instruction.pulls is not None:
            rows = instruction.pulls[1]
            starts = np.flatnonzero(np.r_[True, rows["copy_id"][1:] != rows["copy_id"][:-1]])
            node.pulls += np.split(rows, starts[1:])

    def heartbeats(self) -> None:
        for node in self.nodes.values():
            self.heartbeat(node)

    def tick(self, seconds: float = 0.0) -> None:
        self.now_s += seconds
        self.apply(c.Tick())

    # ---- clients ------------------------------------------------------------------------------

    def digests(self, *keys: int) -> Digests:
        assert self.namespace is not None
        return digests_of(*keys, seed=self.namespace.digest_seed)

    @property
    def place(self) -> tuple[int, int]:
        assert self.namespace is not None
        return self.namespace.namespace_id, self.namespace.generation

    def start(
        self, keys: list[int], size: int | list[int] = KIB, session: int = 1, **options: Any
    ) -> Put:
        sizes = [size] * len(keys) if isinstance(size, int) else size
        self.requests += 1
        options.setdefault("request_id", self.requests)
        reply = self.apply(
            c.PutStart(
                session_id(session),
                namespace_id=self.place[0],
                generation=self.place[1],
                digests=self.digests(*keys),
                sizes=np.array(sizes, np.uint64),
                **options,
            )
        )
        return read_put(reply, keys, sizes)

    def commit(
        self,
        put: Put,
        positions: list[int] | None = None,
        session: int = 1,
        *,
        seal: bool = True,
        **options: Any,
    ) -> list[int]:
        """Decide, and seal unless told not to; CommitStatus of each position."""
        chosen = put.granted if positions is None else positions
        self.requests += 1
        options.setdefault("request_id", self.requests)
        reply: c.PutCommitReply = self.apply(
            c.PutCommit(
                session_id(session),
                grant_id=put.reply.grant_id,
                indexes=None if positions is None else np.array(positions, np.uint32),
                checksums=np.array(
                    [checksum_of(put.keys[i]) if i < len(put.keys) else 0 for i in chosen],
                    np.uint64,
                ),
                **options,
            )
        )
        statuses = list(reply.statuses)
        for i, (position, status) in enumerate(zip(chosen, statuses, strict=True)):
            if status == CommitStatus.DECIDED and seal:
                self.seal(put, position, reply.epoch, reply.seq_first + i)
        self._tell(session, options["request_id"], statuses, seal)
        return statuses

    def _tell(self, session: int, request_id: int, statuses: list[int], sealed: bool) -> None:
        """What became of a commit: as a client does with its next request."""
        if CommitStatus.DECIDED not in statuses:
            return
        one = np.array([request_id], np.uint64)
        news = {"sealed_through": request_id} if sealed else {"cancelled_request_ids": one}
        self.apply(c.RenewSession(session_id(session), **news))

    def start_spares(
        self,
        count: int,
        size: int = KIB,
        session: int = 1,
        *,
        keys: Sequence[int] = (9999,),
        **options: Any,
    ) -> tuple[Put, Put]:
        """A put_start that asks for spare extents: (what its keys got, the spares)."""
        put = self.start(list(keys), size, session, spare_count=count, spare_bytes=size, **options)
        return put, read_spares(put.reply)

    def commit_spares(
        self,
        spares: Put,
        positions: Sequence[int],
        keys: Sequence[int],
        size: int | list[int] = KIB,
        session: int = 1,
        *,
        tails: list[int] | None = None,
        seal: bool = True,
        many: bool = False,
        place: tuple[int, int] | None = None,
        request_id: int | None = None,
        failed_replicas: NDArray[np.uint32] | None = None,
    ) -> list[int]:
        """Decide what spare extents hold, and seal. One is a CommitSpare, unless as `many`."""
        sizes = [size] * len(keys) if isinstance(size, int) else size
        self.requests += 1
        of = session_id(session), self.requests if request_id is None else request_id
        grant_id, sums = spares.reply.grant_id, [checksum_of(key) for key in keys]
        place = place or self.place
        command: c.Command
        if len(keys) == 1 and failed_replicas is None and not many:
            digest, tail = self.digests(*keys).tobytes(), tails[0] if tails else 0
            where = grant_id, positions[0], sums[0]
            command = c.CommitSpare(*of, *where, *place, digest, sizes[0], tail)
        else:
            lengths = None if tails is None else np.array(tails, np.uint16)
            indexes, checksums = np.array(positions, np.uint32), np.array(sums, np.uint64)
            names = c.SpareNames(
                *place, self.digests(*keys), np.array(sizes, np.uint64), lengths, False
            )
            command = c.PutCommit(*of, grant_id, indexes, checksums, failed_replicas, names)
        reply: c.PutCommitReply = self.apply(command)
        statuses = list(reply.statuses)
        for i, (position, status) in enumerate(zip(positions, statuses, strict=True)):
            if status == CommitStatus.DECIDED:
                spares.keys[position], spares.sizes[position] = keys[i], sizes[i]
                if seal:
                    self.seal(spares, position, reply.epoch, reply.seq_first + i)
        self._tell(session, of[1], statuses, seal)
        return statuses

    def seal(self, put: Put, position: int, epoch: int, seq: int) -> None:
        extents = put.extents[position]
        per_replica = len(extents) // put.replicas[position]
        for number, (segment_id, slot, offset, length) in enumerate(extents):
            segment = self.segments.get(segment_id)
            if segment is None:
                continue
            row = np.zeros(1, SLOT)[0]
            node = next((n for n in self.nodes.values() if segment in n.segments), None)
            if node is None:
                continue
            row["segment_index"] = node.segments.index(segment)
            row["slot"], row["offset"], row["length"] = slot, offset, length
            row["seq"], row["epoch"] = seq, epoch
            row["checksum"] = checksum_of(put.keys[position])
            row["object_size"] = put.sizes[position]
            row["digest"] = self.digests(put.keys[position]).tobytes()
            row["namespace_id"], row["generation"] = self.place
            row["extent_index"] = number % per_replica
            row["extent_count"] = per_replica
            row["replica"] = number // per_replica
            segment.table[slot] = row

    def put(
        self, keys: list[int], size: int | list[int] = KIB, session: int = 1, **options: Any
    ) -> list[int]:
        """Start, commit, seal; PutStatus of each key."""
        put = self.start(keys, size, session, **options)
        if put.extents:
            self.commit(put, session=session)
        return put.statuses

    def acquire(self, *keys: int, session: int = 1, **options: Any) -> c.AcquireReply:
        options.setdefault("ttl_ms", 1000)
        reply: c.AcquireReply = self.apply(
            c.Acquire(
                session_id(session),
                namespace_id=self.place[0],
                generation=self.place[1],
                digests=self.digests(*keys),
                **options,
            )
        )
        return reply

    def get(self, *keys: int, session: int = 1, **options: Any) -> list[Hit | None]:
        options.setdefault("lease", False)
        return read_hits(self.acquire(*keys, session=session, **options))

    def release(self, *replies: c.AcquireReply) -> None:
        self.apply(c.Release(np.array([reply.lease_id for reply in replies], np.uint64)))

    def exists(self, *keys: int) -> list[int]:
        present: NDArray[np.uint8] = self.apply(c.Exists(*self.place, self.digests(*keys)))
        return [int(one) for one in present]

    def remove(self, *keys: int) -> list[int]:
        removed: NDArray[np.uint8] = self.apply(c.Remove(*self.place, self.digests(*keys)))
        return [int(one) for one in removed]


def restarted(kit: Kit, *, journal: list[DurableEffect] | None = None, **changes: Any) -> Kit:
    """A new master in the next epoch, after replay; daemons and sessions have not come back yet."""
    new = Kit(StateConfig(**changes), kit.state.epoch + 1)
    for effect in kit.durable() if journal is None else journal:
        new.state.replay(effect)
    new.effects = list(kit.durable() if journal is None else journal)
    new.now_s = kit.now_s
    new.requests = kit.requests
    new.namespace = kit.namespace
    new.effects += new.state.start(new.now_s)
    return new


def stored_keys(kit: Kit) -> int:
    return sum(len(effect.digests) for effect in kit.new(Stored))
