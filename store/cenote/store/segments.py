"""All segments of a daemon: opened at the start, and what the data server knows of their tenure."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from typing import Final, final

from cenote.api.contents import TICKET_KEY_BYTES
from cenote.api.errors import ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.runtime.memory import PAGE_BYTES
from cenote.runtime.units import format_size

from .claims import ClaimFile, ClaimTable, open_claims, survived
from .disk_io import DiskIo
from .dram import (
    SEGMENT_BYTES_MIN,
    DramSegment,
    SegmentPlan,
    find_survivor,
    plan_segments,
)
from .node_files import NodeFiles
from .pool_copy import PoolCopyFile
from .ssd import SsdFile, SsdSegment
from .table_file import Survivor

__all__ = ["NO_GRANT", "LocalSegments", "open_segments"]

EPOCH_BITS: Final = 24
GRANTS_BITS: Final = 40
NO_GRANT: Final = (1 << 64) - 1
"""Above all grant ids."""

_log = get_logger(__name__)


def first_grant_id_of(epoch: int) -> int:
    """The least id that a grant of this epoch can have: its number fills the high bits."""
    return (epoch & (1 << EPOCH_BITS) - 1) << GRANTS_BITS


@final
class LocalSegments:
    """Implements `cenote.store.segment.SegmentSet`.

    Right after a restart it answers with the ids and the epoch of the earlier life, so that clients
    go on reading while the daemon attaches anew. Nothing is written or sealed before that: only the
    master's answer tells what may still be.
    """

    def __init__(
        self,
        segments: Sequence[DramSegment],
        claims: ClaimTable,
        disks: Sequence[SsdSegment] = (),
    ) -> None:
        self._dram = tuple(segments)
        self._segments: tuple[DramSegment | SsdSegment, ...] = (*segments, *disks)
        self.disk: DiskIo | None = disks[0].disk if disks else None
        """Of the SSD, where there is one that works."""
        self.claims = claims
        """What writers over shared memory may be writing into."""
        for segment in self._segments:
            segment.table.hold()
        self.first_grant_id = NO_GRANT
        """Writers under older grants are refused."""
        claims.shut(NO_GRANT)
        self._lock = threading.Lock()
        self.epoch = max((s.header.last_epoch for s in self._segments), default=0)
        """Of the leader that this daemon follows; 0 before the first attach."""
        self.pool = PoolCopyFile()
        """What is kept of the pool that they belong to."""
        self.ticket_key = secrets.token_bytes(TICKET_KEY_BYTES)
        """By which the master knows tickets of this process; see `proofs`."""
        self.claim_file: ClaimFile | None = None
        """Where these claims are."""
        self.node_id = next((s.header.node_id for s in self._segments if s.header.node_id), 0)
        self._by_id = {s.segment_id: s for s in self._segments if s.segment_id}

    def by_id(self, segment_id: int) -> DramSegment | SsdSegment | None:
        """The segment that the master calls so."""
        return self._by_id.get(segment_id)

    def knows(self, namespace_id: int, generation: int) -> bool:
        """See `SegmentSet`."""
        return self.pool.knows(namespace_id, generation)

    def namespace_name(self, namespace_id: int) -> str:
        """See `SegmentSet`."""
        return self.pool.name_of(namespace_id)

    def all(self) -> Sequence[DramSegment | SsdSegment]:
        """In the order of their indexes."""
        return self._segments

    def dram(self) -> Sequence[DramSegment]:
        """Those in memory."""
        return self._dram

    def ssd(self) -> Sequence[SsdSegment]:
        """Those on the SSD."""
        return tuple(s for s in self._segments if isinstance(s, SsdSegment))

    def give_up_failed(self) -> bool:
        """Leave out SSD segments whose device does not work any more; whether there were any. The
        daemon must attach anew then."""
        with self._lock:
            kept = tuple(
                s for s in self._segments if not isinstance(s, SsdSegment) or s.check_health()
            )
            if len(kept) == len(self._segments):
                return False
            self._segments = kept
            self.disk = next((segment.disk for segment in self.ssd()), None)
            self._by_id = {s.segment_id: s for s in kept if s.segment_id}
            return True

    def fence(self, epoch: int) -> None:
        """Follow `epoch`: seals of older ones, and writes under their grants, are refused
        everywhere when this returns."""
        with self._lock:
            if epoch > self.epoch:
                if self.first_grant_id != NO_GRANT:
                    self.first_grant_id = first_grant_id_of(epoch)
                    self.claims.shut(self.first_grant_id)
                self.epoch = epoch
            for segment in self._segments:
                segment.fence(self.epoch)

    def forget_ids(self) -> None:
        """Another pool's master numbers its segments anew: what clients call by the old numbers is
        not here, until this daemon has attached."""
        with self._lock:
            for segment in self._segments:
                segment.attached(0, 0)
            self.node_id = 0
            self._by_id = {}

    def attached(
        self, node_id: int, segment_ids: Sequence[int], last_seq: int = 0, first_grant_id: int = 0
    ) -> None:
        """Take up the ids that the master gave, in the order of `all()`; from now on, seals of
        what was decided after `last_seq`, and writes under `first_grant_id` and later ones."""
        with self._lock:
            for segment, segment_id in zip(self._segments, segment_ids, strict=True):
                segment.attached(node_id, segment_id)
                segment.table.admit(self.epoch, last_seq)
            self.node_id = node_id
            self._by_id = {s.segment_id: s for s in self._segments}
            self.first_grant_id = first_grant_id
            self.claims.admit(first_grant_id)

    @property
    def ready(self) -> bool:
        """Whether all memory is allocatable."""
        return all(s.ready_bytes == s.size_bytes for s in self._dram)

    def close(self) -> None:
        """Close all; the files stay."""
        for segment in self._segments:
            segment.close()
        if self.claim_file is not None:
            self.claim_file.close()


def open_segments(
    files: NodeFiles,
    total_bytes: int,
    boot_id: bytes,
    *,
    allow_less: bool = False,
    ssd: SsdFile | None = None,
) -> LocalSegments:
    """The node's segments, of `total_bytes` of memory together with their tables, and those on the
    SSD where there is one.

    Those that survived an earlier life with the planned size are opened, others are made anew, and
    what no plan names is removed. No slot is looked at yet (`DramSegment.recover`), and of new data
    files nothing is backed by memory yet (`Preparation`). Raises ResourceUnavailable where there is
    not enough memory for all of it, naming how much there is; with `allow_less` it goes on with
    that.
    """
    granule = max(PAGE_BYTES, os.statvfs(files.directory).f_bsize)
    survivors = {
        index: survivor
        for index in files.indexes()
        if (survivor := find_survivor(files, index, boot_id)) is not None
    }
    plans = plan_segments(total_bytes, granule)
    if allow_less:
        wanted = sum(plan.memory_bytes for plan in plans)
        plans = _kept_plans(files, survivors, wanted) or plans
    survivors = _kept(files, plans, survivors)
    if survivors and not survived(files.claims_path):
        # Somebody may be writing into these segments, and it can't be told who.
        survivors = _kept(files, plans, {})
    on_ssd = [header for header in ssd.survivors if header is not None] if ssd else []
    known = [*(s.header for s in survivors.values()), *on_ssd]
    files.announce(
        next((header.node_uuid for header in known), files.node_uuid),
        max((header.start_number for header in known), default=0),
    )
    plans = _affordable(files, plans, survivors, total_bytes, granule, allow_less)
    opened: list[DramSegment] = []
    claims = open_claims(files.claims_path)
    try:
        for plan in plans:
            survivor = survivors.get(plan.index)
            opened.append(
                DramSegment(files, plan, boot_id, survivor=survivor, granule_bytes=granule)
            )
        disks = ssd.open(files) if ssd else []
    except BaseException:
        claims.close()
        for segment in opened:
            segment.close()
            if not segment.reopened:
                files.remove(segment.index)
        raise
    segments = LocalSegments(opened, claims.table, disks)
    segments.claim_file = claims
    return segments


def _kept(
    files: NodeFiles, plans: Sequence[SegmentPlan], survivors: dict[int, Survivor]
) -> dict[int, Survivor]:
    """The survivors that fit their plan; files of all others are removed."""
    sizes = {plan.index: plan.data_bytes for plan in plans}
    kept = {i: s for i, s in survivors.items() if sizes.get(i) == s.header.data_bytes}
    for index in files.indexes():
        if index not in kept:
            _log.warning(
                "a segment of an earlier life can't be used any more and is removed",
                segment=str(files.data_path(index)),
                why="of another size"
                if index in survivors
                else "damaged, without a table of claims, or from before a reboot",
            )
            files.remove(index)
    return kept


def _kept_plans(
    files: NodeFiles, survivors: dict[int, Survivor], wanted_bytes: int
) -> list[SegmentPlan]:
    """The plan that an earlier life went on with, where `wanted_bytes` can't be had now either."""
    plans = [
        SegmentPlan(i, s.header.data_bytes, s.header.slots) for i, s in sorted(survivors.items())
    ]
    if not plans or [plan.index for plan in plans] != list(range(len(plans))):
        return []
    held = sum(
        path.stat().st_blocks * 512
        for index in survivors
        for path in (files.data_path(index), files.table_path(index))
    )
    fits = held <= wanted_bytes and sum(plan.data_bytes for plan in plans) <= wanted_bytes
    return plans if fits and _room_bytes(files, plans) + held < wanted_bytes else []


