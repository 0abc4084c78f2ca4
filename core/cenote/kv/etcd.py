"""etcd as a `Kv`, through the client library etcd3. The only module that knows the library.

What the library does: channels, TLS, passwords, stubs, transactions as messages. What it does not:

- It does not load under protobuf 4 and later, whose runtime refuses its generated stubs. The same
  stubs, generated anew, come with etcd-sdk-python, and are put in their place before the import.
- It knows one endpoint. Here each endpoint has a client, one of them is in use, and a call that it
  does not answer goes on to the next within its own time, and every later call with it.
- It ignores `limit`, keeps no lease alive, and its watch ends with its connection. These calls use
  the library's stubs directly.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, Final, TypeVar, final

import grpc

from cenote.api.errors import CenoteError, ConfigError
from cenote.runtime.log import get_logger

from .calls import CALLS
from .etcd_options import EtcdOptions
from .etcd_watch import ConnectionClosed, EtcdWatch, unavailable
from .service import (
    Condition,
    Created,
    Delete,
    Get,
    KvCompacted,
    KvRefused,
    KvRow,
    KvUnavailable,
    Operation,
    Put,
    RangeReply,
    TxnReply,
)

__all__ = ["EtcdKv"]

T = TypeVar("T")

ATTEMPT_S_MAX: Final = 1.0
ATTEMPT_S_MIN: Final = 0.05
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),  # what a range returns is bounded by its limit
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),  # etcd hangs up on those who ask more often than each 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)
_FRAGMENT: Final = b"\x40\x01"
"""`fragment=True` of a watch, which the stubs do not know: else a watch that catches up is answered
with 1000 revisions at once, which may be 250 MB."""
_OLD_USERS: Final = ("revision of auth store is old", "auth: revision in header is old")
"""What etcd says to a login that is of before its users changed: 3.4, and 3.5 when it applies a
write."""
_TRY_ELSEWHERE: Final = frozenset(
    (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
)
_log = get_logger("cenote.kv.etcd")


def _import_etcd3() -> ModuleType:
    """The library, on stubs that today's protobuf takes."""
    if "etcd3" not in sys.modules:
        try:
            stubs = importlib.import_module("pyetcd.etcdrpc")
            sys.modules["etcd3.etcdrpc"] = stubs
            for name in ("rpc_pb2", "rpc_pb2_grpc", "kv_pb2", "auth_pb2"):
                full = f"pyetcd.etcdrpc.{name}"
                sys.modules[f"etcd3.etcdrpc.{name}"] = importlib.import_module(full)
        except ImportError as error:
            raise _not_installed(error) from error
    try:
        return importlib.import_module("etcd3")
    except ImportError as error:
        raise _not_installed(error) from error


def _not_installed(error: ImportError) -> ConfigError:
    return ConfigError(
        f"what is in etcd needs packages that are missing: {error}",
        remedy="pip install 'cenote[etcd]'",
    )


