"""`cenote completion SHELL`: what makes a shell complete commands, options, nodes, namespaces."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Final

import typer

__all__ = ["complete_namespace", "complete_node", "completion"]

_ASK_S: Final = 0.5
"""Who presses the tab key does not wait longer."""


class Shell(StrEnum):
    """Those that are known."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="Whose script to print.")],
) -> None:
    """Print the script for a shell: bash: source <(cenote completion bash), in ~/.bashrc.

    zsh: cenote completion zsh > "${fpath[1]}/_cenote"; fish: cenote completion fish >
    ~/.config/fish/completions/cenote.fish. Names of nodes and namespaces come from the pool that
    CENOTE_MASTER names.
    """
    from typer._completion_shared import get_completion_script

    script = get_completion_script(
        prog_name="cenote", complete_var="_CENOTE_COMPLETE", shell=shell.value
    )
    print(script)


def _names(kind: str) -> list[str]:
    """Nothing where the pool does not answer: there is nobody to tell an error to."""
    from cenote.api.errors import CenoteError

    from .connect import open_admin
    from .options import MASTER_DEFAULT

    try:
        master = os.environ.get("CENOTE_MASTER", MASTER_DEFAULT)
        with open_admin(master, os.environ.get("CENOTE_GRPC"), _ASK_S) as admin:
            if kind == "node":
                return [node.view.name for node in admin.nodes()]
            return [namespace.name for namespace in admin.namespaces()]
    except CenoteError:
        return []


def complete_node(incomplete: str) -> list[str]:
    """Names of nodes that begin so."""
    return [name for name in _names("node") if name.startswith(incomplete)]


def complete_namespace(incomplete: str) -> list[str]:
    """Names of namespaces that begin so."""
    return [name for name in _names("namespace") if name.startswith(incomplete)]
