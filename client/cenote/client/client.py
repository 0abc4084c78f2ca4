"""`Client`: a program's way into the pool."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self, TypedDict, Unpack, cast

from cenote.api.errors import InvalidArgument, InvalidBuffer, ResourceUnavailable
from cenote.api.master import MasterApi
from cenote.api.types import ClientStats, PeerPath
from cenote.runtime.log import get_logger
from cenote.transport.base import Region, Transport
from cenote.transport.gil import RELEASES
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .buffers import AnyBuffer, Buffer, readable_memory
from .config import ClientConfig, make_config
from .device_buffers import DeviceMemory
from .namespace import Namespace
from .plan.space import Space
from .reaching import reach_masters
from .registering import Registration, RegistrationCache, register_everywhere
from .session import Session
from .survey import survey
from .transports import make_transports

__all__ = ["Client", "ClientKeywords", "Registration"]

_SUMMED: Final = (
    "hits",
    "ssd_hits",
    "misses",
    "unreachable_misses",
    "stored",
    "existed",
    "failed",
    "read_bytes",
    "written_bytes",
    "cached_reads",
    "stale_locations",
    "misreads",
)
"""Counted by namespace."""
_log = get_logger(__name__)


class ClientKeywords(TypedDict, total=False):
    """Options of a client; the others come from `CENOTE_CLIENT_*` variables, then defaults."""

    namespace: str
    fingerprint: bytes | str
    name: str
    deadline_s: float
    transports: Sequence[str]
    rdma_devices: Sequence[str]
    rdma_gid_index: int
    verbs: Literal["auto", "ibverbs", "pyverbs"]
    verify: Literal["auto", "lease", "checksum"]
    replicas: int
    min_replicas: int
    durability: Literal["default", "relaxed", "journaled"]
    local_first: bool
    tenant: str
    token: str
    token_file: str
    tls_ca: str
    tls_cert: str
    tls_key: str
    tls_server_name: str
    etcd_ca: str
    etcd_cert: str
    etcd_key: str
    etcd_user: str
    etcd_password: str
    location_cache_entries: int
    device_staging_bytes: int
    transfer_threads: int
    metrics_listen: str
    tracing: bool
    gives_way: bool


class Client(Namespace):
    """A connection to a cenote pool; its own calls work in its default namespace.

        with Client("127.0.0.1:5110", namespace="llama", fingerprint=b"bf16;block=16") as client:
            client.put("key", b"bytes")
            client.get("key")

    `addresses`: one or several masters, `host:port` or `unix:///path`, or the etcd that they are
    registered in, `etcd://host:2379,host:2379/prefix`. Options are those of `ClientConfig`.
    Connects at once: raises Unavailable or DeadlineExceeded where no master answers within
    `deadline_s`, FingerprintMismatch, Unauthenticated, ConfigError.

    Safe from several threads; not after `os.fork()` (ForkedClient). `close` it, or use `with`.
    """

    def __init__(
        self, addresses: str | Sequence[str] | None = None, **options: Unpack[ClientKeywords]
    ) -> None:
        config, fingerprint = _configure(addresses, options)
        tls = config.tls()
        self._start(
            config,
            fingerprint,
            lambda hello, greeted: reach_masters(config, hello, greeted, tls),
            make_transports(config, tls),
        )

    @classmethod
    def embedded(
        cls,
        master: MasterApi,
        over: Sequence[Transport],
        **options: Unpack[ClientKeywords],
    ) -> Self:
        """A client of a master in this process, over given transports (tests, embedded use)."""
        config, fingerprint = _configure(None, options)
        client = cls.__new__(cls)
        client._start(config, fingerprint, lambda hello, greeted: master, over)
        return client

    def _start(
        self,
        config: ClientConfig,
        fingerprint: bytes,
        make_master: Callable[[pb.HelloRequest, Callable[[pb.HelloResponse], None]], MasterApi],
        transports: Sequence[Transport],
    ) -> None:
        until_s = time.monotonic() + config.deadline_s
        if config.gives_way:
            RELEASES.give_way()
        session = Session(config, make_master, transports)
        self._transports = list(transports)
        self._registrations: list[Registration] = []
        for transport in transports:
            if transport.kind == common_pb2.TRANSPORT_KIND_RDMA:
                session.cache = RegistrationCache(transport)
        try:
            session.open(max(0.001, until_s - time.monotonic()))
            left_s = max(0.001, until_s - time.monotonic())
            if config.namespace:
                space = session.open_space(config.namespace, fingerprint, left_s)
            else:
                space = Space.nameless()
            super().__init__(session, space)
            if config.metrics_listen:
                from .metrics import serve_once  # prometheus_client, for those who want it

                serve_once(config.metrics_listen)
            session.housekeeper.watch(self)
            session.housekeeper.start()
        except BaseException:  # whatever it was, no session may stay open
            session.close()
            raise

    @property
    def session(self) -> Session:
        """What this client's faces share; for drivers, not for users."""
        return self._session

    @property
    def config(self) -> ClientConfig:
        return self._session.config

    def namespace(
        self,
        name: str,
        *,
        fingerprint: bytes | str = b"",
        deadline_s: float | None = None,
    ) -> Namespace:
        """Another namespace over the same connections; created if it does not exist.

        `fingerprint`: what its bytes depend on (model, dtype, block size, hash ...). Raises
        FingerprintMismatch where it exists with another one.
        """
        call = self._calls.begin(deadline_s)
        if not name:
            raise InvalidArgument("a namespace has a name")
        space = self._session.open_space(name, _as_bytes(fingerprint), call.remaining_s())
        return Namespace(self._session, space)

    # ---- memory ------------------------------------------------------------------------------

    def alloc(self, size_bytes: int) -> Buffer:
        """Memory that every local transport uses without a copy: page aligned, populated, and
        registered until the client is closed. Raises ResourceUnavailable."""
        self._session.check()
        buffer = Buffer(size_bytes)
        self._registrations.append(self._register(buffer.address, size_bytes, buffer))
        return buffer

    def register(self, buffer: AnyBuffer) -> Registration:
        """Make memory of yours known to every transport, once, instead of at each transfer.

        Optional for shm and TCP; the buffer is kept alive until `deregister` or `close`. What lies
        on a GPU may then be named by `addresses=`, too, and is read into by NICs that can, without
        a copy (`Registration.is_direct`); else it is staged. Raises InvalidBuffer, and
        ResourceUnavailable where this process can't reach a GPU.
        """
        self._session.check()
        address, length, keeper = readable_memory(buffer)
        if isinstance(keeper, DeviceMemory):
            registration = self._register_device(keeper)
        else:
            registration = self._register(address, length, keeper)
        self._registrations.append(registration)
        return registration

    def _register_device(self, memory: DeviceMemory) -> Registration:
        staging = self._session.staging
        # In any case: what can't go directly is staged.
        bus_address = staging.copies.bus_address(memory.device)
        parts: list[tuple[Transport, Region]] = []
        for transport in self._transports:
            register = getattr(transport, "register_device", None)
            if register is None:
                continue
            try:
                region = register(memory.address, memory.length, memory, bus_address=bus_address)
                parts.append((transport, region))
            except (ResourceUnavailable, InvalidBuffer) as error:
                _log.warning(
                    "memory of a GPU is staged", size_bytes=memory.length, why=error.message
                )
        forget = staging.add(memory.address, memory.length, memory.device, direct=bool(parts))
        return Registration(parts, forget)

    def _register(self, address: int, length: int, keeper: object) -> Registration:
        return register_everywhere(self._transports, address, length, keeper)

    # ---- the client itself -------------------------------------------------------------------

    def paths(self, *, deadline_s: float | None = None) -> list[PeerPath]:
        """The way that this client's bytes take to each store daemon, and why no better one.

        Connects to daemons that it has not talked to yet; one that does not answer by the deadline
        has no path. Raises Unavailable, DeadlineExceeded where the master is not reached.
        """
        self._session.check()
        limit_s = self._session.config.deadline_s if deadline_s is None else deadline_s
        return survey(self._session, limit_s)

    def stats(self) -> ClientStats:
        """Counters since the client was made."""
        session = self._session
        spaces = list(session.spaces.values())

        def total(name: str) -> int:
            return sum(getattr(space.counters, name) for space in spaces)

        return ClientStats(
            node_failures=session.state.counters.node_failures,
            retries=session.state.counters.retries,
            locations_cached=sum(len(space.locations) for space in spaces),
            nodes_connected=len(session.channels),
            **{name: total(name) for name in _SUMMED},
            device_staged_bytes=session.staging.staged_bytes,
            device_direct_bytes=session.staging.direct_bytes,
            **_rdma_counters(self._transports),
        )

    @property
    def closed(self) -> bool:
        return self._session.refusal is not None

    def close(self) -> None:
        """End the session: calls under way end with ClientClosed, leases and grants are given back,
        no thread and no socket is left. From any state and thread, also twice; ends within 2 s."""
        self._session.close()
        registrations, self._registrations = self._registrations, []
        if not self._session.forked:
            for registration in registrations:
                registration.deregister()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        session = self.__dict__.get("_session")
        if session is not None and session.refusal is None and not session.forked:
            # The background thread closes it; a destructor must not wait for a network.
            warnings.warn("a cenote Client was not closed", ResourceWarning, 1, source=self)


