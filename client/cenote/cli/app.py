"""The commands of `cenote`. Each imports what it needs when it runs, so that `--help` is quick."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Final

import typer

from . import (
    cmd_bench,
    cmd_capacity,
    cmd_completion,
    cmd_data,
    cmd_demo,
    cmd_doctor,
    cmd_evict,
    cmd_explain,
    cmd_inspect,
    cmd_ls,
    cmd_mrc,
    cmd_paths,
    cmd_pins,
    cmd_pool,
    cmd_replay,
    cmd_simulate,
    cmd_tasks,
    cmd_top,
    cmd_upkeep,
)
from .cmd_config import config_app
from .cmd_namespaces import namespaces_app
from .cmd_token import token_app
from .exits import EXIT_CODES_HELP

__all__ = ["app"]

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
_RUN: Final = "Administer it"
_MOVE: Final = "Move what it holds, or let it go"
_USE: Final = "Use it"

_COMMANDS: Final[tuple[tuple[_Function, str], ...]] = (
    (cmd_pool.up, _POOL),
    (cmd_pool.down, _POOL),
    (cmd_doctor.doctor, _LOOK),
    (cmd_inspect.status, _LOOK),
    (cmd_top.top, _LOOK),
    (cmd_inspect.nodes, _LOOK),
    (cmd_inspect.segments, _LOOK),
    (cmd_paths.paths, _LOOK),
    (cmd_ls.ls, _LOOK),
    (cmd_data.stat, _LOOK),
    (cmd_explain.explain, _LOOK),
    (cmd_explain.leases, _LOOK),
    (cmd_mrc.mrc, _LOOK),
    (cmd_pins.pins, _LOOK),
    (cmd_tasks.tasks, _LOOK),
    (cmd_tasks.drain, _MOVE),
    (cmd_tasks.undrain, _MOVE),
    (cmd_tasks.rebalance, _MOVE),
    (cmd_evict.evict, _MOVE),
    (cmd_pins.prefetch, _MOVE),
    (cmd_upkeep.snapshot, _RUN),
    (cmd_data.put, _USE),
    (cmd_data.get, _USE),
    (cmd_data.rm, _USE),
    (cmd_pins.pin, _USE),
    (cmd_pins.unpin, _USE),
    (cmd_bench.bench, _USE),
    (cmd_replay.replay, _USE),
    (cmd_simulate.simulate, _USE),
    (cmd_capacity.capacity, _USE),
    (cmd_demo.demo, _USE),
    (cmd_completion.completion, _USE),
)
for _function, _panel in _COMMANDS:
    app.command(rich_help_panel=_panel)(_function)
for _daemon in (cmd_pool.master, cmd_pool.store):
    app.command(rich_help_panel=_POOL, context_settings=_PASS_THROUGH, add_help_option=False)(
        _daemon
    )
app.add_typer(namespaces_app, name="namespaces", rich_help_panel=_RUN)
app.add_typer(config_app, name="config", rich_help_panel=_RUN)
app.add_typer(cmd_upkeep.debug_app, name="debug", rich_help_panel=_RUN)
app.add_typer(token_app, name="token", rich_help_panel=_RUN)


def _unwrapped(doc: str) -> str:
    """A docstring whose paragraphs are a line each: their lines are as long as those of the source,
    and Typer breaks them where the terminal ends, too."""
    paragraphs = inspect.cleandoc(doc).split("\n\n")
    return "\n\n".join(
        paragraph if paragraph.startswith(" ") else paragraph.replace("\n", " ")
        for paragraph in paragraphs
    )


for _typer in (app, namespaces_app, config_app, cmd_upkeep.debug_app, token_app):
    for _command in _typer.registered_commands:
        assert _command.callback is not None
        _command.help = _unwrapped(_command.callback.__doc__ or "")


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
