"""One frozen dataclass per program, filled from flags, environment, a TOML file and the defaults.

The first of these that names a key wins, in that order. Keys are the dataclass's fields: `port` is
`port = 5111` in the file and `CENOTE_MASTER_PORT` in the environment of a program whose prefix is
`CENOTE_MASTER_`. `<prefix>CONFIG` names the file where the caller names none. A key that no field
has is refused, with the nearest one that exists: a misspelt limit must not become a default.

Fields are bool, int, float, str, Path, `tuple[str, ...]`, a Literal of strings, or one of these
`| None`. `option()` gives a field a unit (so that one can write "4GiB" and "250ms"), a range and a
help text:

    @dataclass(frozen=True, slots=True, kw_only=True)
    class StoreConfig:
        capacity_bytes: int = field(default=4 << 30, metadata=option(unit="size", minimum=1 << 20))
        heartbeat_s: float = field(default=1.0, metadata=option(unit="duration", help="..."))

Written here rather than taken from a library: pydantic-settings ignores misspelt environment
variables, names no near miss, builds models instead of plain slotted dataclasses, and would put one
more pinned version of pydantic into every engine's process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from cenote.api.errors import ConfigError, InvalidArgument

from .units import format_size, parse_duration_s, parse_size_bytes

__all__ = ["add_boolean_flag", "has_flag", "help_of", "load_config", "option"]

if TYPE_CHECKING:
    import argparse

T = TypeVar("T")
_FILE_BYTES_MAX: Final = 1 << 20
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    unit: Literal["size", "duration"] | None
    minimum: float | None
    maximum: float | None
    help: str
    flag: bool = True


_NO_OPTION: Final = _Option(unit=None, minimum=None, maximum=None, help="")
_METADATA_KEY: Final = "cenote.option"


def option(
    *,
    unit: Literal["size", "duration"] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    help: str = "",
    flag: bool = True,
) -> Mapping[str, object]:
    """The `metadata=` of a configuration field.

    `unit="size"` (an int of bytes) and `unit="duration"` (a float of seconds) admit text with
    units. `minimum` and `maximum` are inclusive. A field with `repr=False` is a secret: errors
    don't quote its value. `flag=False`: it can't be given on a command line, which all users of
    the machine can read.
    """
    return {
        _METADATA_KEY: _Option(unit=unit, minimum=minimum, maximum=maximum, help=help, flag=flag)
    }


def help_of(cls: type[object], name: str) -> str:
    """The help text of the field `name` of the configuration class `cls`, for a flag's `--help`."""
    return next((_option(f).help for f in _fields(cls) if f.name == name), "")


def has_flag(cls: type[object], name: str) -> bool:
    """Whether the field `name` may be given on a command line."""
    return next((_option(f).flag for f in _fields(cls) if f.name == name), True)


def add_boolean_flag(
    parser: argparse.ArgumentParser, name: str, flags: Sequence[str], text: str
) -> None:
    """`--flag`, and `--flag true` as the environment and scripts would have it; `--no-flag`, too.

    `name`: the field of the configuration; `flags` begin with its own name.
    """
    from argparse import SUPPRESS  # not in every process that has a configuration

    parser.add_argument(
        *flags, dest=name, nargs="?", const=True, metavar="true|false", help=text.replace("%", "%%")
    )
    no = "--no-" + flags[0].removeprefix("--")
    parser.add_argument(no, dest=name, action="store_const", const=False, help=SUPPRESS)


