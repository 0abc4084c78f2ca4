"""The master's process: sockets, timers, and the one loop on which everything is decided."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, final

from cenote.api.errors import (
    CenoteError,
    NotLeader,
    ResourceUnavailable,
    Unauthenticated,
    Unavailable,
)
from cenote.rpc.address import host_and_port, is_loopback, joined
from cenote.rpc.grpc_auth import CredentialsInterceptor
from cenote.rpc.grpc_util import GrpcServer
from cenote.rpc.lane_server import LaneLimits, LaneServer
from cenote.runtime.log import get_logger
from cenote.runtime.metrics import Metrics
from cenote.runtime.metrics_http import MetricsServer
from cenote.security.refusals import Refusals
from cenote.security.tls import Tls
from cenote.v1 import admin_pb2_grpc, common_pb2, master_pb2_grpc

from .admin import ADMIN_SERVICE, AdminGrpc
from .config import MasterConfig
from .front import STANDBY, Front
from .grpc_service import MASTER_SERVICE, MasterGrpc
from .guard import PORTS, Guard
from .journal import JournalCorrupt
from .master_metrics import TickStats, register_metrics, register_refusals
from .metadata import MasterRow, MetadataBackend, open_backend
from .operations import Settings
from .people_rows import PeopleRows
from .probing import Prober
from .service import MasterService
from .standby import Standby
from .state_config import StateConfig

__all__ = ["MasterServer"]

LOAD_SLICE_S: Final = 0.02
"""Of a replay, between two looks at whether to stop."""
LATE_S: Final = 0.25
HEAR_S: Final = 0.05
GUARD_S: Final = 0.25
"""Between looks at tokens and keys."""
RETRY_S: Final = 0.2
"""After a campaign that was won in vain."""
RETRY_S_MAX: Final = 30.0
"""The same after a journal that is damaged."""
BEGIN_S: Final = 10.0
"""The journal gives up earlier by itself."""
GC_INTERVAL_S: Final = 30.0
GC_IDLE_CALLS_MAX: Final = 4
"""Calls since the last tick, at most, for a collection to begin."""
GC_OBJECTS_MAX: Final = 100_000
_WILDCARDS: Final = frozenset(("0.0.0.0", "::"))
_log = get_logger("cenote.master")


@final
class MasterServer:
    """`start`, `wait` and `stop` are for `cenote.runtime.harness.run_daemon`.

    With metadata of its own a master leads from the start. With shared metadata it stands by until
    nobody leads, leads until it is told that its tenure is over, and then begins anew.
    """

    def __init__(
        self,
        config: MasterConfig,
        *,
        version: str = "",
        make_backend: Callable[[], MetadataBackend] | None = None,
    ) -> None:
        """`make_backend` instead of what the configuration names."""
        self._config = config
        self._version = version
        self._make_backend = make_backend or partial(
            open_backend, config.metadata, config.metadata_options()
        )
        self.front: Front | None = None
        self.lane: LaneServer | None = None
        self._grpc: GrpcServer | None = None
        self._metrics_server: MetricsServer | None = None
        self._prober: Prober | None = None
        self._standby: Standby | None = None
        self._campaigning: asyncio.Future[MasterService | None] | None = None
        self._row = MasterRow("")
        self._ticks = TickStats()
        self._gc_at_s = 0.0
        self._guard: Guard | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._tls: Tls | None = None
        self._refusals = Refusals(_log, PORTS)

    # ---- start ------------------------------------------------------------------------------

    async def start(self) -> Mapping[str, object]:
        """Listen; before that replay the journal, where no other master can lead.

        Raises ResourceUnavailable, ConfigError.
        """
        config = self._config
        settings = Settings(
            cluster_name=config.cluster_name,
            server_version=self._version,
            addresses=config.advertise or (config.listen,),
            location_ttl_ms=int(config.location_ttl_s * 1000),
            heartbeat_interval_ms=int(config.heartbeat_s * 1000),
        )
        if config.tokens:
            self._guard = Guard.from_file(
                config.tokens, isolation=config.isolation, rotation_s=config.key_rotation_s
            )
        self._tls = Tls.for_server(config.tls_files())
        backend = self._make_backend()
        front = self.front = Front(backend, settings)
        front.guard = self._guard
        if not backend.shared:
            state_config = config.state_config()
            if backend.name.startswith("file:"):
                state_config = _with_pool_id(state_config)
            service = MasterService(backend, state_config, settings)
            service.decider.on_notice = lambda text: _log.warning(text)
            front.opening = service
            await self._load(service)
            self._begin_to_lead(service)
        if self._guard is not None:
            self._refusals = self._guard.refusals
        fields = await self._listen(front)
        if self._guard is not None or self._tls is not None:
            self._guarding = asyncio.create_task(self._watch_credentials(front))
        if backend.shared:
            self._row = self._own_row(fields)
            backend.join(self._row)
            _log.info("ready to stand by", metadata=backend.name, **fields)
            return {**fields, "role": STANDBY}
        epoch = front.service().epoch
        _log.info("ready", epoch=epoch, metadata=backend.name, **fields)
        return {**fields, "epoch": epoch}

    async def _load(self, service: MasterService) -> None:
        started_s = last_s = time.monotonic()
        for _ in service.load():
            now_s = time.monotonic()
            if now_s - last_s >= LOAD_SLICE_S:
                last_s = now_s
                await asyncio.sleep(0)  # a signal may have cancelled this task
        _log.info(
            "journal replayed",
            entries=service.decider.replayed_entries,
            objects=service.state.object_count,
            seconds=round(time.monotonic() - started_s, 3),
        )

    def _own_row(self, fields: Mapping[str, object]) -> MasterRow:
        assert self.front is not None
        addresses = tuple(self.front.settings.addresses)
        return MasterRow(
            addresses[0],
            addresses,
            str(fields.get("grpc", "")),
            {"version": self._version, "pid": os.getpid(), "host": socket.gethostname()},
        )

    async def _listen(self, front: Front) -> dict[str, object]:
        config = self._config
        self.lane = LaneServer(
            front.dispatch,
            front.lane_hello,
            before_flush=front.flush_urgent,
            after_flush=front.flush_soon,
            limits=LaneLimits(connections_max=config.connections_max, spin_s=config.spin_s),
        )
        self.lane.on_handshake_failed = self._note_handshake
        host, port = await self.lane.listen_tcp(
            *host_and_port(config.listen, "listen"), tls=self._tls
        )
        fields: dict[str, object] = {"lane": f"tcp://{joined(host, port)}"}
        if not config.advertise:
            known_as = socket.gethostname() if host in _WILDCARDS else host
            front.set_addresses((joined(known_as, port),))
        grpc_host = host_and_port(config.grpc, "grpc")[0] if config.grpc else host
        if not self._asks_who_it_is() and not (is_loopback(host) and is_loopback(grpc_host)):
            _log.warning(
                "this master is open to the network, and asks nobody who he is (--insecure):"
                " give --tokens",
                listen=config.listen,
                grpc=config.grpc,
            )
        if config.socket:
            await self.lane.listen_unix(config.socket)
            fields["socket"] = f"unix://{config.socket}"
        if config.grpc:
            asking = []
            if self._guard is not None:
                asking.append(CredentialsInterceptor(self._guard.admit_call, front.enter_call))
            self._grpc = GrpcServer(interceptors=asking)
            self._grpc.add_service(
                master_pb2_grpc.add_MasterServiceServicer_to_server,
                MasterGrpc(front),
                MASTER_SERVICE,
            )
            self._grpc.add_service(
                admin_pb2_grpc.add_AdminServiceServicer_to_server,
                AdminGrpc(front, config, version=self._version),
                ADMIN_SERVICE,
            )
            grpc_host, _ = host_and_port(config.grpc, "grpc")
            fields["grpc"] = joined(grpc_host, self._grpc.listen(config.grpc, self._tls))
            await self._grpc.start()
        if config.metrics_listen:
            metrics = Metrics()
            register_metrics(metrics, front, self.lane.stats, self._ticks, version=self._version)
            if self._guard is not None or self._tls is not None:
                register_refusals(metrics, self._refusals)
            metrics_host, metrics_port = host_and_port(config.metrics_listen, "metrics-listen")
            self._metrics_server = MetricsServer(metrics, metrics_port, metrics_host)
            fields["metrics"] = f"http://{joined(metrics_host, self._metrics_server.port)}/metrics"
        return fields

    def _asks_who_it_is(self) -> bool:
        """Whether somebody who only reaches the ports is refused."""
        return self._guard is not None or (self._tls is not None and self._tls.asks_clients)

    def _note_handshake(self, error: Unavailable, peer: str) -> None:
        """Somebody could not prove who he is, or spoke no TLS."""
        self._refusals.note("lane", error, peer)

    async def _watch_credentials(self, front: Front) -> None:
        """End whose tokens or certificates count no more, and renew keys."""
        assert self.lane is not None
        trusted = 0
        while True:
            await asyncio.sleep(GUARD_S)
            tls, guard = self._tls, self._guard
            if tls is not None:
                tls.refresh()
                if tls.trust_generation != trusted:
                    trusted = tls.trust_generation
                    self._have_proven_anew()
            if guard is None:
                continue
            service = front.leading
            ended = guard.tick(time.monotonic(), None if service is None else service.state)
            if not ended:
                continue
            if service is not None:
                service.cut_sessions(ended)
            for connection in list(self.lane.connections):
                who = connection.principal
                if who is not None and not guard.still_counts(who):
                    error = Unauthenticated(f"token {who.name} counts no more")
                    guard.refusals.note("lane", error, connection.peer)
                    connection.close(error)

    def _have_proven_anew(self) -> None:
        """Others are trusted now than were: who is connected has to connect again. Replies in
        flight are sent before, and what comes too late for that is sent again by clients."""
        assert self.lane is not None
        for connection in list(self.lane.connections):
            if connection.over_tls:
                connection.close()

    # ---- work -------------------------------------------------------------------------------

    async def wait(self) -> None:
        """Stand by and lead, by turns, until cancelled; with metadata of its own, lead.

        A tick that raises is a bug, and ends the master: its state may be wrong, and a restart
        builds it anew from what was journaled.
        """
        front = self.front
        assert front is not None
        while True:
            if front.leading is None:
                await self._stand_by(front)
            await self._lead(front.service())
            await self._step_down(front)

    async def _stand_by(self, front: Front) -> None:
        """Until this master leads."""
        retry_s = RETRY_S
        while True:
            state_config = _with_pool_id(self._config.state_config())
            standby = self._standby = Standby(front.backend, state_config)
            run = asyncio.to_thread(_campaign, standby, state_config, front.settings)
            self._campaigning = asyncio.ensure_future(run)
            try:
                service = await asyncio.shield(self._campaigning)
            except (NotLeader, ResourceUnavailable) as error:
                _log.warning("could not begin to lead", why=str(error))
                await self._renew_backend(front)
                await asyncio.sleep(retry_s)
                retry_s = _next_retry_s(retry_s, error)
                continue
            finally:
                standby.stop()
            assert service is not None, "only the end of the process stops a standby"
            self._standby = self._campaigning = None
            self._begin_to_lead(service)
            _log.info(
                "leads",
                epoch=service.epoch,
                entries=service.decider.replayed_entries,
                objects=service.state.object_count,
            )
            return

    def _begin_to_lead(self, service: MasterService) -> None:
        front = self.front
        assert front is not None
        self._prober = Prober(
            lambda node_id: service.endpoint_of(node_id, common_pb2.TRANSPORT_KIND_TCP),
            service.note_probe,
            (lambda _: b"") if self._guard is None else self._guard.own_ticket,
            self._tls,
        )
        service.decider.on_probe = self._prober.probe
        _rest_after_load()
        service.guard = self._guard
        front.leading = service

    async def _lead(self, service: MasterService) -> None:
        """Tick until another master may lead."""
        tick_s = self._config.tick_s
        rows = PeopleRows(service.decider, service.settings) if service.is_shared else None
        next_s = time.monotonic()
        refused = False
        while True:
            next_s = max(next_s + tick_s, time.monotonic())
            await asyncio.sleep(next_s - time.monotonic())
            if service.decider.lost is not None:
                return
            if time.monotonic() - next_s > LATE_S:
                # The loop was busy (a large attach), or the machine asleep: hear what was sent
                # meanwhile before anybody is taken for silent.
                await asyncio.sleep(HEAR_S)
            began_s = time.monotonic()
            service.tick()
            self._ticks.note(time.monotonic() - began_s, late_s=began_s - next_s)
            if rows is not None:
                rows.look()
            self._collect_when_idle(service, began_s)
            refusal = service.decider.refusal
            if (refusal is not None) != refused:
                refused = refusal is not None
                if refusal is not None:
                    _log.error("writes are refused", why=str(refusal))
                else:
                    _log.info("writes are taken again")

    async def _step_down(self, front: Front) -> None:
        """Another master may lead: nothing of what was decided here counts unless it is in the
        journal. The state is given up, a new one follows that."""
        service = front.service()
        _log.warning("leads no more", epoch=service.epoch, why=str(service.decider.lost))
        front.leading = None
        service.release_waiting()
        if self._prober is not None:
            self._prober.close()
            self._prober = None
        del service
        gc.unfreeze()
        gc.enable()
        await self._renew_backend(front)

    async def _renew_backend(self, front: Front) -> None:
        old = front.backend
        with contextlib.suppress(CenoteError):  # lost, or out of reach: it has let go all the same
            await asyncio.to_thread(old.close)
        gc.collect()
        backend = self._make_backend()
        backend.join(self._row)
        front.backend = backend

    def _collect_when_idle(self, service: MasterService, now_s: float) -> None:
        """The collector is off while the master works; its little work is done when idle, or when
        much was allocated and not freed."""
        calls = sum(service.calls)
        idle = calls - self._ticks.calls <= GC_IDLE_CALLS_MAX
        self._ticks.calls = calls
        if now_s >= self._gc_at_s and (idle or gc.get_count()[0] > GC_OBJECTS_MAX):
            gc.collect(2 if idle else 0)
            took_s = time.monotonic() - now_s
            self._ticks.gc_seconds += took_s
            # A dear collection comes less often: a thousandth of the time at most.
            self._gc_at_s = now_s + max(GC_INTERVAL_S, took_s * 1000)

    # ---- the end ----------------------------------------------------------------------------

    async def stop(self) -> None:
        """Stop listening, answer what is under way, sync the journal. Within about a second."""
        front = self.front
        service = None if front is None else front.leading or front.opening
        if service is not None:
            service.release_waiting()
        if self._guarding is not None:
            self._guarding.cancel()
        if self._standby is not None:
            self._standby.stop()
        if self._prober is not None:
            self._prober.close()
        closing = []
        if self.lane is not None:
            closing.append(self.lane.close(0.5))
        if self._grpc is not None:
            closing.append(self._grpc.close(0.3))
        if closing:
            await asyncio.gather(*closing)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        if front is not None:
            await self._close_metadata(front, service)

    async def _close_metadata(self, front: Front, service: MasterService | None) -> None:
        """Resign, where this master leads: another one may begin at once."""
        if service is None and self._campaigning is not None:
            with contextlib.suppress(CenoteError):
                service = await self._campaigning  # it may have won just now
        try:
            await asyncio.to_thread(front.backend.close if service is None else service.close)
        except CenoteError as error:
            _log.error("the journal could not be closed in order", error=str(error))
            raise


def _with_pool_id(config: StateConfig) -> StateConfig:
    """With an id for a pool that begins now; one that has its id keeps it."""
    return dataclasses.replace(config, pool_id=secrets.token_bytes(16))


def _next_retry_s(last_s: float, error: CenoteError) -> float:
    """How long to wait before the attempt after the next one: all of the journal may be read then,
    and one that is damaged will be so the next time, too."""
    return min(2 * last_s, RETRY_S_MAX) if isinstance(error, JournalCorrupt) else RETRY_S


def _campaign(standby: Standby, config: StateConfig, settings: Settings) -> MasterService | None:
    """In a thread: follow until nobody leads, win, and replay what is left; None where it was
    stopped. Raises JournalCorrupt, NotLeader and ResourceUnavailable."""
    won = standby.run()
    if won is None:
        return None
    backend = standby.backend
    service = MasterService(backend, config, settings)
    for _ in service.load(won.opened, won.followed):
        pass
    if service.state.pool_id == config.pool_id:
        # A pool begins: its id must not be another one under the next leader.
        backend.sync(backend.last_entry).result(BEGIN_S)
    return service


def _rest_after_load() -> None:
    """What was loaded stays: no collection needs to look at it again."""
    gc.collect()
    gc.freeze()
    gc.disable()
