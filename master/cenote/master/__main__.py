"""`cenote-master`, also `python -m cenote.master`: the metadata service of a pool."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cenote.runtime.program import Daemon, Program

from .config import ENV_PREFIX, MasterConfig

__all__ = ["PROGRAM", "main"]


def _make(config: MasterConfig, version: str) -> Daemon:
    from .server import MasterServer  # takes a while to import

    return MasterServer(config, version=version)


PROGRAM = Program(
    "cenote-master",
    "The metadata service of a cenote pool.",
    MasterConfig,
    ENV_PREFIX,
    "Durations are written 250ms, 10s, 1h.",
    _make,
    aliases={"listen": "--lane", "metrics_listen": "--metrics"},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a master until it is told to stop; returns the exit code."""
    return PROGRAM.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
