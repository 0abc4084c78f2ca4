"""What the command lines of the daemons have in common: flags from the settings, and one life."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

from cenote.api.errors import CenoteError

from .config import add_boolean_flag, has_flag, help_of, load_config, option_of
from .harness import begin_program, exit_code_of, run_daemon
from .log import get_logger, setup_logging

__all__ = ["Daemon", "DaemonConfig", "Program"]

_SECONDS: Final = "_s"
_log = get_logger("cenote.program")


class DaemonConfig(Protocol):
    """The settings that every daemon has."""

    @property
    def log_level(self) -> str: ...

    @property
    def log_json(self) -> bool: ...


class Daemon(Protocol):
    """What `run_daemon` brings up, waits for and takes down."""

    async def start(self) -> Mapping[str, object]: ...

    async def wait(self) -> None: ...

    async def stop(self) -> None: ...


C = TypeVar("C", bound=DaemonConfig)


@dataclasses.dataclass(frozen=True)
class Program(Generic[C]):
    """A daemon's program: its flags are the fields of its settings.

    `make` takes the settings and the version. It is called after errors in the flags were told,
    so it may import what takes a while. `aliases` maps a setting's name to one more flag for it.
    """

    name: str
    about: str
    config: type[C]
    env_prefix: str
    values_are_written: str  # the last sentence of the help, such as "Durations are written 250ms."
    make: Callable[[C, str], Daemon]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the daemon until it is told to stop; returns the exit code. None: of sys.argv."""
        if arguments is None:  # it is this process's own program, not somebody's call
            begin_program()
        options = vars(self.parser().parse_args(arguments))
        file = options.pop("config")
        try:
            config = load_config(
                self.config, env_prefix=self.env_prefix, file=file, overrides=options
            )
            setup_logging(level=config.log_level, json=config.log_json)
        except CenoteError as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            return exit_code_of(error)
        self._warn_of_secrets(options)
        daemon = self.make(config, _version())
        return run_daemon(daemon.start, daemon.stop, wait=daemon.wait)

    def _warn_of_secrets(self, given: Mapping[str, object]) -> None:
        """A command line is shown to every user of the machine, and kept in shells' histories."""
        for field in dataclasses.fields(self.config):  # type: ignore[arg-type]
            if not field.repr and given.get(field.name):
                _log.warning(
                    "a secret stands on the command line, which every user of this machine can see",
                    flag=self.flags_of(field.name)[0],
                    remedy=f"set {self.env_prefix}{field.name.upper()},"
                    f" or {field.name} in the --config file",
                )

    def parser(self) -> argparse.ArgumentParser:
        """One flag a setting, and --version and --config."""
        parser = argparse.ArgumentParser(
            prog=self.name,
            description=self.about,
            epilog=f"Each flag is also a variable {self.env_prefix}NAME and a key of the --config "
            "file; flags win over variables, variables over the file. " + self.values_are_written,
            allow_abbrev=False,
        )
        parser.add_argument("--version", action="version", version=f"{self.name} {_version()}")
        parser.add_argument("--config", metavar="FILE", help="TOML file")
        for field in dataclasses.fields(self.config):  # type: ignore[arg-type]
            if not has_flag(self.config, field.name):
                continue
            flags = self.flags_of(field.name)
            text = f"{help_of(self.config, field.name)} {_shown_default(field)}".strip()
            if isinstance(field.default, bool):
                add_boolean_flag(parser, field.name, flags, text)
            else:
                text = text.replace("%", "%%")
                parser.add_argument(*flags, dest=field.name, metavar="VALUE", help=text)
        return parser

    def flags_of(self, name: str) -> list[str]:
        """Of a setting: `--lease-ttl-s`, and `--lease-ttl` since a value may say its unit."""
        flags = ["--" + name.replace("_", "-")]
        if name.endswith(_SECONDS) and option_of(self.config, name).unit == "duration":
            flags.append("--" + name.removesuffix(_SECONDS).replace("_", "-"))
        if name in self.aliases:
            flags.append(self.aliases[name])
        return flags


def _shown_default(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING or default in ("", False):
        return ""
    return f"[{','.join(default)}]" if isinstance(default, tuple) else f"[{default}]"


def _version() -> str:
    try:
        return importlib.metadata.version("cenote")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
