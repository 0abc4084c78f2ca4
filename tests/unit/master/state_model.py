"""A naive model of the master: sets of units, dicts of keys. It learns from replies and effects,
and says what must never happen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from cenote.api.rows import UNIT_BYTES, ObjectStatus
from cenote.master.effects import (
    Effect,
    EpochStarted,
    Gone,
    GoneReason,
    NamespaceOpened,
    Pinned,
    ReplicasChanged,
    SegmentGone,
    SlotsGrown,
    Stored,
)
from unit.master.state_kit import Kit, checksum_of, digests_of
from unit.master.state_replies import Hit, Put

Unit: TypeAlias = tuple[int, int]
"""(segment id, unit number)."""


def units_of(segment_id: int, offset_bytes: int, length_bytes: int) -> set[Unit]:
    first = offset_bytes // UNIT_BYTES
    last = -(-(offset_bytes + length_bytes) // UNIT_BYTES)
    return {(segment_id, unit) for unit in range(first, last)}


@dataclass
class ModelObject:
    key: int
    epoch: int
    seq: int
    size: int
    checksum: int
    replicas: dict[int, list[tuple[int, int, int]]]
    """Replica -> its (segment, offset, length in units)."""
    pinned: bool = False

    def units(self) -> set[Unit]:
        return {
            (segment, unit)
            for pieces in self.replicas.values()
            for segment, offset, length in pieces
            for unit in range(offset, offset + length)
        }


@dataclass
class ModelLease:
    lease_id: int
    session: int
    seqs: set[tuple[int, int]]
    """Versions it covers."""
    units: set[Unit]
    deadline_s: float
    waits_for: set[int] | None = None
    """Orphaned hold: nodes that have to report yet."""


@dataclass
class ModelGrant:
    put: Put
    session: int
    pending: set[int]
    spare_bytes: int = 0
    """Of each extent of a grant of spares; 0 = its keys are known."""

    def units(self, positions: Iterable[int] | None = None) -> set[Unit]:
        return {
            unit
            for position in (self.pending if positions is None else positions)
            for segment, _, offset, length in self.put.extents[position]
            for unit in units_of(segment, offset, length)
        }


@dataclass
class Model:
    keys: int
    stored: dict[int, ModelObject] = field(default_factory=dict)
    grants: dict[int, ModelGrant] = field(default_factory=dict)
    leases: dict[int, ModelLease] = field(default_factory=dict)
    orphans: dict[tuple[int, int], set[Unit]] = field(default_factory=dict)
    """(session, node id) -> units that may still be written."""
    retired: set[Unit] = field(default_factory=set)
    removed: set[tuple[int, int]] = field(default_factory=set)
    """Versions that were removed: never to be seen again."""
    tombstones: dict[int, int] = field(default_factory=dict)
    """Key -> epoch in which it was last removed: nothing older of it may come back."""
    epoch: int = 0
    seed: int = 1
    effects_read: int = 0

    def key_of(self, digest: bytes) -> int | None:
        return self._table().get(digest)

    def _table(self) -> dict[bytes, int]:
        every = digests_of(*range(self.keys), seed=self.seed)
        return {digest.tobytes(): key for key, digest in enumerate(every)}

    # ---- what the master says -----------------------------------------------------------------

    def read_effects(self, kit: Kit) -> None:
        for effect in kit.effects[self.effects_read :]:
            self._read(effect, kit.now_s)
        self.effects_read = len(kit.effects)

    def _read(self, effect: Effect, now_s: float) -> None:
        match effect:
            case Stored():
                self._stored(effect)
            case Gone():
                self._gone(effect, now_s)
            case EpochStarted():
                self.epoch = effect.epoch
            case ReplicasChanged():
                at = 0
                for i, digest in enumerate(effect.digests):
                    placed = effect.placed[at : at + int(effect.extent_counts[i])]
                    at += int(effect.extent_counts[i])
                    key = self.key_of(digest.tobytes())
                    if key is not None:  # else of a generation that was reset
                        assert self.stored[key].seq == int(effect.seqs[i])
                        self.stored[key].replicas = _replicas(placed)
            case NamespaceOpened():
                if effect.digest_seed != self.seed:
                    self.stored.clear()
                    self.tombstones.clear()
                    self.seed = effect.digest_seed
            case Pinned():
                for digest in effect.digests:
                    key = self.key_of(digest.tobytes())
                    if key is not None and key in self.stored:
                        self.stored[key].pinned = effect.pinned
            case SlotsGrown():
                self.retired |= {
                    (effect.segment_id, effect.offset_units + i) for i in range(effect.length_units)
                }
            case SegmentGone():
                self._segment_gone(effect.segment_id)
            case _:
                pass

    def _stored(self, effect: Stored) -> None:
        at = 0
        for i, digest in enumerate(effect.digests):
            placed = effect.placed[at : at + int(effect.extent_counts[i])]
            at += int(effect.extent_counts[i])
            key = self.key_of(digest.tobytes())
            assert key is not None, "something unknown was stored"
            assert key not in self.stored, "stored over another object"
            seq = int(effect.seqs[i])
            assert (effect.epoch, seq) not in self.removed, "a removed object came back"
            assert effect.epoch >= self.tombstones.get(key, 0), "a removed key came back"
            assert int(effect.checksums[i]) == checksum_of(key)
            self.stored[key] = ModelObject(
                key,
                effect.epoch,
                seq,
                int(effect.sizes[i]),
                int(effect.checksums[i]),
                _replicas(placed),
            )

    def _gone(self, effect: Gone, now_s: float) -> None:
        for digest, seq in zip(effect.digests, effect.seqs.tolist(), strict=True):
            key = self.key_of(digest.tobytes())
            if key is not None and effect.reason == GoneReason.REMOVED:
                self.tombstones[key] = self.epoch
            if key is None:
                continue  # of a generation that was reset
            if key not in self.stored:
                assert seq == 0
                continue
            thing = self.stored[key]
            assert effect.reason != GoneReason.RESET
            assert seq == thing.seq
            if effect.reason == GoneReason.EVICTED:
                assert not thing.pinned, "a pinned object was evicted"
                version = (thing.epoch, thing.seq)
                holders = [s for s in self.leases.values() if version in s.seqs]
                assert all(s.deadline_s <= now_s for s in holders), "a leased object was evicted"
            if effect.reason == GoneReason.REMOVED:
                self.removed.add((thing.epoch, thing.seq))
            del self.stored[key]

    def _segment_gone(self, segment_id: int) -> None:
        for thing in self.stored.values():
            assert all(s != segment_id for pieces in thing.replicas.values() for s, *_ in pieces)
        for lease in self.leases.values():
            lease.units = {unit for unit in lease.units if unit[0] != segment_id}
        for at, units in self.orphans.items():
            self.orphans[at] = {unit for unit in units if unit[0] != segment_id}
        self.retired = {unit for unit in self.retired if unit[0] != segment_id}

    # ---- what must not happen -----------------------------------------------------------------

    def busy(self, now_s: float) -> set[Unit]:
        """Units that somebody may read or write just now."""
        found: set[Unit] = set(self.retired)
        for thing in self.stored.values():
            found |= thing.units()
        for grant in self.grants.values():
            found |= grant.units()
        for units in self.orphans.values():
            found |= units
        for lease in self.leases.values():
            if lease.deadline_s > now_s:
                found |= lease.units
        return found

    def granted(self, put: Put, session: int, busy: set[Unit], spare_bytes: int = 0) -> None:
        """A grant was given; nothing of `busy` (without what was evicted for it) may be in it."""
        grant = ModelGrant(put, session, set(put.extents), spare_bytes)
        units = grant.units()
        total = sum(
            len(units_of(segment, offset, length))
            for extents in put.extents.values()
            for segment, _, offset, length in extents
        )
        assert len(units) == total, "a grant overlaps itself"
        assert not units & busy, "granted what somebody may still be using"
        if put.extents:
            self.grants[put.reply.grant_id] = grant

    def leased(self, lease_id: int, session: int, hits: list[Hit | None], until_s: float) -> None:
        covered = [h for h in hits if h is not None and h.status == ObjectStatus.LEASED]
        assert (lease_id != 0) == bool(covered)
        if lease_id:
            self.leases[lease_id] = ModelLease(
                lease_id,
                session,
                {(h.epoch, h.seq) for h in covered},
                {u for h in covered for s, _, o, n in h.extents for u in units_of(s, o, n)},
                until_s,
            )

    def abandon(self, session: int, nodes: dict[int, int]) -> None:
        """The session ran out. `nodes`: segment id -> node id."""
        for grant_id, grant in list(self.grants.items()):
            if grant.session == session:
                for unit in grant.units():
                    if unit[0] in nodes:
                        self.orphans.setdefault((session, nodes[unit[0]]), set()).add(unit)
                del self.grants[grant_id]
        for lease in self.leases.values():
            if lease.session == session and lease.deadline_s == float("inf"):
                lease.waits_for = {nodes[s] for s, _ in lease.units if s in nodes}

    def cut(self, session: int, node_id: int) -> None:
        self.orphans.pop((session, node_id), None)
        for lease_id, lease in list(self.leases.items()):
            if lease.session == session and lease.waits_for is not None:
                lease.waits_for.discard(node_id)
                if not lease.waits_for:
                    del self.leases[lease_id]


def _replicas(
    placed: np.ndarray[tuple[int], np.dtype[np.void]],
) -> dict[int, list[tuple[int, int, int]]]:
    found: dict[int, list[tuple[int, int, int]]] = {}
    for row in placed:
        piece = (int(row["segment"]), int(row["offset_units"]), int(row["length_units"]))
        found.setdefault(int(row["replica"]), []).append(piece)
    return found
