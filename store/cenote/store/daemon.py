"""The store daemon: brings its parts up in order and takes them down from wherever they got to."""

from __future__ import annotations

import asyncio
import gc
import os
import secrets
import threading
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Final, final

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.rpc.address import host_and_port, joined
from cenote.rpc.grpc_util import GrpcServer
from cenote.runtime.log import get_logger
from cenote.runtime.metrics import Metrics
from cenote.runtime.metrics_http import MetricsServer
from cenote.runtime.units import format_size
from cenote.security.refusals import Refusals
from cenote.security.tls import Tls
from cenote.security.tokens import read_token
from cenote.transport.access import Access
from cenote.transport.base import SessionIdentity
from cenote.transport.opening import TLS_SCHEME
from cenote.v1 import common_pb2, store_pb2_grpc
from cenote.v1 import master_pb2 as pb

from .agent import AgentIdentity, StoreAgent
from .agent_core import Stage
from .config import (
    ANY_HOST,
    StoreConfig,
    advertised_address,
    pool_path,
    socket_path,
)
from .copier import Copier
from .endurance import Endurance
from .gate import OPEN, PORTS, Gate
from .grpc_service import STORE_SERVICE, StoreGrpc
from .master_link import LaneMasterLink
from .memory_warnings import warn_of_disk, warn_of_stale_memory, warn_of_stale_memory_later
from .node_files import NodeFiles, control_directory_for
from .pool_copy import PoolCopyFile
from .preparation import Preparation
from .puller import Puller
from .rdma_host import RdmaHost
from .rdma_serving import RdmaServing, rdma_endpoint
from .segments import LocalSegments, open_segments
from .server import DataServer
from .serving import TlsPort
from .sessions import SessionTable
from .slot_format import boot_id_bytes
from .ssd import SsdFile
from .store_metrics import register_metrics, register_parts, register_verifier
from .tls_watch import wait_watching
from .verifying import Verifier

__all__ = ["StoreDaemon", "read_boot_id"]

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_FIRST_MEMORY_S: Final = 1.0
_FIRST_ATTACH_S: Final = 0.5
_AGENT_STOP_S: Final = 0.8
_SERVER_STOP_S: Final = 0.4
_GRPC_STOP_S: Final = 0.3
_RDMA_STOP_S: Final = 0.3

_log = get_logger(__name__)


def read_boot_id() -> str:
    """This host's boot id, as text."""
    return _BOOT_ID.read_text().strip()


