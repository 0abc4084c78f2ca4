"""What happened when inside an engine: each step, each turn of a request's fetch. For `faults.py`.

Runs in vLLM's environment. Times are of the monotonic clock, which all processes of a host share,
so that those of the killer stand in the same line.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from cenote.connectors.vllm.fetches import Fetch, Phase
from cenote.connectors.vllm.mover import Mover
from cenote.connectors.vllm.worker import StoreWorker

EVENTS_MAX = 20_000
EVENTS: deque[tuple[float, str]] = deque(maxlen=EVENTS_MAX)


def note(what: str) -> None:
    EVENTS.append((time.monotonic(), what))


def take() -> list[tuple[float, str]]:
    """All events so far, which are forgotten."""
    found = list(EVENTS)
    EVENTS.clear()
    return found


def _wrap(owner: Any, name: str, tell: Callable[..., str | None]) -> None:
    """`tell(self, result, seconds, *arguments)`: what to note when the call has ended."""
    inner = getattr(owner, name)

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_s = time.monotonic()
        result: Any = None
        try:
            result = inner(self, *args, **kwargs)
            return result
        except BaseException as error:  # noted, and raised again
            result = error
            raise
        finally:
            told = tell(self, result, time.monotonic() - began_s, *args)
            if told:
                note(told)

    setattr(owner, name, noted)


def watch_fetches() -> None:
    def get(self: Any) -> Phase:
        found: Phase = self.__dict__["phase"]
        return found

    def set_(self: Any, phase: Phase) -> None:
        before = self.__dict__.get("phase")
        self.__dict__["phase"] = phase
        if before is not None and phase is not before:
            note(f"fetch {self.ticket}: {before.value} -> {phase.value}")

    Fetch.phase = property(get, set_)  # type: ignore[assignment,method-assign]
    _wrap(Fetch, "_end", lambda f, _r, _s, outcome: f"fetch {f.ticket}: {outcome.value}")


def watch_worker() -> None:
    inner = Mover.begin

    def begin(mover: Any, batch: Any, done: Callable[[Any], None]) -> None:
        began_s = time.monotonic()
        limit_s = batch.until_s - began_s

        def ended(answer: Any) -> None:
            hits = getattr(answer, "done", None)
            came = repr(answer)
            if hits is not None:
                came = f"{int(hits.sum())} of {len(hits)}, taking {1e3 * answer.took_s:.0f} ms"
            took_s = time.monotonic() - began_s
            note(f"{batch.what}: {came}; seen after {1e3 * took_s:.0f} of {1e3 * limit_s:.0f} ms")
            done(answer)

        inner(mover, batch, ended)

    Mover.begin = begin  # type: ignore[method-assign]
    _wrap(StoreWorker, "_load", lambda _w, _r, took_s, o: f"load {o.ticket}: {1e3 * took_s:.0f} ms")


def watch_core(core: Any) -> None:
    inner = core.step_fn
    idle = [0, 0.0]

    def step() -> Any:
        began_s = time.monotonic()
        outputs, executed = inner()
        took_s = time.monotonic() - began_s
        if executed or took_s > 0.02:
            note(f"step: {1e3 * took_s:.0f} ms, computed: {executed}; {idle[0]} empty before")
            idle[0] = 0
        else:
            idle[0] += 1
        return outputs, executed

    core.step_fn = step
    for name in ("add_request", "finish_requests"):
        bound = getattr(core.scheduler, name)

        def noted(*args: Any, bound: Any = bound, name: str = name, **kwargs: Any) -> Any:
            who = getattr(args[0], "request_id", args[0]) if args else ""
            note(f"{name} {str(who)[-12:]}")
            return bound(*args, **kwargs)

        setattr(core.scheduler, name, noted)


def watch(core: Any) -> None:
    """Begin."""
    watch_fetches()
    watch_worker()
    watch_core(core)
