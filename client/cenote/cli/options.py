"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from .cmd_completion import complete_namespace

__all__ = [
    "MASTER_DEFAULT",
    "AsJson",
    "DeadlineS",
    "FingerprintText",
    "GrpcAddress",
    "MasterAddress",
    "NamespaceName",
    "Wide",
    "fingerprint_bytes",
]

MASTER_DEFAULT: Final = "127.0.0.1:5110"
_HEX: Final = "hex:"

MasterAddress = Annotated[
    str,
    typer.Option(
        "--master",
        envvar="CENOTE_MASTER",
        metavar="HOST:PORT",
        help="The master's lane; several masters with commas between; or the etcd that they are "
        "registered in, etcd://host:2379,host:2379/prefix.",
    ),
]
GrpcAddress = Annotated[
    str | None,
    typer.Option(
        "--grpc",
        envvar="CENOTE_GRPC",
        metavar="HOST:PORT",
        help="The master's gRPC address; by default the port after --master's.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document, for scripts.")]
Wide = Annotated[
    bool, typer.Option("--wide", "-w", help="All columns, however narrow the terminal is.")
]
NamespaceName = Annotated[
    str,
    typer.Option(
        "--namespace",
        "-n",
        envvar="CENOTE_NAMESPACE",
        metavar="NAME",
        help="Key space.",
        autocompletion=complete_namespace,
    ),
]
DeadlineS = Annotated[
    float,
    typer.Option(
        "--deadline", min=0.001, max=86_400, metavar="SECONDS", help="Of each call to the pool."
    ),
]
FingerprintText = Annotated[
    str | None,
    typer.Option(
        "--fingerprint",
        metavar="TEXT",
        help="What the namespace's bytes depend on (model, dtype ...); hex:... for bytes.",
    ),
]


def fingerprint_bytes(text: str | None) -> bytes | None:
    """The fingerprint that an option names. Raises InvalidArgument."""
    from cenote.api.errors import InvalidArgument

    if text is None or not text.startswith(_HEX):
        return None if text is None else text.encode()
    try:
        return bytes.fromhex(text.removeprefix(_HEX))
    except ValueError as error:
        raise InvalidArgument(f"the fingerprint {text!r} is no hex number") from error
