"""Bugs on purpose: each takes one rule out of the production code; the simulator must notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cenote.api.rows import BLOCK, SEAL
from cenote.client.driver import BlockingDriver
from cenote.client.locations import LOCATION_STRUCT
from cenote.client.plan import reads, singles
from cenote.client.plan.commits import Commits
from cenote.client.plan.grants import Grant
from cenote.client.plan.state import ClientState
from cenote.client.session import Session
from cenote.master import adopting, attach, commits, damage, housekeeping, pool, puts, session_ops
from cenote.master.adoption import AdoptionLog
from cenote.master.effects import Gone, GoneReason
from cenote.master.leases import LeaseTable
from cenote.master.log_writer import LogWriter
from cenote.master.operations import Operations
from cenote.master.segments import Segments
from cenote.store.claims import ClaimTable
from cenote.store.segments import LocalSegments
from cenote.store.sessions import SessionTable
from cenote.store.slot_format import SLOT_BYTES
from cenote.store.slots import SlotTable
from cenote.transport.claims import ClaimPage
from sim.data_path import ShmChannel
from sim.one_sided import QueuePair

__all__ = ["MUTATIONS", "mutated", "replaced", "together"]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def together(*bugs: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for bug in bugs:
            stack.enter_context(bug)
        yield


def _free_on_expiry() -> contextlib.AbstractContextManager[None]:
    """A session that falls silent: its grants' extents are free at once, without the cut."""

    def give(at: Any, session_id: bytes, spans: Any) -> None:
        at.segments.give(spans)

    return replaced(session_ops, "quarantine", give)


def _free_unfenced() -> contextlib.AbstractContextManager[None]:
    """Extents whose writer can't say that it is done are free at once."""

    def give(at: Any, session_id: bytes, spans: Any) -> None:
        at.segments.give(spans)

    return replaced(commits, "quarantine", give)


