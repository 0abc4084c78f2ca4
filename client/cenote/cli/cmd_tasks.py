"""`cenote drain`, `undrain`, `rebalance`, `tasks`: what moves objects from node to node."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .asking import Yes, agreed, nothing_done
from .cmd_completion import complete_node
from .exits import EXIT_OK, NothingOfThatName
from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress, Wide
from .watching import Watch, watched

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .connect import Admin

__all__ = ["drain", "rebalance", "tasks", "undrain"]

_LOOK_S = 0.2
NodeName = Annotated[
    str,
    typer.Argument(
        metavar="NODE",
        help="Name or id, as `cenote nodes` has it.",
        autocompletion=complete_node,
    ),
]
Bandwidth = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Bytes a second at most, such as 500MiB; 0: no limit."),
]


def _node_of(admin: Admin, name: str) -> admin_pb2.NodeStatus:
    """The node of this name or id. Raises NothingOfThatName."""
    found = admin.nodes()
    for node in found:
        if node.view.name == name or str(node.view.node_id) == name:
            return node
    raise NothingOfThatName(
        f"there is no node {name!r}",
        remedy="there are " + ", ".join(node.view.name for node in found),
    )


def drain(
    node: NodeName,
    wait: Annotated[bool, typer.Option("--wait", help="Until it holds nothing more.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="As `cenote undrain`.")] = False,
    bandwidth: Bandwidth = "0",
    yes: Yes = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Move all that a node holds to others, so that it can be stopped.

    It is given nothing new, and is read until all is elsewhere. What the others have no room for,
    and is colder than all that they hold, is evicted. It stays drained, also over restarts of
    daemon and master, until `cenote undrain`. Ctrl-C ends the waiting alone.
    """
    from cenote.runtime.units import format_size, parse_size_bytes

    from .connect import open_admin
    from .output import counted, note, print_json

    if cancel:
        return undrain(node, master, grpc, json, deadline)
    with open_admin(master, grpc, deadline) as admin:
        found = _node_of(admin, node)
        if not agreed(_drain_question(admin, found), yes=yes, harmless=True):
            return nothing_done()
        left = admin.drain(found.view.node_id, bandwidth=parse_size_bytes(bandwidth))
        task = _wait_drained(admin, found.view.node_id) if wait else _task_of(admin, found)
    if json:
        print_json(_task(task) if task is not None else {"remaining_bytes": left})
    elif wait and task is not None:
        evicted = f", {task.evicted_objects} evicted" if task.evicted_objects else ""
        note(
            f"{found.view.name} is drained: {counted(task.moved_objects, 'object')}"
            f" ({format_size(task.moved_bytes)}) moved{evicted}; it can be stopped"
        )
    else:
        note(f"{found.view.name} is being drained of {format_size(left)}: see `cenote tasks`")
    return EXIT_OK


def _drain_question(admin: Admin, node: admin_pb2.NodeStatus) -> str:
    from cenote.runtime.units import format_size

    others = [other for other in admin.nodes() if other.view.node_id != node.view.node_id]
    free = sum(o.capacity_bytes - o.used_bytes for o in others if not o.drained)
    question = f"Drain {node.view.name}, which holds {format_size(node.used_bytes)}?"
    if free < node.used_bytes:
        return f"The other nodes have {format_size(free)} free: what is coldest goes. {question}"
    return question


def _task_of(admin: Admin, node: admin_pb2.NodeStatus) -> admin_pb2.TaskStatus | None:
    tasks = (t for t in admin.tasks() if t.kind == "drain" and t.node_id == node.view.node_id)
    return next(tasks, None)


def _wait_drained(admin: Admin, node_id: int) -> admin_pb2.TaskStatus:
    """Show how far it is until it is done. Raises InvalidArgument where somebody cancels it."""
    from .output import Bar

    task = _named(admin, node_id)
    total = task.remaining_bytes
    with Bar("drain", total=max(1, total), unit="bytes") as bar:
        while task.state != "done":
            bar.update(max(0, total - task.remaining_bytes))
            time.sleep(_LOOK_S)
            task = _named(admin, node_id)
    return task


def _named(admin: Admin, node_id: int) -> admin_pb2.TaskStatus:
    """Raises InvalidArgument where it is not there any more."""
    from cenote.api.errors import InvalidArgument

    for task in admin.tasks():
        if task.kind == "drain" and task.node_id == node_id:
            return task
    raise InvalidArgument("somebody took the node up again")


def undrain(
    node: NodeName,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Take a node up again that was, or is being, drained; what has moved stays where it is."""
    from .connect import open_admin
    from .output import note, print_json

    with open_admin(master, grpc, deadline) as admin:
        found = _node_of(admin, node)
        left = admin.drain(found.view.node_id, cancel=True)
    if json:
        print_json({"node": found.view.name, "remaining_bytes": left})
    else:
        note(f"{found.view.name} is used again")
    return EXIT_OK


def rebalance(
    bandwidth: Bandwidth = "0",
    cancel: Annotated[bool, typer.Option("--cancel", help="End it where it is.")] = False,
    yes: Yes = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Even out how full the nodes' memory is, as after a node was added. It ends by itself.

    Given again, it changes the bandwidth. It does not outlive the master that leads.
    """
    from cenote.runtime.units import parse_size_bytes

    from .connect import open_admin
    from .output import note, print_json

    with open_admin(master, grpc, deadline) as admin:
        if not cancel and not agreed("Move objects between nodes?", yes=yes, harmless=True):
            return nothing_done()
        admin.rebalance(cancel=cancel, bandwidth=parse_size_bytes(bandwidth))
    if json:
        print_json({"rebalancing": not cancel})
    else:
        note("ended" if cancel else "begun: see `cenote tasks`")
    return EXIT_OK


def tasks(
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    wide: Wide = False,
    watch: Watch = None,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """Nodes that are drained, replicas that are made anew, objects on the move: how far it is."""
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        return watched(watch, lambda: _show_tasks(admin, json=json, wide=wide))


def _show_tasks(admin: Admin, *, json: bool, wide: bool) -> int:
    from cenote.runtime.units import format_duration, format_size

    from .output import print_json, print_table

    found = admin.tasks()
    if json:
        print_json([_task(task) for task in found])
        return EXIT_OK
    print_table(
        ["task", "node", "state", "moved", "left", "evicted", "for", "bandwidth", "note"],
        (
            (
                task.kind,
                task.node_name or None,
                task.state,
                f"{task.moved_objects} ({format_size(task.moved_bytes)})",
                format_size(task.remaining_bytes),
                task.evicted_objects,
                format_duration(task.running_s),
                format_size(task.bandwidth) + "/s" if task.bandwidth else None,
                task.note or None,
            )
            for task in found
        ),
        empty="nothing is on the move",
        spare=["bandwidth", "for", "evicted"],
        wide=wide,
    )
    return EXIT_OK


def _task(task: admin_pb2.TaskStatus) -> dict[str, Any]:
    return {field.name: getattr(task, field.name) for field in task.DESCRIPTOR.fields}
