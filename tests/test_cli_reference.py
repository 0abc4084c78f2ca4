"""docs/operating/cli.md and the command tree are the same thing, told twice."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from cenote.cli.app import app

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "operating" / "cli.md"
COMMON: Final = {
    *("--master", "--grpc", "--json", "--deadline", "--wide", "-w", "--watch", "--yes", "-y"),
    *("--help", "-h", "--namespace", "-n"),
}
PASS_THROUGH: Final = {"cenote master", "cenote store"}
"""Their flags are the daemons' own."""


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{path} {name}")


ROOT: Final = typer.main.get_command(app)
COMMANDS: Final = dict(walk(ROOT, "cenote"))
_SECTION: Final = re.compile(r"^### `(cenote [a-z -]+)`\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
SECTIONS: Final[dict[str, str]] = dict(_SECTION.findall(PAGE.read_text()))
EXAMPLES: Final = [
    line.strip()
    for body in SECTIONS.values()
    for line in body.splitlines()
    if line.startswith("    cenote ")
]


def options_of(command: Any) -> set[str]:
    return {
        name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }


def test_every_command_has_its_section_and_no_other_has() -> None:
    groups = {path for path, command in COMMANDS.items() if hasattr(command, "commands")}
    assert set(COMMANDS) - groups - set(SECTIONS) == set()
    assert set(SECTIONS) - set(COMMANDS) == set()


@pytest.mark.parametrize("path", sorted(set(SECTIONS) - PASS_THROUGH))
def test_a_section_names_all_options_and_no_others(path: str) -> None:
    told = set(re.findall(r"(?<![\w-])(--?[a-z][a-z-]*)", SECTIONS[path]))
    own = options_of(COMMANDS[path])
    assert own - COMMON - told == set(), "not documented"
    daemons = {"--decisions-max", "--node-dead-s"}
    assert told - own - daemons == set(), "documented, and not there"
    assert any(example.startswith(path) for example in EXAMPLES), "no example"


def test_help_is_broken_where_the_terminal_ends_alone() -> None:
    for path, command in COMMANDS.items():
        for paragraph in (command.help or "").split("\n\n"):
            assert "\n" not in paragraph, path


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_is_right_usage(line: str) -> None:
    words = shlex.split(line)
    command, path = ROOT, words.pop(0)
    while words and words[0] in getattr(command, "commands", {}):
        path += f" {words.pop(0)}"
        command = COMMANDS[path]
    command.make_context(path, words)  # raises a usage error


def test_what_is_common_is_common() -> None:
    listings = ("status", "nodes", "segments", "namespaces", "tasks", "leases", "pins", "mrc")
    for name in listings:
        assert {"--json", "--watch", "--master"} <= options_of(COMMANDS[f"cenote {name}"]), name
    for path in ("evict", "namespaces reset", "namespaces delete", "drain", "rebalance"):
        assert "--yes" in options_of(COMMANDS[f"cenote {path}"]), path
    talks = (p for p, c in COMMANDS.items() if "--master" in options_of(c))
    for path in talks:
        assert path in {"cenote get", "cenote paths"} or "--json" in options_of(COMMANDS[path]), (
            path
        )
