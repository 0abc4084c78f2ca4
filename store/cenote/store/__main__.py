"""`cenote-store`, also `python -m cenote.store`: contributes this machine's memory to a pool."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cenote.runtime.program import Daemon, Program

from .config import ENV_PREFIX, StoreConfig

__all__ = ["PROGRAM", "main"]


def _make(config: StoreConfig, version: str) -> Daemon:
    from .daemon import StoreDaemon  # takes a while to import

    return StoreDaemon(config, version=version)


PROGRAM = Program(
    "cenote-store",
    "Contributes this machine's memory to a cenote pool.",
    StoreConfig,
    ENV_PREFIX,
    "Sizes are written 64MiB, 1.5GiB.",
    _make,
    aliases={"metrics_listen": "--metrics"},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a store daemon until it is told to stop; returns the exit code."""
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
