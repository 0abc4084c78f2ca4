"""Data servers and their clients in processes of their own, which can be stopped and killed."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cenote.runtime.log import get_logger
from cenote.security.refusals import Refusals
from cenote.security.tls import Tls
from cenote.store.rdma_host import RdmaHost
from cenote.store.server import DataServer
from cenote.store.serving import ServingLimits, TlsPort
from cenote.store.sessions import SessionTable
from cenote.transport.base import Seen, SessionIdentity
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.nics.advertised import encode_ports
from cenote.transport.nics.choice import advertised
from cenote.transport.rdma_nics import find_nics
from cenote.transport.shm import ShmTransport
from cenote.transport.testing_support import LocalMemory, batch
from cenote.v1 import common_pb2
from waiting import stop_process

__all__ = ["SEGMENT_ID", "DataDaemon", "MappingClient", "data_daemon"]

SEGMENT_ID = 7
_context = multiprocessing.get_context("forkserver")
# So that a new process has it all imported.
_context.set_forkserver_preload(
    ["cenote.store.server", "cenote.transport.fake_segment", "cenote.transport.shm"]
)


def _serve(pipe: Connection, size_bytes: int, unix_path: str, options: dict[str, Any]) -> None:
    segment = FakeSegment(SEGMENT_ID, size_bytes)
    segments = FakeSegments([segment])
    sessions = SessionTable(segments)
    limits = ServingLimits(**options.pop("limits", {}))
    library = options.pop("rdma", "")
    files = options.pop("tls_files", None)
    if files is not None:
        refusals = Refusals(get_logger("tests"), ("tcp",))
        options["tls"] = TlsPort(Tls(files), refusals)
    host = None
    if library:
        host = RdmaHost(segments, find_nics(library))
        while not host.register_more():
            pass
    server = DataServer(
        segments,
        sessions,
        tcp=("127.0.0.1", options.pop("port", 0)),
        unix_path=unix_path,
        limits=limits,
        rdma=host,
        **options,
    )
    server.start()
    ports = b"" if host is None else encode_ports(advertised(host.nics.ports))
    pipe.send((segment.fd, server.tcp_address, ports))
    while True:
        try:
            name, *args = pipe.recv()
        except EOFError:
            return
        if name == "epoch":
            segments.epoch = args[0]
            pipe.send(sessions.end_older_writes(args[0]))
        elif name == "cut":
            pipe.send(sessions.cut(args))
        elif name == "poll":
            pipe.send(sessions.poll())
        elif name == "add":
            segments.add(FakeSegment(*args))
            pipe.send(None)
        elif name == "silence":  # queue pairs answer no more, and connections stay
            assert host is not None
            pipe.send([lane.end() for lane in list(host._lanes.values())])
        elif name == "counters":
            pipe.send(server.counters())


class DataDaemon:
    """Handle on the process; the segment's bytes are mapped here, too."""

    def __init__(self, size_bytes: int, unix_path: str, options: dict[str, Any]) -> None:
        self._pipe, other = _context.Pipe()
        self._process = _context.Process(
            target=_serve, args=(other, size_bytes, unix_path, options), daemon=True
        )
        self._process.start()
        other.close()
        fd, (host, port), ports = self._pipe.recv()
        self.pid = self._process.pid or 0
        self.tcp = (host, port)
        self.unix_path = unix_path
        with open(f"/proc/{self.pid}/fd/{fd}", "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), size_bytes)
        address = f"{'tls://' if 'tls_files' in options else ''}{host}:{port}"
        self.node = common_pb2.NodeView(
            node_id=1,
            name="far",
            boot_id="this boot",
            endpoints=[
                common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address=address),
                common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_SHM, address=unix_path),
            ],
        )
        if ports:
            self.node.endpoints.add(
                kind=common_pb2.TRANSPORT_KIND_RDMA,
                address=address,
                device_info=ports,
            )

    def ask(self, name: str, *args: object) -> Any:
        """Have the process do something: epoch, cut, poll, add, silence, counters."""
        self._pipe.send((name, *args))
        return self._pipe.recv()

    def pause(self) -> None:
        stop_process(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)

    def close(self) -> None:
        self.kill()
        self._process.close()
        self._pipe.close()
        self.memory.close()


@contextlib.contextmanager
def data_daemon(size_bytes: int = 1 << 20, **options: Any) -> Iterator[DataDaemon]:
    """A running daemon. `limits` are those of ServingLimits, `tls_files` are for TLS, `rdma` is the
    verbs library to serve with; others go to DataServer."""
    with tempfile.TemporaryDirectory() as folder:
        daemon = DataDaemon(size_bytes, str(Path(folder, "data.sock")), options)
        try:
            yield daemon
        finally:
            daemon.close()


def _map_and_wait(pipe: Connection, node: bytes, session_id: bytes, write: bool) -> None:
    """A client process with the daemon's segment mapped."""
    transport = ShmTransport()
    identity = SessionIdentity(session_id, "this boot", os.getpid(), common_pb2.Credentials())
    channel = transport.connect(common_pb2.NodeView.FromString(node), identity, 1, 20.0)
    memory = LocalMemory(64)
    if write:
        assert channel.write_one(SEGMENT_ID, 0, 64, memory.address, 7, 20.0, False)[0] == 0
    seen: Seen | None = channel.view(batch([(SEGMENT_ID, 0, 64)]), 7, 20.0)
    pipe.send("ready")
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order == "close":
            channel.close()
            transport.close()
        elif order == "drop view":
            seen = None
        elif order == "fork":
            # The child keeps everything that a fork hands down, and is none of ours.
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            pipe.send(pid)
            continue
        pipe.send(seen is not None)


class MappingClient:
    """Another process that has a session and maps the segments of a daemon."""

    def __init__(self, node: common_pb2.NodeView, session_id: bytes, *, write: bool) -> None:
        self._pipe, other = _context.Pipe()
        self._process = _context.Process(
            target=_map_and_wait,
            args=(other, node.SerializeToString(), session_id, write),
            daemon=True,
        )
        self._process.start()
        other.close()
        self.pid = self._process.pid or 0
        assert self._pipe.recv() == "ready"

    def ask(self, order: str) -> Any:
        self._pipe.send(order)
        return self._pipe.recv()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)
        self._pipe.close()
