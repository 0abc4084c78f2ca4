"""`cenote config get|set|unset`: a master's settings, and those that change while it runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .asking import Yes, agreed, nothing_done
from .exits import EXIT_OK, NothingOfThatName
from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress, Wide

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

__all__ = ["config_app"]

config_app = typer.Typer(no_args_is_help=True, help="Settings of the master.")


def _value(value: admin_pb2.ConfigValue) -> dict[str, Any]:
    return {
        "name": value.name,
        "value": value.value,
        "dynamic": value.dynamic,
        "changed": value.changed,
        "started_with": value.started_with if value.changed else value.value,
        "help": value.help,
    }


def _must_exist(names: Iterable[str], settings: Collection[str]) -> None:
    """Raises NothingOfThatName."""
    import difflib

    for name in names:
        if name not in settings:
            near = difflib.get_close_matches(name, settings, n=1)
            remedy = f"did you mean {near[0]}?" if near else "see cenote config get"
            raise NothingOfThatName(f"there is no setting {name!r}", remedy=remedy)


def _print(values: Iterable[admin_pb2.ConfigValue], *, json: bool, wide: bool) -> None:
    from .output import print_json, print_table

    listed = list(values)
    if json:
        print_json([_value(value) for value in listed])
        return
    print_table(
        ["setting", "value", "changes while it runs", "started with", "what"],
        (
            (
                value.name,
                value.value or "''",
                "yes" if value.dynamic else None,
                value.started_with if value.changed else None,
                value.help,
            )
            for value in listed
        ),
        spare=["what", "started with"],
        wide=wide,
    )


@config_app.command("get")
def config_get(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME...]", help="All by default.")
    ] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Only what `config set` can change.")
    ] = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    wide: Wide = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """What the leader works with. One name alone prints its value alone. No secrets are shown."""
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        values = {value.name: value for value in admin.config()}
    wanted = [name.replace("-", "_") for name in names or ()]
    _must_exist(wanted, values)
    shown = [values[name] for name in wanted or values]
    if dynamic:
        shown = [value for value in shown if value.dynamic]
    if len(wanted) == 1 and not json:
        print(shown[0].value if shown else "")
        return EXIT_OK
    _print(shown, json=json, wide=wide)
    return EXIT_OK


@config_app.command("set")
def config_set(
    settings: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="As `config get --dynamic` lists.")
    ],
    yes: Yes = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Change limits at once, for this and all later leaders, until `config unset`."""
    from cenote.api.errors import InvalidArgument

    from .connect import open_admin

    values = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name:
            raise InvalidArgument(f"{setting!r} is no NAME=VALUE")
        values[name.replace("-", "_")] = value
    with open_admin(master, grpc, deadline) as admin:
        before = {value.name: value.value for value in admin.config()}
        _must_exist(values, before)
        changes = ", ".join(f"{n}: {before.get(n, '?')} -> {v}" for n, v in values.items())
        if not agreed(f"Change {changes}?", yes=yes, harmless=True):
            return nothing_done()
        found = admin.set_config(values=values)
    _print((v for v in found if v.name in values), json=json, wide=False)
    return EXIT_OK


@config_app.command("unset")
def config_unset(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="That were set.")],
    yes: Yes = False,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 5.0,
) -> int:
    """Go back to what the masters are started with."""
    from .connect import open_admin

    wanted = [name.replace("-", "_") for name in names]
    with open_admin(master, grpc, deadline) as admin:
        _must_exist(wanted, {value.name for value in admin.config()})
        if not agreed(f"Unset {', '.join(wanted)}?", yes=yes, harmless=True):
            return nothing_done()
        found = admin.set_config(unset=wanted)
    _print((v for v in found if v.name in wanted), json=json, wide=False)
    return EXIT_OK
