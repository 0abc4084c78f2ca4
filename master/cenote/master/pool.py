"""Everything the master knows, and the only code that moves an object from one state to another.

Life of an object (a row of the object table) and of its extents::

            put_start           put_commit            unlink              last lease ends
    (free) ----------> granted ------------> LIVE -------------> REMOVED --------------> (free)
                          |                   |                    (no lease: at once)
                          | abort, loser      | drop_replicas: fewer extents
                          v                   v
                       (free)               LIVE
                          |
                          | writer lost: quarantined until its daemons cut it off ----> (free)

`link`, `unlink`, `drop_replicas`, `free_spans` and `end_lease` are those arrows. They keep all
counts and emit the durable effects; which rows they are called for is decided elsewhere (`puts`,
`commits`, `eviction`, `removal`, `attach`, `housekeeping`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cenote.api.rows import UNIT_BYTES
from cenote.policy.advisor import Advisor
from cenote.policy.base import EvictionPolicy
from cenote.policy.names import AUTO, new_policy

from .adoption import AdoptionLog
from .blobs import BlobTable
from .counters import Counters
from .decisions import DecisionLog
from .effects import (
    Effect,
    Gone,
    GoneReason,
    InstructionsWaiting,
    ReplicasChanged,
    SegmentGone,
    Stored,
    ViewChanged,
)
from .extents import EXTENT
from .grants import Grant, GrantTable
from .index import Vacancies
from .instructions import Instruction
from .leases import Lease, LeaseTable
from .move_tables import Moves
from .namespaces import Namespace, Namespaces
from .nodes import Node, Nodes
from .object_columns import COPIED
from .object_rows import RECORD_WORDS, ObjectRows, Rows
from .objects import LIVE, ObjectTable
from .placement import Placement
from .quotas import Quotas
from .segments import DRAM, Segment, Segments
from .sessions import Orphans, Session, Sessions
from .spans import (
    Spans,
    distinct,
    segments_of,
    to_extents,
    to_placed,
    units_of,
)
from .stamp_times import StampTimes
from .state_config import StateConfig, with_overrides
from .tier_tables import Copies, Tiers
from .timers import ObjectTimers

__all__ = ["RECORD_WORDS", "Pool", "Rows"]

NO_SEGMENT = 0
"""No segment has this number: extents there are forgotten when they are freed."""
NO_SAMPLES = (1 << 64) - 1


class Pool(ObjectRows):
    """The structures, and the transitions. One for each `MasterState`; not used by anybody else."""

    def __init__(self, config: StateConfig, epoch: int, policy: EvictionPolicy | None) -> None:
        super().__init__(ObjectTable(config.objects_max), Segments())
        self.config = self.started_with = config
        self.overrides: dict[str, float] = {}  # see `dynamic_config`
        self.last_seq = 0
        self.started = False
        self.gathering_until_s = 0.0
        """Daemons that are known are expected to attach by then; see `placing`."""
        self.tenure_end_s = math.inf
        """See `tenure`."""
        self.tenure_lapsed = False
        """It had ended when time was looked at last."""
        self.pool_id = b""
        """Empty where no metadata are kept."""
        self.ancestors: list[bytes] = []
        self.rebuilt_epoch = 0
        """In which it was rebuilt from what daemons hold; 0: never."""
        self.tell_all = False
        """Daemons' copies of the pool are to be made anew."""
        first = "lru" if config.policy == AUTO else config.policy
        self.policy: EvictionPolicy = policy or new_policy(first)
        self.keeps_links = self.policy.chained or config.policy == AUTO
        """Whether it is kept which object stands before which in a chain."""
        self.advisor = Advisor(first, compares=config.policy == AUTO)
        self.sample_mask = NO_SAMPLES
        """Keys without any of these bits in their first word are sampled; see `sampling`."""
        self.sampled_s = self.surveyed_s = -math.inf  # see `sampling`, `housekeeping`
        self.namespaces, self.quotas, self.nodes = Namespaces(), Quotas(), Nodes()
        self.sessions, self.orphans = Sessions(), Orphans()
        self._begin(epoch)
        self.tiers = Tiers()
        self.moves = Moves()
        self.adoption = AdoptionLog(config.tombstones_max)
        self.blobs = BlobTable(self.are_there)
        self.expiries = ObjectTimers()
        self.unix_offset_s = 0.0
        """From monotonic time to the wall clock's, since the epoch started; see `lifetimes`."""
        self.unpins = ObjectTimers()
        self.counters = Counters()
        self.decisions = DecisionLog(config.decisions_max)
        self.effects: list[Effect] = []
        self.view_counter = 0
        self.links = 0
        """Batches of objects that entered the table."""
        self.changes = 0
        """Commands that may have changed something: a snapshot under way notices."""
        self.capacity_bytes = 0
        """Of usable segments in memory; shares are of it."""
        self.lease_cap_bytes = self.session_cap_units = self.leased_bytes = 0
        self.ahead_units = 0
        """To be kept free ahead of need, where that is more than the configured reserve."""
        self.condemned_units = self.condemned_rows = 0
        self.placement = Placement()
        self.placement_dirty = True
        self.victim_queues: dict[int, Any] = {}  # by rank; the business of `victims`
        self.sweep_at = 0
        """Where the sweep of dead generations goes on; 0 = nothing to sweep."""
        self.replayed_epoch = 0
        self.adoption_open = True
        self.adoption_until_s = 0.0
        self.pin_tag = 1
        self.now_s = 0.0
        self._stamp_times = StampTimes()

    def take_up(self, config: StateConfig, epoch: int) -> None:
        """What was replayed so far was followed as a standby: this epoch is to begin upon it."""
        self.started_with = config
        self.config = with_overrides(config, self.overrides)
        self._begin(epoch)

    def _begin(self, epoch: int) -> None:
        """What there is of one tenure alone."""
        self.epoch = epoch
        # The epoch in the high bits: an id of an earlier tenure never names something of this one.
        self.leases = LeaseTable((epoch & 0xFFFFFF) << 40 | 1)
        self.grants = GrantTable((epoch & 0xFFFFFF) << 40 | 1)
        self.copies = Copies(epoch)

    @property
    def is_blank(self) -> bool:
        """Whether no daemon has ever attached, and nothing was put."""
        return not self.nodes.by_id and not self.last_seq

    # ---- age and size -------------------------------------------------------------------------

    @property
    def view_version(self) -> int:
        return self.epoch << 32 | self.view_counter

    @property
    def mean_units(self) -> int:
        """Of an object."""
        return int(self.namespaces.units.sum()) // max(1, self.objects.live_count)

    def idle_s(self, stamp: int, now_s: float) -> float:
        """About how long ago this stamp was given."""
        return self._stamp_times.idle_s(stamp, now_s)

    def note_time(self, now_s: float) -> None:
        """Remember when stamps were given."""
        self.now_s = now_s
        self._stamp_times.note(self.policy.clock, now_s)

    def take_policy(self, policy: EvictionPolicy) -> None:
        """Another policy goes on from where the one in force is."""
        self.policy = policy
        self.victim_queues.clear()

    # ---- nodes and segments -------------------------------------------------------------------

    def instruct(self, node: Node, instruction: Instruction) -> None:
        # Numbers of one tenure are above those of all earlier ones: "done" can't be mistaken.
        node.last_instruction = max(node.last_instruction, self.epoch << 32)
        node.instruct(instruction)
        self.effects.append(InstructionsWaiting(node.node_id))

    def cut_off(self, node: Node, session_id: bytes) -> None:
        """Have the node make sure that this session can't touch its segments any more.

        A daemon that has cut a session off never lets it in again: once told is enough.
        """
        if session_id not in node.cutting:
            self.instruct(node, Instruction(0, cut_sessions=[session_id]))

    def view_changed(self) -> None:
        self.view_counter += 1
        self.placement_dirty = True
        self.effects.append(ViewChanged(self.view_version))

    def refresh_placement(self, now_s: float) -> None:
        """Which segments are usable now, how large they are, and what share each one gets."""
        usable = [s for s in self.segments.by_id.values() if s.is_usable and s.tier == DRAM]
        self.placement.refresh(usable, now_s)
        self.placement_dirty = False
        config = self.config
        units = self.segments.memory_units
        self.capacity_bytes = units * UNIT_BYTES
        self.lease_cap_bytes = int(self.capacity_bytes * config.leased_share_max)
        self.session_cap_units = int(units * config.session_granted_share_max)

    def close_adoption(self) -> None:
        """From now on daemons bring nothing that the journal does not know."""
        self.adoption_open = False
        self.adoption.below = 0
        self.adoption.raise_floor(self.epoch)

    # ---- transitions --------------------------------------------------------------------------

    def link(
        self,
        namespace: Namespace,
        effect: Stored,
        stamps: NDArray[np.uint64],
        spans: Spans,
        units: int,
        vacancies: Vacancies | None = None,
        *,
        flags: int = 0,
    ) -> Rows:
        """granted -> LIVE: decided objects (absent, distinct) enter the table.

        Raises ResourceUnavailable, having changed nothing, when the table is full.
        """
        self.links += 1
        counts = effect.extent_counts
        simple = len(spans) == len(effect.digests)
        rows = self.objects.insert(
            effect.digests,
            size_bytes=effect.sizes,
            checksum=effect.checksums,
            seq=effect.seqs,
            epoch=effect.epoch,
            namespace=namespace.incarnation,
            stamp=stamps,
            extents=to_extents(spans).view(EXTENT),
            counts=None if simple else counts.astype(np.int64),
            tail_bytes=effect.tails,
            replicas=effect.replicas,
            flags=flags,
            vacancies=vacancies,
        )
        self.namespaces.objects[namespace.incarnation] += len(rows)
        self.namespaces.units[namespace.incarnation] += units
        if self.segments.has_ssd:
            on_ssd = self.segments.on_ssd[segments_of(spans)]
            self.namespaces.ssd_units[namespace.incarnation] += units_of(spans[on_ssd])
        return rows

    def unlink(self, rows: Rows, reason: GoneReason, why: int = 0, *, quiet: bool = False) -> int:
        """LIVE -> REMOVED, and on to free where no lease runs. Emits Gone unless `quiet`.

        Returns the units that became free.
        """
        if not len(rows):
            return 0
        incarnations = self.incarnations_of(rows)
        if not quiet:
            self._emit_gone(rows, incarnations, reason, why)
        counts, spans = self.spans_of(rows)
        ends = np.cumsum(counts)
        sums = np.add.reduceat(spans[:, 3].astype(np.int64), ends - counts)
        self.namespaces.account(incarnations, sums, -1)
        if self.segments.has_ssd:
            self.namespaces.add_ssd_units(incarnations, -self.ssd_units_of(counts, spans))
        self.objects.unlink(rows)
        self.counters.gone[reason] += len(rows) if self.started else 0
        if self.keeps_links:
            self.objects.parent[rows] = 0
        if self.pinned_objects:
            self.clear_pins(rows)
        leased = self.lease_count.take(rows) != 0
        if leased.any():
            self.condemned_rows += int(np.count_nonzero(leased))
            self.condemned_units += int(sums[leased].sum())
            spans = spans[np.repeat(~leased, counts)]
            rows = rows[~leased]
        kept_units = self.segments.kept_units
        self.segments.give(spans)
        self.objects.free(rows)
        return units_of(spans) - (self.segments.kept_units - kept_units)

    def _emit_gone(
        self, rows: Rows, incarnations: NDArray[np.int64], reason: GoneReason, why: int
    ) -> None:
        digests, seqs = self.digests_of(rows), self.seqs_of(rows)
        owner, first = self.namespaces.owner, int(incarnations[0])
        self.decisions.note(reason, why, digests, self.now_s, self.stamp.take(rows), seqs)
        if len(rows) == 1 or (incarnations == first).all():
            self.effects.append(Gone(int(owner[first]), digests, seqs, reason))
            return
        owners = owner[incarnations]
        for namespace_id in distinct(owners).tolist():
            here = owners == namespace_id
            self.effects.append(Gone(namespace_id, digests[here], seqs[here], reason))

    def register_grant(self, session: Session, grant: Grant) -> None:
        """Space was taken for a grant."""
        self.grants.add(grant)
        session.grants[grant.grant_id] = grant
        session.granted_units += grant.units

    def settle_grant(self, session: Session, grant: Grant, entries: Rows, units: int) -> None:
        """Entries of a grant, of so many units, are decided or given up."""
        self.grants.settle(grant, entries, units)
        session.granted_units -= units

    def settle_one(self, session: Session, grant: Grant, entry: int, units: int) -> None:
        """`settle_grant` for one entry."""
        self.grants.settle_one(grant, entry, units)
        session.granted_units -= units

    def drop_replicas(
        self, rows: Rows, lost: Spans, reason: GoneReason, *, vanishing: int = NO_SEGMENT
    ) -> int:
        """These extents (each of a LIVE row, one row an extent) hold nothing any more.

        A replica with a lost extent goes as a whole; an object without any replica left goes, too.
        One under lease stays as it is where it has another replica and the lost one has space
        outside of the `vanishing` segment: its readers may be there, so that space can't be free
        yet. Returns how many objects went.
        """
        if not len(rows):
            return 0
        unique = distinct(rows)
        counts, spans = self.spans_of(unique)
        owner = np.repeat(np.arange(len(unique)), counts)
        replica = (spans[:, 0] >> 16) & 0xFF
        pairs = owner * 256 + replica
        lost_pairs = np.searchsorted(unique, rows) * 256 + ((lost[:, 0] >> 16) & 0xFF)
        stays = ~np.isin(pairs, lost_pairs)
        kept = np.bincount(owner[stays], minlength=len(unique))
        reusable = ~stays & (segments_of(spans) != vanishing)
        waits = np.bincount(owner[reusable], minlength=len(unique)) > 0
        gone = kept == 0
        waits &= self.lease_count.take(unique) != 0
        self.unlink(unique[gone], reason)
        gone |= waits
        some = np.flatnonzero(~gone)
        if len(some):
            stays &= ~gone[owner]
            drops = ~stays & ~gone[owner]
            replicas = np.bincount(distinct(pairs[stays]) // 256, minlength=len(unique))
            self.state[unique[some]] &= ~np.uint8(COPIED)
            self._keep_spans(
                unique[some],
                kept[some],
                spans[stays],
                replicas[some].astype(np.uint8),
                spans[drops],
            )
        return int(np.count_nonzero(kept == 0))

    def _keep_spans(
        self,
        rows: Rows,
        counts: NDArray[np.int64],
        spans: Spans,
        replicas: NDArray[np.uint8],
        dropped: Spans,
    ) -> None:
        self.set_spans(rows, counts, spans, replicas)
        self.effects.append(
            ReplicasChanged(
                self.digests_of(rows),
                self.seqs_of(rows),
                counts.astype(np.uint16),
                replicas,
                to_placed(spans),
            )
        )
        self.segments.give(dropped)

    def set_spans(
        self, rows: Rows, counts: NDArray[np.int64], spans: Spans, replicas: NDArray[np.uint8]
    ) -> None:
        """LIVE -> LIVE with other extents; their space is the caller's business."""
        before = self.units_of_rows(rows)
        owners = self.incarnations_of(rows)
        if self.segments.has_ssd:
            change = self.ssd_units_of(counts, spans) - self.ssd_units_of(*self.spans_of(rows))
            self.namespaces.add_ssd_units(owners, change)
        self.objects.set_extents(rows, counts, to_extents(spans).view(EXTENT), replicas)
        self.namespaces.add_units(owners, self.units_of_rows(rows) - before)

    def lose_segment(self, segment: Segment) -> int:
        """A segment's contents are gone, and so is it. Returns how many objects were lost."""
        rows, spans = self.rows_in_segment(segment.segment_id)
        live = (self.state.take(rows) & LIVE) != 0
        lost = self.drop_replicas(
            rows[live], spans[live], GoneReason.LOST, vanishing=segment.segment_id
        )
        left = rows[live & ((self.state.take(rows) & LIVE) != 0)]
        self.moves.note_short(self.digests_of(left), self.seqs_of(left))
        self.segments.drop(segment.segment_id)
        for hold in self.orphans.forget_segment(segment.segment_id, segment.node):
            self.drop_lease(hold)
        if not segment.node.segment_ids:
            segment.node.forget_instructions()
        self.effects.append(SegmentGone(segment.segment_id))
        self.counters.lost += lost
        self.view_changed()
        return lost

    def hold(self, rows: Rows) -> Lease:
        """A hold on distinct rows that is no session's: whoever asks for it ends it."""
        counts = self.lease_count.take(rows)
        self.leased_bytes += int(self.sizes_of(rows[counts == 0]).sum())
        self.lease_count[rows] = counts + np.uint32(1)
        return self.leases.give(rows, float("inf"), b"")

    def drop_lease(self, lease: Lease) -> None:
        """End a lease that is still in the table."""
        if self.leases.by_id.pop(lease.lease_id, None) is not None:
            self.end_lease(lease)

    def end_lease(self, lease: Lease) -> None:
        """A lease is over (taken out of the table already): its rows lose one count each."""
        session = self.sessions.by_id.get(lease.session_id)
        if session is not None:
            session.leases.discard(lease)
        rows = lease.rows
        if isinstance(rows, int):
            count = int(self.lease_count[rows]) - 1
            self.lease_count[rows] = count
            if count:
                return
            self.leased_bytes -= int(self.record_flat[rows * RECORD_WORDS])
            if self.condemned_rows and not self.state[rows] & LIVE:
                self._free_condemned(np.array([rows]))
            return
        left = self.lease_count.take(rows) - np.uint32(1)
        self.lease_count[rows] = left
        over = rows[left == 0]
        if not len(over):
            return
        self.leased_bytes -= int(self.sizes_of(over).sum())
        if self.condemned_rows:
            self._free_condemned(over[(self.state.take(over) & LIVE) == 0])

    def _free_condemned(self, rows: Rows) -> None:
        if not len(rows):
            return
        _, spans = self.spans_of(rows)
        self.condemned_rows -= len(rows)
        self.condemned_units -= units_of(spans)
        self.segments.give(spans)
        self.objects.free(rows)