def load_config(
    cls: type[T],
    *,
    env_prefix: str,
    file: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    overrides_are: Literal["flags", "keywords"] = "flags",
) -> T:
    """A `cls` filled from `overrides` (flags), then `env`, then `file`, then its defaults.

    `env` is os.environ where None; only names that start with `env_prefix` are looked at, so each
    program has a prefix of its own. An override of None means that the flag was not given; other
    overrides are values of the field's type, or text. `overrides_are`: how errors spell them, as
    `--deadline-s` of a command or as `deadline_s=` of a call.

    Raises ConfigError, naming the source and the key: unknown key, wrong type, out of range,
    missing value, unreadable file, or what the class's `__post_init__` found wrong (as ValueError
    or InvalidArgument).
    """
    fields = {f.name: f for f in _fields(cls)}
    hints = typing.get_type_hints(cls)
    variables = os.environ if env is None else env
    from_env: dict[str, object] = {
        name[len(env_prefix) :].lower(): value
        for name, value in variables.items()
        if name.startswith(env_prefix)
    }
    env_file = from_env.pop("config", None)
    path = Path(file) if file is not None else Path(str(env_file)) if env_file else None
    values: dict[str, object] = {}
    given = {k: v for k, v in (overrides or {}).items() if v is not None}
    if overrides_are == "flags":
        overriding = _Source("", "", _as_flag, given)
    else:
        overriding = _Source("the argument ", "", _as_is, given)
    origins: dict[str, _Source] = {}
    for source in (
        _Source("", f" in {path}", _as_is, _read_file(path) if path else {}),
        _Source("the environment variable ", "", lambda key: env_prefix + key.upper(), from_env),
        overriding,
    ):
        for key, value in source.values.items():
            if key not in fields:
                raise source.unknown(key, fields)
            origins[key] = source
            values[key] = _convert(value, hints[key], fields[key], source.place(key))
    missing = [name for name, f in fields.items() if name not in values and _is_required(f)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} must be given",
            remedy=f"set {overriding.spell(missing[0])} or {env_prefix}{missing[0].upper()}",
        )
    try:
        return cls(**values)
    except InvalidArgument as error:
        message = _respelled(error.message, origins)
        if type(error) is ConfigError and message == error.message:
            raise
        raise ConfigError(message, remedy=error.remedy) from error
    except ValueError as error:
        raise ConfigError(f"the configuration is inconsistent: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """Where values came from, and how a key is written there."""

    before: str
    after: str
    spell: Callable[[str], str]
    values: Mapping[str, object]

    def place(self, key: str) -> str:
        return f"{self.before}{self.spell(key)}{self.after}"

    def unknown(self, key: str, known: Mapping[str, object]) -> ConfigError:
        near = difflib.get_close_matches(key.replace("-", "_").lower(), known, n=1)
        if near:
            remedy = f"did you mean {self.spell(near[0])}?"
        else:
            remedy = "known: " + ", ".join(self.spell(name) for name in sorted(known))
        return ConfigError(f"{self.place(key)} is unknown", remedy=remedy)


def _as_is(key: str) -> str:
    return key


def _as_flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _respelled(message: str, origins: Mapping[str, _Source]) -> str:
    """A message of `__post_init__`, which speaks of flags, with the names of where values are."""
    for key, source in origins.items():
        place = source.place(key).replace("\\", r"\\")
        message = re.sub(rf"{_as_flag(key)}(?![\w-])", place, message)
    return message


def _fields(cls: type[object]) -> Iterator[dataclasses.Field[Any]]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls.__name__} is no dataclass")
    return (f for f in dataclasses.fields(cls) if f.init)


def _option(field: dataclasses.Field[Any]) -> _Option:
    found = field.metadata.get(_METADATA_KEY, _NO_OPTION)
    assert isinstance(found, _Option)
    return found


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as stream:
            raw = stream.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"can't read the configuration file {path}: {error.strerror}") from error
    if len(raw) > _FILE_BYTES_MAX:
        raise ConfigError(f"the configuration file {path} is larger than {_FILE_BYTES_MAX} bytes")
    try:
        return tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, [[[[...
        raise ConfigError(
            f"the configuration file {path} is no TOML: {error}",
            remedy='write lines such as: log_level = "debug"',
        ) from error


def _convert(value: object, hint: object, field: dataclasses.Field[Any], where: str) -> object:
    """`value` as the type `hint`, within the field's range; errors name `where` it came from."""
    shown = repr(value) if field.repr else "the given value"
    try:
        converted = _as_type(value, hint, _option(field))
        _check_range(converted, value, _option(field))
    except InvalidArgument as error:
        raise ConfigError(f"{where}: {shown} is {error.message}", remedy=error.remedy) from error
    return converted


def _as_type(value: object, hint: object, options: _Option) -> object:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in arguments if a is not type(None)]
        if len(inner) == 1:
            return (
                None if value == "" and inner[0] is not str else _as_type(value, inner[0], options)
            )
    elif origin is Literal:
        if value in arguments:
            return value
        raise InvalidArgument(
            "none of the choices", remedy="one of: " + ", ".join(map(str, arguments))
        )
    elif origin is tuple and arguments == (str, ...):
        return _as_texts(value)
    elif hint in _SCALARS:
        return _SCALARS[hint](value, options)
    raise TypeError(f"a configuration field can't have the type {hint}")


def _as_texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise InvalidArgument("no list of strings", remedy="write a,b or, in the file, ['a', 'b']")


def _as_bool(value: object, _options: _Option) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise InvalidArgument("no boolean", remedy="write true or false")


@contextlib.contextmanager
def _renamed(message: str) -> Iterator[None]:
    """An InvalidArgument that says `message` only, since the error will quote the value anyway."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(message, remedy=error.remedy) from error


def _as_int(value: object, options: _Option) -> int:
    if options.unit == "size" and isinstance(value, str):
        with _renamed("no size"):
            return parse_size_bytes(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return int(value)
    raise InvalidArgument("no whole number", remedy="write a whole number")


def _as_float(value: object, options: _Option) -> float:
    if options.unit == "duration" and isinstance(value, str):
        with _renamed("no duration"):
            return parse_duration_s(value)
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            number = float(value)
    if math.isfinite(number):
        return number
    raise InvalidArgument("no number", remedy="write a finite number")


def _as_str(value: object, _options: _Option) -> str:
    if isinstance(value, str):
        return value
    raise InvalidArgument("no string", remedy="put it in quotes")


def _as_path(value: object, _options: _Option) -> Path:
    if isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        return Path(value).expanduser()
    raise InvalidArgument("no path", remedy="write the path of a file or directory")


_SCALARS: Final[dict[object, Callable[[object, _Option], object]]] = {
    bool: _as_bool,
    int: _as_int,
    float: _as_float,
    str: _as_str,
    Path: _as_path,
}


def _check_range(value: object, given: object, options: _Option) -> None:
    if not isinstance(value, int | float):
        return
    if options.minimum is not None and value < options.minimum:
        raise InvalidArgument(
            f"less than {_bound(options.minimum, options)}", remedy=_unit_remedy(given, options)
        )
    if options.maximum is not None and value > options.maximum:
        raise InvalidArgument(f"more than {_bound(options.maximum, options)}")


def _bound(bound: float, options: _Option) -> str:
    if options.unit == "size":
        return format_size(int(bound))
    return f"{bound:g} s" if options.unit == "duration" else str(bound)


def _unit_remedy(given: object, options: _Option) -> str:
    """For a size that is too small because its unit was forgotten."""
    text = str(given).strip()
    if options.unit != "size" or not text.isdigit() or not int(text):
        return ""
    return f"a number without a unit is bytes; write {text}MiB or {text}GiB if that was meant"
