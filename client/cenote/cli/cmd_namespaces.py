"""`cenote namespaces`: list, create, reset, set-quota."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .asking import Yes, agreed, nothing_done
from .cmd_completion import complete_namespace
from .exits import EXIT_OK
from .options import (
    MASTER_DEFAULT,
    AsJson,
    DeadlineS,
    FingerprintText,
    GrpcAddress,
    MasterAddress,
    Wide,
    fingerprint_bytes,
)
from .watching import Watch, watched

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .connect import Admin

__all__ = ["namespaces_app"]

namespaces_app = typer.Typer(invoke_without_command=True)


@namespaces_app.callback()
def list_namespaces(
    context: typer.Context,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    wide: Wide = False,
    watch: Watch = None,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """The key spaces: list them; `create`, `reset` or `delete` one, or `set-quota` of one."""
    from .connect import open_admin

    context.obj = {"master": master, "grpc": grpc, "json": json, "deadline": deadline}
    if context.invoked_subcommand is not None:
        return None
    with open_admin(master, grpc, deadline) as admin:
        return watched(watch, lambda: _show(admin, json=json, wide=wide))


def _show(admin: Admin, *, json: bool, wide: bool) -> None:
    from .output import print_json, print_table

    found = [_namespace(namespace) for namespace in admin.namespaces()]
    if json:
        print_json(found)
        return
    from cenote.runtime.units import format_size

    def _size(size_bytes: int) -> str | None:
        return format_size(size_bytes) if size_bytes else None

    print_table(
        [
            *("namespace", "id", "generation", "objects", "used", "quota", "on SSD", "SSD quota"),
            *("most objects", "priority", "pinned", "durability", "fingerprint"),
        ],
        (
            (
                namespace["name"],
                namespace["namespace_id"],
                namespace["generation"],
                namespace["objects"],
                format_size(namespace["used_bytes"] - namespace["ssd_used_bytes"]),
                _size(namespace["dram_quota_bytes"]),
                _size(namespace["ssd_used_bytes"]),
                _size(namespace["ssd_quota_bytes"]),
                namespace["objects_quota"] or None,
                None if namespace["priority"] == "normal" else namespace["priority"],
                _size(namespace["pinned_bytes"]),
                namespace["durability"],
                namespace["fingerprint"] or None,
            )
            for namespace in found
        ),
        empty="no namespace yet; a client's first call makes one",
        spare=[
            *("id", "generation", "fingerprint", "durability", "most objects", "pinned"),
            *("SSD quota", "on SSD"),
        ],
        wide=wide,
    )


def _namespace(namespace: admin_pb2.NamespaceStatus) -> dict[str, Any]:
    from cenote.v1 import common_pb2

    from .output import enum_name, key_text

    return {
        "name": namespace.name,
        "namespace_id": namespace.namespace_id,
        "generation": namespace.generation,
        "fingerprint": key_text(namespace.fingerprint),
        "durability": enum_name(common_pb2.Durability, namespace.durability, "DURABILITY_"),
        "objects": namespace.objects,
        "used_bytes": namespace.used_bytes,
        "ssd_used_bytes": namespace.ssd_used_bytes,
        "dram_quota_bytes": namespace.dram_quota_bytes,
        "ssd_quota_bytes": namespace.ssd_quota_bytes,
        "objects_quota": namespace.objects_quota,
        "priority": enum_name(common_pb2.Priority, namespace.priority, "PRIORITY_"),
        "pinned_objects": namespace.pinned_objects,
        "pinned_bytes": namespace.pinned_bytes,
    }


# The same options behind a subcommand: without defaults of their own, so that what stands in front
# of it holds, too.
_Master = Annotated[str | None, typer.Option("--master", metavar="HOST:PORT", help="As above.")]
_Grpc = Annotated[str | None, typer.Option("--grpc", metavar="HOST:PORT", help="As above.")]
_Json = Annotated[bool, typer.Option("--json", help="One JSON document, for scripts.")]


def _open(context: typer.Context, master: str | None, grpc: str | None) -> Admin:
    from .connect import open_admin

    given = context.obj
    return open_admin(master or given["master"], grpc or given["grpc"], given["deadline"])


@namespaces_app.command("create")
def create_namespace(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the new namespace.")],
    fingerprint: FingerprintText = None,
    journaled: Annotated[
        bool, typer.Option("--journaled", help="Acknowledge puts only once they are journaled.")
    ] = False,
    master: _Master = None,
    grpc: _Grpc = None,
    json: _Json = False,
) -> None:
    """Make a namespace; no error where it is there with the same fingerprint."""
    from cenote.v1 import common_pb2

    from .output import note, print_json

    durability = common_pb2.DURABILITY_JOURNALED if journaled else common_pb2.DURABILITY_UNSPECIFIED
    with _open(context, master, grpc) as admin:
        made = admin.create_namespace(name, fingerprint_bytes(fingerprint) or b"", durability)
    if json or context.obj["json"]:
        print_json(_namespace(made))
    else:
        note(f"namespace {made.name} has the id {made.namespace_id}")


class PriorityName(StrEnum):
    """As on the command line."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


