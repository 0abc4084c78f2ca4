"""`cenote-master`, also `python -m cenote.master`: the metadata service of a pool."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import sys
from collections.abc import Sequence

from cenote.api.errors import CenoteError
from cenote.runtime.config import add_boolean_flag, help_of, load_config
from cenote.runtime.harness import begin_program, exit_code_of, run_daemon
from cenote.runtime.log import setup_logging

from .config import ENV_PREFIX, MasterConfig

__all__ = ["main"]


def _version() -> str:
    try:
        return importlib.metadata.version("cenote")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cenote-master",
        description="The metadata service of a cenote pool.",
        epilog=f"Each flag is also a variable {ENV_PREFIX}NAME and a key of the --config file; "
        "flags win over variables, variables over the file. Durations are written 250ms, 10s, 1h.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cenote-master {_version()}")
    parser.add_argument("--config", metavar="FILE", help="TOML file")
    for field in dataclasses.fields(MasterConfig):
        flags = _flags(field.name)
        text = help_of(MasterConfig, field.name)
        if isinstance(field.default, bool):
            add_boolean_flag(parser, field.name, flags, text)
            continue
        text = f"{text} [{field.default}]" if text else f"[{field.default}]"
        parser.add_argument(*flags, dest=field.name, metavar="VALUE", help=text.replace("%", "%%"))
    return parser


def _flags(name: str) -> list[str]:
    """`--lease-ttl-s`, and `--lease-ttl` since a value may say its unit."""
    flags = ["--" + name.replace("_", "-")]
    if name.endswith("_s"):
        flags.append(flags[0].removesuffix("-s"))
    if name == "listen":
        flags.append("--lane")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a master until it is told to stop; returns the exit code."""
    if arguments is None:  # it is this process's own program, not somebody's call
        begin_program()
    options = vars(_parser().parse_args(arguments))
    file = options.pop("config")
    try:
        config = load_config(MasterConfig, env_prefix=ENV_PREFIX, file=file, overrides=options)
        setup_logging(level=config.log_level, json=config.log_json)
    except CenoteError as error:
        print(f"cenote-master: {error}", file=sys.stderr)
        return exit_code_of(error)
    from .server import MasterServer  # takes a while to import: after errors in the flags

    server = MasterServer(config, version=_version())
    return run_daemon(server.start, server.stop, wait=server.wait)


if __name__ == "__main__":
    sys.exit(main())
