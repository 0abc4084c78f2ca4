"""`cenote-store`, also `python -m cenote.store`: contributes this machine's memory to a pool."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Any

from cenote.api.errors import CenoteError
from cenote.runtime.config import add_boolean_flag, help_of, load_config
from cenote.runtime.harness import begin_program, exit_code_of, run_daemon
from cenote.runtime.log import setup_logging

from .config import ENV_PREFIX, StoreConfig

__all__ = ["main"]


def _version() -> str:
    try:
        return importlib.metadata.version("cenote")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cenote-store",
        description="Contributes this machine's memory to a cenote pool.",
        epilog=f"Each flag is also a variable {ENV_PREFIX}NAME and a key of the --config file; "
        "flags win over variables, variables over the file. Sizes are written 64MiB, 1.5GiB.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"cenote-store {_version()}")
    parser.add_argument("--config", metavar="FILE", help="TOML file")
    for field in dataclasses.fields(StoreConfig):
        flags = ["--" + field.name.replace("_", "-")]
        if field.name == "metrics_listen":
            flags.append("--metrics")
        text = f"{help_of(StoreConfig, field.name)} {_shown_default(field)}".strip()
        if isinstance(field.default, bool):
            add_boolean_flag(parser, field.name, flags, text)
        else:
            text = text.replace("%", "%%")
            parser.add_argument(*flags, dest=field.name, metavar="VALUE", help=text)
    return parser


def _shown_default(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING or default in ("", False):
        return ""
    return f"[{','.join(default)}]" if isinstance(default, tuple) else f"[{default}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a store daemon until it is told to stop; returns the exit code."""
    if arguments is None:  # it is this process's own program, not somebody's call
        begin_program()
    options = vars(_parser().parse_args(arguments))
    file = options.pop("config")
    try:
        config = load_config(StoreConfig, env_prefix=ENV_PREFIX, file=file, overrides=options)
        setup_logging(level=config.log_level, json=config.log_json)
    except CenoteError as error:
        print(f"cenote-store: {error}", file=sys.stderr)
        return exit_code_of(error)
    from .daemon import StoreDaemon  # takes a while to import: after errors in the flags

    daemon = StoreDaemon(config, version=_version())
    return run_daemon(daemon.start, daemon.stop, wait=daemon.wait)


if __name__ == "__main__":
    sys.exit(main())
