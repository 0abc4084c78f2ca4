"""`cenote put`, `get`, `rm`, `stat`: single objects."""

from __future__ import annotations

import mmap
import os
import stat as stat_module
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .exits import EXIT_ERROR, EXIT_NOT_FOUND, EXIT_OK
from .options import (
    MASTER_DEFAULT,
    AsJson,
    DeadlineS,
    FingerprintText,
    GrpcAddress,
    MasterAddress,
    NamespaceName,
    fingerprint_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .connect import Admin

__all__ = ["get", "put", "rm", "stat"]

KeyText = Annotated[str, typer.Argument(metavar="KEY", help="Text, or hex:0a1b... for bytes.")]


# ---- put -------------------------------------------------------------------------------------


def put(
    key: KeyText,
    source: Annotated[str, typer.Argument(metavar="FILE|-", help="Its bytes; -: standard input.")],
    namespace: NamespaceName = "default",
    fingerprint: FingerprintText = None,
    replicas: Annotated[int, typer.Option(min=1, max=8, help="Copies, all of them or none.")] = 1,
    ttl: Annotated[str, typer.Option(metavar="DURATION", help="Gone after so long: 10m.")] = "",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Store an object. Putting the same bytes again is no error; putting others is one."""
    from cenote.runtime.units import format_size, parse_duration_s

    from .connect import open_admin, open_client
    from .output import note, parse_key, print_json

    encoded = parse_key(key)
    ttl_s = parse_duration_s(ttl) if ttl else None
    with _bytes_of(source) as data, open_admin(master, grpc, deadline) as admin:
        with open_client(
            master,
            admin,
            namespace,
            deadline_s=deadline,
            create=True,
            fingerprint=fingerprint_bytes(fingerprint),
        ) as client:
            options: dict[str, Any] = {} if ttl_s is None else {"ttl_s": ttl_s}
            result = client.put(encoded, data, replicas=replicas, min_replicas=replicas, **options)
        size_bytes = len(data)
        if result.existed and _differs(admin, namespace, encoded, data):
            note(
                f"cenote: {key} is there with other bytes, and objects never change"
                f" (remove it first: cenote rm {key})"
            )
            return EXIT_ERROR
    if json:
        print_json({"key": key, "stored": result.stored, "size_bytes": size_bytes})
    else:
        what = "stored" if result.stored else "was there already:"
        note(f"{what} {format_size(size_bytes)} under {key}")
    return EXIT_OK


@contextmanager
def _bytes_of(source: str) -> Iterator[memoryview]:
    """What is to be put; a file is mapped, not read."""
    from cenote.api.errors import InvalidArgument

    if source == "-":
        yield memoryview(sys.stdin.buffer.read())
        return
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgument(f"can't read {source}: {error.strerror}") from error
    try:
        found = os.fstat(fd)
        if stat_module.S_ISDIR(found.st_mode):
            raise InvalidArgument(f"{source} is a directory", remedy="put one file under each key")
        if not found.st_size:  # empty, or a pipe, which can't be mapped either
            with os.fdopen(os.dup(fd), "rb") as file:
                yield memoryview(file.read())
            return
        # Not closed: an error's traceback may still hold the view. It goes with the last of them.
        yield memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise InvalidArgument(f"can't read {source}: {error.strerror}") from error
    finally:
        os.close(fd)


def _differs(admin: Admin, namespace: str, key: bytes, data: memoryview) -> bool:
    """Whether the object that is there holds other bytes; False where it has just gone."""
    from xxhash import xxh3_64_intdigest

    found = _look_up(admin, namespace, key)
    if found is None:
        return False
    return bool(
        found["size_bytes"] != len(data) or int(found["checksum"], 16) != xxh3_64_intdigest(data)
    )


# ---- get -------------------------------------------------------------------------------------


def get(
    key: KeyText,
    target: Annotated[
        str, typer.Argument(metavar="[FILE|-]", help="Where to; -: standard output.")
    ] = "",
    namespace: NamespaceName = "default",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    deadline: DeadlineS = 30.0,
) -> int:
    """Fetch an object to a file or standard output."""
    from cenote.api.errors import InvalidArgument
    from cenote.runtime.units import format_size

    from .connect import open_admin, open_client
    from .output import note, parse_key

    encoded = parse_key(key)
    with (
        open_admin(master, grpc, deadline) as admin,
        open_client(master, admin, namespace, deadline_s=deadline) as client,
    ):
        data = client.get(encoded)
    if data is None:
        return _not_found(key, namespace)
    if target not in ("", "-"):
        try:
            Path(target).write_bytes(data)
        except OSError as error:
            raise InvalidArgument(f"can't write {target}: {error.strerror}") from error
        note(f"{format_size(len(data))} in {target}")
        return EXIT_OK
    if not target and sys.stdout.isatty() and not _is_text(data):
        raise InvalidArgument(
            f"{key} is {format_size(len(data))} that are no text",
            remedy="name a file, or write `-` to have them on the terminal anyway",
        )
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return EXIT_OK


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c.isspace() for c in text)


def _not_found(key: str, namespace: str) -> int:
    import shlex

    from .output import note

    # What begins with a dash would be an option.
    words = ["cenote", "explain", "-n", namespace, *(["--"] if key.startswith("-") else []), key]
    note(f"cenote: there is no {key} in namespace {namespace} (why: {shlex.join(words)})")
    return EXIT_NOT_FOUND


# ---- rm --------------------------------------------------------------------------------------


def rm(
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Text, or hex:0a1b...")],
    namespace: NamespaceName = "default",
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Missing keys are no error.")
    ] = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Remove objects for good: acknowledged once it is journaled."""
    from .connect import open_admin, open_client
    from .output import note, parse_key, print_json

    encoded = [parse_key(key) for key in keys]
    with (
        open_admin(master, grpc, deadline) as admin,
        open_client(master, admin, namespace, deadline_s=deadline) as client,
    ):
        removed = client.remove_batch(encoded).tolist()
    missing = [key for key, there in zip(keys, removed, strict=True) if not there]
    if json:
        print_json({"removed": sum(removed), "missing": missing})
    else:
        note(f"removed {sum(removed)} of {len(keys)}")
    if missing and not force:
        return _not_found(missing[0], namespace)
    return EXIT_OK


# ---- stat ------------------------------------------------------------------------------------


def stat(
    key: KeyText,
    namespace: NamespaceName = "default",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Where an object is, its size, its last use, who holds it. Does not count as a use."""
    from cenote.runtime.units import format_duration, format_size

    from .connect import open_admin
    from .output import parse_key, print_json, print_pairs, print_table

    with open_admin(master, grpc, deadline) as admin:
        found = _look_up(admin, namespace, parse_key(key))
        if found is None:
            return _not_found(key, namespace)
        if json:
            print_json({"key": key, "namespace": namespace} | found)
            return EXIT_OK
    print_pairs(
        [
            ("key", key),
            ("namespace", namespace),
            ("size", f"{format_size(found['size_bytes'])} ({found['size_bytes']} bytes)"),
            ("version", f"epoch {found['version']['epoch']}, seq {found['version']['seq']}"),
            ("xxh3-64", found["checksum"]),
            ("last used", format_duration(found["idle_s"]) + " ago"),
            ("leases", found["lease_count"]),
            ("replicas", found["replicas"]),
        ]
    )
    print_table(
        ["replica", "tier", "node", "segment", "offset", "length"],
        (
            [
                *(e[name] for name in ("replica", "tier", "node", "segment_id", "offset_bytes")),
                format_size(e["length_bytes"]),
            ]
            for e in found["extents"]
        ),
    )
    return EXIT_OK


def _look_up(admin: Admin, namespace: str, key: bytes) -> dict[str, Any] | None:
    """What the master knows of one object, None where there is none."""
    import numpy as np

    from cenote.api.rows import EXTENT, OBJECT, ObjectStatus
    from cenote.v1 import common_pb2

    from .output import enum_name

    reply = admin.stat(admin.namespace(namespace), keys=[key])
    row = np.frombuffer(reply.objects, OBJECT)[0]
    if row["status"] == ObjectStatus.MISS:
        return None
    names, tiers = {}, {}
    for segment in admin.segments():
        number = segment.view.segment_id
        names[number] = segment.node_name
        tiers[number] = enum_name(common_pb2.Tier, segment.view.tier, "TIER_")
    return {
        "size_bytes": int(row["size"]),
        "version": {"epoch": int(row["epoch"]), "seq": int(row["seq"])},
        "checksum": f"{int(row['checksum']):016x}",
        "replicas": int(row["replicas"]),
        "idle_s": float(np.frombuffer(reply.idle_s, "<f8")[0]),
        "lease_count": int(np.frombuffer(reply.lease_counts, "<u4")[0]),
        "extents": [
            {
                "replica": int(extent["slot"]),
                "tier": tiers.get(int(extent["segment"]), "?"),
                "node": names.get(int(extent["segment"]), "?"),
                "segment_id": int(extent["segment"]),
                "offset_bytes": int(extent["offset"]),
                "length_bytes": int(extent["length"]),
            }
            for extent in np.frombuffer(reply.extents, EXTENT)
        ],
    }
