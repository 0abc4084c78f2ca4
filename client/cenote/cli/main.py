"""The `cenote` command: runs one of the commands in `app`, and says how it ended.

Light, since signals are caught only once this module is there; all else is imported after that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from .exits import EXIT_OK, exit_code_of
from .interrupts import Interrupts

__all__ = ["main"]

_BROKEN_PIPE: Final = 141
_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors are one line on standard error."""
    interrupts = Interrupts()
    try:
        with interrupts.catching():
            try:
                code = _run(arguments, interrupts)
                sys.stdout.flush()
                return code
            except KeyboardInterrupt:
                interrupts.take()
                words = f": {interrupts.last_words}" if interrupts.last_words else ""
                print(f"cenote: ended by {interrupts.name}{words}", file=sys.stderr)
                return interrupts.exit_code
    except BrokenPipeError:  # `cenote ls | head`: whoever read has enough
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        return _BROKEN_PIPE
    except KeyboardInterrupt:  # another one
        return interrupts.exit_code


def _run(arguments: Sequence[str] | None, interrupts: Interrupts) -> int:
    """Raises KeyboardInterrupt where that ended the command."""
    import typer

    from cenote.api.errors import CenoteError

    from .app import app

    interrupts.check()
    # The classes of its argument parser are not typer's API; their common root is found from one.
    usage_errors: Any = typer.BadParameter.__mro__[2]
    try:
        given = None if arguments is None else list(arguments)
        result = app(given, prog_name="cenote", standalone_mode=False)
    except CenoteError as error:
        print(f"cenote: {_one_line(str(error))}", file=sys.stderr)
        return exit_code_of(error)
    except usage_errors as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "cenote"
        message = _one_line(error.format_message()).replace("Value error, ", "")
        print(f"cenote: {message} (see {where} --help)", file=sys.stderr)
        return int(error.exit_code)
    except typer.Abort:  # Ctrl-C instead of an answer
        raise KeyboardInterrupt from None
    # The argument parser makes this of every KeyboardInterrupt.
    if result == _INTERRUPTED and interrupts.number and not interrupts.told:
        raise KeyboardInterrupt
    return result if isinstance(result, int) else EXIT_OK


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
