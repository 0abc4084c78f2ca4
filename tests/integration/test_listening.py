"""Nothing listens on anything but loopback unless told to."""

from __future__ import annotations

import ipaddress
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cenote.runtime.harness import EXIT_USAGE
from cluster import Cluster, run_module, start_cenote
from remote import Remote
from waiting import wait_until

pytestmark = pytest.mark.integration

TCP_LISTEN = "0A"
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def children_of(pid: int) -> list[int]:
    """The process and all that it started, and they in turn."""
    found = [pid]
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += children_of(int(child))
    return found


def sockets_of(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    return inodes


def listening(pid: int) -> list[tuple[str, Address, int]]:
    """(protocol, address, port) of everything at which the process takes in strangers."""
    inodes = sockets_of(pid)
    found = []
    for protocol in ("tcp", "tcp6", "udp", "udp6", "udplite", "raw", "raw6"):
        path = Path(f"/proc/{pid}/net/{protocol}")
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            words = line.split()
            if words[9] not in inodes:
                continue
            if protocol.startswith("tcp") and words[3] != TCP_LISTEN:
                continue
            host, _, port = words[1].partition(":")
            found.append((protocol, decoded(host), int(port, 16)))
    return found


def decoded(host: str) -> Address:
    """The kernel prints addresses as words in the machine's byte order."""
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def check_loopback(pid: int, *, count: int | None = None) -> None:
    found = listening(pid)
    strangers = [where for where in found if not where[1].is_loopback]
    assert not strangers
    if count is not None:
        assert len(found) == count, found


@contextmanager
def cenote(*arguments: str) -> Iterator[int]:
    """A `cenote` command that runs; its pid. Told to end at the end."""
    with start_cenote(*arguments) as process:
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(10.0)


def test_the_check_can_fail() -> None:
    import socket

    with socket.create_server(("", 0)) as public, socket.create_server(("127.0.0.1", 0)) as private:
        found = {(str(address), port) for _, address, port in listening(os.getpid())}
        assert ("0.0.0.0", public.getsockname()[1]) in found
        assert ("127.0.0.1", private.getsockname()[1]) in found
        with pytest.raises(AssertionError):
            check_loopback(os.getpid())


def test_daemons_and_clients_by_default(tmp_path: Path) -> None:
    # Without the flags that other tests pass: their defaults are what is looked at.
    flags: dict[str, object] = {"metrics-listen": "127.0.0.1:0", "listen": None, "grpc": None}
    with Cluster(stores=0, master_flags={"metrics-listen": "127.0.0.1:0"}) as cluster:
        store = cluster.add_store(flags=flags)
        check_loopback(cluster.master.pid, count=3)
        check_loopback(store.pid, count=3)
        with Remote("peer", cluster.lane, {}) as client:
            client.expect("ready")
            client.say(("put", ("key", b"x"), {}))
            assert client.hear()[0]
            assert listening(client.process.pid) == []
            client.say(None)
        # What other users could open is as private as the ports are local.
        sockets = [p for p in cluster.directory.rglob("*") if stat.S_ISSOCK(p.stat().st_mode)]
        assert sockets
        for path in sockets:
            modes = [p.stat().st_mode for p in (path, path.parent)]
            assert any(not mode & 0o077 for mode in modes), path
        for path in cluster.dram_directory.rglob("*"):
            assert not path.stat().st_mode & 0o007 or not path.parent.stat().st_mode & 0o007


def test_the_defaults_of_a_whole_pool() -> None:
    with cenote("up", "--nodes", "2", "--dram", "16MiB", "--port", "0") as pid:
        wait_until(lambda: sum(map(len, map(listening, children_of(pid)))) >= 6, what="ports")
        for each in children_of(pid):
            check_loopback(each)


def test_elsewhere_it_asks_for_credentials() -> None:
    for module, remedy in (("cenote.master", "--tokens"), ("cenote.store", "--token-file")):
        done = run_module(module, "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1")
        assert done.returncode == EXIT_USAGE
        said = done.stderr.decode()
        assert "open to the network" in said
        assert remedy in said
        assert "--insecure" in said


def test_it_listens_elsewhere_where_it_is_told_to() -> None:
    flags = {"listen": "0.0.0.0:0", "grpc": "127.0.0.1:0", "insecure": True}
    with Cluster(stores=0, master_flags=flags) as cluster:
        found = listening(cluster.master.pid)
        public = [port for _, address, port in found if not address.is_loopback]
        assert len(public) == 1
        assert len(found) == 2
        cluster.master.ready["lane"] = f"127.0.0.1:{public[0]}"
        store = cluster.add_store(
            flags={"listen": "0.0.0.0:0", "advertise": "127.0.0.1", "insecure": True}
        )
        for process in (cluster.master, store):
            assert "open to the network, and asks nobody who he is" in process.log_text()
        public = [port for _, address, port in listening(store.pid) if not address.is_loopback]
        assert len(public) == 1
        assert store.ready["data"].endswith(f":{public[0]}")
        with cluster.client(transports=("tcp",)) as client:
            client.put("key", b"over the advertised address")
            assert client.get("key") == b"over the advertised address"
