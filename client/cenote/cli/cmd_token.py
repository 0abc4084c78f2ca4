"""`cenote token`: init, create, list and revoke, in the file that masters read (`--tokens`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Wide

if TYPE_CHECKING:
    from cenote.security.tokens import TokenEntry

__all__ = ["token_app"]

token_app = typer.Typer(no_args_is_help=True, help="Tokens: who may do what in which namespaces.")

TokensFile = Annotated[
    Path,
    typer.Option(
        "--tokens",
        envvar="CENOTE_TOKENS",
        metavar="FILE",
        help="The file of tokens: the same that masters are given. They read it again by "
        "themselves within two seconds of a change.",
    ),
]


@token_app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Made where it is not.")],
    json: AsJson = False,
) -> None:
    """Make all tokens that a pool begins with: tokens.json for its masters, store.token for its
    daemons, admin.token for administrators, client.token for engines (all namespaces). What is
    there already stays."""
    from cenote.security.token_set import FIRST_TOKENS, TOKENS_FILE, make_token_set

    from .output import note, print_json

    made = make_token_set(directory)
    if json:
        print_json([_row(entry) for entry in made])
    names = ", ".join(f"{entry.name}.token" for entry in made)
    note(f"{directory}: made {names}" if made else f"{directory}: nothing was missing")
    note(f"masters: --tokens {directory / TOKENS_FILE}")
    note(f"store daemons: --token-file {directory / 'store.token'}")
    for name in FIRST_TOKENS:
        if name != "store":
            note(f"{name}s: CENOTE_CLIENT_TOKEN_FILE={directory / f'{name}.token'}")


@token_app.command()
def create(
    name: Annotated[str, typer.Argument(help="Who is to have it, for logs.", metavar="NAME")],
    tokens: TokensFile,
    role: Annotated[str, typer.Option(help="read, write, admin, or store for a daemon.")] = "write",
    namespace: Annotated[
        list[str] | None,
        typer.Option("--namespace", "-n", help="Name, or its beginning and a *; may be repeated."),
    ] = None,
    ttl: Annotated[
        str, typer.Option(metavar="DURATION", help="After which it counts no more, such as 90d.")
    ] = "",
    certificate: Annotated[
        str,
        typer.Option(
            metavar="IDENTITY",
            help="Make no token: a certificate for uri:..., dns:... or cn:... stands for it.",
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Write the token into this file (mode 0600) instead of showing it."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Make a token. It is shown once; the file has only its hash."""
    from cenote.api.errors import ResourceUnavailable
    from cenote.security.token_set import write_token
    from cenote.security.tokens import Role, TokenFile, role_of

    from .output import note, print_json

    wanted = role_of(role)
    names = namespace or (["*"] if wanted is Role.STORE else [])
    known = TokenFile(tokens, must_exist=False)
    made, token = known.create(name, wanted, names, ttl_s=_ttl_s(ttl), certificate=certificate)
    if out is not None and token:
        try:
            write_token(out, token)
        except ResourceUnavailable:
            print(token)  # it is in the file of tokens, and must not be lost
            raise
    if json:
        shown = {"token": token} if token and out is None else {}
        print_json({**_row(made), **shown})
    elif token and out is None:
        print(token)
    note(f"token {made.token_id} ({made.name}) is in {tokens}")


@token_app.command("list")
def list_tokens(tokens: TokensFile, json: AsJson = False, wide: Wide = False) -> None:
    """The tokens in the file; what they are is not in it."""
    from cenote.security.tokens import TokenFile

    from .output import print_json, print_table

    rows = [_row(entry) for entry in TokenFile(tokens).entries.values()]
    if json:
        print_json(rows)
        return
    columns = ("id", "name", "role", "namespaces", "state", "created", "expires", "certificate")
    print_table(
        columns,
        ([row[column] for column in columns] for row in rows),
        empty=f"no token is in {tokens}",
        spare=["created", "certificate"],
        wide=wide,
    )


@token_app.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `cenote token list` shows it.")],
    tokens: TokensFile,
) -> None:
    """Let a token count no more: masters end its connections and sessions within two seconds, and
    have daemons cut them off."""
    from cenote.security.tokens import TokenFile

    from .output import note

    gone = TokenFile(tokens).revoke(token_id)
    note(f"token {gone.token_id} ({gone.name}) is revoked")


def _ttl_s(text: str) -> float:
    from cenote.runtime.units import parse_duration_s

    if text.endswith("d") and text[:-1].isdigit():
        return int(text[:-1]) * 86_400.0
    return parse_duration_s(text) if text else 0.0


def _row(entry: TokenEntry) -> dict[str, Any]:
    def when(seconds: float) -> str | None:
        return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds else None

    return {
        "id": entry.token_id,
        "name": entry.name,
        "role": entry.role.name.lower(),
        "namespaces": ",".join(entry.namespaces),
        "state": entry.state(time.time()),
        "created": when(entry.created_s),
        "expires": when(entry.expires_s),
        "certificate": entry.certificate or None,
    }
