"""A watch of etcd: a thread that reads its stream, and a bounded queue between it and `poll`.

It ends with its connection; who watches knows what is due next, and watches anew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Final, Protocol, final

import grpc

from .service import KvCompacted, KvEvent, KvUnavailable

__all__ = ["ConnectionClosed", "EtcdWatch", "WatchStreams", "unavailable"]

QUEUED_BYTES_MAX: Final = 8 << 20
"""Of keys and values: then etcd is not read from until `poll` has taken them."""
_EVENT_BYTES: Final = 200
"""What an event costs besides."""
CLOSE_TIMEOUT_S: Final = 2.0


class ConnectionClosed(Exception):
    """The connection was closed by ourselves."""


class WatchStreams(Protocol):
    """The connection, as a watch sees it."""

    def watch_stream(self, requests: Iterator[Any]) -> tuple[int, Any]:
        """(endpoint, the stream of answers). Raises RpcError and ConnectionClosed."""
        ...

    def watch_failed(self, index: int, error: grpc.RpcError) -> None:
        """A watch of this endpoint ended."""
        ...

    def watch_ended(self, watch: EtcdWatch) -> None:
        """However it ended."""
        ...

    def distrust(self) -> None:
        """See `Kv`."""
        ...


@final
class EtcdWatch:
    """See `Watch`. A thread reads what etcd sends; `poll` takes it."""

    def __init__(self, streams: WatchStreams, request: Any) -> None:
        self._streams = streams
        self._request = request
        self._changed = threading.Condition()
        self._events: deque[list[KvEvent]] = deque()
        self.queued_bytes = 0
        """What `poll` has not taken yet."""
        self._failure: KvUnavailable | KvCompacted | None = None
        self._woken = False
        self._closed = False
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name="cenote-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poll(self, timeout_s: float) -> list[KvEvent]:
        with self._changed:
            self._changed.wait_for(
                lambda: self._events or self._failure or self._woken or self._closed, timeout_s
            )
            self._woken = False
            if self._events:
                events = [event for batch in self._events for event in batch]
                self._events.clear()
                self.queued_bytes = 0
                self._changed.notify_all()
                return events
            if self._failure is not None:
                raise self._failure
            if self._closed:
                raise KvUnavailable("the watch is closed")
            return []

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            stream = self._stream
        if stream is not None:
            stream.cancel()
        if self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_S)

    # ---- the thread -------------------------------------------------------------------------

    def _requests(self) -> Iterator[Any]:
        """The one request; then the stream stays open until the watch is closed."""
        yield self._request
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._failure)

    def _run(self) -> None:
        failure: KvUnavailable | KvCompacted = KvUnavailable("etcd ended the watch")
        try:
            index, stream = self._streams.watch_stream(self._requests())
            with self._changed:
                self._stream = stream
                closed = self._closed
            if closed:
                stream.cancel()
            try:
                failure = self._read(stream) or failure
            except grpc.RpcError as error:
                failure = unavailable("watching etcd", error)
                if not self._closed:
                    self._streams.watch_failed(index, error)
            finally:
                stream.cancel()
        except (ConnectionClosed, ValueError):
            failure = KvUnavailable("the connection to etcd is closed")
        except Exception as error:  # logging in: the library's own, and whatever gRPC has
            failure = KvUnavailable(f"watching etcd: {error!r}")
            self._streams.distrust()
        finally:
            with self._changed:
                self._failure = failure
                self._changed.notify_all()
            self._streams.watch_ended(self)

    def _read(self, stream: Any) -> KvCompacted | KvUnavailable | None:
        for response in stream:
            if response.compact_revision:
                return KvCompacted(f"etcd keeps nothing before {response.compact_revision}")
            if response.canceled:
                return KvUnavailable(
                    f"etcd ended the watch: {response.cancel_reason or 'no reason'}"
                )
            events = [_event(event) for event in response.events]
            if events:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self.queued_bytes < QUEUED_BYTES_MAX or self._closed
                    )
                    if self._closed:
                        return None
                    self._events.append(events)
                    self.queued_bytes += sum(map(_size_bytes, events))
                    self._changed.notify_all()
        return None


def _size_bytes(event: KvEvent) -> int:
    return len(event.key) + len(event.value or b"") + _EVENT_BYTES


def _event(event: Any) -> KvEvent:
    kv = event.kv
    return KvEvent(kv.key, None if event.type else kv.value, kv.mod_revision)


def unavailable(what: str, error: grpc.RpcError | None) -> KvUnavailable:
    """What no answer comes to."""
    said = "no answer" if error is None else f"{error.details() or error.code().name}"
    return KvUnavailable(f"{what} failed: {said}")
