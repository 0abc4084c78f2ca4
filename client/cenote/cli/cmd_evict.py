"""`cenote evict`: make room by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from .asking import Yes, agreed, nothing_done
from .exits import EXIT_NOT_FOUND, EXIT_OK
from .options import (
    MASTER_DEFAULT,
    AsJson,
    DeadlineS,
    GrpcAddress,
    MasterAddress,
    NamespaceName,
)

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .connect import Admin

__all__ = ["evict"]

_STEP_OBJECTS: Final = 8192
_KEYS_MAX: Final = 65_536


def evict(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY...]", help="Text, or hex:0a1b...")
    ] = None,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="Coldest first, until so much is free.")
    ] = "",
    idle: Annotated[
        str, typer.Option("--idle", metavar="DURATION", help="What was not used for so long: 1h.")
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="All objects that nobody reads or has pinned.")
    ] = False,
    namespace: NamespaceName = "default",
    yes: Yes = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Let objects of a namespace go, from memory and SSD: some keys, or the coldest.

    What is pinned or being read stays. Unlike `rm` it promises nothing: whoever computes an evicted
    block anew may put it again at once. --size and --idle together: the colder of both.
    """
    from cenote.api.errors import InvalidArgument
    from cenote.runtime.units import format_size, parse_duration_s, parse_size_bytes

    from .connect import open_admin
    from .output import counted, note, parse_key, print_json

    if sum((bool(keys), bool(size or idle), everything)) != 1:
        raise InvalidArgument("name keys, or --size and/or --idle, or --all")
    encoded = [parse_key(key) for key in keys or ()]
    size_bytes = parse_size_bytes(size) if size else 0
    idle_s = parse_duration_s(idle) if idle else 0.0
    with open_admin(master, grpc, deadline) as admin:
        known = admin.namespace(namespace)
        what = counted(len(encoded), "object") if encoded else _named(size, idle, known.objects)
        if not agreed(f"Evict {what} of namespace {namespace}?", yes=yes):
            return nothing_done()
        done = _evict(admin, namespace, encoded, size_bytes, idle_s, known.objects)
    if json:
        print_json({f.name: getattr(done, f.name) for f in done.DESCRIPTOR.fields})
    else:
        stay = [
            (f"{done.pinned} pinned", done.pinned),
            (f"{done.leased} being read", done.leased),
            (f"{done.absent} not there", done.absent),
        ]
        rest = ", ".join(text for text, some in stay if some)
        note(
            f"evicted {counted(done.objects, 'object')}, {format_size(done.size_bytes)}"
            + (f"; {rest}" if rest else "")
        )
    return EXIT_NOT_FOUND if encoded and done.absent == len(encoded) else EXIT_OK


def _named(size: str, idle: str, objects: int) -> str:
    from .output import counted

    if not size and not idle:
        return f"all {counted(objects, 'object')}"
    parts = ["the coldest objects"]
    parts += [f"until {size} are free"] if size else []
    parts += [f"not used for {idle}"] if idle else []
    return ", ".join(parts)


def _evict(
    admin: Admin,
    namespace: str,
    keys: list[bytes],
    size_bytes: int,
    idle_s: float,
    objects: int,
) -> admin_pb2.EvictObjectsResponse:
    """In steps that the master does not feel, with a bar."""
    from cenote.v1 import admin_pb2

    from .output import Bar

    total = admin_pb2.EvictObjectsResponse()

    def add(part: admin_pb2.EvictObjectsResponse) -> None:
        for field in part.DESCRIPTOR.fields:
            setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))

    if keys:
        for start in range(0, len(keys), _KEYS_MAX):
            add(admin.evict(namespace, keys=keys[start : start + _KEYS_MAX]))
        return total
    with Bar(
        "evict", total=size_bytes or max(1, objects), unit="bytes" if size_bytes else ""
    ) as bar:
        while not size_bytes or total.size_bytes < size_bytes:
            left = size_bytes - total.size_bytes if size_bytes else 0
            part = admin.evict(namespace, size_bytes=left, idle_s=idle_s, objects_max=_STEP_OBJECTS)
            add(part)
            bar.update(total.size_bytes if size_bytes else total.objects)
            if not part.objects or total.objects >= objects + _STEP_OBJECTS:
                break  # nothing is left, or others put as fast as this evicts
    return total
