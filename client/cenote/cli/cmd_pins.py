"""`cenote pin`, `unpin`, `pins`, `prefetch`: what is kept from eviction, or fetched to memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .exits import EXIT_ERROR, EXIT_NOT_FOUND, EXIT_OK
from .options import (
    MASTER_DEFAULT,
    AsJson,
    DeadlineS,
    GrpcAddress,
    MasterAddress,
    NamespaceName,
)
from .watching import Watch, watched

if TYPE_CHECKING:
    from cenote.client import Client

    from .cmd_ls import Listed
    from .connect import Admin

__all__ = ["pin", "pins", "prefetch", "unpin"]

Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="Text, or hex:0a1b...")]


def pin(
    keys: Keys,
    namespace: NamespaceName = "default",
    ttl: Annotated[
        str,
        typer.Option(metavar="DURATION", help="Only for so long: 10m. Pin again to renew."),
    ] = "",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Keep objects from eviction, until `unpin` or for a time."""
    from cenote.runtime.units import parse_duration_s

    ttl_s = parse_duration_s(ttl) if ttl else None

    def pin_all(client: Client, encoded: list[bytes]) -> list[bool]:
        done: list[bool] = client.pin(encoded, ttl_s=ttl_s).tolist()
        return done

    asked = _Asked(keys, namespace, master, grpc, deadline)
    return _report("pinned", asked, asked.of_client(pin_all), json=json)


def unpin(
    keys: Keys,
    namespace: NamespaceName = "default",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Let objects be evicted again."""
    asked = _Asked(keys, namespace, master, grpc, deadline)
    done = asked.of_client(lambda client, encoded: client.unpin(encoded).tolist())
    return _report("unpinned", asked, done, json=json)


def prefetch(
    keys: Keys,
    namespace: NamespaceName = "default",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Have objects that are on SSDs alone copied to memory, in the order of the keys.

    In the background: `cenote stat` shows where one is, `cenote status` how much was promoted.
    """
    asked = _Asked(keys, namespace, master, grpc, deadline)
    there = asked.of_client(lambda client, encoded: client.prefetch(encoded).present.tolist())
    return _report("asked for", asked, there, json=json)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Keys as they were typed, and where they are to be."""

    keys: list[str]
    namespace: str
    master: str
    grpc: str | None
    deadline_s: float

    def of_client(self, call: Callable[[Client, list[bytes]], list[bool]]) -> list[bool]:
        """What `call` says of each key."""
        from .connect import open_admin, open_client
        from .output import parse_key

        encoded = [parse_key(key) for key in self.keys]
        with (
            open_admin(self.master, self.grpc, self.deadline_s) as admin,
            open_client(self.master, admin, self.namespace, deadline_s=self.deadline_s) as client,
        ):
            return call(client, encoded)


def _report(what: str, asked: _Asked, done: list[bool], *, json: bool) -> int:
    from .output import note, print_json

    keys, namespace = asked.keys, asked.namespace
    missing = [key for key, there in zip(keys, done, strict=True) if not there]
    if json:
        print_json({what.replace(" ", "_"): sum(done), "missing": missing})
    else:
        note(f"{what} {sum(done)} of {len(keys)}")
    if not missing:
        return EXIT_OK
    note(f"cenote: there is no {missing[0]} in namespace {namespace} (cenote ls -n {namespace})")
    return EXIT_NOT_FOUND


def pins(
    namespace: Annotated[
        str | None,
        typer.Option("--namespace", "-n", metavar="NAME", help="The pinned keys of this one."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most so many keys.")] = 100,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    watch: Watch = None,
    deadline: DeadlineS = 30.0,
) -> int | None:
    """How much is pinned in each namespace, or with -n which keys are, and for how much longer."""
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        if namespace is None:
            return watched(watch, lambda: _totals(admin, json=json))
        return watched(watch, lambda: _show_keys(admin, namespace, limit, deadline, json=json))


def _show_keys(admin: Admin, namespace: str, limit: int, deadline: float, *, json: bool) -> int:
    from .cmd_ls import list_keys

    found, silent = list_keys(admin, namespace, b"", limit, deadline, pinned=True)
    shown = sorted(found.values(), key=lambda listed: listed.key)
    _print_keys(shown[:limit], namespace, json=json)
    from .output import note

    if len(shown) > limit:
        note(f"more than {limit} keys are pinned (--limit shows more)")
    for what in silent:
        note(f"cenote: not all is listed: {what}")
    return EXIT_ERROR if silent else EXIT_OK


def _print_keys(shown: list[Listed], namespace: str, *, json: bool) -> None:
    from cenote.runtime.units import format_duration, format_size

    from .output import key_text, print_json, print_table

    if json:
        print_json([_key(listed) for listed in shown])
        return
    print_table(
        ["key", "size", "pinned for"],
        (
            (
                key_text(listed.key),
                format_size(listed.size_bytes),
                "ever" if math.isinf(listed.pinned_s) else format_duration(listed.pinned_s),
            )
            for listed in shown
        ),
        empty=f"no key of namespace {namespace} is pinned",
    )


def _key(listed: Listed) -> dict[str, Any]:
    from .output import key_text

    left_s = None if math.isinf(listed.pinned_s) else round(listed.pinned_s, 3)
    return {"key": key_text(listed.key), "size_bytes": listed.size_bytes, "left_s": left_s}


def _totals(admin: Admin, *, json: bool) -> int:
    from cenote.runtime.units import format_size

    from .output import note, print_json, print_table

    status = admin.status()
    found = [each for each in admin.namespaces() if each.pinned_objects]
    if json:
        print_json(
            {
                "pinned_objects": status.pinned_objects,
                "pinned_bytes": status.pinned_bytes,
                "pinned_bytes_max": status.pinned_bytes_max,
                "namespaces": [
                    {
                        "name": each.name,
                        "pinned_objects": each.pinned_objects,
                        "pinned_bytes": each.pinned_bytes,
                    }
                    for each in found
                ],
            }
        )
        return EXIT_OK
    print_table(
        ["namespace", "objects", "pinned"],
        ((each.name, each.pinned_objects, format_size(each.pinned_bytes)) for each in found),
        empty="nothing is pinned",
    )
    note(
        f"{format_size(status.pinned_bytes)} of {format_size(status.pinned_bytes_max)} that may be"
    )
    return EXIT_OK
