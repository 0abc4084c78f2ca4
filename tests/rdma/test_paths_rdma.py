"""What the commands say of RDMA, and of NICs that go down and come back: real devices, daemons."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from cenote.cli.app import app
from cenote.client import Client
from cenote.transport.nics.choice import usable_ports
from cenote.transport.nics.sysfs import read_netdevs, read_ports
from cluster import Cluster
from rdma.links import set_links
from waiting import wait_until

pytestmark = [
    pytest.mark.rdma,
    pytest.mark.skipif(not read_ports(), reason="this host has no RDMA device"),
]

MIB = 1 << 20
SLOW_S = 300.0
"""The machine is emulated. So slow is it that a daemon may miss a master's probe meanwhile, and
what it holds is a miss for a moment; other bytes it never is."""


@pytest.mark.timeout(900)
def test_paths_follow_the_nics() -> None:
    ports, _ = usable_ports(read_ports(), netdevs=read_netdevs())
    netdevs = [port.gids[0].netdev for port in ports]
    if os.geteuid() or not all(name.startswith("rnic") for name in netdevs):
        pytest.skip("takes NICs down: only in the emulated machine")
    data = os.urandom(MIB)
    with (
        Cluster(stores=1, dram_bytes=48 * MIB, ready_timeout_s=SLOW_S) as cluster,
        Client(cluster.lane, transports=("rdma", "tcp"), deadline_s=60.0) as client,
    ):
        client.put("k", data)
        (path,) = client.paths(deadline_s=60.0)
        assert path.path == "rdma", path
        assert all(port.name in path.route for port in ports)
        try:
            set_links(netdevs, "down")

            def over_tcp() -> bool:
                assert client.get("k") in (data, None)
                (found,) = client.paths(deadline_s=60.0)
                return found.path == "tcp" and any(o.path == "rdma" for o in found.obstacles)

            wait_until(over_tcp, SLOW_S, what="TCP to be taken, and said why")
        finally:
            set_links(netdevs, "up")

        def over_rdma() -> bool:
            assert client.get("k") in (data, None)
            (found,) = client.paths(deadline_s=60.0)
            return found.path == "rdma"

        wait_until(over_rdma, SLOW_S, what="RDMA to be taken again")
        wait_until(lambda: client.get("k") == data, SLOW_S, what="the object to be read")


@pytest.mark.timeout(900)
def test_commands_tell_of_rdma(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor`, `paths` and `nodes` as an operator calls them, on a host with devices."""
    ports, _ = usable_ports(read_ports(), netdevs=read_netdevs())
    with Cluster(
        stores=1,
        dram_bytes=48 * MIB,
        ready_timeout_s=SLOW_S,
        master_flags={"node-dead-s": 60},
        store_flags={"rdma": "on"},
    ) as cluster:
        cluster.wait_alive(1, SLOW_S)
        monkeypatch.setenv("CENOTE_MASTER", cluster.lane)
        monkeypatch.setenv("CENOTE_GRPC", cluster.grpc)

        def told(*arguments: str) -> list[dict[str, Any]]:
            """In this process: in such a machine a command takes a minute to start."""
            options = ["--json", "--deadline", "60"]
            app([*arguments, *options], prog_name="cenote", standalone_mode=False)
            found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
            assert found
            return found

        findings = {finding["check"]: finding for finding in told("doctor")}
        assert findings["rdma library"]["verdict"] == "ok", findings
        for port in ports:
            assert findings[f"rdma {port.name}"]["verdict"] == "ok", findings
            assert str(port.gids[0].address) in findings[f"rdma {port.name}"]["found"]
        assert findings["locked memory"]["verdict"] == "ok", findings
        assert findings["peer s0"]["verdict"] == "ok", findings

        [path] = told("paths", "--transports", "rdma,tcp")
        assert path["path"] == "rdma", path
        assert all(port.name in path["over"] for port in ports), path
        [forced] = told("paths", "--transports", "tcp")
        assert forced["path"] == "tcp", forced
        [node] = told("nodes", "--transports", "rdma,tcp")
        assert node["path"] == "rdma", node
        assert node["rdma_registered_bytes"] > 40 * MIB, node
