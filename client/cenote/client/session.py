"""One client's tie to the cluster: its session at the master, its channels to the daemons.

Whatever is shared by a client's threads and does I/O lives here; decisions are made in `plan`. The
session ends with `close`, with the process's main thread, or when its owner is garbage.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    InvalidArgument,
    NotLeader,
    Unavailable,
)
from cenote.api.master import MasterApi
from cenote.rpc.fork import ForkGuard
from cenote.transport.base import Channel, SessionIdentity, Transport
from cenote.v1 import common_pb2
from cenote.v1 import master_pb2 as pb

from .config import ClientConfig
from .devices import DeviceStaging
from .housekeeping import Housekeeper
from .master_stub import LaneMaster
from .plan.grants import Grant
from .plan.peers import Peers
from .plan.space import Space
from .plan.state import ClientState
from .registering import RegistrationCache, register_everywhere
from .tally import TALLY
from .turns import Turn
from .ways import Ways

__all__ = ["DURABILITIES", "Session", "clock_id"]

_CLOSE_BUDGET_S: Final = 1.0
_IMPROVE_S: Final = 1.0
"""For connecting by a better way. Who closes the client, or has few transfer threads, may have to
wait for it."""
_RETIRED_S: Final = 1.0
_log: Final = logging.getLogger("cenote.client")
DURABILITIES: Final = {
    "default": common_pb2.DURABILITY_UNSPECIFIED,
    "relaxed": common_pb2.DURABILITY_RELAXED,
    "journaled": common_pb2.DURABILITY_JOURNALED,
}

MakeMaster = Callable[[pb.HelloRequest, Callable[[pb.HelloResponse], None]], MasterApi]


def boot_id() -> str:
    """Identifies this boot of this host, "" where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def clock_id() -> str:
    """Identifies the monotonic clock: equal in all processes that read the same one."""
    try:
        return f"{boot_id()}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return boot_id()


