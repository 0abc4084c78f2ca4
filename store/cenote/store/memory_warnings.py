"""What is told of the memory that a daemon was given, and of what others keep.

Memory is kept for daemons that don't run; that is told once it is clear that they don't. After a
reboot, an upgrade or `cenote up --dir` the daemons of a host start side by side: which of them is
there first finds the memory of all others without a daemon.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from cenote.runtime.log import get_logger
from cenote.runtime.storage import is_memory
from cenote.runtime.units import format_size

from .node_files import NodeFiles, stale_nodes

__all__ = ["warn_of_disk", "warn_of_stale_memory", "warn_of_stale_memory_later"]

GRACE_S: Final = 10.0
"""Who starts with this one is there by then."""

_log = get_logger(__name__)


def warn_of_disk(directory: Path) -> None:
    """Where memory is to be taken from one."""
    if not is_memory(directory):
        _log.warning(
            "--dram-dir is on a disk, which every put will wait for: give a tmpfs or hugetlbfs",
            directory=directory,
        )


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
