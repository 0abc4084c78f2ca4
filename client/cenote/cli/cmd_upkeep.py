"""`cenote snapshot`: of the metadata, now. `cenote debug dump`: all that a bug report needs."""

from __future__ import annotations

import json as json_module
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .exits import EXIT_ERROR, EXIT_OK
from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from .connect import Admin

__all__ = ["debug_app", "snapshot"]

_LOOK_S: Final = 0.2
debug_app = typer.Typer(no_args_is_help=True, help="What a bug report needs.")


def snapshot(
    wait: Annotated[bool, typer.Option("--wait", help="Until it is made.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, max=86_400, metavar="SECONDS", help="Of --wait.")
    ] = 300.0,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Have a snapshot of the metadata made now: a restart replays less, the journal shrinks.

    Snapshots are made by themselves, too, when the journal outgrows the last one. With file: copy
    the directory afterwards to have a backup.
    """
    from cenote.api.errors import DeadlineExceeded
    from cenote.runtime.units import format_size

    from .connect import open_admin
    from .output import note, print_json

    with open_admin(master, grpc, deadline) as admin:
        reply = admin.snapshot()
        wanted = reply.wanted_entry
        until_s = time.monotonic() + timeout
        while wait and reply.covered_entry < wanted:
            if time.monotonic() > until_s:
                raise DeadlineExceeded(
                    f"the snapshot is not made after {timeout:g} s: the newest one covers entry"
                    f" {reply.covered_entry} of {wanted}",
                    remedy="see the master's log for 'compaction failed'",
                )
            time.sleep(_LOOK_S)
            reply = admin.snapshot(only_look=True)
    if json:
        print_json(
            {
                "wanted_entry": wanted,
                "covered_entry": reply.covered_entry,
                "journal_bytes": reply.journal_bytes,
            }
        )
    elif reply.covered_entry >= wanted:
        note(
            f"the snapshot covers the journal up to entry {reply.covered_entry};"
            f" {format_size(reply.journal_bytes)} are kept"
        )
    else:
        note(f"asked for: up to entry {wanted} (--wait waits for it)")
    return EXIT_OK


# ---- debug dump ------------------------------------------------------------------------------


@debug_app.command("dump")
def debug_dump(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE.tar.gz]", help="Default: cenote-debug-TIME.tar.gz here."),
    ] = None,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Collect what all masters and nodes know of themselves into one file, for a bug report.

    Settings, states, counters, where each thread is. No secrets, no keys, no bytes of objects. What
    does not answer is named in the file, and is no error unless nothing does.
    """
    from cenote.api.errors import InvalidArgument, Unavailable

    from .connect import open_admin
    from .output import note, print_json

    path = target or Path(time.strftime("cenote-debug-%Y%m%d-%H%M%S.tar.gz"))
    with open_admin(master, grpc, deadline) as admin:
        documents, silent = _collect(admin, deadline)
    if not documents:
        raise Unavailable(f"nothing answers: {silent[0]}", remedy="see cenote doctor")
    documents["errors.json"] = silent
    try:
        size_bytes = _write(path, documents)
    except OSError as error:
        raise InvalidArgument(f"can't write {path}: {error.strerror}") from error
    if json:
        print_json({"file": str(path), "documents": sorted(documents), "errors": silent})
    else:
        note(f"{path}: {len(documents)} documents, {size_bytes:,} bytes")
        for what in silent:
            note(f"cenote: not in it: {what}")
    return EXIT_ERROR if len(documents) == 1 else EXIT_OK


def _collect(admin: Admin, deadline_s: float) -> tuple[dict[str, Any], list[str]]:
    """(documents by file name; what could not be had, and why)."""
    from cenote.api.errors import CenoteError

    from .connect import store_status

    ticket = b""
    documents: dict[str, Any] = {}
    silent: list[str] = []

    def take(name: str, read: Callable[..., Any], *arguments: Any) -> Any:
        try:
            documents[name] = found = read(*arguments)
        except CenoteError as error:
            silent.append(f"{name}: {error}")
            return None
        return found

    take("status.json", lambda: _message(admin.status()))
    take("segments.json", lambda: [_message(s) for s in admin.segments()])
    take("namespaces.json", lambda: [_message(n) for n in admin.namespaces()])
    take("tasks.json", lambda: [_message(t) for t in admin.tasks()])
    take("sessions.json", lambda: _message(admin.sessions(0)))
    take("miss_ratios.json", lambda: _message(admin.miss_ratios()))
    take("config.json", lambda: [_message(v) for v in admin.config()])
    nodes = take("nodes.json", lambda: [_message(n) for n in admin.nodes()]) or []
    for address in admin.all_addresses():
        name = f"masters/{address.replace(':', '_').strip('[]')}.json"
        take(name, lambda of: json_module.loads(admin.debug_of(of)), address)
    with suppress(CenoteError):  # then each node says so
        ticket = admin.ticket()
    ask = partial(store_status, deadline_s=deadline_s, ticket=ticket)
    for node in nodes:
        name, address = node["view"]["name"], _grpc_of(node)
        if address:
            take(f"nodes/{name}.json", lambda of: _message(ask(of)), address)
    return documents, silent


def _grpc_of(node: dict[str, Any]) -> str:
    endpoints = node["view"].get("endpoints", [])
    return next((e["address"] for e in endpoints if e["kind"] == "TRANSPORT_KIND_GRPC"), "")


def _message(message: Any) -> Any:
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(message, preserving_proto_field_name=True)


def _write(path: Path, documents: dict[str, Any]) -> int:
    """A gzipped tar; its size. Raises OSError."""
    import io
    import tarfile

    with tarfile.open(path, "w:gz") as archive:
        for name, document in documents.items():
            data = json_module.dumps(document, indent=1).encode()
            entry = tarfile.TarInfo(f"cenote-debug/{name}")
            entry.size, entry.mtime = len(data), int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return path.stat().st_size
