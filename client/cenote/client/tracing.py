"""OpenTelemetry spans for the SDK's calls: one a call, where `tracing=True`, and no cost elsewhere.

A span is named after its call (`cenote.get`, `cenote.put_batch` ...; of kind CLIENT) and lasts as
long. It is a child of the span that its thread or task is in, so that a request of an engine shows
what it waited for. Attributes: `cenote.namespace`, `cenote.session` and `cenote.deadline_s`; of
batches `cenote.keys`, and `cenote.hits` or `cenote.stored`. One that raises has the error's class
in `error.type`, and its status is ERROR.

Only `opentelemetry-api` is needed here. Where the program sets up no SDK of OpenTelemetry, spans go
nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, final

from cenote.api.errors import CenoteError, ConfigError

from .aio import AsyncDriver
from .driver import BlockingDriver
from .plan.counters import CALL_KINDS
from .plan.state import Call
from .plan.steps import Plan
from .results import GetResults, PutResults
from .session import Session

__all__ = ["CallTracer", "TracedAsyncDriver", "TracedDriver"]

T = TypeVar("T")

_NAMES: Final = tuple(f"cenote.{name}" for name in CALL_KINDS)


@final
class CallTracer:
    """Makes the spans of one session. Raises ConfigError without OpenTelemetry."""

    def __init__(self, session: Session) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise ConfigError(
                f"tracing needs OpenTelemetry: {error}", remedy="pip install 'cenote[otel]'"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("cenote.client")
        self._session = session

    def _attributes(self, call: Call) -> dict[str, Any]:
        return {
            "cenote.namespace": call.space.name,
            "cenote.session": self._session.identity.session_id.hex(),
            "cenote.deadline_s": call.deadline_s,
        }

    @contextmanager
    def span(self, call: Call) -> Iterator[Any]:
        """Around one call."""
        trace = self._trace
        with self._tracer.start_as_current_span(
            _NAMES[call.kind],
            kind=trace.SpanKind.CLIENT,
            attributes=self._attributes(call),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except BaseException as error:  # whatever it is, the span says so
                name = error.reason if isinstance(error, CenoteError) else type(error).__name__
                span.set_attribute("error.type", name)
                span.set_status(trace.StatusCode.ERROR, str(error))
                raise

    def note_result(self, span: Any, result: object) -> None:
        """What came of a batch."""
        if isinstance(result, GetResults):
            span.set_attribute("cenote.keys", len(result))
            span.set_attribute("cenote.hits", result.hit_count)
        elif isinstance(result, PutResults):
            span.set_attribute("cenote.keys", len(result))
            span.set_attribute("cenote.stored", result.stored_count)
        elif isinstance(result, list):
            span.set_attribute("cenote.keys", len(result))
            span.set_attribute("cenote.hits", sum(value is not None for value in result))

    def note_cached(self, call: Call, began_ns: int, size: int) -> None:
        """A read that took one round trip, since the location was cached."""
        span = self._tracer.start_span(
            _NAMES[call.kind],
            kind=self._trace.SpanKind.CLIENT,
            attributes=self._attributes(call) | {"cenote.cached": True, "cenote.bytes": size},
            start_time=began_ns,
        )
        span.end()


class TracedDriver(BlockingDriver):
    """A `BlockingDriver` whose calls have spans."""

    def __init__(self, session: Session, tracer: CallTracer) -> None:
        super().__init__(session)
        self._tracer = tracer

    def run(self, call: Call, plan: Plan[T]) -> T:
        with self._tracer.span(call) as span:
            result = super().run(call, plan)
            self._tracer.note_result(span, result)
            return result

    def read_cached(self, call: Call, digest: bytes, row: bytes, address: int, length: int) -> int:
        began_ns = time.time_ns()
        size = super().read_cached(call, digest, row, address, length)
        if size:
            self._tracer.note_cached(call, began_ns, size)
        return size


class TracedAsyncDriver(AsyncDriver):
    """An `AsyncDriver` whose calls have spans."""

    def __init__(self, session: Session, tracer: CallTracer) -> None:
        super().__init__(session)
        self._tracer = tracer

    async def run(self, call: Call, plan: Plan[T]) -> T:
        with self._tracer.span(call) as span:
            result = await super().run(call, plan)
            self._tracer.note_result(span, result)
            return result

    async def read_cached(
        self, call: Call, digest: bytes, row: bytes, address: int, length: int
    ) -> int:
        began_ns = time.time_ns()
        size = await super().read_cached(call, digest, row, address, length)
        if size:
            self._tracer.note_cached(call, began_ns, size)
        return size