@final
class StoreDaemon:
    """`start`, `wait` and `stop` are for `cenote.runtime.harness.run_daemon`."""

    def __init__(self, config: StoreConfig, *, version: str = "") -> None:
        self._config = config
        self._version = version
        self._boot_id = read_boot_id()
        self._session_id = secrets.token_bytes(16)
        self._credentials = common_pb2.Credentials()
        self._access = Access()
        self._gate: Gate | None = None
        self._tls: Tls | None = None
        self._refusals = Refusals(_log, PORTS)
        self._stopping = threading.Event()
        self._opening: asyncio.Task[None] | None = None
        self._failed: asyncio.Future[None] | None = None
        self._is_up = False
        self._files: NodeFiles | None = None
        self.segments: LocalSegments | None = None
        self.server: DataServer | None = None
        self._rdma: RdmaServing | None = None
        self._endpoints: list[common_pb2.Endpoint] = []
        """What the master is told of, again when they change."""
        self.agent: StoreAgent | None = None
        self._preparation: Preparation | None = None
        self._verifier: Verifier | None = None
        self._ssd: SsdFile | None = None
        self._copier: Copier | None = None
        self._endurance: Endurance | None = None
        self._puller: Puller | None = None
        self._grpc: GrpcServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._stale: asyncio.Task[None] | None = None

    # ---- start --------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, object]:
        """Open the memory, serve, and begin to look for the master, which may be away.

        Raises ResourceUnavailable, ConfigError, InvalidArgument.
        """
        config = self._config
        self._credentials.token = read_token(config.token, config.token_file).encode()
        self._tls = tls = Tls.for_client(config.tls_files())
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        # A task of its own: when this one is cancelled, `stop` waits for what it got to.
        self._opening = loop.create_task(asyncio.to_thread(self._open))
        await asyncio.shield(self._opening)
        segments = self.segments
        assert segments is not None
        sessions = SessionTable(segments)
        if self._credentials.token or config.tls_identity:
            self._gate = gate = Gate(segments)
            self._refusals = gate.refusals
            sessions.on_cut = gate.holders.forget_session
            await asyncio.to_thread(gate.take_up, segments)
        elif config.is_open:
            _log.warning(OPEN)
        path = socket_path(config)
        self._rdma = rdma = RdmaServing(config, segments, self._serve_rdma)
        await asyncio.to_thread(rdma.open)
        self.server = server = DataServer(
            segments,
            sessions,
            tcp=host_and_port(config.listen, "listen"),
            unix_path=path,
            gate=self._gate,
            connections_max=config.connections_max,
            server_version=self._version,
            claims=segments.claim_file,
            rdma=rdma.host,
            tls=TlsPort(tls, self._refusals) if tls is not None and config.tls_data else None,
        )
        assert server.tcp_address is not None
        server.start()
        self._preparation = Preparation(segments.dram(), self._on_no_memory, config.huge_pages)
        # So that the master hears of a node with room, not of one that refuses what is put now.
        await asyncio.to_thread(self._preparation.wait_first, _FIRST_MEMORY_S)
        fields: dict[str, object] = {
            "name": config.name,
            "data": f"{'tls' if config.tls_data else 'tcp'}://{joined(*server.tcp_address)}",
            "socket": f"unix://{path}",
        }
        endpoints = self._endpoints
        endpoints += [
            common_pb2.Endpoint(
                kind=common_pb2.TRANSPORT_KIND_TCP,
                address=TLS_SCHEME * config.tls_data
                + advertised_address(config, server.tcp_address),
            ),
            common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_SHM, address=path),
        ]
        if rdma.host is not None:
            self._serve_rdma(rdma.host)
            fields["rdma"] = ",".join(port.name for port in rdma.host.nics.ports)
        if config.grpc:
            fields["grpc"] = grpc = await self._start_grpc(segments, sessions, server)
            endpoints.append(common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_GRPC, address=grpc))
        agent = self._start_agent(segments, sessions, server)
        rdma.start()
        # Whoever waits for this daemon may put to it then, if there is a master.
        await asyncio.to_thread(agent.wait_settled, _FIRST_ATTACH_S)
        if config.metrics_listen:
            fields["metrics"] = self._start_metrics(segments, sessions, server)
        self._is_up = True
        _rest_after_start()
        _log.info("ready", dram=format_size(config.dram), **fields)
        return fields

    def _serve_rdma(self, host: RdmaHost) -> None:
        """From now on, over the ports that it has."""
        assert self.server is not None
        self.server.rdma = host
        offer = rdma_endpoint(host, self._endpoints[0].address)
        others = [endpoint for endpoint in self._endpoints if endpoint.kind != offer.kind]
        self._endpoints[:] = [*others, offer]

    def _open(self) -> None:
        config = self._config
        self._files = files = NodeFiles(
            config.dram_dir,
            config.name,
            control_directory=control_directory_for(config.dram_dir),
            ssd=config.ssd,
        )
        warn_of_disk(config.dram_dir)
        if config.ssd:
            self._ssd = SsdFile(
                Path(config.ssd),
                config.ssd_size,
                config.ssd_staging,
                object_bytes=config.ssd_object_size,
                huge_pages=config.huge_pages,
            )
        try:
            self.segments = segments = open_segments(
                files,
                config.dram,
                boot_id_bytes(self._boot_id),
                allow_less=config.dram_allow_less,
                ssd=self._ssd,
            )
        except ResourceUnavailable:
            warn_of_stale_memory(files)
            raise
        kept_at = pool_path(config, files)
        if not any(segment.reopened for segment in segments.all()):
            kept_at.unlink(missing_ok=True)  # nothing is left of what it was about
        segments.pool = PoolCopyFile(kept_at)
        for segment in segments.all():
            sealed = segment.recover(self._stopping.is_set)
            if segment.reopened:
                _log.info("contents survived", segment=segment.index, slots=sealed)

    def _start_agent(
        self, segments: LocalSegments, sessions: SessionTable, server: DataServer
    ) -> StoreAgent:
        config, files = self._config, self._files
        assert files is not None
        identity = AgentIdentity(
            node_name=config.name,
            node_uuid=files.node_uuid,
            boot_id=self._boot_id,
            failure_domain=config.failure_domain,
            process_id=os.getpid(),
            server_version=self._version,
            start_number=files.start_number,
            endpoints=self._endpoints,
            credentials=self._credentials,
        )
        hello = pb.HelloRequest(
            credentials=self._credentials,
            session_id=self._session_id,
            client_name=f"store {config.name}",
            boot_id=self._boot_id,
            process_id=os.getpid(),
            observer=True,
        )
        self._verifier = verifier = Verifier(segments, self._stage)

        def has_news() -> bool:
            return self._is_preparing() or verifier.has_news

        def connect(master: str) -> LaneMasterLink:
            hello.pool_id, hello.last_epoch = segments.pool.pool_id, segments.epoch
            return LaneMasterLink(master, hello, self._access.greeted, self._tls)

        self._start_copies(segments)
        directory = config.directory()
        self.agent = agent = StoreAgent(
            identity,
            segments,
            sessions,
            () if directory is not None else config.master,
            directory=directory,
            connect=connect,
            stats=lambda: self._stats(segments, sessions, server, verifier),
            is_preparing=has_news,
            on_end=self._fail,
            copier=self._copier,
            puller=self._puller,
            on_keys=None if self._gate is None else self._gate.learn,
        )
        agent.start()
        verifier.start()
        self._stale = asyncio.create_task(warn_of_stale_memory_later(files))
        return agent

    def _stats(
        self,
        segments: LocalSegments,
        sessions: SessionTable,
        server: DataServer,
        verifier: Verifier,
    ) -> pb.NodeStats:
        """For the next heartbeat."""
        counters = server.counters()
        stats = pb.NodeStats(
            read_bytes=counters.read_bytes,
            written_bytes=counters.written_bytes,
            seals=counters.seals,
            sessions=sessions.session_count(),
            connections=counters.connections,
            broken_slots=sum(segment.table.broken for segment in segments.all()),
            unverified_slots=verifier.unverified_slots,
            damaged_slots=verifier.tell(),
        )
        if self._rdma is not None:
            self._rdma.tell(stats)
        if self._endurance is not None:
            self._endurance.tell(stats)
        return stats

    def _start_copies(self, segments: LocalSegments) -> None:
        if segments.disk is not None:
            config = self._config
            if config.ssd_daily_writes:
                device = segments.disk.device
                self._endurance = Endurance(device, config.ssd_daily_writes)
            self._copier = Copier(
                segments, write_limit=config.ssd_write_limit, endurance=self._endurance
            )
            self._copier.start()
        self._puller = Puller(
            segments,
            SessionIdentity(
                self._session_id, self._boot_id, os.getpid(), self._credentials, self._access
            ),
            self._tls,
        )
        self._puller.start()

    async def _start_grpc(
        self, segments: LocalSegments, sessions: SessionTable, server: DataServer
    ) -> str:
        """Where it serves, as clients are told."""
        gate = self._gate
        self._grpc = GrpcServer(interceptors=() if gate is None else gate.interceptors())
        self._grpc.add_service(
            store_pb2_grpc.add_StoreServiceServicer_to_server,
            StoreGrpc(segments, server.counters, sessions.session_count),
            STORE_SERVICE,
        )
        host, _ = host_and_port(self._config.grpc, "grpc")
        tls = self._tls if self._config.tls_cert else None
        port = self._grpc.listen(self._config.grpc, tls)
        await self._grpc.start()
        if host in ANY_HOST:
            assert server.tcp_address is not None
            host, _ = host_and_port(advertised_address(self._config, server.tcp_address), "listen")
        return joined(host, port)

    def _start_metrics(
        self, segments: LocalSegments, sessions: SessionTable, server: DataServer
    ) -> str:
        assert self.agent is not None
        assert self._verifier is not None
        metrics = Metrics()
        metrics.build_info("store", self._version)
        register_metrics(metrics, segments, server, sessions, self.agent)
        register_verifier(metrics, self._verifier)
        register_parts(
            metrics,
            self._refusals if self._gate is not None or self._tls is not None else None,
            self._copier,
            self._puller,
            self._rdma,
            self._endurance,
        )
        host, port = host_and_port(self._config.metrics_listen, "metrics-listen")
        self._metrics_server = MetricsServer(metrics, port, host)
        return f"http://{joined(host, self._metrics_server.port)}/metrics"

    # ---- work ---------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Until something ends the daemon; raises what it is."""
        assert self._failed is not None
        await wait_watching(self._failed, self._tls)

    def _stage(self) -> Stage:
        return Stage.SEEKING if self.agent is None else self.agent.stage

    def _is_preparing(self) -> bool:
        return self._preparation is not None and not self._preparation.done

    def _fail(self, error: CenoteError) -> None:
        """End the daemon with `error`; from any thread."""
        failed = self._failed
        if failed is None or self._stopping.is_set():
            return

        def set_error() -> None:
            if not failed.done():
                failed.set_exception(error)

        failed.get_loop().call_soon_threadsafe(set_error)

    def _on_no_memory(self, error: CenoteError) -> None:
        segments, files = self.segments, self._files
        assert segments is not None
        assert files is not None
        warn_of_stale_memory(files)
        wanted = sum(segment.size_bytes for segment in segments.dram())
        ready = sum(segment.ready_bytes for segment in segments.dram())
        could_be_had = ready + files.available_bytes()[0]
        if self._config.dram_allow_less:
            _log.warning(
                "going on with less memory than was asked for",
                wanted=format_size(wanted),
                got=format_size(ready),
                why=error,
            )
            return
        self._fail(
            ResourceUnavailable(
                f"the memory went elsewhere while it was being set up: {format_size(could_be_had)}"
                f" ({could_be_had} bytes) of {format_size(wanted)} could be had: {error.message}",
                remedy="ask for less with --dram, or go on with less with --dram-allow-less",
            )
        )

    # ---- the end ------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Detach, end all connections, close the files. Within about a second."""
        self._stopping.set()
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if not self._opening.cancelled():
                self._opening.exception()  # `start` raised it, unless it was cancelled before
        if self._failed is not None and self._failed.done() and not self._failed.cancelled():
            self._failed.exception()  # `wait` may not have been there to take it
        if self._stale is not None:
            self._stale.cancel()
        closing: list[Awaitable[object]] = []
        if self.agent is not None:
            agent, survive = self.agent, self._contents_survive()
            closing.append(
                asyncio.to_thread(
                    lambda: agent.stop(contents_survive=survive, timeout_s=_AGENT_STOP_S)
                )
            )
        if self._copier is not None:
            closing.append(asyncio.to_thread(self._copier.stop))
        if self._puller is not None:
            closing.append(asyncio.to_thread(self._puller.stop))
        if self._preparation is not None:
            closing.append(asyncio.to_thread(self._preparation.stop))
        if self._verifier is not None:
            closing.append(asyncio.to_thread(self._verifier.stop))
        if self._metrics_server is not None:
            closing.append(asyncio.to_thread(self._metrics_server.close))
        await asyncio.gather(*closing)
        if self._grpc is not None:
            await self._grpc.close(_GRPC_STOP_S)
        await asyncio.to_thread(self._close)

    def _contents_survive(self) -> bool:
        segments = self.segments.all() if self.segments is not None else ()
        return not self._config.wipe_on_exit and (
            self._is_up or any(segment.reopened for segment in segments)
        )

    def _close(self) -> None:
        try:
            if self.server is not None:
                self.server.close(_SERVER_STOP_S)
        finally:
            if self._rdma is not None:  # before its memory is unmapped
                self._rdma.close(_RDMA_STOP_S)
            if self.segments is not None:
                self.segments.close()
            if self._endurance is not None:
                self._endurance.save()
            if self._ssd is not None:
                self._ssd.close()
            if self._files is not None:
                self._remove_files(self._files)
                self._files.close()

    def _remove_files(self, files: NodeFiles) -> None:
        """Those that are not to survive: all, or new ones of a daemon that never got to serve."""
        if not self._is_up and self.segments is not None:
            for segment in self.segments.dram():
                if not segment.reopened:
                    files.remove(segment.index)
        if self._config.wipe_on_exit or not files.indexes():
            files.remove_all()


def _rest_after_start() -> None:
    """What was loaded stays: no collection needs to look at it again."""
    gc.collect()
    gc.freeze()
