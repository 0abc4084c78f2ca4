"""Every setting of the daemons and the SDK, as their configuration classes have it.

    python tests/settings.py        # writes the tables in docs/operating/config.md anew

tests/test_settings.py holds the page to it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from cenote.client.config import ENV_PREFIX as CLIENT_PREFIX
from cenote.client.config import ClientConfig
from cenote.master.__main__ import PROGRAM as MASTER
from cenote.master.state_config import DYNAMIC
from cenote.runtime.config import Option, option_of
from cenote.runtime.units import format_duration, format_size, parse_duration_s, parse_size_bytes
from cenote.store.__main__ import PROGRAM as STORE

__all__ = ["PAGE", "PARTS", "Part", "Setting", "settings_of", "with_tables"]

PAGE: Final = Path(__file__).resolve().parent.parent / "docs" / "operating" / "config.md"
_KINDS: Final[dict[object, str]] = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    tuple[str, ...]: "list",
}


@dataclass(frozen=True)
class Part:
    """One program's settings."""

    name: str
    config: type[Any]
    env_prefix: str
    spellings_of: Callable[[str], list[str]]
    """How a setting is given where it isn't the environment or the file."""
    dynamic: frozenset[str] = frozenset()
    """What can be changed while it runs."""

    @property
    def begin(self) -> str:
        """The line before the table."""
        return f"<!-- settings of {self.name}: made by tests/settings.py -->"

    @property
    def end(self) -> str:
        """The line after it."""
        return f"<!-- end of the settings of {self.name} -->"


PARTS: Final = (
    Part("cenote-master", MASTER.config, MASTER.env_prefix, MASTER.flags_of, frozenset(DYNAMIC)),
    Part("cenote-store", STORE.config, STORE.env_prefix, STORE.flags_of),
    Part("the client", ClientConfig, CLIENT_PREFIX, lambda name: [f"{name}="]),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A row."""

    name: str
    spellings: list[str]
    """Flags, or the argument's name; none: it can't be given so."""
    variable: str
    kind: str
    default: str
    range: str
    help: str

    def row(self) -> str:
        """Markdown."""
        cells = (
            f"`{self.name}`",
            ", ".join(f"`{one}`" for one in self.spellings) or "-",
            f"`{self.variable}`",
            *(self.kind, self.default, self.range, self.help),
        )
        return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def settings_of(part: Part) -> Iterator[Setting]:
    """In the order of the class."""
    hints = typing.get_type_hints(part.config)
    for field in dataclasses.fields(part.config):
        name, said = field.name, option_of(part.config, field.name)
        notes = [] if field.repr else ["a secret"]
        if name in part.dynamic:
            notes.append("`cenote config set` changes it while masters run")
        yield Setting(
            name,
            part.spellings_of(name) if said.flag else [],
            part.env_prefix + name.upper(),
            _kind(hints[name], said),
            _default(field, said),
            _range(hints[name], said),
            "; ".join([said.help.replace("*", r"\*"), *notes]),
        )


def _kind(hint: object, said: Option) -> str:
    if typing.get_origin(hint) is Literal:
        return "choice"
    return said.unit or _KINDS[hint]


def _default(field: dataclasses.Field[Any], said: Option) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        assert field.default_factory is not dataclasses.MISSING, f"{field.name} has no default"
        return "found out"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value in ("", ()):
        return "none"
    if isinstance(value, int | float):
        return _number(value, said)
    return f"`{','.join(value)}`" if isinstance(value, tuple) else f"`{value}`"


def _range(hint: object, said: Option) -> str:
    if typing.get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    least, most = said.minimum, said.maximum
    if least is None or most is None:
        assert most is None, "write what an upper bound alone looks like"
        return "" if least is None else f"from {_number(least, said)}"
    return f"{_number(least, said)} to {_number(most, said)}"


def _number(value: float, said: Option) -> str:
    """As it may be written, and exact."""
    if said.unit == "size":
        text = format_size(int(value)).replace(" ", "")
        return text if parse_size_bytes(text) == value else f"{value:d}"
    if said.unit == "duration":
        text = format_duration(value).replace(" ", "")
        return text if value and parse_duration_s(text) == value else f"{_plain(value)}s"
    return _plain(value)


def _plain(value: float) -> str:
    return f"{value:g}" if value != int(value) else str(int(value))


def table(part: Part) -> str:
    """Markdown."""
    how = "argument" if part.config is ClientConfig else "flags"
    head = f"| setting | {how} | environment | kind | default | range | what it is |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *(s.row() for s in settings_of(part))])


def with_tables(text: str) -> str:
    """The page with the tables of today."""
    for part in PARTS:
        before, begin, rest = text.partition(part.begin)
        _, end, after = rest.partition(part.end)
        assert begin, f"{PAGE} has lost the line {part.begin}"
        assert end, f"{PAGE} has lost the line {part.end}"
        text = f"{before}{begin}\n\n{table(part)}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