def _affordable(
    files: NodeFiles,
    plans: list[SegmentPlan],
    survivors: dict[int, Survivor],
    total_bytes: int,
    granule: int,
    allow_less: bool,
) -> list[SegmentPlan]:
    """The plans, or smaller ones where that is allowed and all would be new."""
    missing = _missing_bytes(plans, survivors)
    room = _room_bytes(files, plans)
    if missing <= room:
        return plans
    less = max(0, total_bytes - missing + room) // SEGMENT_BYTES_MIN * SEGMENT_BYTES_MIN
    if not allow_less or less < SEGMENT_BYTES_MIN:
        raise _too_little(files, total_bytes, less)
    if survivors:
        return plans  # they get what there is, and tell how far that goes
    _log.warning(
        "going on with less memory than was asked for",
        wanted=format_size(total_bytes),
        got=format_size(less),
    )
    return plan_segments(less, granule)


def _missing_bytes(plans: Sequence[SegmentPlan], survivors: dict[int, Survivor]) -> int:
    missing = 0
    for plan in plans:
        survivor = survivors.get(plan.index)
        if survivor is None:
            missing += plan.memory_bytes
        else:
            missing += survivor.header.data_bytes - survivor.header.ready_bytes
    return missing


def _room_bytes(files: NodeFiles, plans: Sequence[SegmentPlan]) -> int:
    """How much memory could be had for data and tables together."""
    data, tables = files.available_bytes()
    if tables is None:
        return data
    share = sum(plan.table_bytes for plan in plans) * data // sum(p.data_bytes for p in plans)
    return data + min(tables, share)


def _too_little(files: NodeFiles, wanted: int, available: int) -> ResourceUnavailable:
    return ResourceUnavailable(
        f"can't get {format_size(wanted)} of memory in {files.directory}:"
        f" {format_size(available)} ({available} bytes) could be had",
        remedy="ask for less with --dram, go on with what there is with --dram-allow-less,"
        " or give the machine, container or file system more",
    )