class Session:
    """See the module's docstring. `open` before use."""

    def __init__(
        self, config: ClientConfig, make_master: MakeMaster, transports: Sequence[Transport]
    ) -> None:
        self.config = config
        self.clock_id = clock_id()
        self.identity = SessionIdentity(
            session_id=secrets.token_bytes(16),
            boot_id=boot_id(),
            process_id=os.getpid(),
            credentials=config.credentials(),
        )
        self.state = ClientState(
            self.identity.session_id, time.monotonic, self.identity.credentials
        )
        self.state.access = self.identity.access
        self.spaces: dict[str, Space] = {}
        self.refusal: CenoteError | None = ClientClosed("the client is not open yet")
        """Why calls are refused; None while the session is open."""
        self.aborts: deque[Grant] = deque()
        self.channels: dict[int, Channel] = {}
        self.moved: dict[str, list[int]] = {}
        """Bytes read and written by transport."""
        self._transports = list(transports)
        self.ways = Ways(transports)
        self._retired: list[tuple[Channel, int, frozenset[object], float]] = []
        """Channels that a better one replaced, their nodes, the calls that may use them still, and
        until when others may that are counted nowhere."""
        self._improving: Future[None] | None = None
        self._connect_turns: dict[int, Turn] = {}
        """By node: one that does not answer must not keep a thread from another."""
        self._hello_turn = Turn()
        self._hello_s = 0.0
        self._space_lock = threading.Lock()
        self._pool_id: bytes | None = None
        """Of the master's metadata; None before its first hello."""
        self._numbers_lock = threading.Lock()
        """Held while numbers of nodes and segments begin to mean others."""
        self._pool_lock = threading.Lock()
        self._close_lock = threading.RLock()
        self._closed = False
        self._greetable = False
        self.running: set[object] = set()
        """Calls under way."""
        self.staging = DeviceStaging(
            config.device_staging_bytes, partial(register_everywhere, self._transports)
        )
        """For what lies on GPUs."""
        self.cache: RegistrationCache | None = None
        """Registers what is used again and again; None where no transport gains by it."""
        self.exports = 0
        """Views that something exports after their block ended."""
        self._fork = ForkGuard()
        self._pool: ThreadPoolExecutor | None = None
        self._hello = pb.HelloRequest(
            credentials=self.identity.credentials,
            session_id=self.identity.session_id,
            client_name=config.name or f"{socket.gethostname()}:{os.getpid()}",
            boot_id=self.identity.boot_id,
            process_id=self.identity.process_id,
        )
        self.master = make_master(self._hello, self._greeted)
        self.housekeeper = Housekeeper(self)
        self.state.wake = self.housekeeper.wake

    # ---- open and close ----------------------------------------------------------------------

    def open(self, deadline_s: float) -> None:
        """Say hello. Raises what connecting raises; nothing stays open then."""
        try:
            self.hello(deadline_s)
        except BaseException:
            self.close()
            raise
        self.refusal = None
        TALLY.opened(self)

    def check(self) -> None:
        """Raises ClientClosed or ForkedClient where this session can't be used."""
        if self._fork.forked:
            self._fork.check()
        if self.refusal is not None:
            raise type(self.refusal)(self.refusal.message)

    @property
    def forked(self) -> bool:
        return self._fork.forked

    def close(self) -> None:
        """End all calls, say goodbye, close sockets and threads. From any state, thread, twice."""
        if self._fork.forked:
            self._close_in_child()
            return
        with self._close_lock:  # held to the end: who closes second returns when all is closed
            if self._closed:
                return
            if self.refusal is None:
                self._greetable = True
            self.refusal = ClientClosed("the client was closed")
            try:
                self.housekeeper.close()
                self._close_channels()
                if self._greetable and self._is_quiet():
                    self._say_goodbye()
            finally:
                # After Ctrl-C, too; where that is interrupted as well, `close` may be called again.
                self._close_channels()
                if isinstance(self.master, LaneMaster):
                    self.master.close()
                if self._pool is not None:
                    self._pool.shutdown(wait=True, cancel_futures=True)
                self.staging.close()
            self._closed = True
            TALLY.closed(self)

    def _close_channels(self) -> None:
        """Calls of other threads end; afterwards this process touches no segment any more."""
        while self.channels:
            node_id = next(iter(self.channels))
            self.channels[node_id].close()
            self.channels.pop(node_id, None)
        retired, self._retired = self._retired, []
        for channel, *_ in retired:
            channel.close()
        if self.cache is not None:
            self.cache.close()
        for transport in self._transports:
            transport.close()

    def _is_quiet(self) -> bool:
        """Whether nothing of this session reads or writes any more, so that the master may free all
        that it holds. Where that can't be told, the session is left to run out, and the master asks
        the daemons."""
        until_s = time.monotonic() + _CLOSE_BUDGET_S / 2
        while self.running and time.monotonic() < until_s:
            time.sleep(0.002)
        if self.running or self.exports:
            return False
        return self.housekeeper.flush_aborts()

    def _say_goodbye(self) -> None:
        """Ends leases and grants at once instead of when the session runs out."""
        commits = self.state.commits
        request = pb.CloseSessionRequest(
            session_id=commits.session_id, sealed_through=commits.through()
        )
        with suppress(CenoteError):  # nobody there: it ends sessions that aren't renewed
            self.master.close_session(request, _CLOSE_BUDGET_S)

    def _close_in_child(self) -> None:
        """The parent's connections and threads are not ours to end."""
        self._closed = True
        self.refusal = ClientClosed("the client was closed")

    # ---- the master --------------------------------------------------------------------------

    def hello(self, deadline_s: float) -> None:
        """(Re)open the session. Several threads that find it lost say one hello."""
        began_s = time.monotonic()
        try:
            self._hello_turn.take(began_s + deadline_s, "another thread is opening the session")
            if self._hello_s > began_s:  # another thread did, after we found it lost
                return
            reply = self.master.hello(
                self._hello, max(0.001, deadline_s - (time.monotonic() - began_s))
            )
            if not reply.is_leader:
                raise NotLeader(
                    "this master is a standby", addresses=reply.leader_addresses, epoch=reply.epoch
                )
            self._greeted(reply)
            self._hello_s = time.monotonic()
        finally:
            self._hello_turn.give()

    def replace_session(self, cut_session_id: bytes, deadline_s: float) -> None:
        """A daemon cut this session off and takes no connection of it any more: begin another.

        The old one is left to run out, since calls of other threads may still be at work in it.
        """
        began_s = time.monotonic()
        try:
            self._hello_turn.take(began_s + deadline_s, "another thread is opening the session")
            if self.identity.session_id != cut_session_id:
                return  # another thread did
            self.identity = replace(self.identity, session_id=secrets.token_bytes(16))
            self._hello.session_id = self.identity.session_id
            self.state.begin_session(self.identity.session_id)
        finally:
            self._hello_turn.give()
        # Closing them lets go of the old session's mappings, which its daemons wait for.
        for node_id, channel in list(self.channels.items()):
            self.drop_channel(node_id, channel)
        self.hello(max(0.001, deadline_s - (time.monotonic() - began_s)))

    def _greeted(self, reply: pb.HelloResponse) -> None:
        """Take over what a master says in its hello."""
        limits = self.state.limits
        self.identity.access.greeted(reply)
        with self._numbers_lock:
            if self._pool_id not in (None, reply.pool_id):
                self._begin_pool(reply)
            self._pool_id = reply.pool_id
        limits.epoch = max(limits.epoch, reply.epoch)
        limits.session_ttl_s = reply.session_ttl_ms / 1000 or limits.session_ttl_s
        limits.location_ttl_s = reply.location_ttl_ms / 1000
        limits.lease_ttl_max_ms = reply.lease_ttl_max_ms
        limits.batch_keys_max = min(reply.batch_keys_max or 16_384, 16_384)
        self.take_view(reply.cluster_view, reply.epoch)

    def _begin_pool(self, reply: pb.HelloResponse) -> None:
        """The master's metadata were lost: its numbers of nodes and segments mean others now. No
        answer of it is used before this returns."""
        self.state.use_peers(Peers(reply.cluster_view))
        self.ways.forget_all()
        for node_id, channel in list(self.channels.items()):
            self.drop_channel(node_id, channel)

    def refresh_view(self, deadline_s: float) -> None:
        """Fetch the cluster view if there is a newer one."""
        known = self.state.peers.view_version
        reply = self.master.get_cluster_view(
            pb.GetClusterViewRequest(known_view_version=known), deadline_s
        )
        self.state.view_seen = 0
        if reply.HasField("cluster_view"):
            self.take_view(reply.cluster_view, reply.epoch)

    def take_view(self, view: common_pb2.ClusterView, epoch: int) -> None:
        """Use a newer cluster view; channels to daemons that changed are given up."""
        old = self.state.peers
        # The one that is known comes again with each connection's hello: it is no news of anybody.
        if view.view_version <= old.view_version and epoch <= self.state.limits.epoch:
            return
        self.state.limits.epoch = max(self.state.limits.epoch, epoch)
        peers = Peers(view, old)
        self.state.use_peers(peers)
        for node_id, channel in list(self.channels.items()):
            before, now = old.nodes.get(node_id), peers.nodes.get(node_id)
            if now is None or (before is not None and _address_of(before) != _address_of(now)):
                self.drop_channel(node_id, channel)
            elif hasattr(channel, "epoch"):
                channel.epoch = self.state.limits.epoch

    def open_space(self, name: str, fingerprint: bytes, deadline_s: float) -> Space:
        """The namespace of this name, opened once per session.

        Raises FingerprintMismatch where it exists with another fingerprint.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"a namespace's name is a str, not {type(name).__name__}")
        with self._space_lock:
            space = self.spaces.get(name)
        if space is not None and space.fingerprint == fingerprint:
            return space
        space = Space(name, fingerprint, self.config.location_cache_entries)
        self.reopen_space(space, deadline_s)
        with self._space_lock:
            return self.spaces.setdefault(name, space)

    def reopen_space(self, space: Space, deadline_s: float) -> None:
        """Ask the master for the namespace's present id, generation and seed."""
        space.check_name()
        request = pb.OpenNamespaceRequest(
            name=space.name,
            fingerprint=space.fingerprint,
            create=True,
            durability=DURABILITIES[self.config.durability],
            credentials=self.identity.credentials,
        )
        space.opened(self.master.open_namespace(request, deadline_s))

    def reopen_session(self, deadline_s: float) -> None:
        """The master does not know us: say hello again and open what was open."""
        began_s = time.monotonic()
        self.hello(deadline_s)
        with self._space_lock:
            spaces = list(self.spaces.values())
        for space in spaces:
            self.reopen_space(space, max(0.001, deadline_s - (time.monotonic() - began_s)))

    # ---- channels ----------------------------------------------------------------------------

    def channel(self, node_id: int, deadline_s: float) -> Channel:
        """The channel to a node, made if there is none.

        Raises Unavailable where no transport reaches it, DeadlineExceeded, ClientClosed.
        """
        channel = self.channels.get(node_id)
        if channel is not None:
            return channel
        until_s = time.monotonic() + deadline_s
        turn = self._connect_turns.setdefault(node_id, Turn())
        try:
            turn.take(until_s, "another thread is connecting to that node")
            channel = self.channels.get(node_id)
            if channel is None:
                if self.refusal is not None:
                    raise ClientClosed(self.refusal.message)
                pool_id = self._pool_id
                channel = self._connect(node_id, until_s)
                with self._numbers_lock:
                    if pool_id != self._pool_id:
                        channel.close()
                        raise Unavailable(f"node {node_id} is another one by now")
                    self._count_by_transport(node_id)
                    self.channels[node_id] = channel
        finally:
            turn.give()
        return channel

    def _connect(self, node_id: int, until_s: float) -> Channel:
        node = self.state.peers.nodes.get(node_id)
        if node is None:
            raise Unavailable(f"node {node_id} is not in the cluster view any more")
        channel = self.ways.connect(node, self.identity, self.state.limits.epoch, until_s)
        if channel.verifies_by_lease:
            self.state.lease_proven.add(node_id)
        else:
            self.state.lease_proven.discard(node_id)
        return channel

    def improve_ways(self) -> None:
        """Try better ways to nodes where it is time, in a thread; let go of channels that such a
        way has replaced. Now and then, by housekeeping."""
        now_s = time.monotonic()
        self._close_retired(now_s)
        if self._improving is not None and not self._improving.done():
            return
        nodes = self.state.peers.nodes
        in_use = {node_id: nodes[node_id] for node_id in list(self.channels) if node_id in nodes}
        found = self.ways.improvable(in_use, self.identity, now_s)
        if found:
            self._improving = self.pool().submit(self._improve, found)

    def _improve(self, node_ids: Sequence[int]) -> None:
        for node_id in node_ids:
            if self.refusal is not None:
                return
            until_s = time.monotonic() + _IMPROVE_S
            turn = self._connect_turns.setdefault(node_id, Turn())
            try:
                turn.take(until_s, "another thread is connecting to that node")
                self._improve_one(node_id, until_s)
            except CenoteError as error:
                _log.debug("no better way to node %d: %s", node_id, error)
            finally:
                turn.give()

    def _improve_one(self, node_id: int, until_s: float) -> None:
        old, pool_id = self.channels.get(node_id), self._pool_id
        node = self.state.peers.nodes.get(node_id)
        if node is None or old is None or self.refusal is not None:
            return
        channel = self.ways.improve(node, self.identity, self.state.limits.epoch, until_s)
        if channel is None:
            return
        with self._numbers_lock:
            if pool_id == self._pool_id and self.refusal is None:
                self.state.lease_proven.discard(node_id)
                self._count_by_transport(node_id)
                self.channels[node_id] = channel
                late_s = time.monotonic() + _RETIRED_S
                self._retired.append((old, node_id, frozenset(self.running), late_s))
                return
        channel.close()

    def _count_by_transport(self, node_id: int) -> None:
        """What moves to and from that node goes by its present way from now on."""
        name = self.ways.taken(node_id)
        self.state.moved[node_id] = self.moved.setdefault(name, [0, 0])

    def _close_retired(self, now_s: float) -> None:
        for entry in list(self._retired):
            old, node_id, calls, late_s = entry
            if now_s < late_s or any(call in self.running for call in calls):
                continue
            old.close()
            with self._numbers_lock:
                if entry in self._retired:
                    self._retired.remove(entry)
                # Not before: a call that began on the old one must not trust a lease instead.
                channel = self.channels.get(node_id)
                if channel is not None and channel.verifies_by_lease:
                    self.state.lease_proven.add(node_id)

    def drop_channel(self, node_id: int, channel: Channel) -> None:
        """Give a channel up; the next use makes a new one."""
        if self.channels.get(node_id) is channel:
            self.channels.pop(node_id, None)
            channel.close()

    # ---- helpers -----------------------------------------------------------------------------

    def pool(self) -> ThreadPoolExecutor:
        """Threads for transfers with several nodes at once."""
        pool = self._pool
        if pool is None:
            with self._pool_lock:
                if self.refusal is not None:
                    raise ClientClosed("the client was closed")
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(
                        self.config.transfer_threads, thread_name_prefix="cenote-transfer"
                    )
                pool = self._pool
        return pool

    def abort_later(self, grant: Grant) -> None:
        """Give a grant back without waiting for it."""
        self.aborts.append(grant)
        self.state.wake()


def _address_of(node: common_pb2.NodeView) -> list[tuple[int, str]]:
    return [(endpoint.kind, endpoint.address) for endpoint in node.endpoints]
