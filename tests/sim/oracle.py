"""What must hold: who may write where, which bytes may be read, what may be lost.

The oracle sees what the master decides (its effects and grants), every byte that lands in a
segment, and what each call of a client was answered. It knows nothing of how they work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cenote.api.errors import CenoteError
from cenote.api.rows import EXTENT, PUT, UNIT_BYTES, PutStatus
from cenote.master.effects import (
    Effect,
    Gone,
    GoneReason,
    NamespaceOpened,
    Notice,
    ReplicasChanged,
    SegmentGone,
    Stored,
)
from cenote.master.pool import Pool
from sim.contents import KEYS_EACH, Contents
from sim.existing import asked, check_answer
from sim.facts import is_intact, is_sealed, known_versions
from sim.fingerprint import fingerprint
from sim.following import Following
from sim.loop import Violation
from sim.places import check
from sim.readings import Readings
from sim.tier_oracle import TierOracle
from sim.values import PutRecord, Removal

if TYPE_CHECKING:
    from sim.data_connection import Write
    from sim.masters import MasterProcess
    from sim.stores import SegmentFile
    from sim.world import World

__all__ = ["Oracle", "PutRecord"]

CHECK_EVERY: Final = 40
"""Commands between two looks at everything that the master has."""
Version = tuple[int, int]
"""(epoch, seq)."""
_WITH_EXTENTS: Final = PutStatus.GRANTED, PutStatus.UNSEALED, PutStatus.DEDUPLICATED


class Oracle:
    """See the module. Raises Violation where something happened that must not."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.puts: dict[int, PutRecord] = {}
        self.contents = Contents(world)
        self.numbers: dict[Version, int] = {}
        """Version -> the number of its decision."""
        self._decisions = 0
        self.put_of: dict[Version, PutRecord] = {}
        self._placed: dict[Version, list[tuple[SegmentFile, int, int]]] = {}
        """Version -> (file, slot, replica) of each extent."""
        self.gone: dict[Version, GoneReason] = {}
        self._lost_unsealed: set[Version] = set()
        """What the master dropped for want of slots: they must not be written any more."""
        self._versions_of: dict[tuple[bytes, int], Version] = {}
        """(digest, seq) -> version."""
        self._unheard: set[Version] = set()
        """Decided by a master that died before it wrote them down, sealed nowhere by then: the
        next one does not know of them, and decides a put that comes again anew."""
        self._removed_at: dict[bytes, list[tuple[int, float]]] = {}
        self._resets: list[tuple[int, float, str]] = []
        self._metadata_lost_s = 0.0
        self._revenants: set[Version] = set()
        """Gone before metadata were lost: they may come back then, and go again."""
        self._opened_anew = 0  # what that daemon holds is lost, and said to be
        """Epoch in which the namespace was opened before a daemon brought that of a lost master."""
        self.removals: dict[int, list[Removal]] = {}
        """By key."""
        self._grants: dict[int, int] = {}
        self.grant_epochs: dict[int, int] = {}
        self.readings = Readings(self)
        self._writes: dict[Write, None] = {}
        self._commands = 0
        self.reads = self.hits = self.acks = self.lost = self.leaders = 0
        self.references = self.foreign_references = 0
        self.power_failed = False
        self.journal_lags = False
        """A master's death takes the end of the journal: several share it."""
        self._acting_epoch = 0
        self.following = Following(world)
        self.tiers = TierOracle(self)
        self.digests: dict[int, set[bytes]] = {}
        """By key, in all generations."""

    # ---- the master -----------------------------------------------------------------------------

    def master_started(self, master: MasterProcess) -> None:
        self.leaders += 1
        decider = master.service.decider
        apply, take = decider.apply, decider._take

        def watched(command: Any) -> Any:
            pool = decider.state._pool
            before, digests = fingerprint(pool), asked(pool, command)
            self.tiers.command = type(command)
            try:
                reply = apply(command)
                self.tiers.carried_out(command, reply)
                if digests is not None:
                    check_answer(self, pool, digests, reply)
                return reply
            except CenoteError as error:
                if fingerprint(pool) != before:
                    raise Violation(
                        f"{type(command).__name__} raised {error!r} and changed something:\n"
                        f"{before}\n{fingerprint(pool)}"
                    ) from error
                raise

        def taken(effects: list[Effect]) -> None:
            self._take(master, effects)
            take(effects)

        decider.apply = watched  # type: ignore[method-assign]
        decider._take = taken  # type: ignore[method-assign]
        self.tiers.started(decider.state._pool)
        self._note_unheard(decider.state._pool)
        self._check(master)

    @property
    def has_lost_metadata(self) -> bool:
        return self._metadata_lost_s > 0

    def metadata_lost(self) -> None:
        """Nobody knows what was removed; all that is sealed may come back."""
        self.removals.clear()
        self._removed_at.clear()
        self._resets.clear()
        self._lost_unsealed.clear()
        self._revenants.update(self.gone)
        self._metadata_lost_s = self._world.loop.now_s

    def _note_unheard(self, pool: Pool) -> None:
        known = known_versions(pool)
        for put in self.puts.values():
            for version in [each for each in put.versions if not put.is_acked(each)]:
                if version not in known and not self.surviving_replicas(version):
                    self._unheard.add(version)

    def alive(self, put: PutRecord) -> list[Version]:
        """What the master was told to keep of a put."""
        heard = [version for version in put.versions if version not in self._unheard]
        gone = self.gone.keys() | self._revenants
        return [version for version in heard or put.versions if version not in gone]

    def acknowledged(self, put: PutRecord) -> list[Version]:
        """What the master was told to keep of a put, and somebody that it is there."""
        return [version for version in self.alive(put) if put.is_acked(version)]

    @contextlib.contextmanager
    def watching(self, who: str, master: MasterProcess) -> Iterator[None]:
        """The master carries something out."""
        yield
        self._commands += 1
        if self._commands % CHECK_EVERY == 0:
            self._check(master)

    def _check(self, master: MasterProcess) -> None:
        check(self, master)
        for put in self.puts.values():
            for version in self.acknowledged(put):
                self._check_slots(put, version)

    def _is_excused(self, put: PutRecord, version: Version) -> bool:
        """Whether it may be gone without a word, after a power failure or where the metadata were
        lost: what is not known any more is that it was evicted, and others have written where it
        was since; or its key was removed or put again before its daemon came; or it lies on several
        nodes, of which none brings a whole replica."""
        away = self.power_failed or self.has_lost_metadata
        if version[0] < self._opened_anew or not (away or self.journal_lags):
            return version[0] < self._opened_anew
        nodes = {(f.name.partition("[")[0], replica) for f, _, replica in self._placed[version]}
        striped = len(nodes) > len({replica for _, replica in nodes})
        removed = self._last_removal(put.key) > (number := self.numbers[version])
        others = [v for other in self.puts.values() if other.key == put.key for v in other.versions]
        put_again = any(self.numbers[v] > number for v in others)
        moved = version in self.tiers.forgotten
        moved |= not is_intact(put.value, self._placed[version], version)  # or overwritten
        gone = away and moved and not self.tiers.will_find(version)
        return striped or removed or put_again or gone

    def _check_slots(self, put: PutRecord, version: Version) -> None:
        """As long as the master has not let go of it, an acknowledged object's slots are its own:
        a daemon that restarts finds it there."""
        if not self.is_safe(put, version):
            raise Violation(
                f"put {put.serial} of key {put.key}, version {version}, was acknowledged, and none"
                " of its replicas has its slots any more"
            )

    def is_safe(self, put: PutRecord, version: Version) -> bool:
        """Whether it is sealed, or really lost."""
        excused = self._is_really_lost(version) or self._is_excused(put, version)
        return bool(excused or self.surviving_replicas(version)) or self.tiers.will_find(version)

    def _is_really_lost(self, version: Version) -> bool:
        """Whether something that held it is gone, with no word of the master's."""
        files = [file for file, _, _ in self._placed[version]]
        lost = any(file.is_lost or version in file.damaged for file in files)
        return lost or version in self.tiers.bereft

    def _file(self, pool: Pool, segment_id: int) -> SegmentFile | None:
        segment = pool.segments.by_id.get(segment_id)
        return None if segment is None else self._world.files[segment.incarnation]

    def _take(self, master: MasterProcess, effects: list[Effect]) -> None:
        epoch = master.service.epoch
        if epoch < self._acting_epoch and any(isinstance(e, Stored | Gone) for e in effects):
            raise Violation(f"epoch {epoch} decides after {self._acting_epoch} has begun")
        self._acting_epoch = max(epoch, self._acting_epoch)
        pool = master.service.state._pool
        stored_later = {
            digest.tobytes()
            for effect in effects
            if isinstance(effect, Stored)
            for digest in effect.digests
        }
        self.tiers.note_copies(pool)
        forgotten = [e.segment_id for e in effects if isinstance(e, SegmentGone)]
        for effect in effects:
            if isinstance(effect, Stored):
                self._stored(pool, effect)
            elif isinstance(effect, Gone):
                self._gone(pool, effect, stored_later, forgotten)
            elif isinstance(effect, ReplicasChanged):
                self.tiers.replicas_changed(pool, effect)
            elif isinstance(effect, Notice) and "opened anew" in effect.text:
                self._opened_anew = master.service.epoch
            elif isinstance(effect, NamespaceOpened):
                self._decisions += 1
                self._world.learn_seed(effect.digest_seed)
                if effect.generation > 1:
                    # All of the old generation is gone, though not a word is said of each.
                    for version, put in self.put_of.items():
                        if self._namespace_of(put.key) == effect.name:
                            self.gone.setdefault(version, GoneReason.RESET)
                    reset = self._decisions, self._world.loop.now_s, effect.name
                    self._resets.append(reset)

    def _stored(self, pool: Pool, effect: Stored) -> None:
        at = 0
        for i, digest in enumerate(effect.digests):
            placed = effect.placed[at : at + int(effect.extent_counts[i])]
            at += len(placed)
            version = (effect.epoch, int(effect.seqs[i]))
            puts = self.contents.of(int(effect.checksums[i]))
            if not puts:
                raise Violation(f"version {version} has the checksum of nothing that was put")
            put = next((p for p in puts if digest.tobytes() in self.digests.get(p.key, ())), None)
            if put is None:
                raise Violation(f"version {version} has the digest of another key")
            self._decisions += 1
            self.put_of[version] = put
            self.gone.pop(version, None)  # a master died before it wrote that down
            files = self._world.files
            self._placed[version] = [
                (files[pool.segments.by_id[segment].incarnation], slot, replica)
                for segment, slot, _, _, replica, _ in placed.tolist()
            ]
            if version not in self.numbers:
                self.numbers[version] = self._decisions
                put.versions.append(version)
                self._versions_of[digest.tobytes(), version[1]] = version

    def _gone(
        self, pool: Pool, effect: Gone, stored_later: set[bytes], forgotten: list[int]
    ) -> None:
        self._decisions += 1
        now_s = self._world.loop.now_s
        for digest, seq in zip(effect.digests, effect.seqs.tolist(), strict=True):
            name = digest.tobytes()
            if effect.reason == GoneReason.REMOVED:
                self._removed_at.setdefault(name, []).append((self._decisions, now_s))
                if self.has_lost_metadata:  # also of versions that daemons are yet to bring
                    versions = self._versions_of.items()
                    self._revenants.update(v for (other, _), v in versions if other == name)
            version = self._versions_of.get((name, seq))
            if version is None:
                continue
            self.gone[version] = effect.reason
            if effect.reason == GoneReason.LOST:
                self.lost += 1
                if name not in stored_later and not self.surviving_replicas(version):
                    self._lost_unsealed.add(version)
                if version in self._revenants:
                    continue
                if name not in stored_later or self._is_readable(pool, version):
                    self._check_loss(version, forgotten)

    def _is_readable(self, pool: Pool, version: Version) -> bool:
        """Whether a replica lies on nodes that the master takes for alive: then it does not give
        way to what another writer puts."""
        replicas: dict[int, bool] = {}
        for file, slot, replica in self._placed[version]:
            up = bool(pool.segments.readable[file.segment_id]) and not file.is_lost
            up = up and is_sealed(file, slot, version)
            replicas[replica] = replicas.get(replica, True) and up
        return any(replicas.values())

    def _check_loss(self, version: Version, forgotten: list[int]) -> None:
        """An acknowledged object is lost with all the daemons that held it, and not otherwise."""
        put = self.put_of.get(version)
        if put is None or not put.is_acked(version):
            return
        survives = self.surviving_replicas(version, forgotten)
        if (survives or self.tiers.will_find(version)) and not self._is_excused(put, version):
            raise Violation(
                f"put {put.serial} of key {put.key}, version {version}, was acknowledged and is"
                f" lost, though its replicas {sorted(survives)} are there"
            )

    def surviving_replicas(self, version: Version, forgotten: list[int] | None = None) -> set[int]:
        """Replicas whose slots are all sealed in memory that was not lost."""
        alive: dict[int, bool] = {}
        for file, slot, replica in self._placed[version]:
            good = (
                not file.is_lost
                and version not in file.damaged
                and file.segment_id not in (forgotten or ())
                and is_sealed(file, slot, version)
            )
            alive[replica] = alive.get(replica, True) and good
        return {replica for replica, good in alive.items() if good}

    # ---- writers --------------------------------------------------------------------------------

    def granted(self, master: MasterProcess, request: Any, reply: Any) -> None:
        """The master granted space: nobody else may still write there."""
        puts = np.frombuffer(reply.puts, PUT)
        told = np.isin(puts["status"], _WITH_EXTENTS)
        assert (puts["extents"][~told] == 0).all()
        self.references += int(np.count_nonzero(puts["status"] == PutStatus.DEDUPLICATED))
        aliases = master.pool.grants.by_id.get(reply.alias_grant_id)
        if aliases is not None and aliases.foreign is not None:
            self.foreign_references += int(np.count_nonzero(aliases.foreign))
        self._granted(master, reply.grant_id, reply.extents)
        self._granted(master, reply.spare_grant_id, reply.spare_extents)

    def _granted(self, master: MasterProcess, grant_id: int, extents: bytes) -> None:
        if not grant_id or grant_id in self._grants:
            return
        number = self.new_owner(grant_id, grant_id >> 40)
        pool = master.service.state._pool
        for segment_id, _, offset, length in np.frombuffer(extents, EXTENT).tolist():
            file = self._file(pool, segment_id)
            assert file is not None
            end = offset + -(-length // UNIT_BYTES) * UNIT_BYTES
            self.give(file, offset, end, number, f"grant {grant_id & 0xFFFFFFFFFF}")

    def new_owner(self, name: int, epoch: int) -> int:
        """A number for whoever is given space: a grant, or (negative) a copy."""
        number = self._grants[name] = len(self._grants) + 1
        self.grant_epochs[number] = epoch & 0xFFFFFF
        return number

    def give(self, file: SegmentFile, offset: int, end: int, number: int, whom: str) -> None:
        """This space is that owner's now."""
        for write in self._writes:
            if write.may_touch(file, offset, end):
                raise Violation(
                    f"[{offset}, {end}) of {file.name} was given to {whom} while {write.who} is"
                    f" writing there under grant {write.grant_id & 0xFFFFFFFFFF}"
                    f" of epoch {write.grant_id >> 40}"
                )
        file.owner[offset // UNIT_BYTES : end // UNIT_BYTES] = number

    def writes(self) -> list[Write]:
        """Those that have begun and not ended."""
        return list(self._writes)

    def write_begun(self, write: Write) -> None:
        self._writes[write] = None

    def write_ended(self, write: Write) -> None:
        self._writes.pop(write, None)

    def landed(self, write: Write, file: SegmentFile, offset: int, length: int) -> None:
        """Bytes reach a segment."""
        number = self._grants.get(write.grant_id, -1)
        units = file.owner[offset // UNIT_BYTES : -(-(offset + length) // UNIT_BYTES)]
        if (units != number).any():
            raise Violation(
                f"{write.who} wrote [{offset}, {offset + length}) of {file.name} under grant"
                f" {write.grant_id & 0xFFFFFFFFFF} of epoch {write.grant_id >> 40}, which another"
                " was granted since"
            )

    # ---- calls of clients -----------------------------------------------------------------------

    def new_put(self, key: int, client: int, size: int, min_replicas: int) -> PutRecord:
        serial = len(self.puts) + 1
        self.puts[serial] = self.contents.new_put(serial, key, client, size, min_replicas)
        return self.puts[serial]

    def put_acked(self, put: PutRecord) -> None:
        """The client was told that it is stored."""
        self.acks += 1
        put.acked = True
        alive = [v for v in self.alive(put) if not self._is_excused(put, v)]
        if not put.versions:
            raise Violation(f"put {put.serial} was acknowledged and never decided")
        for version in put.versions if not alive else ():
            if version in self._lost_unsealed and self.surviving_replicas(version):
                raise Violation(
                    f"put {put.serial} of key {put.key}, version {version}, was acknowledged with"
                    " slots that were sealed after the master had dropped it"
                )
        for version in alive:
            survive = self.surviving_replicas(version)
            really_lost = self._is_really_lost(version)
            wanted = min(put.min_replicas, len({r for _, _, r in self._placed[version]}))
            if len(survive) < wanted and not really_lost:
                raise Violation(
                    f"put {put.serial} of key {put.key} was acknowledged with replicas"
                    f" {sorted(survive)} sealed, {wanted} were wanted"
                )

    def removed(self, key: int, began_s: float) -> None:
        """A client was told that the key is removed."""
        numbers = [
            number
            for digest in self.digests.get(key, ())
            for number, at_s in self._removed_at.get(digest, ())
            if at_s >= began_s
        ]
        if began_s <= self._metadata_lost_s:
            return  # whether it was before or after
        if not numbers:
            raise Violation(f"the removal of key {key} was acknowledged and never decided")
        self.removals.setdefault(key, []).append(Removal(min(numbers), self._world.loop.now_s))

    def reset(self, name: str, began_s: float) -> None:
        """The namespace was reset: as if all its keys had been removed."""
        numbers = [number for number, at_s, of in self._resets if at_s >= began_s and of == name]
        if began_s <= self._metadata_lost_s:
            return
        for key in self.digests:
            if self._namespace_of(key) == name:
                removal = Removal(min(numbers), self._world.loop.now_s)
                self.removals.setdefault(key, []).append(removal)

    def _namespace_of(self, key: int) -> str:
        return self._world.namespaces[key // KEYS_EACH]

    def read(self, key: int, value: bytes | memoryview | None, began_s: float) -> None:
        """A client read this, in a call (or under a lease) that began then."""
        self.reads += 1
        if value is None:
            return
        self.hits += 1
        data = bytes(value)
        put = self.contents.read(key, data)
        if put.key != key:
            raise Violation(f"key {key} gave the bytes of key {put.key} (put {put.serial})")
        if not put.versions:
            raise Violation(f"key {key} gave the bytes of put {put.serial}, never decided")
        patience_s = self._world.location_ttl_ms / 1000 * 1.1
        if self.following.may_be_behind(began_s - patience_s):
            return
        latest = max(self.numbers[version] for version in put.versions)
        for removal in self.removals.get(key, ()):
            if latest < removal.number and began_s > removal.acked_s + patience_s:
                raise Violation(
                    f"key {key} gave the bytes of put {put.serial} to a read that began"
                    f" {began_s - removal.acked_s:.3f} s after its removal was acknowledged"
                )

    # ---- at the end -----------------------------------------------------------------------------

    def is_expected(self, put: PutRecord, version: Version) -> bool:
        """Whether it was acknowledged and must be readable now, unless there is a later one."""
        if not put.is_acked(version) or version in self.gone:
            return False
        if self.has_lost_metadata and self.tiers.is_on and self._is_excused(put, version):
            return False  # what an SSD was told to forget is on it until its page is written again
        there = bool(self.surviving_replicas(version))
        return there and self._last_removal(put.key) <= self.numbers[version]

    def _last_removal(self, key: int) -> int:
        """The number of the latest decision that removed it, told to anybody or not."""
        numbers = [n for n, _, of in self._resets if of == self._namespace_of(key)]
        for digest in self.digests.get(key, ()):
            numbers += [number for number, _ in self._removed_at.get(digest, ())]
        return max(numbers, default=0)
