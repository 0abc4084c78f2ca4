"""Random commands against the naive model; after each one everything is counted anew."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cenote.api.errors import NamespaceReset, QuotaExceeded
from cenote.api.rows import CommitStatus, PutStatus
from cenote.master import commands as c
from cenote.master.nodes import NodeState
from cenote.master.state import MasterState, StateConfig
from unit.master.state_checks import check, contents, pool_of
from unit.master.state_kit import KIB, FakeSegment, Kit, new_node, restarted, session_id
from unit.master.state_model import Model, ModelObject
from unit.master.state_replies import Put, read_hits

KEYS = 40
SESSIONS = (1, 2)
CONFIG = {"tick_compact_rows_max": 64, "spares_share_max": 0.25, "spares_free_share_max": 0.5}
key_lists = st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=12)
sessions = st.sampled_from(SESSIONS)
nodes = st.integers(1, 3)
# Unsealed until its writer says otherwise, with its next request.
SAME = (CommitStatus.EXISTS_SAME, CommitStatus.UNSEALED_SAME)
TO_BEGIN_ANEW = (CommitStatus.NOT_GRANTED,)
DIFFERENT = (CommitStatus.EXISTS_DIFFERENT, CommitStatus.UNSEALED_DIFFERENT)


class StateMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.kit = Kit(StateConfig(**CONFIG))  # type: ignore[arg-type]
        self.model = Model(KEYS)
        self.holds_back = False
        self.freed: list[int] = []
        self.journaled = 0
        """Durable effects that no crash can lose."""

    @initialize(holds_back=st.booleans())
    def set_up(self, holds_back: bool) -> None:
        """`holds_back`: metadata are shared, and what freed space takes a while to be durable."""
        self.holds_back = holds_back
        kit = self.kit
        kit.with_nodes(*(new_node(i, 64 * KIB, slots=48) for i in (1, 2, 3)))
        for number in SESSIONS:
            kit.with_session(number, f"host-{number}")
        self.news(flushed=True)

    def news(self, *, flushed: bool = False) -> None:
        """Read the effects. `flushed`: all so far are in the journal before the next step."""
        self.model.read_effects(self.kit)
        if self.holds_back:
            self.freed.append(self.kit.state.take_freed()[1])
            self.kit.state.release_freed(self.freed[max(0, len(self.freed) - 4)])
        if flushed:
            self.journaled = len(self.kit.durable())

    def node_of_segment(self) -> dict[int, int]:
        segments = pool_of(self.kit.state).segments.by_id
        return {i: segment.node.node_id for i, segment in segments.items()}

    # ---- writers ------------------------------------------------------------------------------

    @rule(
        keys=key_lists,
        size=st.sampled_from([1, 64, 700, 4 * KIB, 9 * KIB, 30 * KIB, 90 * KIB]),
        session=sessions,
        replicas=st.integers(1, 3),
        chain=st.booleans(),
        local=st.booleans(),
    )
    def start(
        self, keys: list[int], size: int, session: int, replicas: int, chain: bool, local: bool
    ) -> None:
        kit, model = self.kit, self.model
        put = kit.start(keys, size, session, replicas=replicas, chain=chain, local_first=local)
        # What was evicted for this grant is not busy any more: read the effects first.
        self.news(flushed=True)
        model.granted(put, session, model.busy(kit.now_s))
        for position, status in enumerate(put.statuses):
            key = keys[position]
            if status == PutStatus.EXISTS:
                assert key in model.stored or model.effects_read
            elif status == PutStatus.DUPLICATE_IN_BATCH:
                assert key in keys[:position]

    @rule(
        key=st.integers(0, KEYS - 1),
        size=st.sampled_from([1, 64, 700, 4 * KIB]),
        count=st.sampled_from([1, 3, 8, 5000]),
        session=sessions,
    )
    def start_with_spares(self, key: int, size: int, count: int, session: int) -> None:
        kit, model = self.kit, self.model
        put, spares = kit.start_spares(count, size, session, keys=[key])
        self.news(flushed=True)
        model.granted(put, session, model.busy(kit.now_s))
        model.granted(spares, session, model.busy(kit.now_s), size)
        assert len(spares.keys) <= count
        assert len({segment for ((segment, *_),) in spares.extents.values()}) <= 1

    def a_grant(self, data: st.DataObject, *, spare: bool | None = None) -> Put:
        grants = self.model.grants
        chosen = [i for i in sorted(grants) if spare in (None, grants[i].spare_bytes > 0)]
        return grants[data.draw(st.sampled_from(chosen))].put

    def has_grant(self, *, spare: bool) -> bool:
        return any((grant.spare_bytes > 0) == spare for grant in self.model.grants.values())

    def settle(self, put: Put, positions: set[int]) -> None:
        """They are decided or given up."""
        grant = self.model.grants[put.reply.grant_id]
        grant.pending -= positions
        if not grant.pending:
            del self.model.grants[put.reply.grant_id]

    @precondition(lambda self: self.has_grant(spare=True))
    @rule(
        data=st.data(),
        keys=st.lists(st.integers(0, KEYS - 1), min_size=1, max_size=6),
        run=st.booleans(),
        shorter=st.booleans(),
        seal=st.booleans(),
    )
    def commit_spares(
        self, data: st.DataObject, keys: list[int], run: bool, shorter: bool, seal: bool
    ) -> None:
        put = self.a_grant(data, spare=True)
        model, grant = self.model, self.model.grants[put.reply.grant_id]
        if run:
            first = data.draw(st.sampled_from(sorted(grant.pending)))
            positions = list(range(first, first + len(keys)))
        else:
            any_position = st.integers(0, len(put.keys))
            positions = data.draw(st.lists(any_position, min_size=len(keys), max_size=len(keys)))
        sizes = [grant.spare_bytes] * len(keys)
        if shorter and grant.spare_bytes % 64 != 1:
            sizes[-1] -= 1
        before = {key: thing.size for key, thing in model.stored.items()}
        # An object whose nodes are all dead gives way, where it is looked at.
        readable = set(np.flatnonzero(self.kit.exists(*range(KEYS))).tolist())
        gone = {
            position
            for position, ((segment, *_),) in put.extents.items()
            if segment not in pool_of(self.kit.state).segments.by_id
        }
        # What only the journal tells of may be dropped in a moment: that it exists is not said.
        doubtful = () if pool_of(self.kit.state).segments.all_attached else TO_BEGIN_ANEW
        left = set(grant.pending)
        self.settle(put, set(positions) & left)
        statuses = self.kit.commit_spares(put, positions, keys, sizes, grant.session, seal=seal)
        self.news()
        for position, key, size, status in zip(positions, keys, sizes, statuses, strict=True):
            if position not in left:
                assert status == CommitStatus.NOT_GRANTED
                continue
            left.discard(position)
            if key in readable:
                same = before[key] == size
                assert status in (*(SAME if same else DIFFERENT), *doubtful)
            elif position in gone:
                assert status == CommitStatus.NOT_GRANTED
            else:
                assert status == CommitStatus.DECIDED
                assert model.stored[key].size == size
                before[key] = size
                if self.is_readable(model.stored[key]):
                    readable.add(key)

    @precondition(lambda self: self.has_grant(spare=True))
    @rule(data=st.data())
    def abort_some_spares(self, data: st.DataObject) -> None:
        put = self.a_grant(data, spare=True)
        grant = self.model.grants[put.reply.grant_id]
        positions = data.draw(st.lists(st.integers(0, len(put.keys)), min_size=1, max_size=6))
        self.kit.apply(
            c.PutAbort(
                session_id(grant.session), put.reply.grant_id, np.array(positions, np.uint32)
            )
        )
        self.settle(put, set(positions))
        self.news()

    @precondition(lambda self: self.has_grant(spare=False))
    @rule(data=st.data(), some=st.booleans(), seal=st.booleans())
    def commit(self, data: st.DataObject, some: bool, seal: bool) -> None:
        put = self.a_grant(data, spare=False)
        grant = self.model.grants[put.reply.grant_id]
        positions = sorted(grant.pending)
        if some:
            positions = data.draw(st.permutations(positions))[: max(1, len(positions) // 2)]
        stored_before = dict(self.model.stored)
        self.settle(put, set(positions))
        statuses = self.kit.commit(put, list(positions), grant.session, seal=seal)
        self.news()
        for position, status in zip(positions, statuses, strict=True):
            key = put.keys[position]
            if status == CommitStatus.DECIDED:
                assert self.model.stored[key].size == put.sizes[position]
            elif status in SAME:
                assert stored_before[key].size == put.sizes[position]
            elif status in DIFFERENT:
                assert stored_before[key].size != put.sizes[position]

    @precondition(lambda self: self.model.grants)
    @rule(data=st.data(), unfenced=st.booleans())
    def abort(self, data: st.DataObject, unfenced: bool) -> None:
        put = self.a_grant(data)
        grant = self.model.grants.pop(put.reply.grant_id)
        self.kit.apply(c.PutAbort(session_id(grant.session), put.reply.grant_id, unfenced=unfenced))
        if unfenced:
            owners = self.node_of_segment()
            for unit in grant.units():
                if unit[0] in owners:
                    at = (grant.session, owners[unit[0]])
                    self.model.orphans.setdefault(at, set()).add(unit)
        self.news()

    # ---- readers ------------------------------------------------------------------------------

    @rule(keys=key_lists, session=sessions, hold=st.booleans(), chain=st.booleans())
    def acquire(self, keys: list[int], session: int, hold: bool, chain: bool) -> None:
        reply = self.kit.acquire(*keys, session=session, hold=hold, chain=chain, ttl_ms=3000)
        self.news()
        hits = read_hits(reply)
        missed = False
        for key, hit in zip(keys, hits, strict=True):
            thing = self.model.stored.get(key)
            if hit is None:
                missed = True
                continue
            assert not (missed and chain)
            assert thing is not None
            assert (hit.epoch, hit.seq, hit.size) == (thing.epoch, thing.seq, thing.size)
            assert hit.checksum == thing.checksum
            assert sum(n for *_, n in hit.extents) == hit.size * hit.replicas
        until_s = float("inf") if hold else self.kit.now_s + 3
        self.model.leased(reply.lease_id, session, hits, until_s)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.model.leases)))
        del self.model.leases[lease_id]
        self.kit.apply(c.Piggyback(released_lease_ids=np.array([lease_id], np.uint64)))
        self.news()

    @rule(keys=key_lists, chain=st.booleans())
    def touch(self, keys: list[int], chain: bool) -> None:
        self.kit.apply(c.Touch(*self.kit.place, self.kit.digests(*keys), chain))

    # ---- removal ------------------------------------------------------------------------------

    @rule(keys=key_lists)
    def remove(self, keys: list[int]) -> None:
        known = set(self.model.stored)
        removed = self.kit.remove(*keys)
        assert removed == [int(key in known) for key in keys]
        self.news(flushed=True)
        assert not set(keys) & set(self.model.stored)

    @rule(keys=key_lists, ttl_ms=st.sampled_from([0, 2000]), unpin=st.booleans())
    def pin(self, keys: list[int], ttl_ms: int, unpin: bool) -> None:
        digests = self.kit.digests(*keys)
        try:
            if unpin:
                self.kit.apply(c.Unpin(*self.kit.place, digests))
            else:
                self.kit.apply(c.Pin(*self.kit.place, digests, ttl_ms))
        except QuotaExceeded:
            return
        self.news()
        for key in keys:
            if key in self.model.stored:
                assert self.model.stored[key].pinned is not unpin

    @rule(kib=st.sampled_from([0, 4, 40, 1024]), objects=st.sampled_from([0, 0, 5]))
    def set_quota(self, kib: int, objects: int) -> None:
        self.kit.apply(c.SetQuota("a", kib * KIB, objects=objects, priority=1 + kib % 3))
        self.news()

    @rule()
    def reset(self) -> None:
        old = self.kit.place
        self.kit.namespace = self.kit.apply(c.ResetNamespace("a", self.model.seed + 1))
        self.news(flushed=True)
        for grant_id, grant in list(self.model.grants.items()):
            # Their writers go on; a commit will be refused.
            if grant.spare_bytes:
                some = sorted(grant.pending)[:2]
                with pytest.raises(NamespaceReset):
                    self.kit.commit_spares(
                        grant.put, some, some, grant.spare_bytes, grant.session, place=old
                    )
                self.kit.apply(c.PutAbort(session_id(grant.session), grant_id))
                del self.model.grants[grant_id]
                continue
            statuses = self.kit.commit(grant.put, sorted(grant.pending), grant.session)
            assert set(statuses) == {CommitStatus.NOT_GRANTED}
            del self.model.grants[grant_id]

    # ---- time and nodes -----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.01, 0.5, 2.0]))
    def tick(self, seconds: float) -> None:
        kit = self.kit
        for number in SESSIONS:
            kit.apply(c.RenewSession(session_id(number)))
        kit.tick(seconds)
        for lease_id, lease in list(self.model.leases.items()):
            if lease.deadline_s <= kit.now_s:
                del self.model.leases[lease_id]
        self.news()

    @rule(session=sessions)
    def session_runs_out(self, session: int) -> None:
        kit = self.kit
        for _ in range(4):
            for number in SESSIONS:
                if number != session:
                    kit.apply(c.RenewSession(session_id(number)))
            for number in kit.nodes:
                self.beat(number, obey=False)
            kit.tick(3.0)
            self.news()
        self.model.abandon(session, self.node_of_segment())
        for lease_id, lease in list(self.model.leases.items()):
            if lease.deadline_s <= kit.now_s:
                del self.model.leases[lease_id]
        kit.with_session(session, f"host-{session}")

    @rule(session=sessions)
    def session_closes(self, session: int) -> None:
        self.kit.apply(c.CloseSession(session_id(session)))
        grants, leases = self.model.grants, self.model.leases
        for grant_id in [i for i, grant in grants.items() if grant.session == session]:
            del grants[grant_id]
        for lease_id, lease in list(leases.items()):
            if lease.session == session and lease.waits_for is None:
                del leases[lease_id]
        self.kit.with_session(session, f"host-{session}")
        self.news()

    @rule(number=nodes)
    def heartbeat(self, number: int) -> None:
        self.beat(number, obey=True)

    def beat(self, number: int, *, obey: bool) -> None:
        node = self.kit.nodes[number]
        known = pool_of(self.kit.state).nodes.by_id[node.node_id]
        if known.state == NodeState.DETACHED or not known.attached:
            return
        cut = list(node.cut)
        self.kit.heartbeat(node, obey=obey)
        for session in cut:
            self.model.cut(int.from_bytes(session, "little"), node.node_id)
        self.news()

    @rule(number=nodes)
    def daemon_restarts(self, number: int) -> None:
        node = self.kit.nodes[number]
        node.process_id += 1
        self.kit.attach(node)
        self.news(flushed=True)

    @rule(number=nodes)
    def daemon_comes_back_empty(self, number: int) -> None:
        node = self.kit.nodes[number]
        node.process_id += 1
        node.segments = [
            FakeSegment(f"inc-{number}-{node.process_id}".encode(), 64 * KIB, 64 * KIB, slots=48)
        ]
        self.kit.attach(node)
        self.news(flushed=True)

    @rule(number=nodes, survive=st.booleans())
    def detach(self, number: int, survive: bool) -> None:
        node = self.kit.nodes[number]
        self.kit.apply(c.Detach(node.node_id, survive))
        self.news(flushed=not survive)
        if not survive:
            node.segments = [
                FakeSegment(
                    f"inc-{number}-d{node.process_id}".encode(), 64 * KIB, 64 * KIB, slots=48
                )
            ]
            node.process_id += 1

    @rule(number=nodes, session=sessions)
    def report_failure(self, number: int, session: int) -> None:
        node_id = self.kit.nodes[number].node_id
        self.kit.apply(c.ReportFailure(node_id, session_id(session), "timeout"))

    @rule(snapshot=st.booleans(), absent=st.sets(nodes, max_size=2))
    def master_restarts(self, snapshot: bool, absent: set[int]) -> None:
        kit = self.kit
        journal = list(kit.state.snapshot()) if snapshot else kit.durable()
        fresh = restarted(kit, journal=journal, **CONFIG)
        assert contents(fresh.state) == contents(kit.state)
        self.take_over(fresh, absent)

    @rule(data=st.data(), absent=st.sets(nodes, max_size=2))
    def master_crashes(self, data: st.DataObject, absent: set[int]) -> None:
        """The tail of the journal is lost; what was sealed comes back with the daemons."""
        durable = self.kit.durable()
        kept = data.draw(st.integers(self.journaled, len(durable)))
        acknowledged = {
            (thing.epoch, thing.seq)
            for thing in self.model.stored.values()
            if self.is_sealed(thing)
        }
        self.take_over(restarted(self.kit, journal=durable[:kept], **CONFIG), absent)
        if not absent:
            found = {(thing.epoch, thing.seq) for thing in self.model.stored.values()}
            assert acknowledged <= found, "an acknowledged object is lost"

    def is_sealed(self, thing: ModelObject) -> bool:
        """Whether some replica is sealed, all of it on one node."""
        for node in self.kit.nodes.values():
            for pieces in thing.replicas.values():
                here = 0
                for segment in node.segments:
                    here += sum(
                        (int(row["epoch"]), int(row["seq"])) == (thing.epoch, thing.seq)
                        and (segment.segment_id, int(row["offset"]) // 64)
                        in {p[:2] for p in pieces}
                        for row in segment.table.values()
                    )
                if here == len(pieces):
                    return True
        return False

    def take_over(self, fresh: Kit, absent: set[int]) -> None:
        """Attaching cuts off all writers; no lease is inherited (the wait for them is 0 here)."""
        old, self.kit = self.kit, fresh
        tombstones, removed = self.model.tombstones, self.model.removed
        self.model = Model(KEYS, seed=self.model.seed)
        self.news(flushed=True)
        assert self.model.tombstones == tombstones
        self.model.removed |= removed
        for number, node in old.nodes.items():
            node.done_instruction = 0
            node.cut.clear()
            fresh.nodes[number] = node
            if number not in absent:
                fresh.attach(node)
        for number in SESSIONS:
            fresh.with_session(number, f"host-{number}")
        self.news(flushed=True)

    # ---- always -------------------------------------------------------------------------------

    @invariant()
    def everything_adds_up(self) -> None:
        check(self.kit.state)

    @invariant()
    def the_model_agrees(self) -> None:
        if self.kit.namespace is None:
            return
        expected = [
            int(key in self.model.stored and self.is_readable(self.model.stored[key]))
            for key in range(KEYS)
        ]
        assert self.kit.exists(*range(KEYS)) == expected

    def is_readable(self, thing: ModelObject) -> bool:
        """Whether all nodes of some replica are alive, as far as the master knows."""
        segments = pool_of(self.kit.state).segments.by_id
        alive = {i for i, segment in segments.items() if segment.node.is_readable}
        return any(
            all(segment in alive for segment, *_ in pieces) for pieces in thing.replicas.values()
        )

    def teardown(self) -> None:
        if self.kit.namespace is None:
            return
        for journal in (self.kit.durable(), list(self.kit.state.snapshot())):
            copy = MasterState(StateConfig(), self.kit.state.epoch + 1)
            for effect in journal:
                copy.replay(effect)
            assert contents(copy) == contents(self.kit.state)
            check(copy)


StateMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
TestStateMachine = StateMachine.TestCase
