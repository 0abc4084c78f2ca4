"""`--watch SECONDS`: a listing again and again, until Ctrl-C."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated, Final

import typer

__all__ = ["Watch", "watched"]

Watch = Annotated[
    float | None,
    typer.Option(
        "--watch",
        min=0.1,
        max=3600,
        metavar="SECONDS",
        help="Again every so many seconds, until Ctrl-C; with --json one document a line.",
    ),
]
_CLEAR: Final = "\x1b[H\x1b[2J\x1b[3J"


def watched(
    watch: float | None,
    show: Callable[[], int | None],
    *,
    count: int | None = None,
    at_once: bool = True,
) -> int | None:
    """`show` once, or every `watch` seconds until Ctrl-C, which is no error then.

    A pool that can't be reached for a while is told, and asked again. `count`: so many times at
    most. `at_once`: not after the first `watch` seconds only.
    """
    from .interrupts import current_interrupts

    if watch is None:
        return show()
    try:
        if not at_once:
            time.sleep(watch)
        while count is None or count > 0:
            began_s = time.monotonic()
            _show_again(show, watch)
            if count is not None:
                count -= 1
                if not count:
                    break
            time.sleep(max(0.0, began_s + watch - time.monotonic()))
    except KeyboardInterrupt:
        interrupts = current_interrupts()
        interrupts.take()
        interrupts.told = True
    return 0


def _show_again(show: Callable[[], int | None], watch: float) -> None:
    from cenote.api.errors import DeadlineExceeded, NotLeader, Unavailable

    from .output import note

    if sys.stdout.isatty():
        what = " ".join(["cenote", *sys.argv[1:]])
        sys.stdout.write(f"{_CLEAR}{time.strftime('%H:%M:%S')}  every {watch:g} s: {what}\n")
    try:
        show()
    except (Unavailable, DeadlineExceeded, NotLeader) as error:
        note(f"cenote: {error}")
    sys.stdout.flush()