@final
class EtcdKv:
    """See `Kv`. Nothing is connected before the first call."""

    def __init__(self, options: EtcdOptions) -> None:
        """Raises ConfigError: packages, or files of certificates, that are missing."""
        self._etcd3: Any = _import_etcd3()
        self._rpc: Any = self._etcd3.etcdrpc
        self._options = options
        for path in (options.ca, options.cert, options.key):
            if path:
                _check_readable(path)
        self._lock = threading.Lock()
        self._clients: dict[int, Any] = {}
        self._watches: set[EtcdWatch] = set()
        self._current = 0
        """The endpoint in use."""
        self._closed = False

    # ---- one call, wherever it is answered --------------------------------------------------

    def _client(self, index: int, timeout_s: float) -> Any:
        """The library's client of an endpoint. Raises RpcError where it logs in, and can't."""
        with self._lock:
            if self._closed:
                raise ConnectionClosed
            client = self._clients.get(index)
        if client is not None:
            return client
        host, port = self._options.endpoints[index]
        options = self._options
        client = self._etcd3.client(
            host=f"[{host}]" if ":" in host else host,
            port=port,
            ca_cert=options.ca or None,
            cert_cert=options.cert or None,
            cert_key=options.key or None,
            user=options.user or None,
            password=options.password or None,
            timeout=timeout_s,
            grpc_options=_OPTIONS,
        )
        with self._lock:
            if not self._closed:
                return self._clients.setdefault(index, client)
        client.close()
        raise ConnectionClosed

    def _drop_client(self, index: int) -> None:
        with self._lock:
            client = self._clients.pop(index, None)
        if client is not None:
            client.close()

    def _move_on(self, failed: int) -> None:
        """Whoever calls next does not try this endpoint first."""
        with self._lock:
            if self._current == failed:
                self._current = (failed + 1) % len(self._options.endpoints)

    def _call(
        self, operation: str, what: str, run: Callable[[Any, float], T], timeout_s: float
    ) -> T:
        """`_try_each`, counted."""
        began_s = time.monotonic()
        try:
            found = self._try_each(what, run, timeout_s)
        except CenoteError:
            CALLS.failures[operation] += 1
            raise
        CALLS.seconds[operation].observe(time.monotonic() - began_s)
        return found

    def _try_each(self, what: str, run: Callable[[Any, float], T], timeout_s: float) -> T:
        """`run(client, timeout_s)` on one endpoint after the other until one answers.

        Raises KvUnavailable, KvRefused and KvCompacted.
        """
        end_s = time.monotonic() + timeout_s
        last: grpc.RpcError | None = None
        logged_in_again = False
        attempts = 0
        while True:
            rest_s = end_s - time.monotonic()
            if rest_s < ATTEMPT_S_MIN and attempts:
                raise unavailable(what, last) from last
            attempts += 1
            index = self._current
            attempt_s = rest_s if len(self._options.endpoints) == 1 else rest_s / 2
            attempt_s = max(min(attempt_s, ATTEMPT_S_MAX), ATTEMPT_S_MIN)
            try:
                return run(self._client(index, attempt_s), attempt_s)
            except ConnectionClosed:
                raise KvUnavailable(f"{what}: the connection to etcd is closed") from last
            except ValueError as error:  # gRPC's for a channel that another thread has closed
                raise KvUnavailable(f"{what}: {error}") from error
            except grpc.RpcError as error:
                last = error
                if not self._is_elsewhere(error):
                    if _is_login_over(error) and not logged_in_again:
                        logged_in_again = True
                        self._drop_client(index)
                        continue
                    raise _refused(what, error) from error
            except self._etcd3.Etcd3Exception as error:  # the library's own, from its log-in
                last = None
                raise KvUnavailable(f"{what}: etcd does not let us log in: {error!r}") from error
            self._move_on(index)
            CALLS.moves += 1
            # What refuses at once is not asked more often than this.
            self._pause(min(0.05, max(end_s - time.monotonic(), 0.0)))

    @staticmethod
    def _is_elsewhere(error: grpc.RpcError) -> bool:
        """Whether another endpoint, or the same one later, may answer."""
        code, details = error.code(), error.details() or ""
        return code in _TRY_ELSEWHERE or (
            code == grpc.StatusCode.RESOURCE_EXHAUSTED and "too many requests" in details
        )

    @staticmethod
    def _pause(seconds: float) -> None:
        time.sleep(seconds)

    @staticmethod
    def _auth(client: Any) -> dict[str, Any]:
        return {"credentials": client.call_credentials, "metadata": client.metadata}

    # ---- requests ---------------------------------------------------------------------------

    def range(
        self,
        key: bytes,
        end: bytes = b"",
        *,
        limit: int = 0,
        keys_only: bool = False,
        stale_ok: bool = False,
        timeout_s: float,
    ) -> RangeReply:
        """`stale_ok`: a member may answer from what it has, also where it has lost the others."""
        request = self._rpc.RangeRequest(
            key=key, range_end=end, limit=limit, keys_only=keys_only, serializable=stale_ok
        )
        reply = self._call(
            "range",
            "reading from etcd",
            lambda client, s: client.kvstub.Range(request, s, **self._auth(client)),
            timeout_s,
        )
        return RangeReply([_row(kv) for kv in reply.kvs], reply.header.revision, reply.more)

    def txn(
        self,
        conditions: Sequence[Condition],
        then: Sequence[Operation],
        otherwise: Sequence[Operation] = (),
        *,
        timeout_s: float,
    ) -> TxnReply:
        rpc = self._rpc
        request = rpc.TxnRequest(
            compare=[self._compare(condition) for condition in conditions],
            success=[self._operation(operation) for operation in then],
            failure=[self._operation(operation) for operation in otherwise],
        )
        reply = self._call(
            "txn",
            "writing to etcd",
            lambda client, s: client.kvstub.Txn(request, s, **self._auth(client)),
            timeout_s,
        )
        rows = [
            _row(r.response_range.kvs[0]) if r.response_range.kvs else None
            for r in reply.responses
            if r.WhichOneof("response") == "response_range"
        ]
        return TxnReply(reply.succeeded, reply.header.revision, rows)

    def _compare(self, condition: Condition) -> Any:
        compare = self._rpc.Compare
        if isinstance(condition, Created):
            return compare(
                result=compare.EQUAL,
                target=compare.CREATE,
                key=condition.key,
                create_revision=condition.revision,
            )
        return compare(
            result=compare.EQUAL,
            target=compare.MOD,
            key=condition.key,
            mod_revision=condition.revision,
        )

    def _operation(self, operation: Operation) -> Any:
        rpc = self._rpc
        if isinstance(operation, Put):
            put = rpc.PutRequest(key=operation.key, value=operation.value, lease=operation.lease)
            return rpc.RequestOp(request_put=put)
        if isinstance(operation, Delete):
            delete = rpc.DeleteRangeRequest(key=operation.key, range_end=operation.end)
            return rpc.RequestOp(request_delete_range=delete)
        assert isinstance(operation, Get)
        return rpc.RequestOp(request_range=rpc.RangeRequest(key=operation.key))

    def grant(self, ttl_s: int, *, timeout_s: float) -> int:
        request = self._rpc.LeaseGrantRequest(TTL=ttl_s)
        reply = self._call(
            "lease",
            "a lease in etcd",
            lambda client, s: client.leasestub.LeaseGrant(request, s, **self._auth(client)),
            timeout_s,
        )
        return int(reply.ID)

    def keep_alive(self, lease: int, *, timeout_s: float) -> bool:
        request = self._rpc.LeaseKeepAliveRequest(ID=lease)

        def run(client: Any, s: float) -> bool:
            stream = client.leasestub.LeaseKeepAlive(iter((request,)), s, **self._auth(client))
            # For a lease that has ended, the answer is no error but one of 0 seconds.
            return any(reply.TTL > 0 for reply in stream)

        return self._call("lease", "a lease in etcd", run, timeout_s)

    def revoke(self, lease: int, *, timeout_s: float) -> None:
        request = self._rpc.LeaseRevokeRequest(ID=lease)

        def run(client: Any, s: float) -> None:
            try:
                client.leasestub.LeaseRevoke(request, s, **self._auth(client))
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.NOT_FOUND:
                    raise

        self._call("lease", "a lease in etcd", run, timeout_s)

    def compact(self, revision: int, *, timeout_s: float) -> None:
        request = self._rpc.CompactionRequest(revision=revision)

        def run(client: Any, s: float) -> None:
            try:
                client.kvstub.Compact(request, s, **self._auth(client))
            except grpc.RpcError as error:
                if "has been compacted" not in (error.details() or ""):
                    raise

        self._call("compact", "compacting etcd", run, timeout_s)

    def size_bytes(self, *, timeout_s: float) -> int:
        request = self._rpc.StatusRequest()
        reply = self._call(
            "status",
            "the status of etcd",
            lambda client, s: client.maintenancestub.Status(request, s, **self._auth(client)),
            timeout_s,
        )
        return int(reply.dbSize)

    def watch(self, key: bytes, end: bytes, *, revision: int) -> EtcdWatch:
        rpc = self._rpc
        create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=revision)
        create.MergeFromString(_FRAGMENT)
        watch = EtcdWatch(self, rpc.WatchRequest(create_request=create))
        with self._lock:
            self._watches.add(watch)
        watch.start()
        return watch

    def watch_ended(self, watch: EtcdWatch) -> None:
        with self._lock:
            self._watches.discard(watch)

    def watch_stream(self, requests: Iterator[Any]) -> tuple[int, Any]:
        """(endpoint, the stream of answers). Raises RpcError, and `ConnectionClosed`."""
        index = self._current
        client = self._client(index, ATTEMPT_S_MAX)
        stub = self._rpc.WatchStub(client.channel)
        return index, stub.Watch(requests, **self._auth(client))

    def watch_failed(self, index: int, error: grpc.RpcError) -> None:
        """A watch of this endpoint ended."""
        if _is_login_over(error):
            self._drop_client(index)
        elif self._is_elsewhere(error):
            self._move_on(index)

    def distrust(self) -> None:
        """The endpoint in use seems to say less than there is: use another one."""
        self._move_on(self._current)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            clients, self._clients = list(self._clients.values()), {}
            watches = list(self._watches)
        for watch in watches:
            watch.close()
        for client in clients:
            client.close()


# ---- small things -----------------------------------------------------------------------------


def _is_login_over(error: grpc.RpcError) -> bool:
    """Tokens end after some minutes, and signed ones with each change of etcd's users."""
    details = error.details() or ""
    return error.code() == grpc.StatusCode.UNAUTHENTICATED or any(
        text in details for text in _OLD_USERS
    )


def _row(kv: Any) -> KvRow:
    return KvRow(kv.key, kv.value, kv.create_revision, kv.mod_revision)


def _refused(what: str, error: grpc.RpcError) -> KvRefused | KvCompacted:
    details = error.details() or error.code().name
    if "has been compacted" in details:
        return KvCompacted(f"{what}: {details}")
    return KvRefused(f"{what} was refused: {details}")


def _check_readable(path: str) -> None:
    try:
        with contextlib.closing(open(path, "rb")) as stream:
            stream.read(1)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror or error}") from error