def _no_version_check() -> contextlib.AbstractContextManager[None]:
    """A seal that comes late overwrites a newer slot."""
    seal = SlotTable._seal_one

    def forgetful(table: Any, epoch: int, head: bytes, row: bytes, keys: Any, start: int) -> int:
        slot = int.from_bytes(row[4:8], "little")
        if slot < table.slots:
            table._memory[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = bytes(SLOT_BYTES)
        return seal(table, epoch, head, row, keys, start)

    return replaced(SlotTable, "_seal_one", forgetful)


def _free_leased() -> contextlib.AbstractContextManager[None]:
    """What is removed or evicted is free at once, whoever reads it under a lease."""
    unlink = pool.Pool.unlink

    def unleased(at: Any, rows: Any, reason: Any, why: int = 0, *, quiet: bool = False) -> int:
        for lease in list(at.leases.by_id.values()):
            held = {lease.rows} if isinstance(lease.rows, int) else set(lease.rows.tolist())
            if held & set(np.asarray(rows).tolist()):
                at.drop_lease(lease)
        return unlink(at, rows, reason, why, quiet=quiet)

    return replaced(pool.Pool, "unlink", unleased)


def _older_writes_go_on() -> contextlib.AbstractContextManager[None]:
    """A daemon follows a new leader without an end to what was begun under the old one."""
    return replaced(SessionTable, "end_older_writes", lambda table, epoch, timeout_s=1.0: True)


def _removals_are_not_journaled() -> contextlib.AbstractContextManager[None]:
    """A removal is told before it is written down."""
    add = LogWriter.add

    def adding(log: Any, effect: Any) -> None:
        if not (isinstance(effect, Gone) and effect.reason == GoneReason.REMOVED):
            add(log, effect)

    return replaced(LogWriter, "add", adding)


def _cut_is_a_word() -> contextlib.AbstractContextManager[None]:
    """A daemon reports sessions as cut off, and does nothing about them."""

    def cut(table: Any, session_ids: Any, timeout_s: float = 1.0) -> Any:
        return list(session_ids), []

    return replaced(SessionTable, "cut", cut)


def _mappings_are_overlooked() -> contextlib.AbstractContextManager[None]:
    """Closing connections counts as a cut, though the process may still write over shm."""

    def is_out(table: Any, session_id: bytes, connections: Any, deadline: float) -> bool:
        return True

    return replaced(SessionTable, "_is_out", is_out)


def _second_commit_wins() -> contextlib.AbstractContextManager[None]:
    """The later of two writers of a key replaces the earlier one's object."""
    resolve = commits._resolve_conflicts

    def replacing(at: Any, session: Any, grant: Any, *rest: Any) -> Any:
        rows = at.objects.lookup(grant.digests[rest[1]])
        at.unlink(np.unique(rows[rows >= 0]), GoneReason.LOST)
        return resolve(at, session, grant, *rest)

    return replaced(commits, "_resolve_conflicts", replacing)


def _leases_never_end() -> contextlib.AbstractContextManager[None]:
    """Leases are given and not taken back."""
    return replaced(LeaseTable, "due", lambda table, now_s, limit: [])


def _sessions_never_end() -> contextlib.AbstractContextManager[None]:
    """A dead client's session is kept, with all that it holds."""

    def none(at: Any, session: Any) -> None:
        at.sessions.by_id[session.session_id] = session

    return replaced(housekeeping, "abandon_session", none)


def _seals_before_the_attach() -> contextlib.AbstractContextManager[None]:
    """A restarted daemon seals at once."""
    return replaced(SlotTable, "hold", lambda table: None)


def _seals_of_what_was_dropped() -> contextlib.AbstractContextManager[None]:
    """A daemon seals what was decided before it attached."""
    admit = SlotTable.admit

    def all_of_it(table: Any, epoch: int, last_seq: int) -> None:
        admit(table, epoch, 0)

    return replaced(SlotTable, "admit", all_of_it)


def _sums_are_not_compared() -> contextlib.AbstractContextManager[None]:
    """What a daemon sums up counts as what the table has, so its inventory is never asked for."""
    return replaced(attach, "wanted_blocks", lambda pool, command: np.zeros(0, BLOCK))


def _late_attaches_count() -> contextlib.AbstractContextManager[None]:
    """What a daemon said before it died is taken for news."""
    return replaced(attach, "_check_place", lambda pool, command: None)


def _grants_outlive_daemons() -> contextlib.AbstractContextManager[None]:
    """A restarted daemon lets in whoever has a grant."""
    attached = LocalSegments.attached

    def all_of_them(
        segments: Any, node_id: int, ids: Any, last_seq: int = 0, first_grant_id: int = 0
    ) -> None:
        attached(segments, node_id, ids, last_seq, 0)

    return replaced(LocalSegments, "attached", all_of_them)


def _claims_are_overlooked() -> contextlib.AbstractContextManager[None]:
    """A master is not told of writers over shm who are in the middle of a copy."""
    return replaced(ClaimTable, "_claims", lambda table: [])


def _views_are_overlooked() -> contextlib.AbstractContextManager[None]:
    """A master is not told of what is looked at in place under holds of an earlier one."""
    claims = ClaimTable._claims

    def writes(table: Any) -> Any:
        return [claim for claim in claims(table) if not claim.is_view]

    return replaced(ClaimTable, "_claims", writes)


def _claims_end_by_themselves() -> contextlib.AbstractContextManager[None]:
    """A daemon tells of claims, and a moment later that they are over."""
    older = ClaimTable.older

    def once(table: Any) -> Any:
        found, table._older = older(table), []
        return found

    return replaced(ClaimTable, "older", once)


def _void_grants_are_used() -> contextlib.AbstractContextManager[None]:
    """A writer over shm does not look whether its grant is valid still."""
    claim = ClaimPage.claim

    def blind(page: Any, grant_id: int, ranges: Any, deadline_s: float) -> int:
        return claim(page, (1 << 64) - 1, ranges, deadline_s)

    return replaced(ClaimPage, "claim", blind)


def _queue_pairs_outlive_epochs() -> contextlib.AbstractContextManager[None]:
    """A daemon that follows a new leader leaves one-sided writers of the old one alone."""
    return replaced(QueuePair, "writes_of_older", lambda pair, epoch: False)


def _nothing_is_cancelled() -> contextlib.AbstractContextManager[None]:
    """What was granted in an answer that nobody saw is kept."""
    return replaced(ClientState, "cancel", lambda state, request_id: None)


def _acknowledged_unsealed() -> contextlib.AbstractContextManager[None]:
    """A put is acknowledged once it is decided; its slots are written by and by, or never."""

    def seals(driver: Any, call: Any, step: Any) -> None:
        for part in step.parts:
            part.statuses = np.zeros(len(part.batch.rows) // SEAL.itemsize, np.uint8)

    return replaced(BlockingDriver, "seals", seals)


@contextlib.contextmanager
def _adopt_everything() -> Iterator[None]:
    """A master takes over every slot that it does not know, however old, removed or not."""

    def everything(at: Any, segments: Any, slots: Any) -> Any:
        return np.ones(len(slots), np.bool_)

    with (
        replaced(adopting, "_newer", everything),
        replaced(AdoptionLog, "may_adopt", lambda *_: True),
    ):
        yield


def _attaches_are_for_anybody() -> contextlib.AbstractContextManager[None]:
    """A master takes in what a daemon told another one, for which it had fenced its writers."""
    return replaced(Operations, "_refuse_unless_meant", lambda operations, request: None)


def _tombstones_are_forgotten() -> contextlib.AbstractContextManager[None]:
    """A master does not look whether what the journal missed was removed meanwhile."""
    return replaced(AdoptionLog, "removed", lambda *_: None)


def _unfenced_is_forgotten() -> contextlib.AbstractContextManager[None]:
    """A client whose write may still land says that it is done."""
    return replaced(Grant, "is_unfenced", lambda grant: False)


def _locations_do_not_end() -> contextlib.AbstractContextManager[None]:
    """A location is used for as long as its bytes are right, removed or not."""
    greeted = Session._greeted

    def long_lived(session: Any, reply: Any) -> None:
        reply.location_ttl_ms = 60_000
        greeted(session, reply)

    return replaced(Session, "_greeted", long_lived)


def _cached_reads_are_not_verified() -> contextlib.AbstractContextManager[None]:
    """What lies where an object was a moment ago is taken for that object."""

    def read(driver: Any, call: Any, digest: Any, row: bytes, address: int, length: int) -> int:
        _, offset, size, _, segment, node = LOCATION_STRUCT.unpack(row)
        channel = driver._session.channels.get(node)
        if channel is None or size > length:
            return 0
        status, _ = channel.read_one(segment, offset, size, address, call.remaining_s(), False)
        return 0 if status else size

    return replaced(BlockingDriver, "read_cached", read)


@contextlib.contextmanager
def _leases_are_believed_for_ever() -> Iterator[None]:
    """A reader does not look at its clock when it has read under a lease."""
    with replaced(reads, "LEASE_SHARE", 1e6), replaced(singles, "LEASE_SHARE", 1e6):
        yield


def _leases_outlive_tenures() -> contextlib.AbstractContextManager[None]:
    """A reader over shared memory does not look whether its daemon follows another leader now."""
    return replaced(ShmChannel, "_is_of_tenure", lambda channel, lease_id: lease_id != 0)


def _the_unsealed_exist() -> contextlib.AbstractContextManager[None]:
    """What is decided exists, whether its writer lived to seal it or not."""
    return together(
        replaced(puts, "is_known", lambda at, row: at.is_settled(row)),
        replaced(puts, "unsealed_rows", lambda at, rows: np.zeros(len(rows), np.bool_)),
        replaced(commits, "unsealed_rows", lambda at, rows: np.zeros(len(rows), np.bool_)),
    )


def _commits_seal() -> contextlib.AbstractContextManager[None]:
    """A client tells of commits under way that they are sealed."""
    begin = Commits.begin

    def begun(at: Commits) -> tuple[int, int]:
        request_id, _ = begin(at)
        return request_id, request_id - 1

    return replaced(Commits, "begin", begun)


def _others_seals_are_not_confirmed() -> contextlib.AbstractContextManager[None]:
    """A writer takes back what others were told exists."""
    return replaced(damage, "unsealed_rows", lambda at, rows: np.ones(len(rows), np.bool_))


def _nothing_is_verified_again() -> contextlib.AbstractContextManager[None]:
    """A lease proves what outlived a loss of the journal's end, or of all of it, though somebody
    may have been writing there since, and left no word of it."""
    refresh = Segments.refresh_readable

    def refreshed(segments: Any) -> None:
        refresh(segments)
        segments.verified[:] = segments.all_verified = True

    return replaced(Segments, "refresh_readable", refreshed)


MUTATIONS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "free on expiry": _free_on_expiry,
    "free unfenced": _free_unfenced,
    "no version check": _no_version_check,
    "free leased": _free_leased,
    "older writes go on": _older_writes_go_on,
    "removals are not journaled": _removals_are_not_journaled,
    "cut is a word": _cut_is_a_word,
    "mappings are overlooked": _mappings_are_overlooked,
    "second commit wins": _second_commit_wins,
    "leases never end": _leases_never_end,
    "sessions never end": _sessions_never_end,
    "seals before the attach": _seals_before_the_attach,
    "seals of what was dropped": _seals_of_what_was_dropped,
    "sums are not compared": _sums_are_not_compared,
    "late attaches count": _late_attaches_count,
    "grants outlive daemons": _grants_outlive_daemons,
    "claims are overlooked": _claims_are_overlooked,
    "views are overlooked": _views_are_overlooked,
    "claims end by themselves": _claims_end_by_themselves,
    "void grants are used": _void_grants_are_used,
    "queue pairs outlive epochs": _queue_pairs_outlive_epochs,
    "nothing is cancelled": _nothing_is_cancelled,
    "acknowledged unsealed": _acknowledged_unsealed,
    "adopt everything": _adopt_everything,
    "attaches are for anybody": _attaches_are_for_anybody,
    "tombstones are forgotten": _tombstones_are_forgotten,
    "unfenced is forgotten": _unfenced_is_forgotten,
    "locations do not end": _locations_do_not_end,
    "cached reads are not verified": _cached_reads_are_not_verified,
    "leases are believed for ever": _leases_are_believed_for_ever,
    "leases outlive tenures": _leases_outlive_tenures,
    "the unsealed exist": _the_unsealed_exist,
    "commits seal": _commits_seal,
    "nothing is verified again": _nothing_is_verified_again,
    "what exists is taken back": _others_seals_are_not_confirmed,
}


def mutated(name: str) -> contextlib.AbstractContextManager[None]:
    """The production code with one bug in it."""
    return MUTATIONS[name]()
