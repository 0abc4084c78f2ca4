"""Before something is changed that can't be taken back, or not easily: `--yes`, or an answer."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

__all__ = ["Yes", "agreed", "nothing_done"]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]


def agreed(question: str, *, yes: bool, harmless: bool = False) -> bool:
    """Whether to go on. No answer at the end of the input is a no.

    `harmless`: it can be taken back, so that scripts, which have no terminal, need not say --yes.
    """
    from .interrupts import current_interrupts

    if yes or (harmless and not sys.stdin.isatty()):
        return True
    try:
        return bool(typer.confirm(question, err=True))
    except typer.Abort:
        if current_interrupts().number:  # Ctrl-C
            raise
        print(file=sys.stderr)
        return False


def nothing_done(why: str = "") -> int:
    """Say so; the exit code."""
    from .exits import EXIT_ERROR
    from .output import note

    note(f"cenote: nothing was done{why and ': '}{why or ' (--yes goes on unasked)'}")
    return EXIT_ERROR
