"""What commands print: tables for people, JSON for scripts, progress for those who wait.

Results go to standard output, all else to standard error. Colours and bars appear on terminals
only, and not where NO_COLOR or TERM=dumb asks for none.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self, TextIO, final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

__all__ = [
    "Bar",
    "counted",
    "enum_name",
    "key_text",
    "note",
    "parse_key",
    "print_json",
    "print_pairs",
    "print_report",
    "print_table",
]

_PIPE_WIDTH: Final = 240  # nobody wraps a pipe; rich would at 80
_GAP: Final = 2  # between the columns of a table
_BAR_AFTER_S: Final = 1.0
_HEX: Final = "hex:"

Cell = str | int | float | None


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    width = None if stream.isatty() else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False, soft_wrap=False)


def print_json(value: object) -> None:
    """One JSON document."""
    json.dump(value, sys.stdout, indent=2 if sys.stdout.isatty() else None)
    sys.stdout.write("\n")


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    empty: str = "none",
    spare: Sequence[str] = (),
    wide: bool = False,
) -> None:
    """A table; numbers stand right. `empty` is said where there is no row.

    On a terminal that is too narrow for it, the columns `spare` are left out, the first of them
    first, and a note says so. `wide`: none is, and the terminal breaks the lines.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    listed = [list(row) for row in rows]
    if not listed:
        note(empty)
        return
    columns_width = [
        max(_width(name), *(_width(_shown(row[index])) for row in listed))
        for index, name in enumerate(columns)
    ]
    left_out: list[str] = []
    width = None
    if sys.stdout.isatty() and (wide or spare):
        if not wide:
            left_out = _left_out(columns, columns_width, spare, _console(sys.stdout).width)
        # Rather a line that the terminal breaks than a cell that is folded into several.
        width = _table_width(
            cells
            for cells, name in zip(columns_width, columns, strict=True)
            if name not in left_out
        )
    kept = [index for index, name in enumerate(columns) if name not in left_out]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, header_style="bold")
    for index in kept:
        numeric = any(isinstance(row[index], int | float) for row in listed) or _looks_numeric(
            [row[index] for row in listed]
        )
        table.add_column(columns[index], justify="right" if numeric else "left", overflow="fold")
    for row in listed:
        table.add_row(*(Text(_shown(row[index])) for index in kept))
    _print(table, width)
    if left_out:
        note(f"left out for lack of width: {', '.join(left_out)}; all of it: --wide")


def _shown(cell: Cell) -> str:
    return "-" if cell is None else str(cell)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _table_width(widths: Iterable[int]) -> int:
    listed = list(widths)
    return sum(listed) + _GAP * (len(listed) - 1) + 2  # a blank at either edge


def _left_out(
    columns: Sequence[str], widths: Sequence[int], spare: Sequence[str], width: int
) -> list[str]:
    """Which of the columns `spare` go so that the rest fits; in this order."""
    left = dict(zip(columns, widths, strict=True))
    out: list[str] = []
    for name in spare:
        if _table_width(left.values()) <= width:
            break
        del left[name]
        out.append(name)
    return out


def _looks_numeric(cells: Sequence[Cell]) -> bool:
    texts = [str(cell) for cell in cells if cell not in (None, "-")]
    return bool(texts) and all(text[:1].isdigit() and " " in text for text in texts)


def print_pairs(pairs: Iterable[tuple[str, Cell]], title: str = "") -> None:
    """A list of names and values."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, title_justify="left", title=title)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text("-" if value is None else str(value)))
    _print(table)


_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "bold red", "skipped": "dim"}


def print_report(rows: Iterable[tuple[str, str, str, str]]) -> None:
    """Lines of verdict, subject, text; below those that are not well, what would help."""
    from rich.text import Text

    listed = list(rows)
    subjects_width = max((_width(subject) for _, subject, _, _ in listed), default=0)
    console = _console(sys.stdout)
    plain = not sys.stdout.isatty()
    for verdict, subject, text, remedy in listed:
        head = f"{verdict:<7}  {subject}{' ' * (subjects_width - _width(subject))}  "
        lines = [Text(head, _STYLES.get(verdict, "")).append(text, "default")]
        if remedy and verdict != "ok":
            lines.append(Text(" " * len(head) + f"-> {remedy}"))
        for line in lines:
            if plain:
                sys.stdout.write(f"{line.plain}\n")
            else:
                console.print(line, soft_wrap=True)


def _print(table: Table, width: int | None = None) -> None:
    console = _console(sys.stdout)
    if width is not None:
        console.width = max(width, console.width)
    if sys.stdout.isatty():
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    lines = (line.rstrip() for line in captured.get().splitlines())
    sys.stdout.write("".join(f"{line}\n" for line in lines if line))


def counted(count: int, thing: str) -> str:
    """ "1 client", "2 clients"."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def note(text: str) -> None:
    """Something that is no result."""
    print(text, file=sys.stderr, flush=True)


@final
class Bar:
    """A progress bar on standard error, once the work has taken a second.

    with Bar("Replaying", total=1000, unit="requests") as bar:
        bar.update(10)
    """

    def __init__(self, what: str, *, total: int, unit: str = "") -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._began_s = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def update(self, done: int) -> None:
        """So much of the total is done."""
        if self._progress is None:
            if time.monotonic() - self._began_s < _BAR_AFTER_S or not sys.stderr.isatty():
                return
            self._start()
        assert self._progress is not None
        assert self._task is not None
        self._progress.update(self._task, completed=done)

    def _start(self) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        in_bytes = self._unit == "bytes"
        columns: list[Any] = [TextColumn("{task.description}"), BarColumn()]
        columns += [DownloadColumn(True), TransferSpeedColumn()] if in_bytes else []
        columns += [] if in_bytes else [MofNCompleteColumn(), TextColumn(self._unit)]
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=_console(sys.stderr), transient=True
        )
        self._task = self._progress.add_task(self._what, total=self._total)
        self._progress.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()


def enum_name(enum: Any, value: int, prefix: str) -> str:
    """A schema enum's value as people and scripts read it: "alive" for NODE_STATE_ALIVE."""
    try:
        return str(enum.Name(value)).removeprefix(prefix).lower()
    except ValueError:  # of a newer release
        return str(value)


# ---- keys ------------------------------------------------------------------------------------


def parse_key(text: str) -> bytes:
    """The key that a command line names: text, or `hex:0a1b...`. Raises InvalidArgument."""
    from cenote.api.errors import InvalidArgument
    from cenote.api.keys import encode_key

    if not text.startswith(_HEX):
        return encode_key(text)
    try:
        return encode_key(bytes.fromhex(text.removeprefix(_HEX)))
    except ValueError as error:
        raise InvalidArgument(
            f"the key {text!r} is no hex number", remedy="write hex: and an even number of digits"
        ) from error


def key_text(key: bytes) -> str:
    """`key` as `parse_key` takes it."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return _HEX + key.hex()
    return text if text.isprintable() and not text.startswith(_HEX) else _HEX + key.hex()
