"""`cenote mrc`: the hit rate that more or less capacity, or another policy, would bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .options import MASTER_DEFAULT, AsJson, DeadlineS, GrpcAddress, MasterAddress
from .watching import Watch, watched

if TYPE_CHECKING:
    from cenote.v1 import admin_pb2

    from .connect import Admin

__all__ = ["mrc"]

_SHOWN: Final = ((0.25, "1/4"), (0.5, "half"), (1.0, "as it is"), (2.0, "twice"), (4.0, "4 times"))
_EVERYTHING: Final = "(all)"


def mrc(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Only this one.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the curves in the terminal.")] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves into a PNG file.")
    ] = None,
    master: MasterAddress = MASTER_DEFAULT,
    grpc: GrpcAddress = None,
    json: AsJson = False,
    watch: Watch = None,
    deadline: DeadlineS = 5.0,
) -> int | None:
    """Miss-ratio curves: what each namespace would hit if the pool were smaller or larger.

    From the use of some keys, lately; a read or a first put counts. For LRU; with `--policy auto`
    also what each policy would hit with the capacity as it is.
    """
    from .connect import open_admin

    with open_admin(master, grpc, deadline) as admin:
        return watched(watch, lambda: _show(admin, namespace, plot=plot, png=png, json=json))


def _show(admin: Admin, namespace: str | None, *, plot: bool, png: Path | None, json: bool) -> None:
    from cenote.api.errors import NamespaceNotFound

    from .output import note, print_json, print_pairs, print_table

    reply = admin.miss_ratios()
    curves = [curve for curve in reply.namespaces if namespace in (None, curve.namespace)]
    if namespace is None:
        curves.insert(0, reply.all)
    elif not curves:
        raise NamespaceNotFound(
            f"of namespace {namespace!r} nothing was sampled lately: few of its keys were used, or"
            " there is no such namespace",
            remedy="`cenote namespaces` lists them; `cenote mrc` shows the pool as a whole",
        )
    if json:
        print_json(_document(reply, curves))
    elif not reply.capacity_objects:
        note("nothing is known yet: too little is in the pool, or --no-sampling was said")
    else:
        print_pairs((name, value) for name, value in _pairs(reply) if value is not None)
        print_table(
            ["namespace", *(name for _, name in _SHOWN), "references"],
            [(curve.namespace or _EVERYTHING, *_cells(reply, curve)) for curve in curves],
        )
        if not any(curve.references for curve in curves):
            note(
                "nothing was read since the pool has had this capacity: curves begin anew when it"
                " changes, as with a drain"
            )
    if plot or png is not None:
        _plot(reply, curves, in_terminal=plot and not json, png=png)


def _pairs(reply: admin_pb2.GetMissRatioCurvesResponse) -> list[tuple[str, str | int | None]]:
    rates = sorted(reply.policies, key=lambda rate: -rate.hit_rate)
    wanted = reply.eviction_policy_wanted
    in_force = "" if wanted == reply.eviction_policy else f", {reply.eviction_policy} now"
    return [
        ("capacity", f"about {reply.capacity_objects:,} objects"),
        ("sampled", f"1 of {round(1 / reply.sampling_rate):,} keys"),
        ("dropped", f"{reply.references_dropped:,}" if reply.references_dropped else None),
        ("policy", wanted + in_force),
        ("would hit", ", ".join(f"{r.policy} {100 * r.hit_rate:.1f} %" for r in rates) or None),
    ]


def _cells(
    reply: admin_pb2.GetMissRatioCurvesResponse, curve: admin_pb2.MissRatioCurve
) -> list[str | int | None]:
    found = dict(zip(reply.capacity_factors, curve.hit_rates, strict=False))
    cells = [f"{100 * found[factor]:.1f} %" if factor in found else None for factor, _ in _SHOWN]
    return [*cells, curve.references]


def _document(
    reply: admin_pb2.GetMissRatioCurvesResponse, curves: list[admin_pb2.MissRatioCurve]
) -> dict[str, Any]:
    return {
        "capacity_objects": reply.capacity_objects,
        "sampling_rate": reply.sampling_rate,
        "references_dropped": reply.references_dropped,
        "policy": reply.eviction_policy_wanted,
        "policy_now": reply.eviction_policy,
        "policy_switches": reply.eviction_policy_switches,
        "policies": {rate.policy: rate.hit_rate for rate in reply.policies},
        "capacity_factors": list(reply.capacity_factors),
        "curves": [
            {
                "namespace": curve.namespace or None,
                "references": curve.references,
                "hit_rates": list(curve.hit_rates),
            }
            for curve in curves
        ],
    }


def _plot(
    reply: admin_pb2.GetMissRatioCurvesResponse,
    curves: list[admin_pb2.MissRatioCurve],
    *,
    in_terminal: bool,
    png: Path | None,
) -> None:
    from shutil import get_terminal_size

    from cenote.api.errors import InvalidArgument

    from .plots import Line, draw, save_png

    capacities = [max(1.0, factor * reply.capacity_objects) for factor in reply.capacity_factors]
    lines = [
        Line(curve.namespace or _EVERYTHING, capacities, list(curve.hit_rates))
        for curve in curves
        if curve.hit_rates
    ]
    if not lines:
        raise InvalidArgument("there is no curve to draw yet", remedy="use the pool for a while")
    title = "Hit rate by the pool's capacity (LRU)"
    if in_terminal:
        print(draw(title, lines, width=get_terminal_size().columns))
    if png is not None:
        save_png(png, title, lines)
