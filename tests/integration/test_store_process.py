"""The store daemon as a process: signals, kill -9, restarts, and a master that comes and goes."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from cenote.api.errors import InvalidArgument, ResourceUnavailable
from cenote.cli.daemons import clean_environment
from cenote.cli.scratch import MEMORY_DIRECTORY, scratch_directory
from cenote.cli.specs import store_spec
from cenote.transport.base import SealBatch, SessionIdentity
from cenote.transport.tcp import TcpTransport
from cenote.v1 import common_pb2, store_pb2, store_pb2_grpc
from cluster import Cluster, Process
from slot_rows import Sealed, seal_arguments
from waiting import wait_until

pytestmark = pytest.mark.integration

MIB = 1 << 20
STOP_S = 2.0


@pytest.fixture
def memory() -> Iterator[Path]:
    with scratch_directory(MEMORY_DIRECTORY) as directory:
        yield directory


@pytest.fixture
def lonely(memory: Path, tmp_path: Path) -> Iterator[Process]:
    """A store daemon, not started, whose master is away."""
    made = make(memory, tmp_path)
    yield made
    made.daemon.kill()


def make(memory: Path, directory: Path, dram_bytes: int = 16 * MIB, **flags: object) -> Process:
    spec = store_spec(
        "n1",
        master="127.0.0.1:1",
        dram_bytes=dram_bytes,
        dram_directory=memory,
        socket_directory=directory,
        extra=flags,
    )
    return Process(spec, directory, clean_environment())


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_its_memory_stays(
    lonely: Process, memory: Path, number: signal.Signals
) -> None:
    lonely.start()
    fields = lonely.wait_ready()
    assert fields["name"] == "n1"
    lonely.send_signal(number)
    assert lonely.wait_exit(STOP_S) == 0
    kept = {name for name in names(memory) if name.startswith("cenote-")}
    assert kept == {
        "cenote-n1.lock",
        "cenote-n1.claims",
        "cenote-n1-0.data",
        "cenote-n1-0.slots",
    }
    assert not Path(fields["socket"].removeprefix("unix://")).exists()


def test_a_signal_ends_it_while_it_starts_and_while_memory_is_set_up(
    memory: Path, tmp_path: Path, rng: random.Random
) -> None:
    for dram_bytes in (256 * MIB, 16 * MIB):
        store = make(memory, tmp_path, dram_bytes, **{"wipe-on-exit": True})
        store.start()
        if dram_bytes == 256 * MIB:
            store.wait_ready()  # the memory is not
        else:
            wait_until(
                lambda: "cenote-n1.lock" in names(memory) or rng.random() < 0.01, what="any moment"
            )
        assert store.stop(STOP_S) in (0, -signal.SIGTERM), store.log_text()


def test_it_listens_on_loopback_only(lonely: Process) -> None:
    lonely.flags["metrics-listen"] = "127.0.0.1:0"
    lonely.start()
    lonely.wait_ready()
    inodes = set()
    for descriptor in os.listdir(f"/proc/{lonely.pid}/fd"):
        target = os.readlink(f"/proc/{lonely.pid}/fd/{descriptor}")
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{lonely.pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            if state == "0A" and inode in inodes:
                listening.append(local.split(":")[0])
    assert len(listening) == 3
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}
    lonely.stop(STOP_S)


def test_what_it_cannot_do_is_an_exit_code_and_a_reason(
    lonely: Process, memory: Path, tmp_path: Path
) -> None:
    lonely.start()
    lonely.wait_ready()
    (tmp_path / "second").mkdir()
    second = make(memory, tmp_path / "second")
    second.start()
    with pytest.raises(ResourceUnavailable, match=f"'n1': pid {lonely.pid} holds"):
        second.wait_ready()
    for dram, kind, message in (
        (1 << 50, ResourceUnavailable, r"can't get 1 PiB of memory in .* could be had"),
        ("4G", InvalidArgument, "--dram: '4G' is no size"),
    ):
        second.flags.update({"dram": dram, "name": "n2"})
        second.start()
        with pytest.raises(kind, match=message):
            second.wait_ready()
    assert lonely.stop(STOP_S) == 0


# ---- with a master ------------------------------------------------------------------------------


def host_port(text: str) -> tuple[str, int]:
    host, port = text.removeprefix("tcp://").rsplit(":", 1)
    return host, int(port)


@contextmanager
def stub_of(store: Process) -> Iterator[Any]:
    with grpc.insecure_channel(store.ready["grpc"]) as channel:
        yield store_pb2_grpc.StoreServiceStub(channel)  # type: ignore[no-untyped-call]


def status_of(store: Process) -> store_pb2.GetStoreStatusResponse:
    with stub_of(store) as stub:
        answer: store_pb2.GetStoreStatusResponse = stub.GetStoreStatus(
            store_pb2.GetStoreStatusRequest(), timeout=10
        )
    return answer


def keys_in(stub: Any) -> list[bytes]:
    request = store_pb2.ListSlotsRequest(namespace_id=5, generation=3, limit=1000)
    answers = list(stub.ListSlots(request, timeout=10))
    return [entry.key for answer in answers for entry in answer.entries]


def keys_of(store: Process) -> list[bytes]:
    with stub_of(store) as stub:
        return keys_in(stub)


def wait_attached(store: Process, epoch: int = 1) -> None:
    with stub_of(store) as stub:

        def attached() -> bool:
            status = stub.GetStoreStatus(store_pb2.GetStoreStatusRequest(), timeout=10)
            ready = all(s.ready_bytes == s.size_bytes and s.segment_id for s in status.segments)
            return status.epoch >= epoch and "attached master=" in store.log_text() and ready

        wait_until(attached, what=f"{store.name} to be attached in epoch {epoch}")


def seal(store: Process, rows: list[Sealed], epoch: int) -> list[int]:
    """Seal as a client does, over TCP."""
    segment_id = status_of(store).segments[0].segment_id
    packed, keys, _ = seal_arguments(rows, segment=segment_id)
    host, port = host_port(store.ready["data"])
    node = common_pb2.NodeView(
        node_id=status_of(store).node_id,
        endpoints=[
            common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address=f"{host}:{port}")
        ],
    )
    identity = SessionIdentity(os.urandom(16), "boot", os.getpid(), common_pb2.Credentials())
    transport = TcpTransport()
    try:
        channel = transport.connect(node, identity, epoch, 5.0)
        batch = SealBatch(epoch, 5, 3, packed.tobytes(), bytes(keys))
        return [int(status) for status in np.asarray(channel.seal(batch, 5.0))]
    finally:
        transport.close()


def test_sealed_slots_survive_what_a_daemon_can_die_of() -> None:
    with Cluster(stores=1, dram_bytes=16 * MIB, metadata="memory") as cluster:
        (store,) = cluster.stores
        wait_attached(store)
        before = status_of(store)
        rows = [Sealed(i, key=b"key %d" % i) for i in range(50)]
        assert seal(store, rows, before.epoch) == [0] * 50
        keys = [row.key for row in rows]
        assert keys_of(store) == keys
        # A master that has never heard of these objects has their slots cleared at the attach, so
        # it must be away: the daemon serves what it has, under the names that it had.
        cluster.master.pause()
        for number in (signal.SIGTERM, signal.SIGKILL):
            store.restart(number)
            after = status_of(store)
            assert keys_of(store) == keys
            assert after.segments[0].incarnation == before.segments[0].incarnation
            assert after.segments[0].segment_id == before.segments[0].segment_id
            assert (after.node_id, after.epoch) == (before.node_id, before.epoch)
        assert seal(store, rows, before.epoch) == [0] * 50, "a repeat"
        cluster.master.resume()
        with stub_of(store) as stub:
            wait_until(lambda: keys_in(stub) == [], what="unknown slots to be cleared")
        assert seal(store, rows, before.epoch) == [21] * 50, "a late repeat"


def test_a_restarted_master_is_attached_to_again() -> None:
    with Cluster(stores=2, dram_bytes=16 * MIB) as cluster:
        for store in cluster.stores:
            wait_attached(store)
        epoch = status_of(cluster.stores[0]).epoch
        for number in (signal.SIGTERM, signal.SIGKILL):
            cluster.master.restart(number)
            epoch += 1
            for store in cluster.stores:
                wait_attached(store, epoch)
        cluster.wait_alive(2)
        # The end of a daemon is known at once, not after some silence.
        assert cluster.stores[0].stop(STOP_S) == 0
        cluster.wait_alive(1, timeout_s=2.0)
        cluster.stores[0].start()
        cluster.stores[0].wait_ready()
        cluster.wait_alive(2)


def test_a_client_that_floods_a_data_port_with_garbage_costs_only_itself(lonely: Process) -> None:
    lonely.start()
    fields = lonely.wait_ready()
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 4096, os.urandom(4096)):
        with socket.create_connection(host_port(fields["data"]), timeout=10) as client:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65_536):
                pass
    assert status_of(lonely).sealed_slots == 0
    assert lonely.stop(STOP_S) == 0
