"""A store daemon whose machine is not as it should be: NICs that are down, memory that can't be
pinned, a restart in the middle. Real devices, real daemons, through the SDK.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import pytest

from cenote.api.errors import CenoteError
from cenote.cli.cmd_inspect import show_status
from cenote.cli.connect import Admin
from cenote.client import Client
from cenote.transport.nics.choice import usable_ports
from cenote.transport.nics.sysfs import read_netdevs, read_ports
from cluster import Cluster
from rdma.links import set_links
from rdma_daemon import rdma_nics
from waiting import wait_until

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not read_ports(), reason="this host has no RDMA device"),
]

MIB = 1 << 20
SLOW_S = 300.0
"""The machine is emulated; see test_paths_rdma."""
CALL_S = 60.0


@contextmanager
def admin_of(cluster: Cluster) -> Iterator[Admin]:
    """Asked from here: to start the command takes half a minute in such a machine."""
    with Admin(cluster.grpc.split(","), deadline_s=CALL_S) as admin:
        yield admin


def shown_status(cluster: Cluster) -> str:
    """What `cenote status` prints."""
    text = io.StringIO()
    with admin_of(cluster) as admin, redirect_stdout(text):
        show_status(admin, as_json=False)
    return text.getvalue()


def registered_bytes(cluster: Cluster) -> int:
    with admin_of(cluster) as admin:
        [node] = admin.nodes()
    return node.rdma_registered_bytes


def path_of(client: Client) -> str | None:
    [path] = client.paths(deadline_s=CALL_S)
    return path.path


def is_read(client: Client, key: str, data: bytes) -> bool:
    """Whether it is there; other bytes it never is."""
    found = client.get(key)
    assert found in (data, None)
    return found == data


def put_once_it_can(client: Client, key: str, data: bytes) -> None:
    def put() -> bool:
        try:
            client.put(key, data)
        except CenoteError:
            return False
        return True

    wait_until(put, SLOW_S, what=f"{key} to be put")


def test_nics_that_are_down_when_the_daemon_starts() -> None:
    """It serves over TCP, and over RDMA once they are up; clients change over by themselves."""
    ports, _ = usable_ports(read_ports(), netdevs=read_netdevs())
    netdevs = [port.gids[0].netdev for port in ports]
    if os.geteuid() or not all(name.startswith("rnic") for name in netdevs):
        pytest.skip("takes NICs down: only in the emulated machine")
    data = os.urandom(MIB)
    with (
        Cluster(stores=0, ready_timeout_s=SLOW_S) as cluster,
        Client(cluster.lane, transports=("rdma", "tcp"), deadline_s=CALL_S) as client,
    ):
        set_links(netdevs, "down")
        try:
            store = cluster.add_store(dram_bytes=48 * MIB)
            assert "rdma" not in store.ready
            put_once_it_can(client, "k", data)
            assert path_of(client) == "tcp"
            assert "its port is DOWN" in shown_status(cluster)
        finally:
            set_links(netdevs, "up")
        wait_until(lambda: path_of(client) == "rdma", SLOW_S, what="RDMA to be taken")
        wait_until(lambda: is_read(client, "k", data), SLOW_S, what="the object to be read")
        before = client.stats()
        assert is_read(client, "k", data)
        after = client.stats()
        assert after.rdma_read_bytes - before.rdma_read_bytes == MIB
        wait_until(
            lambda: registered_bytes(cluster) == 48 * MIB,
            SLOW_S,
            what="the master to hear of it",
        )
        assert "DOWN" not in shown_status(cluster)


def test_memory_that_can_not_be_pinned() -> None:
    """It goes over TCP, and `cenote status` says why and what would help."""
    rdma_nics("auto").close()
    if os.geteuid() or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv: a daemon without CAP_IPC_LOCK is started")
    weak = ("prlimit", "--memlock=1048576", "setpriv", "--bounding-set", "-ipc_lock")
    with (
        Cluster(stores=0, ready_timeout_s=SLOW_S) as cluster,
        Client(cluster.lane, transports=("rdma", "tcp"), deadline_s=CALL_S) as client,
    ):
        cluster.add_store(dram_bytes=48 * MIB, flags={"rdma": "on"}, launcher=weak)

        wait_until(
            lambda: "goes over TCP" in shown_status(cluster), SLOW_S, what="the trouble to be told"
        )
        shown = " ".join(shown_status(cluster).split())
        assert "s0: goes over TCP: can't pin 48 MiB for segment 0" in shown, shown
        assert "RLIMIT_MEMLOCK" in shown
        assert "ulimit -l" in shown
        data = os.urandom(MIB)
        put_once_it_can(client, "k", data)
        wait_until(lambda: is_read(client, "k", data), SLOW_S, what="the object to be read")
        stats = client.stats()
        assert stats.rdma_read_bytes == stats.rdma_written_bytes == 0
        assert stats.rdma_calls_over_tcp > 0


def test_a_store_that_is_restarted() -> None:
    """What was put over RDMA is read over RDMA from the next process, and more is put."""
    rdma_nics("auto").close()
    kept, new = os.urandom(MIB), os.urandom(MIB)
    with (
        Cluster(stores=1, dram_bytes=48 * MIB, ready_timeout_s=SLOW_S) as cluster,
        Client(cluster.lane, transports=("rdma", "tcp"), deadline_s=CALL_S) as client,
    ):
        client.put("before", kept)
        [store] = cluster.stores
        for turn in range(2):
            if turn:
                store.kill()
            else:
                store.stop(timeout_s=60)
            store.start()
            store.wait_ready(SLOW_S)
            cluster.wait_alive(1, timeout_s=SLOW_S)
            wait_until(lambda: is_read(client, "before", kept), SLOW_S, what="what was kept")
            put_once_it_can(client, f"after {turn}", new)
            wait_until(
                lambda at=turn: is_read(client, f"after {at}", new),  # type: ignore[misc]
                SLOW_S,
                what="what is new",
            )

            def over_rdma() -> bool:
                before = client.stats().rdma_read_bytes
                return (
                    is_read(client, "before", kept)
                    and client.stats().rdma_read_bytes - before == MIB
                )

            wait_until(over_rdma, SLOW_S, what="RDMA to be used again")
