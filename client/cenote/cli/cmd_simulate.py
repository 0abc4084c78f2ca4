"""`cenote simulate`: what a trace would hit, by policy and capacity, without a pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from .exits import EXIT_OK
from .options import AsJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .replay.trace import Trace

__all__ = ["simulate"]

_CAPACITIES_MAX: Final = 64
_ALL: Final = "all"


def simulate(
    trace: Annotated[Path, typer.Argument(metavar="TRACE.jsonl", help="One request a line.")],
    capacity: Annotated[
        str,
        typer.Option(
            metavar="N,N,...",
            help="Blocks that the cache holds; by default some from a 64th of the trace's to all.",
        ),
    ] = "",
    policy: Annotated[
        str, typer.Option(metavar="NAME,...", help="lru, arc, s3fifo, each also -chain; auto; all.")
    ] = _ALL,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many requests.")
    ] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw the curves in the terminal.")] = False,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves into a PNG file.")
    ] = None,
    json: AsJson = False,
) -> int:
    """Hit rates of eviction policies at some capacities, from a trace alone.

    The policies are the very code that a master evicts by. A request reads the longest prefix that
    is there, and puts the rest.
    """
    from .output import print_json, print_table
    from .replay.trace import load_trace

    names = _policies(policy)
    loaded = load_trace(trace, limit)
    capacities = _capacities(capacity, loaded.distinct_blocks)
    results = _run(loaded, names, capacities)
    if json:
        print_json({"trace": loaded.name, "blocks": len(loaded.block_ids), "results": results})
    else:
        by_place = {(row["policy"], row["capacity_blocks"]): row["hit_rate"] for row in results}
        print_table(
            ["policy", *(f"{blocks:,}" for blocks in capacities)],
            [
                (name, *(f"{100 * by_place[name, blocks]:.1f}" for blocks in capacities))
                for name in names
            ],
        )
    if plot or png is not None:
        _plot(loaded.name, results, names, in_terminal=plot and not json, png=png)
    return EXIT_OK


def _policies(text: str) -> list[str]:
    from cenote.api.errors import InvalidArgument
    from cenote.policy.names import AUTO, POLICIES

    known = [*POLICIES, AUTO]
    names = known if text == _ALL else [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise InvalidArgument(f"no policy {name!r}", remedy=f"one of {', '.join(known)}")
    if not names:
        raise InvalidArgument("no policy is named", remedy=f"one of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _capacities(text: str, distinct: int) -> list[int]:
    """Ascending. Raises InvalidArgument."""
    from cenote.api.errors import InvalidArgument

    if not text:
        return sorted({max(1, distinct >> shift) for shift in range(7)})
    parts = [part.strip().replace("_", "") for part in text.split(",") if part.strip()]
    if not parts or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InvalidArgument(f"--capacity {text!r} is no list of numbers", remedy="2000,10000")
    if len(parts) > _CAPACITIES_MAX:
        raise InvalidArgument(f"more than {_CAPACITIES_MAX} capacities")
    # Beyond what the trace has nothing is ever evicted.
    return sorted({min(int(part), 1 << 31) for part in parts})


def _run(trace: Trace, names: Sequence[str], capacities: Sequence[int]) -> list[dict[str, Any]]:
    import numpy as np

    from cenote.policy.model import spread
    from cenote.policy.simulation import simulate as simulate_policy

    from .output import Bar

    ids, blocks = np.unique(trace.block_ids, return_inverse=True)
    keys = spread(ids)
    requests = [blocks[a:b] for a, b in zip(trace.starts, trace.starts[1:], strict=False) if b > a]
    results = []
    with Bar("Simulating", total=len(names) * len(capacities), unit="runs") as bar:
        for name in names:
            for capacity in capacities:
                found = simulate_policy(requests, keys, name, min(capacity, len(ids)))
                results.append(
                    {
                        "policy": name,
                        "capacity_blocks": capacity,
                        "requests": len(trace),
                        "blocks": found.blocks,
                        "hit_blocks": found.hit_blocks,
                        "hit_rate": found.hit_rate,
                        "evicted_blocks": found.evicted_blocks,
                        "switches": found.switches,
                        "last_policy": found.last_policy,
                    }
                )
                bar.update(len(results))
    return results


def _plot(
    trace: str,
    results: Sequence[dict[str, Any]],
    names: Sequence[str],
    *,
    in_terminal: bool,
    png: Path | None,
) -> None:
    from shutil import get_terminal_size

    from .plots import Line, draw, save_png

    lines = []
    for name in names:
        rows = [row for row in results if row["policy"] == name]
        capacities = [row["capacity_blocks"] for row in rows]
        lines.append(Line(name, capacities, [row["hit_rate"] for row in rows]))
    title = f"Hit rate of {trace}"
    if in_terminal:
        print(draw(title, lines, width=get_terminal_size().columns))
    if png is not None:
        save_png(png, title, lines)
