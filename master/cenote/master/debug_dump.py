"""What a master's process is doing, as plain values: for people who look for a bug.

No secret, no key and no byte of an object is in it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Final

from cenote.v1 import master_pb2

from .config import MasterConfig
from .config_values import config_values
from .front import Front

__all__ = ["debug_dump"]

_FRAMES_MAX: Final = 40
_TASKS_MAX: Final = 200


def debug_dump(front: Front, config: MasterConfig, *, version: str) -> dict[str, Any]:
    """Bounded in size, whatever the pool holds."""
    backend, backlog = front.backend, front.backend.backlog
    service = front.leading
    facts: dict[str, Any] = {
        "version": version,
        "python": sys.version,
        "platform": platform.platform(),
        "time_unix_s": time.time(),
        "uptime_s": time.monotonic() - front.started_s,
        "role": front.role,
        "config": {
            v.name: v.value
            for v in config_values(config, {} if service is None else service.state.overrides)
        },
        "metadata": {
            "backend": backend.name,
            "last_entry": backend.last_entry,
            "durable_entry": backend.durable_entry,
            "snapshot_entry": backend.snapshot_entry,
            "bytes_used": backend.bytes_used,
            "backlog": {"entries": backlog.entries, "age_s": backlog.age_s},
            "refusal": str(backend.refusal or ""),
        },
        "process": _process(),
        "threads": _threads(),
        "tasks": _tasks(),
        "gc": {
            "counts": gc.get_count(),
            "enabled": gc.isenabled(),
            "frozen": gc.get_freeze_count(),
        },
    }
    if service is not None:
        methods = master_pb2.MasterMethod
        facts["calls"] = {
            methods.Name(number): count
            for number, count in enumerate(service.calls)
            if count and number in methods.values()
        }
        facts["limits"] = {
            name: getattr(service.state.limits, name)
            for name in type(service.state.limits).__dataclass_fields__
            if name != "pool_id"
        }
        facts["state"] = service.state.facts(service.decider.clock.monotonic_s())
    return facts


def _process() -> dict[str, Any]:
    """Memory, descriptors, CPU time."""
    facts: dict[str, Any] = {"pid": os.getpid()}
    times = os.times()
    facts["cpu_user_s"], facts["cpu_system_s"] = times.user, times.system
    try:
        status = Path("/proc/self/status").read_text()
        facts["descriptors"] = len(os.listdir("/proc/self/fd"))
    except OSError as error:
        facts["error"] = str(error)
        return facts
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM", "VmSize", "RssShmem", "Threads"):
            facts[name] = value.strip()
    return facts


def _threads() -> dict[str, list[str]]:
    """Where each thread is just now."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        f"{names.get(ident, 'unknown')} ({ident})": [
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack(top)[-_FRAMES_MAX:]
        ]
        for ident, top in sys._current_frames().items()
    }


def _tasks() -> list[str]:
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop: called in process
        return []
    return sorted(
        f"{task.get_name()}: {getattr(task.get_coro(), '__qualname__', '?')}"
        for task in list(tasks)[:_TASKS_MAX]
    )