@namespaces_app.command("set-quota")
def set_quota(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="Of the namespace.", autocompletion=complete_namespace)
    ],
    dram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="In memory: 64GiB; none takes it away.")
    ] = None,
    ssd: Annotated[str | None, typer.Option(metavar="SIZE", help="On SSDs; or none.")] = None,
    objects: Annotated[str | None, typer.Option(metavar="N", help="Objects; or none.")] = None,
    priority: Annotated[
        PriorityName | None, typer.Option(help="Whose objects go first where room is needed.")
    ] = None,
    master: _Master = None,
    grpc: _Grpc = None,
    json: _Json = False,
) -> int:
    """What a namespace has for sure. Beyond it, it gives its own objects before anybody else's.

    What is not named stays as it is.
    """
    from cenote.api.errors import InvalidArgument
    from cenote.runtime.units import format_size, parse_size_bytes

    from .output import note, print_json

    def parsed(text: str | None) -> int | None:
        return None if text is None else 0 if text == "none" else parse_size_bytes(text)

    if objects not in (None, "none") and not str(objects).isdecimal():
        raise InvalidArgument(f"--objects is a number or none, not {objects!r}")
    if dram is ssd is objects is priority is None:
        raise InvalidArgument("no quota is named", remedy="see cenote namespaces set-quota --help")
    level = 0 if priority is None else 1 + list(PriorityName).index(priority)
    count = None if objects is None else 0 if objects == "none" else int(objects)
    with _open(context, master, grpc) as admin:
        found = admin.set_quota(
            name, dram_bytes=parsed(dram), ssd_bytes=parsed(ssd), objects=count, priority=level
        )
        status = admin.status()
    shown = _namespace(found)
    if json or context.obj["json"]:
        print_json(shown)
    else:
        limits = [
            (f"{format_size(found.dram_quota_bytes)} in memory", found.dram_quota_bytes),
            (f"{format_size(found.ssd_quota_bytes)} on SSDs", found.ssd_quota_bytes),
            (f"{found.objects_quota} objects", found.objects_quota),
        ]
        has = ", ".join(text for text, some in limits if some) or "nothing for sure"
        note(f"namespace {name} has {has}; priority {shown['priority']}")
    for what, promised, capacity in (
        ("memory", status.dram_quota_bytes, status.capacity_bytes),
        ("SSD space", status.ssd_quota_bytes, status.ssd_capacity_bytes),
    ):
        if promised > capacity:
            note(
                f"cenote: quotas promise {format_size(promised)} of {what} now, and there are"
                f" {format_size(capacity)}: namespaces within their quotas may evict each other"
            )
    return EXIT_OK


@namespaces_app.command("reset")
def reset_namespace(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help="Whose objects are all to go.", autocompletion=complete_namespace),
    ],
    yes: Yes = False,
    master: _Master = None,
    grpc: _Grpc = None,
    json: _Json = False,
) -> int:
    """Forget all objects of one namespace, and of no other."""
    from .output import counted, note, print_json

    with _open(context, master, grpc) as admin:
        namespace = admin.namespace(name)
        what = counted(namespace.objects, "object")
        if not agreed(f"Forget {what} of {name}?", yes=yes):
            return nothing_done(f"{name} still has {what}")
        generation = admin.reset_namespace(name)
    if json or context.obj["json"]:
        print_json({"name": name, "generation": generation})
    else:
        note(f"namespace {name} is empty: generation {generation}")
    return EXIT_OK


@namespaces_app.command("delete")
def delete_namespace(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What is to go.", autocompletion=complete_namespace)],
    yes: Yes = False,
    master: _Master = None,
    grpc: _Grpc = None,
    json: _Json = False,
) -> int:
    """Forget a namespace, with all its objects and its quota.

    Clients that still use it get NamespaceReset; one that opens it by its name makes it anew.
    """
    from .output import counted, note, print_json

    with _open(context, master, grpc) as admin:
        namespace = admin.namespace(name)
        what = counted(namespace.objects, "object")
        if not agreed(f"Delete namespace {name}, with {what}?", yes=yes):
            return nothing_done(f"{name} still has {what}")
        objects = admin.delete_namespace(name)
    if json or context.obj["json"]:
        print_json({"name": name, "objects": objects})
    else:
        note(f"namespace {name} is gone, with {counted(objects, 'object')}")
    return EXIT_OK