def _rdma_counters(transports: Sequence[Transport]) -> dict[str, int]:
    for transport in transports:
        counters = getattr(transport, "counters", None)
        if counters is not None and transport.kind == common_pb2.TRANSPORT_KIND_RDMA:
            return {
                "rdma_read_bytes": counters.read_bytes,
                "rdma_written_bytes": counters.written_bytes,
                "rdma_staged_bytes": counters.staged_bytes,
                "rdma_calls_over_tcp": counters.tcp_calls,
            }
    return {}


def _as_bytes(fingerprint: bytes | str) -> bytes:
    return fingerprint.encode() if isinstance(fingerprint, str) else bytes(fingerprint)


def _configure(
    addresses: str | Sequence[str] | None, options: ClientKeywords
) -> tuple[ClientConfig, bytes]:
    overrides = dict(cast("dict[str, Any]", options))
    fingerprint = overrides.get("fingerprint")
    if isinstance(fingerprint, bytes):  # the configuration is text; this survives the way back
        overrides["fingerprint"] = fingerprint.decode("utf-8", "surrogateescape")
    if isinstance(overrides.get("transports"), str):
        overrides["transports"] = (overrides["transports"],)
    config = make_config(addresses, overrides)
    return config, config.fingerprint.encode("utf-8", "surrogateescape")
