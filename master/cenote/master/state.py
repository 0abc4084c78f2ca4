"""The master's whole truth, as a pure machine: `apply(command, now_s) -> (reply, effects)`.

No I/O, no clock, no dice, no threads, no log. What time it is comes with each call, what happened
goes out as effects, and the same commands always give the same state.

This file says which command goes where. What it does to an object goes through the transitions in
`pool`, the only code that moves an object from one state to another; decisions are made in

    lookups       exists, acquire, release, touch       session_ops   sessions, orphans
    put_calls     whose put, and whether it came before attach        daemons' inventories
    puts placing  put_start                             node_ops      heartbeats, detach, failures
    commits       put_commit, put_abort                 spares        space granted ahead of need
    removal       remove, pins, quotas, resets          housekeeping  the tick
    tenure        until when anything may be decided
    eviction      which space is made free, when        replay        rebuilding, snapshots

A command that raises (a subclass of `CenoteError`) has changed nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cenote.api.contents import domain_key
from cenote.api.rows import UNIT_BYTES
from cenote.policy.base import EvictionPolicy

from . import (
    administering,
    attach,
    commits,
    dynamic_config,
    evacuation,
    eviction,
    explaining,
    housekeeping,
    lookups,
    node_ops,
    put_calls,
    rebalancing,
    removal,
    replay,
    session_ops,
    task_view,
    tenure,
    tier_reads,
    view,
)
from . import commands as c
from .admin_commands import Configure, DeleteNamespace, Evict
from .dedup_domains import domain_of
from .effects import DurableEffect, Effect
from .nodes import NodeState
from .pool import Pool
from .spans import Spans
from .state_config import StateConfig
from .task_commands import Drain, Rebalance

__all__ = ["MasterState", "StateConfig"]


class MasterState:
    """One tenure's state.

    `MasterState(config, epoch)`, then `replay` of what the journal has, then `start` (or the first
    command) begins the epoch; nothing is replayed after that.

    Hot operations can be called directly (`exists`, `acquire`, `put_start` ...): they return the
    reply alone, and `take_effects` then gives what came of it.
    """

    def __init__(
        self, config: StateConfig, epoch: int, policy: EvictionPolicy | None = None
    ) -> None:
        """`epoch`: this leader's tenure, above all earlier ones. `policy`: that of `config` where
        none is given."""
        self.config = config
        self.epoch = epoch
        self._pool = pool = Pool(config, epoch, policy)
        self.counters = pool.counters
        operations: dict[type[Any], Callable[[Pool, Any, float], Any]] = {
            c.OpenSession: session_ops.open_session,
            c.RenewSession: session_ops.renew_session,
            c.CloseSession: session_ops.close_session,
            c.CutSession: session_ops.cut_session,
            c.OpenNamespace: removal.open_namespace,
            c.ResetNamespace: removal.reset_namespace,
            c.SetQuota: removal.set_quota,
            c.Exists: lookups.exists,
            c.Acquire: lookups.acquire,
            c.Release: lookups.release,
            c.Touch: lookups.touch,
            c.PutStart: put_calls.put_start,
            c.PutCommit: put_calls.put_commit,
            c.CommitSpare: put_calls.commit_spare,
            c.PutAbort: commits.put_abort,
            c.Remove: removal.remove,
            c.Pin: removal.pin,
            c.Unpin: removal.unpin,
            c.Attach: attach.attach,
            c.Heartbeat: node_ops.heartbeat,
            c.Detach: node_ops.detach,
            Drain: evacuation.drain,
            Rebalance: rebalancing.rebalance,
            Configure: dynamic_config.configure,
            DeleteNamespace: administering.delete_namespace,
            Evict: administering.evict_objects,
            c.ReportFailure: node_ops.report_failure,
            c.NodeProbed: node_ops.node_probed,
            c.Tick: housekeeping.tick,
            c.ExtendTenure: tenure.extend_tenure,
            c.Piggyback: lookups.piggyback,
        }
        self._operations = {kind: partial(run, pool) for kind, run in operations.items()}

    # ---- commands -----------------------------------------------------------------------------

    def apply(self, command: c.Command, now_s: float) -> tuple[Any, list[Effect]]:
        """Carry a command out at `now_s` (monotonic seconds, never falling).

        Returns its reply (the type that `commands` names, None for commands without one) and what
        came of it, in order. Raises a `CenoteError` when nothing was changed.
        """
        pool = self._pool
        if not pool.started:
            replay.start_epoch(pool, now_s)
        kind = type(command)
        if now_s >= pool.tenure_end_s and kind in tenure.DECISIONS:
            tenure.check_tenure(pool, now_s)
        pool.changes += 1
        pool.now_s = now_s
        reply = self._operations[kind](command, now_s)
        return reply, self.take_effects()

    def take_effects(self) -> list[Effect]:
        """Effects since they were last taken."""
        pool = self._pool
        effects = pool.effects
        if effects:
            pool.effects = []
        return effects

    def take_freed(self) -> tuple[list[Spans], int]:
        """Space that objects, or grants, have given up since this was last called, and a number
        for it, which rises. It is held back until `release_freed`; nothing is before the first
        call."""
        segments = self._pool.segments
        freed, segments.freed = segments.freed, []
        return freed or [], segments.freed_number

    def release_freed(self, number: int) -> None:
        """What freed that space, up to this number, is known to outlive this master: it is as good
        as any other."""
        self._pool.segments.release(number)

    def evict_ahead(self, now_s: float, factor: float) -> list[Effect]:
        """What a tick does about room, between two ticks. Past the tenure nothing.

        `factor`: of the configured reserve so much is kept free from now on.
        """
        pool = self._pool
        if not tenure.is_past(pool, now_s):
            reserve = eviction.reserve_units(pool, pool.capacity_bytes // UNIT_BYTES)
            pool.ahead_units = int(reserve * factor)
            eviction.evict_ahead(pool)
        return self.take_effects()

    def exists(self, command: c.Exists, now_s: float) -> NDArray[np.uint8]:
        return lookups.exists(self._pool, command, now_s)

    def prefetch(self, command: c.Exists) -> None:
        """These keys will be read soon."""
        tier_reads.prefetch(self._pool, command)

    def acquire(self, command: c.Acquire, now_s: float) -> c.AcquireReply:
        return lookups.acquire(self._pool, command, now_s)

    def put_start(self, command: c.PutStart, now_s: float) -> c.PutStartReply:
        tenure.check_tenure(self._pool, now_s)
        self._pool.changes += 1
        return put_calls.put_start(self._pool, command, now_s)

    def put_commit(self, command: c.PutCommit, now_s: float) -> c.PutCommitReply:
        tenure.check_tenure(self._pool, now_s)
        self._pool.changes += 1
        return put_calls.put_commit(self._pool, command, now_s)

    def piggyback(self, news: c.Piggyback, now_s: float) -> None:
        self._pool.changes += 1
        lookups.piggyback(self._pool, news, now_s)

    # ---- past and future ----------------------------------------------------------------------

    def replay(self, effect: DurableEffect) -> None:
        """Apply a durable effect of an earlier tenure (or of a snapshot)."""
        replay.replay(self._pool, effect)

    def take_up(self, config: StateConfig, epoch: int) -> None:
        """Go on from what was replayed as a standby, in this epoch; then `replay` and `start`."""
        self.config = config
        self.epoch = epoch
        self._pool.take_up(config, epoch)

    def start(self, now_s: float, unix_s: float | None = None) -> list[Effect]:
        """Begin the epoch: EpochStarted is the first effect. Raises StaleEpoch.

        `unix_s`: what the wall clock says now, for what must end at its time whoever leads then.
        """
        replay.start_epoch(self._pool, now_s, unix_s)
        return self.take_effects()

    def snapshot(self) -> Iterator[DurableEffect]:
        """The state as durable effects, in chunks of at most 8192 objects.

        To be consumed before the next command (or in a fork of the process).
        """
        return replay.snapshot(self._pool)

    @property
    def last_seq(self) -> int:
        """Last decided seq."""
        return self._pool.last_seq

    @property
    def replayed_epoch(self) -> int:
        """Highest epoch among what was replayed; 0 for a new pool."""
        return self._pool.replayed_epoch

    @property
    def view_version(self) -> int:
        """Rises with every change of nodes or segments, over restarts, too."""
        return self._pool.view_version

    @property
    def object_count(self) -> int:
        return self._pool.objects.live_count

    @property
    def pinned_objects(self) -> int:
        return self._pool.pinned_objects

    def dedup_key(self, namespace: str) -> bytes:
        """Of content digests of a namespace that is in a dedup domain; else empty."""
        domain = domain_of(self._pool.config.dedup_domains, namespace)
        return domain_key(self._pool.pool_id, domain) if domain else b""

    @property
    def pool_id(self) -> bytes:
        """Of these metadata; empty where none are kept."""
        return self._pool.pool_id

    @property
    def is_blank(self) -> bool:
        """Whether no daemon has ever attached and nothing was put: nothing can be mixed up yet."""
        return self._pool.is_blank

    def has_namespace(self, name: str) -> bool:
        return name in self._pool.namespaces.by_name

    def namespace_name(self, namespace_id: int) -> str:
        """ "" where none has this id."""
        namespace = self._pool.namespaces.by_id.get(namespace_id)
        return "" if namespace is None else namespace.name

    def has_session(self, session_id: bytes) -> bool:
        return session_id in self._pool.sessions.by_id

    def client_of(self, session_id: bytes) -> str:
        """What a session's client calls itself; "" where there is none."""
        session = self._pool.sessions.by_id.get(session_id)
        return "" if session is None else session.client_name

    @property
    def session_count(self) -> int:
        return len(self._pool.sessions.by_id)

    @property
    def namespaces_version(self) -> int:
        """Rises with each namespace that is created or reset."""
        return self._pool.namespaces.version

    # ---- reading ------------------------------------------------------------------------------

    def status(self, now_s: float) -> view.PoolStatus:
        return view.status(self._pool, now_s)

    def nodes(self, now_s: float) -> list[view.NodeStatus]:
        return view.nodes(self._pool, now_s)

    def segments(self, now_s: float) -> list[view.SegmentStatus]:
        return view.segments(self._pool, now_s)

    def namespaces(self) -> list[view.NamespaceStatus]:
        return view.namespaces(self._pool)

    def node_states(self, now_s: float) -> list[NodeState]:
        """Of each node, cheaply."""
        return view.node_states(self._pool, now_s)

    def namespace_uses(self) -> list[view.NamespaceUse]:
        """Of each namespace, cheaply."""
        return view.namespace_uses(self._pool)

    def tasks(self, now_s: float) -> list[task_view.TaskStatus]:
        """What is in hand that takes longer."""
        return list(task_view.tasks(self._pool, now_s))

    def miss_ratios(self) -> view.MissRatios:
        return view.curves(self._pool)

    def stat_objects(
        self, namespace_id: int, generation: int, digests: c.Digests, now_s: float
    ) -> view.ObjectStats:
        """Raises NamespaceReset."""
        return view.objects(self._pool, namespace_id, generation, digests, now_s)

    def explain(
        self, namespace_id: int, generation: int, digest: c.Digests, now_s: float
    ) -> explaining.Explanation:
        """What is known of one key: uint64[2]. Raises NamespaceReset."""
        return explaining.explain(self._pool, namespace_id, generation, digest, now_s)

    def holders(self, now_s: float) -> list[explaining.HolderStatus]:
        """Sessions, and what each of them holds."""
        return explaining.holders(self._pool, now_s)

    def facts(self, now_s: float) -> dict[str, object]:
        """Sizes of what it keeps, for people who look for a bug."""
        return view.facts(self._pool, now_s)

    @property
    def overrides(self) -> Mapping[str, float]:
        """Limits that were changed since the master was started."""
        return self._pool.overrides

    @property
    def limits(self) -> StateConfig:
        """What is in force."""
        return self._pool.config

    def namespace_seed(self, namespace_id: int, generation: int) -> int:
        """Seed of the digests of a namespace's keys. Raises NamespaceReset."""
        return self._pool.namespaces.check(namespace_id, generation).digest_seed
