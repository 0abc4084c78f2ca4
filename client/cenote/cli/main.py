"""The `cenote` command. Commands import what they need when they run, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import typer

from . import (
    cmd_bench,
    cmd_data,
    cmd_demo,
    cmd_doctor,
    cmd_inspect,
    cmd_ls,
    cmd_paths,
    cmd_pool,
    cmd_replay,
)
from .cmd_namespaces import namespaces_app
from .exits import EXIT_CODES_HELP, EXIT_OK, exit_code_of
from .interrupts import Interrupts

__all__ = ["app", "main"]

_BROKEN_PIPE: Final = 141
_INTERRUPTED: Final = 130
_PASS_THROUGH: Final = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="cenote",
    help="A distributed KV-cache store for LLM inference.",
    epilog=EXIT_CODES_HELP,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Function = Callable[..., int | None]
_POOL: Final = "Run a pool"
_LOOK: Final = "Look at it"
_USE: Final = "Use it"

_COMMANDS: Final[tuple[tuple[_Function, str], ...]] = (
    (cmd_pool.up, _POOL),
    (cmd_pool.down, _POOL),
    (cmd_doctor.doctor, _LOOK),
    (cmd_inspect.status, _LOOK),
    (cmd_inspect.nodes, _LOOK),
    (cmd_inspect.segments, _LOOK),
    (cmd_paths.paths, _LOOK),
    (cmd_ls.ls, _LOOK),
    (cmd_data.stat, _LOOK),
    (cmd_data.put, _USE),
    (cmd_data.get, _USE),
    (cmd_data.rm, _USE),
    (cmd_bench.bench, _USE),
    (cmd_replay.replay, _USE),
    (cmd_demo.demo, _USE),
)
for _function, _panel in _COMMANDS:
    app.command(rich_help_panel=_panel)(_function)
for _daemon in (cmd_pool.master, cmd_pool.store):
    app.command(rich_help_panel=_POOL, context_settings=_PASS_THROUGH, add_help_option=False)(
        _daemon
    )
app.add_typer(namespaces_app, name="namespaces", rich_help_panel=_LOOK)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version."),
) -> None:
    """A distributed KV-cache store for LLM inference."""
    if version:
        import importlib.metadata

        print("cenote", importlib.metadata.version("cenote"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Errors are one line on standard error."""
    interrupts = Interrupts()
    try:
        with interrupts.catching():
            code = _run(arguments)
            sys.stdout.flush()
            # The argument parser makes of every KeyboardInterrupt what Ctrl-C ends in.
            ended = interrupts.number and code == _INTERRUPTED
            return interrupts.exit_code if ended else code
    except BrokenPipeError:  # `cenote ls | head`: whoever read has enough
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        return _BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        return interrupts.exit_code


def _run(arguments: Sequence[str] | None) -> int:
    from cenote.api.errors import CenoteError

    # The classes of its argument parser are not typer's API; their common root is found from one.
    usage_errors: Any = typer.BadParameter.__mro__[2]
    try:
        given = None if arguments is None else list(arguments)
        result = app(given, prog_name="cenote", standalone_mode=False)
        return result if isinstance(result, int) else EXIT_OK
    except CenoteError as error:
        print(f"cenote: {_one_line(str(error))}", file=sys.stderr)
        return exit_code_of(error)
    except usage_errors as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "cenote"
        message = _one_line(error.format_message())
        print(f"cenote: {message} (see {where} --help)", file=sys.stderr)
        return int(error.exit_code)


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
