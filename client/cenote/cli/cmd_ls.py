"""`cenote ls`: the keys of a namespace.

The master knows digests only; full keys stand in the slots. So every store daemon is asked for its
slots, and the master which of them still count: a slot outlives its object until it is overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .exits import EXIT_ERROR, EXIT_OK
from .options import (
    MASTER_DEFAULT,
    AsJson,
    DeadlineS,
    GrpcAddress,
    MasterAddress,
    NamespaceName,
    Wide,
)

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .connect import Admin

__all__ = ["Listed", "list_keys", "ls"]

_ASK_KEYS_MAX: Final = 4096
_SLOTS_MAX: Final = 1_000_000  # the most that a daemon lists


@dataclass(slots=True)
class Listed:
    """One object."""

    key: bytes
    size_bytes: int
    version: tuple[int, int]
    nodes: set[str] = field(default_factory=set)
    pinned_s: float = 0.0
    """For how much longer; infinite until it is unpinned."""


def ls(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so; hex:... for bytes.")] = "",
    namespace: NamespaceName = "default",
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most so many keys.")] = 100,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    wide: Wide = False,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """The keys of a namespace, with sizes and nodes."""
    from cenote.runtime.units import format_size

    from .connect import open_admin
    from .output import key_text, note, parse_key, print_json, print_table

    start = parse_key(prefix) if prefix else b""
    with open_admin(master, grpc, deadline) as admin:
        found, silent = list_keys(admin, namespace, start, limit, deadline)
    shown = sorted(found.values(), key=lambda listed: listed.key)
    more = len(shown) > limit
    shown = shown[:limit]
    if json:
        print_json(
            [
                {
                    "key": key_text(listed.key),
                    "size_bytes": listed.size_bytes,
                    "version": {"epoch": listed.version[0], "seq": listed.version[1]},
                    "nodes": sorted(listed.nodes),
                }
                for listed in shown
            ]
        )
    else:
        print_table(
            ["key", "size", "version", "nodes"],
            (
                (
                    key_text(listed.key),
                    format_size(listed.size_bytes),
                    f"{listed.version[0]}.{listed.version[1]}",
                    ", ".join(sorted(listed.nodes)),
                )
                for listed in shown
            ),
            empty=f"no keys in namespace {namespace}" + (f" begin with {prefix}" if prefix else ""),
            spare=["version"],
            wide=wide,
        )
    if more:
        note(f"there are more than {limit} keys (--limit shows more)")
    for what in silent:
        note(f"cenote: not all is listed: {what}")
    return EXIT_ERROR if silent else EXIT_OK


def list_keys(
    admin: Admin,
    name: str,
    prefix: bytes,
    limit: int,
    deadline_s: float,
    *,
    pinned: bool = False,
) -> tuple[dict[bytes, Listed], list[str]]:
    """(live objects by digest, more than `limit` where there are more; who did not answer).

    `pinned`: only those that are.
    """
    from cenote.api.errors import CenoteError
    from cenote.v1 import common_pb2, store_pb2

    from .connect import list_slots

    namespace = admin.namespace(name)
    request = store_pb2.ListSlotsRequest(
        namespace_id=namespace.namespace_id,
        generation=namespace.generation,
        key_prefix=prefix,
        limit=_SLOTS_MAX,
    )
    found: dict[bytes, Listed] = {}
    silent: list[str] = []
    for node in admin.nodes():
        view = node.view
        if view.state in (common_pb2.NODE_STATE_DETACHED, common_pb2.NODE_STATE_DEAD):
            continue
        address = next(
            (e.address for e in view.endpoints if e.kind == common_pb2.TRANSPORT_KIND_GRPC), ""
        )
        if not address:
            silent.append(f"{view.name} serves no gRPC")
            continue
        try:
            slots = list_slots(address, request, deadline_s=deadline_s, ticket=admin.ticket())
            for batch in _batches(slots):
                _add_live(admin, namespace, batch, view.name, found, pinned=pinned)
                if len(found) > limit:
                    break  # which ends the stream, too
        except CenoteError as error:
            silent.append(f"{view.name}: {error}")
    return found, silent


def _batches(slots: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for slot in slots:
        batch.append(slot)
        if len(batch) == _ASK_KEYS_MAX:
            yield batch
            batch = []
    if batch:
        yield batch


def _add_live(
    admin: Admin,
    namespace: admin_pb2.NamespaceStatus,
    slots: list[Any],
    node: str,
    found: dict[bytes, Listed],
    *,
    pinned: bool,
) -> None:
    """Add the slots whose version is the one that the master knows."""
    import numpy as np

    from cenote.api.rows import OBJECT, ObjectStatus

    reply = admin.stat(namespace, digests=b"".join(slot.digest for slot in slots))
    rows, pins = np.frombuffer(reply.objects, OBJECT), np.frombuffer(reply.pinned_s, "<f8")
    for slot, row, pinned_s in zip(slots, rows, pins.tolist(), strict=True):
        if pinned and not pinned_s:
            continue
        version = (slot.version.epoch, slot.version.seq)
        if row["status"] == ObjectStatus.MISS or version != (int(row["epoch"]), int(row["seq"])):
            continue
        listed = found.setdefault(slot.digest, Listed(slot.key, int(row["size"]), version))
        listed.key = listed.key or slot.key
        listed.pinned_s = pinned_s
        listed.nodes.add(node)
