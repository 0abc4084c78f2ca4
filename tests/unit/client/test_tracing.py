"""Spans of calls: one each, with what came of it, and nothing where they are not asked for."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator

import pytest

from cenote.api.errors import ConfigError, InvalidBuffer
from cenote.client import Client
from cenote.client.aio import AsyncClient
from fake_pool import FakeMaster, FakeTransport

trace = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")

from opentelemetry import trace as api  # noqa: E402
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)

MakeClient = Callable[..., Client]
_EXPORTER = InMemorySpanExporter()


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """What was traced. A process has one provider, for good."""
    if not isinstance(api.get_tracer_provider(), TracerProvider):
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_EXPORTER))
        api.set_tracer_provider(provider)
    _EXPORTER.clear()
    yield _EXPORTER
    _EXPORTER.clear()


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_each_call_has_a_span_below_the_programs_own(
    make_client: MakeClient, exporter: InMemorySpanExporter
) -> None:
    client = make_client(tracing=True, namespace="llama")
    tracer = api.get_tracer("the engine")
    with tracer.start_as_current_span("request") as request:
        client.put("a", b"x")
        client.put_batch(["b", "c"], [b"y", b"z"]).raise_for_errors()
        client.get_batch(["a", "none"])
        client.exists("a")
    found = named(exporter)
    assert list(found) == [
        "cenote.put", "cenote.put_batch", "cenote.get_batch", "cenote.exists", "request",
    ]  # fmt: skip
    for name, span in found.items():
        if name != "request":
            assert span.parent is not None
            assert span.parent.span_id == request.get_span_context().span_id
            assert span.kind is api.SpanKind.CLIENT
            assert attributes_of(span)["cenote.namespace"] == "llama"
    assert attributes_of(found["cenote.put_batch"])["cenote.stored"] == 2
    got = attributes_of(found["cenote.get_batch"])
    assert (got["cenote.keys"], got["cenote.hits"]) == (2, 1)


def test_reads_from_cached_locations_have_spans_too(
    make_client: MakeClient, exporter: InMemorySpanExporter
) -> None:
    client = make_client(tracing=True)
    client.put("a", b"x" * 10)
    client.get("a")
    exporter.clear()
    client.get("a")
    (span,) = exporter.get_finished_spans()
    assert span.name == "cenote.get"
    assert attributes_of(span)["cenote.cached"] is True
    assert attributes_of(span)["cenote.bytes"] == 10


def test_an_error_is_in_its_span(make_client: MakeClient, exporter: InMemorySpanExporter) -> None:
    client = make_client(tracing=True)
    client.put("a", b"x" * 10)
    with pytest.raises(InvalidBuffer):
        client.get_into("a", bytearray(1))
    span = named(exporter)["cenote.get"]
    assert attributes_of(span)["error.type"] == "InvalidBuffer"
    assert span.status.status_code is api.StatusCode.ERROR


def test_coroutines_have_spans(master: FakeMaster, exporter: InMemorySpanExporter) -> None:
    async def work() -> None:
        client = await AsyncClient.embedded(master, [FakeTransport(master.nodes)], tracing=True)
        async with client:
            await client.put("a", b"x")
            assert await client.get("a") == b"x"
            assert await client.get("a") == b"x"

    asyncio.run(work())
    names = [span.name for span in exporter.get_finished_spans()]
    assert names == ["cenote.put", "cenote.get", "cenote.get"]


def test_without_it_nothing_is_traced(
    make_client: MakeClient, exporter: InMemorySpanExporter
) -> None:
    client = make_client()
    client.put("a", b"x")
    assert client.get("a") == b"x"
    assert exporter.get_finished_spans() == ()


def test_without_opentelemetry_it_says_what_to_install(
    make_client: MakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"pip install 'cenote\[otel\]'"):
        make_client(tracing=True)
    make_client().close()
