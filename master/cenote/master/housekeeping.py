"""The tick: what time brings. Each step is bounded: a tick never holds requests up for long."""

from __future__ import annotations

from .commands import Tick
from .eviction import evict_ahead, sweep
from .lifetimes import end_lifetimes
from .move_planning import plan_moves
from .node_ops import lose_segment, set_node_state
from .nodes import NodeState
from .pool import Pool
from .rebuilding import known_pool
from .sampling import follow_samples
from .segments import GROW_ALWAYS
from .session_ops import abandon_session
from .slot_growth import grow_slots
from .tenure import resume
from .tiers import plan_copies

__all__ = ["tick"]

FEW_SEGMENTS = 50
"""So many are looked at in every tick."""
SURVEY_S_PER_SEGMENT = 200e-6
"""A segment costs some 4 µs: one fiftieth of the time at most, however many there are."""


def tick(pool: Pool, command: Tick, now_s: float) -> None:
    """Leases and sessions that ran out, silent nodes, pins and objects whose time is over,
    sweeping, eviction ahead of need, slots, compaction. Past the tenure nothing of it."""
    if now_s >= pool.tenure_end_s:
        pool.tenure_lapsed = True
        return
    if pool.tenure_lapsed:
        resume(pool, now_s)
    limit = pool.config.tick_expire_max
    ended = pool.leases.due(now_s, limit)
    pool.counters.leases_expired += len(ended)
    for lease in ended:
        pool.end_lease(lease)
    for session in pool.sessions.due(now_s, limit):
        abandon_session(pool, session)
    end_lifetimes(pool, now_s)
    _watch_nodes(pool, now_s)
    if pool.adoption_open and now_s >= pool.adoption_until_s:
        was_rebuilt = pool.adoption.below > 0
        pool.close_adoption()
        if was_rebuilt:
            pool.effects.append(known_pool(pool))
    sweep(pool, pool.config.tick_sweep_rows_max)
    segments = len(pool.segments.by_id)
    if segments <= FEW_SEGMENTS or now_s >= pool.surveyed_s + SURVEY_S_PER_SEGMENT * segments:
        pool.surveyed_s = now_s
        _survey(pool, now_s)
    moved, _ = pool.objects.compact(pool.config.tick_compact_rows_max)
    pool.counters.rows_moved += len(moved)
    pool.note_time(now_s)
    follow_samples(pool, now_s)


def _survey(pool: Pool, now_s: float) -> None:
    """What looks at every segment."""
    pool.refresh_placement(now_s)
    evict_ahead(pool)
    plan_copies(pool, now_s)
    plan_moves(pool, now_s)
    for entry in pool.placement.entries:
        entry.segment.grow_below = GROW_ALWAYS
        if entry.segment.wants_slots():
            grow_slots(pool, entry.segment)


def _watch_nodes(pool: Pool, now_s: float) -> None:
    config = pool.config
    if pool.nodes.suspects:
        pool.nodes.end_suspicions(now_s)
    for node in pool.nodes.by_id.values():
        silent_s = now_s - node.heard_s
        if silent_s < config.node_dead_s or not node.segment_ids:
            continue
        if node.state in (NodeState.ALIVE, NodeState.DRAINING):
            set_node_state(pool, node, NodeState.DEAD)
        if silent_s >= config.node_forget_s:
            for segment_id in list(node.segment_ids):
                lose_segment(pool, segment_id)
