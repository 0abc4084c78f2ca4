"""Heartbeats, detaching, failure reports: what becomes of a node after it attached."""

from __future__ import annotations

from cenote.api.errors import NodeSuperseded, SessionUnknown, StaleEpoch
from cenote.api.rows import UNIT_BYTES

from .commands import Detach, EndpointInfo, Heartbeat, HeartbeatReply, NodeProbed, ReportFailure
from .copies import end_copies, forget_copies
from .damage import drop_damaged, drop_misread
from .demotion import demote_more
from .effects import NodeServes, ProbeNode
from .nodes import Node, NodeState
from .pool import Pool
from .session_ops import node_cut_session
from .sessions import claimer

__all__ = [
    "detach",
    "heartbeat",
    "lose_segment",
    "node_probed",
    "report_failure",
    "set_endpoints",
    "set_node_state",
]


def set_node_state(pool: Pool, node: Node, state: NodeState) -> None:
    """Alive, dead, detached: what can be read and where can be written follows."""
    if node.state == state:
        return
    node.state = state
    pool.segments.refresh_readable()
    pool.view_changed()


def set_endpoints(pool: Pool, node: Node, endpoints: list[EndpointInfo]) -> bool:
    """Where a node is served; whether that is news."""
    if node.endpoints == endpoints:
        return False
    node.endpoints = endpoints
    pool.effects.append(NodeServes(node.node_id, endpoints))
    return True


def heartbeat(pool: Pool, command: Heartbeat, now_s: float) -> HeartbeatReply:
    """A node is alive; what it did, and what it should do.

    Raises StaleEpoch (attached to another tenure), SessionUnknown (it must attach first),
    NodeSuperseded (a later process has attached).
    """
    node = pool.nodes.by_id.get(command.node_id)
    if command.epoch != pool.epoch:
        raise StaleEpoch(
            f"the heartbeat is of epoch {command.epoch}, this is {pool.epoch}",
            remedy="attach again",
        )
    if node is None or not node.attached or node.state == NodeState.DETACHED:
        raise SessionUnknown(f"node {command.node_id} is not attached", remedy="attach again")
    _check_process(node, command.start_number)
    if command.held:  # what else it says was taken down when it came
        return HeartbeatReply(node.instructions[: pool.config.instructions_per_reply_max])
    node.heard_s = now_s
    if command.damaged is not None:
        drop_damaged(pool, node, command.damaged)
    if command.copied is not None:
        end_copies(pool, node, command.copied, now_s)
    node.counters = command.counters
    if command.endpoints is not None and set_endpoints(pool, node, command.endpoints):
        pool.view_changed()
    node.quarantined_session_ids = list(command.quarantined_session_ids)
    if node.state == NodeState.DEAD:
        if node.unanswered:  # it talks to us, but clients may still not reach it
            pool.effects.append(ProbeNode(node.node_id))
        else:
            set_node_state(pool, node, node.up_state)
    if node.unverified != command.unverified:
        node.unverified = command.unverified
        pool.segments.refresh_readable()
    for index, ready_bytes in command.ready_bytes:
        for segment_id in node.segment_ids:
            segment = pool.segments.by_id[segment_id]
            if segment.index == index and segment.grow(ready_bytes // UNIT_BYTES):
                pool.view_changed()
    for session_id in command.cut_session_ids:
        node_cut_session(pool, session_id, node.node_id)
    for session_id in command.withdrawn_session_ids:
        node_cut_session(pool, claimer(session_id), node.node_id)
    node.done(command.done_instruction)
    if command.copied is not None and len(command.copied) and now_s < pool.tenure_end_s:
        demote_more(pool, node, now_s)
    return HeartbeatReply(node.instructions[: pool.config.instructions_per_reply_max])


def _check_process(node: Node, start_number: int) -> None:
    """What was under way when its daemon died may be read after the next one attached."""
    if start_number < node.start_number:
        raise NodeSuperseded(
            f"start {start_number} of node {node.name!r} speaks after start {node.start_number},"
            f" process {node.process_id}, attached"
        )
    if start_number > node.start_number:
        raise SessionUnknown(
            f"start {start_number} of node {node.name!r} is not attached", remedy="attach first"
        )


def detach(pool: Pool, command: Detach, now_s: float) -> None:
    """A node goes. Its objects are hidden until it attaches again, or lost.

    Raises NodeSuperseded, SessionUnknown.
    """
    node = pool.nodes.by_id.get(command.node_id)
    if node is None:
        return
    _check_process(node, command.start_number)
    if not command.contents_survive:
        for segment_id in list(node.segment_ids):
            lose_segment(pool, segment_id)
    set_node_state(pool, node, NodeState.DETACHED)


def lose_segment(pool: Pool, segment_id: int) -> None:
    """Contents are gone: objects lose what they had there, grants their extents, orphans, too."""
    segment = pool.segments.by_id.get(segment_id)
    if segment is None:
        return
    forget_copies(pool, segment_id)
    pool.lose_segment(segment)


def report_failure(pool: Pool, command: ReportFailure, now_s: float) -> int:
    """A client could not reach a node: its host avoids it for a while, and the shell probes it.

    Returns the node's state, DETACHED for an unknown one.
    """
    node = pool.nodes.by_id.get(command.node_id)
    if node is None:
        return NodeState.DETACHED
    if not node.is_readable:
        return node.state
    if command.misread is not None:
        drop_misread(pool, command, node)
        return node.state
    session = pool.sessions.by_id.get(command.session_id)
    if session is not None:
        node.suspect_until_s[session.boot_id] = now_s + pool.config.suspect_s
        pool.nodes.suspects += 1
    pool.effects.append(ProbeNode(node.node_id))
    return NodeState.SUSPECT


def node_probed(pool: Pool, command: NodeProbed, now_s: float) -> None:
    """No answer hides the node for all until it answers again, which each of its heartbeats has
    tried; an answer of one that is not hidden changes nothing: it stays suspect for the host that
    could not reach it."""
    node = pool.nodes.by_id.get(command.node_id)
    if node is None:
        return
    if not command.answered:
        if node.is_readable:
            node.unanswered = True
            set_node_state(pool, node, NodeState.DEAD)
    elif node.unanswered:
        node.unanswered = False
        if node.state == NodeState.DEAD and now_s - node.heard_s < pool.config.node_dead_s:
            set_node_state(pool, node, node.up_state)
