"""`cenote replay`: a trace of requests through a pool, every byte checked."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .exits import EXIT_ERROR, EXIT_OK
from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .connect import Admin
    from .interrupts import Interrupts
    from .local_pool import PoolPlan
    from .replay.trace import Trace
    from .replay_report import Evictions

__all__ = ["play_trace", "replay"]

SsdObjects = Annotated[
    int, typer.Option(min=0, metavar="N", help="With --pool: blocks that its SSDs can hold.")
]
SsdDirectory = Annotated[
    Path, typer.Option(metavar="DIR", help="With --pool: where the SSDs' files are made.")
]
SsdDailyWrites = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="With --pool: what each SSD may be written a day; the replay gets of it what the time"
        " of the trace brings.",
    ),
]
_LAST_QUESTION_S: Final = 0.3  # of the two seconds that Ctrl-C may take
_DAY_S: Final = 86_400.0


def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="One request a line.")],
    block_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes of a block's object.")
    ] = "64KiB",
    clients: Annotated[int, typer.Option(min=1, max=256, help="Processes that play.")] = 1,
    speed_up: Annotated[
        float | None,
        typer.Option(min=1e-6, metavar="X", help="X times as fast as recorded, not at full speed."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many requests.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=8, help="Copies of each block.")] = 1,
    warm: Annotated[bool, typer.Option("--warm", help="Keep what an earlier replay left.")] = False,
    pool: Annotated[
        bool, typer.Option("--pool", help="Start a pool for this replay alone, and stop it.")
    ] = False,
    capacity_objects: Annotated[
        int, typer.Option(min=1, metavar="N", help="With --pool: blocks that it can hold.")
    ] = 10_000,
    ssd_objects: SsdObjects = 0,
    ssd_dir: SsdDirectory = Path("/var/tmp"),
    ssd_daily_writes: SsdDailyWrites = "",
    nodes: Annotated[int, typer.Option(min=1, max=64, help="With --pool: store daemons.")] = 2,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="With --pool: of eviction; see `cenote simulate`.")
    ] = "",
    transport: Annotated[
        str, typer.Option(metavar="LIST", help="In order of preference: shm,rdma,tcp.")
    ] = "shm,rdma,tcp",
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    deadline: DeadlineS = 30.0,
) -> int:
    """Play a request trace through a pool: match, get the hit prefix, put the rest.

    Bytes follow from the block's id and are checked on every read. The exit code is 1 where a call
    failed or a byte was wrong.
    """
    from cenote.runtime.units import parse_positive_size_bytes, parse_size_bytes

    from .interrupts import current_interrupts
    from .output import print_json
    from .replay.trace import load_trace
    from .replay_report import print_report

    _check_options(pool, ssd_objects, ssd_daily_writes, policy)
    interrupts = current_interrupts()
    interrupts.last_words = "nothing was played"
    block_bytes = parse_positive_size_bytes(block_size, "--block-size")
    loaded = load_trace(trace, limit)
    settings: dict[str, Any] = {
        "block_bytes": block_bytes,
        "clients": clients,
        "speed_up": speed_up,
        "replicas": replicas,
        "warm": warm,
        "transports": tuple(part.strip() for part in transport.split(",") if part.strip()),
        "deadline_s": deadline,
    }
    plan = None
    if pool:
        ssd = (ssd_dir, ssd_objects * replicas) if ssd_objects else None
        plan = _plan(block_bytes, capacity_objects, nodes, replicas, ssd, policy)
        if ssd and ssd_daily_writes:
            budget = replay_budget(parse_size_bytes(ssd_daily_writes), loaded.duration_s)
            plan = replace(plan, store_flags=(*plan.store_flags, ("ssd-daily-writes", budget)))
    show = print_json if json else print_report
    with _where(plan, master, grpc, deadline, interrupts) as (lane, admin):
        report = play_trace(loaded, lane, admin, interrupts, show, **settings)
    return interrupts.exit_code if report["interrupted"] else verdict(report)


def _check_options(pool: bool, ssd_objects: int, ssd_daily_writes: str, policy: str) -> None:
    """Raises InvalidArgument for what would be ignored."""
    from cenote.api.errors import InvalidArgument

    given = {"ssd-objects": ssd_objects, "ssd-daily-writes": ssd_daily_writes, "policy": policy}
    for name, value in given.items():
        if value and not pool:
            raise InvalidArgument(
                f"--{name} is for a pool that is started for this replay", remedy="give --pool, too"
            )
    if ssd_daily_writes and not ssd_objects:
        raise InvalidArgument("--ssd-daily-writes without SSDs", remedy="give --ssd-objects, too")


def verdict(report: dict[str, Any]) -> int:
    """The exit code for a report; says on standard error what was wrong."""
    from .output import note

    for example in report["error_examples"]:
        note(f"cenote: {example}")
    if report["gave_up_clients"]:
        note("cenote: given up, since one request after the other failed")
    if report["wrong_bytes"]:
        note(f"cenote: {report['wrong_bytes']} bytes were not those that were put")
    return EXIT_ERROR if report["errors"] or report["wrong_bytes"] else EXIT_OK


def replay_budget(daily_bytes: int, trace_s: float) -> int:
    """The daily budget to play a trace with that took so long, at whatever speed: its burst, which
    is all that can be spent in a short time, is what a device is given while the trace goes on."""
    from cenote.policy.endurance import BURST_SHARE

    return int(daily_bytes * min(1.0, trace_s / _DAY_S) / BURST_SHARE)


def _plan(
    block_bytes: int,
    capacity_objects: int,
    nodes: int,
    replicas: int,
    ssd: tuple[Path, int] | None,
    policy: str,
) -> PoolPlan:
    from .local_pool import PoolPlan
    from .sizing import dram_bytes_per_node, ssd_bytes_per_node

    return PoolPlan(
        nodes=nodes,
        dram_bytes=dram_bytes_per_node(capacity_objects * replicas, block_bytes, nodes),
        distinct_domains=replicas > 1,
        ssd_directory=None if ssd is None else ssd[0],
        ssd_object_bytes=max(block_bytes, 4096),
        ssd_bytes=0 if ssd is None else ssd_bytes_per_node(ssd[1], block_bytes, nodes),
        master_flags=(("policy", policy),) if policy else (),
    )


@contextmanager
def _where(
    plan: PoolPlan | None,
    master: str,
    grpc: str | None,
    deadline_s: float,
    interrupts: Interrupts,
) -> Iterator[tuple[str, Admin]]:
    """(address of the lane, administration) of the pool to play on."""
    from .connect import open_admin
    from .local_pool import running_pool

    if plan is None:
        with open_admin(master, grpc, deadline_s) as admin:
            yield master, admin
        return
    with (
        running_pool(plan, interrupts) as local,
        open_admin(local.lane, local.grpc, deadline_s) as admin,
    ):
        local.wait_for_memory(admin)
        yield local.lane, admin


def play_trace(
    trace: Trace,
    lane: str,
    admin: Admin,
    interrupts: Interrupts,
    show: Callable[[dict[str, Any]], None],
    *,
    block_bytes: int,
    clients: int,
    speed_up: float | None,
    replicas: int,
    warm: bool,
    transports: tuple[str, ...],
    deadline_s: float,
) -> dict[str, Any]:
    """Play a loaded trace, showing progress; the report, which was given to `show`.

    Until the first request is dealt a signal raises KeyboardInterrupt; from then on it only ends
    the play, and the report is shown. Raises CenoteError.
    """
    from cenote.api.errors import NamespaceNotFound
    from cenote.runtime.units import format_size

    from .output import Bar, note
    from .replay.fleet import Fleet
    from .replay.worker import Job
    from .replay_report import report_of

    size_text = format_size(block_bytes).replace(" ", "")
    job = Job(
        master=lane,
        namespace=f"replay-{trace.name}-{size_text}",
        fingerprint=f"cenote replay 1, blocks of {block_bytes} bytes",
        trace=trace,
        block_bytes=block_bytes,
        replicas=replicas,
        deadline_s=deadline_s,
        transports=transports,
    )
    if not warm:
        with contextlib.suppress(NamespaceNotFound):  # the first replay of this trace here
            admin.reset_namespace(job.namespace)
    before = admin.status()
    with Fleet(job, clients) as fleet:
        fleet.start()
        interrupts.check()
        with interrupts.holding():
            interrupts.last_words = "without its report, since told again and again"
            with Bar("Replaying", total=len(trace), unit="requests") as bar:
                outcome = fleet.play(speed_up, bar.update, lambda: interrupts.number != 0)
            fleet.close()
            evictions = _evictions_since(before, admin, interrupts)
            report = report_of(trace, outcome, evictions, block_bytes=block_bytes, clients=clients)
            report["policy"] = before.eviction_policy_wanted
            show(report)
            sys.stdout.flush()
            if outcome.unheard_clients:
                note(
                    f"cenote: {outcome.unheard_clients} of {clients} clients did not tell in time"
                    " what they had done: the report lacks it"
                )
            interrupts.told = report["interrupted"]
            interrupts.last_words = ""
    return report


def _evictions_since(
    before: admin_pb2.GetStatusResponse, admin: Admin, interrupts: Interrupts
) -> Evictions:
    """Unknown where the master is slow to answer after a signal, or one comes while it is asked."""
    from cenote.api.errors import CenoteError

    from .replay_report import Evictions

    try:
        with interrupts.raising():
            after = admin.status(deadline_s=_LAST_QUESTION_S if interrupts.number else None)
    except (KeyboardInterrupt, CenoteError):
        if not interrupts.number:
            raise
        return Evictions(None, None)
    from cenote.policy.endurance import BURST_SHARE

    return Evictions(
        after.evicted_objects - before.evicted_objects,
        after.evicted_bytes - before.evicted_bytes,
        after.demoted_objects - before.demoted_objects,
        after.demoted_bytes - before.demoted_bytes,
        after.promoted_objects - before.promoted_objects,
        int(after.ssd_write_budget_bytes * BURST_SHARE),
        after.ssd_written_day_bytes - before.ssd_written_day_bytes,
    )
