"""What must hold of copies: from memory to SSD, back, and from node to node.

- Whatever counts as a replica is sealed there, with the bytes that were put; on an SSD so that it
  survives a power cut.
- A copy lands only where the master has taken space for it, and nobody was given that since.
- Nothing that is pinned is evicted, or leaves memory, as long as that memory is there.
- As long as an object that was acknowledged has a good replica, some good one counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from xxhash import xxh3_64_intdigest

from cenote.api.rows import UNIT_BYTES
from cenote.master.commands import Attach, Heartbeat
from cenote.master.effects import GoneReason, ReplicasChanged
from cenote.master.pool import Pool, Rows
from sim.disk import DiskFile
from sim.facts import is_sealed
from sim.loop import Violation

if TYPE_CHECKING:
    from sim.oracle import Oracle
    from sim.stores import SegmentFile, StoreHost

__all__ = ["TierOracle"]

Version = tuple[int, int]
Place = tuple[Any, int, int]
"""(file, slot, replica)."""


class TierOracle:
    """The part of the oracle that knows of tiers; without any it does nothing."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.command: type[Any] = object
        """That the master carries out."""
        self._noted: dict[int, int] = {}
        """Epoch -> the last copy that was ordered in it and is known here."""
        self._copies: dict[int, int] = {}
        """Copy -> the number under which it owns space, as those of grants."""
        self._numbers: set[int] = set()
        self._sharing: set[tuple[SegmentFile, int]] = set()
        """Slots of copies that take no space, since others have their bytes there."""
        self.bereft: set[Version] = set()
        """Of these a replica was really lost, and does not count any more."""
        self.forgotten: set[Version] = set()
        """Where these are is not what a journal says that lost its end."""
        self._untold: dict[Version, list[Place]] = {}
        """Where on SSDs they are all the same."""

    @property
    def is_on(self) -> bool:
        return self._oracle._world.tiers is not None

    # ---- the master -----------------------------------------------------------------------------

    def started(self, pool: Pool) -> None:
        """Another master: what it has is what its journal says."""
        if not self.is_on:
            return
        rows = pool.objects.live_rows(0, pool.objects.high_water)[0]
        counts, spans = pool.spans_of(rows)
        owners = np.repeat(np.arange(len(rows)), counts).tolist()
        records = pool.records_of(rows)
        versions = [(int(r[3]) & 0xFFFF_FFFF, int(r[2])) for r in records]
        found: dict[Version, list[Place]] = {version: [] for version in versions}
        for owner, (word, slot, _, _) in zip(owners, spans.tolist(), strict=True):
            file = self._oracle._file(pool, word & 0xFFFF)
            if file is not None:
                found[versions[owner]].append((file, slot, word >> 16 & 0xFF))
        for version, places in found.items():
            before = self._oracle._placed.get(version, [])
            if before and {at[:2] for at in before} != {at[:2] for at in places}:
                self.forgotten.add(version)
                untold = self._untold.setdefault(version, [])
                untold += [at for at in before if isinstance(at[0], DiskFile) and at not in untold]
            if places:
                self._place(version, before, places)
        unlink = pool.unlink

        def watched(gone: Rows, reason: GoneReason, why: int = 0, *, quiet: bool = False) -> int:
            if reason == GoneReason.EVICTED and pool.pin.take(gone).any():
                raise Violation(f"{int((pool.pin.take(gone) != 0).sum())} pinned are evicted")
            return unlink(gone, reason, why, quiet=quiet)

        pool.unlink = watched  # type: ignore[method-assign, assignment]

    def note_copies(self, pool: Pool) -> None:
        """Those that were ordered just now have space of their own."""
        if not self.is_on:
            return
        fresh = []
        last = self._noted.get(pool.epoch, 0)
        for copy_id in reversed(pool.copies.by_id):
            if copy_id <= last:
                break
            fresh.append(copy_id)
        for copy_id in reversed(fresh):
            self._noted[pool.epoch] = copy_id
            word, slot, offset, units = pool.copies.by_id[copy_id].span[0].tolist()
            file = self._oracle._file(pool, word & 0xFFFF)
            assert file is not None
            number = self._oracle.new_owner(-copy_id, pool.epoch)
            self._copies[copy_id] = number
            self._numbers.add(number)
            self._sharing.discard((file, slot))
            if pool.copies.by_id[copy_id].shares is not None:
                self._sharing.add((file, slot))
            elif not isinstance(file, DiskFile):
                start, end = offset * UNIT_BYTES, (offset + units) * UNIT_BYTES
                self._oracle.give(file, start, end, number, f"a copy ({copy_id & 0xFFFFFFFFFF})")
        for copy_id in fresh:
            one = pool.copies.by_id[copy_id]
            put = self._oracle.put_of.get((one.epoch, one.seq))
            faults = self._oracle._world.faults.tiers
            if put is not None and faults is not None:
                host = self._oracle._world.hosts[one.node.name]
                what = "pull" if one.move is not None else "read" if one.is_promotion else "write"
                faults.strike_copy(put.key, host, what)

    def replicas_changed(self, pool: Pool, effect: ReplicasChanged) -> None:
        """Objects have other replicas than before."""
        if not self.is_on:
            return
        at = 0
        oracle = self._oracle
        for i, digest in enumerate(effect.digests):
            placed = effect.placed[at : at + int(effect.extent_counts[i])].tolist()
            at += len(placed)
            version = oracle._versions_of.get((digest.tobytes(), int(effect.seqs[i])))
            if version is None:
                continue
            before = oracle._placed.get(version, [])
            after: list[Place] = []
            for segment, slot, offset, _, replica, _ in placed:
                file = oracle._file(pool, segment)
                if file is None:
                    continue  # of a segment that goes
                after.append((file, slot, replica))
                if after[-1] not in before and self.command is Heartbeat:
                    self._check_added(version, file, slot, offset * UNIT_BYTES, len(placed))
            self._place(version, before, after)
            put = oracle.put_of[version]
            if put.is_acked(version) and not oracle.is_safe(put, version):
                self._check_left(version, before)
            row = int(pool.objects.lookup(digest.reshape(1, 2))[0])
            if row > 0 and pool.pin[row]:
                self._check_pinned(version, before, after)

    def _place(self, version: Version, before: list[Place], after: list[Place]) -> None:
        self._oracle._placed[version] = after
        for place in before:
            if place not in after and (place[0].is_lost or version in place[0].damaged):
                self.bereft.add(version)

    def will_find(self, version: Version) -> bool:
        """Whether the journal does not tell that it is on an SSD, but its slot does, the journal
        has it in the memory of that host, and no other slot contradicts."""
        oracle = self._oracle
        untold = self._untold.get(version)
        if not untold:
            return False
        placed, value = oracle._placed[version], oracle.put_of[version].value
        hosts = {file.name.partition("[")[0] for file, _, _ in placed}
        numbers = {replica for _, _, replica in placed}
        for file, slot, replica in untold:
            good = not file.is_lost and version not in file.damaged and replica not in numbers
            good = good and file.disk.host in hosts and is_sealed(file, slot, version)
            if good and file.is_believable(slot, version, value):
                return True
        return False

    def _check_added(self, version: Version, file: Any, slot: int, offset: int, _: int) -> None:
        """A copy counts now: it is where its slot says, and is what was put."""
        if file.is_lost or version in file.damaged:
            return
        value = self._oracle.put_of[version].value
        if not is_sealed(file, slot, version):
            raise Violation(f"a copy of version {version} in {file.name} counts, and is not sealed")
        if isinstance(file, DiskFile):
            shares = any(other is file and at == slot for other, at in self._sharing)
            if shares and file.is_flipped(offset, len(value)):
                file.damaged.add(version)  # as those who have been there are: readers find out
            elif not file.is_durable(slot, version, value, offset):
                raise Violation(f"a copy of version {version} counts in {file.name}, not durable")
        elif file.data[offset : offset + len(value)].tobytes() != value:
            raise Violation(f"a copy of version {version} in {file.name} counts, of other bytes")

    def _check_left(self, version: Version, before: list[Place]) -> None:
        """No good replica is left, though it was acknowledged: none was there to be kept?"""
        oracle = self._oracle
        after = oracle._placed[version]
        oracle._placed[version] = before
        good = oracle.surviving_replicas(version)
        oracle._placed[version] = after
        if good:
            raise Violation(
                f"version {version} was acknowledged, and its good replicas {sorted(good)} go,"
                " others stay"
            )

    @staticmethod
    def _check_pinned(version: Version, before: list[Place], after: list[Place]) -> None:
        if any(not isinstance(file, DiskFile) for file, _, _ in after):
            return
        for file, slot, _ in before:
            whole = not isinstance(file, DiskFile) and not file.is_lost
            if whole and version not in file.damaged and is_sealed(file, slot, version):
                raise Violation(
                    f"version {version} is pinned, and leaves the memory of {file.name}"
                )

    def is_in_memory(self, host: StoreHost, version: Version) -> bool:
        """Whether the master has it there, as far as is known."""
        oracle = self._oracle
        placed = oracle._placed.get(version, ())
        return version not in oracle.gone and any(file in host.files for file, _, _ in placed)

    def carried_out(self, command: object, reply: Any) -> None:
        """A daemon that has attached knows which slots to clear; and which of them are on its SSD
        again when it starts once more is nobody's business in this tenure."""
        if isinstance(command, Attach) and reply.node_id:
            for places in self._untold.values():
                places[:] = [at for at in places if at[0].disk.host != command.node_name]

    # ---- daemons --------------------------------------------------------------------------------

    def landed(self, copy_id: int, file: SegmentFile, offset: int, length: int) -> None:
        """Bytes of a copy reach memory."""
        units = file.owner[offset // UNIT_BYTES : -(-(offset + length) // UNIT_BYTES)]
        if (units != self._copies.get(copy_id, -1)).any():
            raise Violation(
                f"copy {copy_id & 0xFFFFFFFFFF} of epoch {copy_id >> 40} lands at {offset} of"
                f" {file.name}, which another was given since"
            )

    def placed(self, file: SegmentFile, record: Any) -> None:
        """A copy becomes a slot in memory, of the bytes that lie there."""
        start = int(record["offset"])
        data = file.data[start : start + int(record["object_size"])].tobytes()
        if xxh3_64_intdigest(data) != int(record["checksum"]):
            raise Violation(f"a copy becomes slot {record['slot']} of {file.name}, of other bytes")
        if (file, int(record["slot"])) in self._sharing:
            return  # the place is others', whose bytes are the same
        if int(file.owner[int(record["offset"]) // UNIT_BYTES]) not in self._numbers:
            raise Violation(
                f"a copy becomes slot {record['slot']} of {file.name}, where another was given"
                " space since"
            )
