"""Telling of memory that is kept for daemons that don't run, once it is clear that they don't.

After a reboot, an upgrade or `cenote up --dir` the daemons of a host start side by side: which of
them is there first finds the memory of all others without a daemon.
"""

from __future__ import annotations

import asyncio
from typing import Final

from cenote.runtime.log import get_logger
from cenote.runtime.units import format_size

from .node_files import NodeFiles, stale_nodes

__all__ = ["warn_of_stale_memory", "warn_of_stale_memory_later"]

GRACE_S: Final = 10.0
"""Who starts with this one is there by then."""

_log = get_logger(__name__)


def warn_of_stale_memory(files: NodeFiles) -> None:
    """Now: where memory is short, whatever holds some matters."""
    for stale in stale_nodes(files):
        _log.warning(
            "memory is kept for a store daemon that isn't running",
            node=stale.name,
            pid=stale.pid,
            size=format_size(stale.size_bytes),
            remove_with=stale.remove_command,
        )


async def warn_of_stale_memory_later(files: NodeFiles) -> None:
    """For a task, that may be cancelled."""
    await _let_others_start()
    await asyncio.to_thread(warn_of_stale_memory, files)


async def _let_others_start() -> None:
    await asyncio.sleep(GRACE_S)
