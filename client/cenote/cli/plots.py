"""Curves over the capacity: as a PNG (matplotlib), or in the terminal (plotille).

Both come with `pip install 'cenote[plot]'`; nothing else of cenote needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cenote.api.errors import InvalidArgument

__all__ = ["Line", "draw", "save_png"]

_WIDTH_MAX: Final = 100
_HEIGHT: Final = 20
_REMEDY: Final = "pip install 'cenote[plot]'"


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    capacities: Sequence[float]
    """Objects, ascending."""
    hit_rates: Sequence[float]
    """Between 0 and 1."""

    @property
    def percent(self) -> list[float]:
        return [100 * rate for rate in self.hit_rates]


def save_png(path: Path, title: str, lines: Sequence[Line]) -> None:
    """Write a picture of the curves. Raises InvalidArgument where that can't be done."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidArgument("a PNG takes matplotlib, which is missing", remedy=_REMEDY) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for line in lines:
        axes.plot(line.capacities, line.percent, marker="o", markersize=3, label=line.label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set(title=title, xlabel="capacity, objects", ylabel="hit rate, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as error:
        raise InvalidArgument(f"can't write {path}: {error.strerror}") from error


def draw(title: str, lines: Sequence[Line], *, width: int) -> str:
    """The curves as text of at most `width` columns. Raises InvalidArgument without plotille."""
    from math import log2

    try:
        import plotille
    except ImportError as error:
        raise InvalidArgument("a plot takes plotille, which is missing", remedy=_REMEDY) from error
    figure: Any = plotille.Figure()
    figure.width = max(20, min(_WIDTH_MAX, width) - 30)
    figure.height = _HEIGHT
    figure.color_mode = "names"
    figure.with_colors = sys.stdout.isatty()
    figure.x_label, figure.y_label = "objects", "hit rate, %"
    figure.register_label_formatter(float, _label)
    top = max((max(line.percent) for line in lines), default=0.0)
    figure.set_y_limits(min_=0.0, max_=max(1.0, 1.05 * top))
    figure.x_ticks_fkt = lambda low, _: f"{2**low:,.0f}"
    figure.y_ticks_fkt = lambda low, _: f"{low:.1f}"
    for number, line in enumerate(lines, 1):
        # Without colours a digit tells the lines apart.
        marker = None if figure.with_colors else str(number % 10)
        label = line.label if marker is None else f"{marker} {line.label}"
        at = [log2(value) for value in line.capacities]
        figure.plot(at, line.percent, label=label, marker=marker)
    return f"{title}\n{figure.show(legend=True)}"


def _label(value: float, chars: int, **_: Any) -> str:
    return f"{value:{chars}.1f}"
