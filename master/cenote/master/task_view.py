"""What people see of tasks: plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .move_tables import Cause, Task
from .nodes import NodeState
from .pool import Pool

__all__ = ["TaskStatus", "moving_text", "tasks"]


@dataclass(slots=True)
class TaskStatus:
    task: Task
    """Not to be changed."""
    node_name: str
    """Empty where it is about several."""
    state: str
    """running, waiting, done."""
    note: str
    running_s: float


def tasks(pool: Pool, now_s: float) -> Iterator[TaskStatus]:
    """Those in hand, and what ended lately."""
    for task in pool.moves.tasks.values():
        node = pool.nodes.by_id.get(task.node_id)
        state, note = "done" if task.done else "running", task.note
        if task.done:
            pass
        elif node is not None and node.state == NodeState.DETACHED:
            state, note = "waiting", "its daemon has been stopped"
        elif node is not None and task.cause is Cause.DRAIN and node.state == NodeState.DEAD:
            state, note = "waiting", "its daemon does not answer"
        elif task.note:
            state = "waiting"
        until_s = task.ended_s if task.done else now_s
        name = "" if node is None else node.name
        yield TaskStatus(task, name, state, note, max(0.0, until_s - task.started_s))


def moving_text(found: Iterable[TaskStatus]) -> str:
    """What is on the move now, for people."""
    parts = []
    for status in found:
        task = status.task
        if status.state != "done" and task.cause is not Cause.HOT:
            of = f" of {status.node_name}" if status.node_name else ""
            note = f", {status.note}" if status.note else ""
            parts.append(f"{task.cause}{of}: {task.remaining_bytes >> 20} MiB left{note}")
    return "; ".join(parts)
