"""`cenote demo`: a pool, a trace played through it, the result; and nothing left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

__all__ = ["SAMPLE", "demo"]

SAMPLE: Final = Path(__file__).parent / "samples" / "conversation.jsonl"
_NODES: Final = 2
_DRAM_BYTES_MAX: Final = 256 << 20
_DRAM_BYTES_MIN: Final = 24 << 20  # a long prompt of the sample has to fit
_DRAM_STEP_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 64 << 10


def demo(
    clients: Annotated[int, typer.Option(min=1, max=16, help="Processes that play.")] = 1,
) -> int:
    """Start a master and two store daemons, play a sample trace through them, stop everything.

    Takes less than a minute and up to 512 MiB of memory.
    """
    from .cmd_inspect import show_status
    from .cmd_replay import play_trace, verdict
    from .connect import open_admin
    from .interrupts import current_interrupts
    from .local_pool import PoolPlan, running_pool
    from .output import note
    from .replay.trace import load_trace
    from .replay_report import print_report

    trace = load_trace(SAMPLE)
    plan = PoolPlan(nodes=_NODES, dram_bytes=_affordable_bytes())
    interrupts = current_interrupts()
    note(f"Starting a master and {_NODES} store daemons of {plan.dram_bytes >> 20} MiB ...")
    with running_pool(plan, interrupts) as pool, open_admin(pool.lane, pool.grpc, 5.0) as admin:
        pool.wait_for_memory(admin)
        note(f"Playing {len(trace)} requests of a chat service, blocks of 64 KiB ...")
        report = play_trace(
            trace,
            pool.lane,
            admin,
            interrupts,
            print_report,
            block_bytes=_BLOCK_BYTES,
            clients=clients,
            speed_up=None,
            replicas=1,
            warm=False,
            transports=("shm", "tcp"),
            deadline_s=30.0,
        )
        if not report["interrupted"]:
            note("The pool now:")
            show_status(admin, as_json=False)
        note("Stopping everything ...")
    note("Done; nothing is left of it. Next: cenote up, cenote --help, README.md")
    return interrupts.exit_code if report["interrupted"] else verdict(report)


def _affordable_bytes() -> int:
    """Memory for each node: less where the machine (or a container's /dev/shm) has little."""
    from cenote.api.errors import ResourceUnavailable
    from cenote.runtime.units import format_size

    from .local_pool import memory_available_bytes

    available = memory_available_bytes()
    each = available * 3 // 4 // _NODES // _DRAM_STEP_BYTES * _DRAM_STEP_BYTES
    if each < _DRAM_BYTES_MIN:
        raise ResourceUnavailable(
            f"the demo needs {format_size(2 * _DRAM_BYTES_MIN)} in /dev/shm, of which"
            f" {format_size(available)} can be had",
            remedy="free memory, or give the container more (docker run --shm-size=1g)",
        )
    return min(each, _DRAM_BYTES_MAX)
