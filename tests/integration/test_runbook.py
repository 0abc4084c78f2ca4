"""docs/operating/runbook.md, played through: each symptom is made, what the page says is looked at,
and what it says to do is done. (etcd out of room: test_etcd_outage.py; a master that another one
follows: test_failover.py, test_security_pool.py.)"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from cenote.api.errors import NoSpace
from cenote.client import Client
from cluster import Cluster, run_cenote
from payloads import payload_of
from secured_pool import secured_pool
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
PROMPT = {"heartbeat-s": 0.2, "node-dead-s": 1}
SLOW_S = 30.0


def listed(cluster: Cluster, *command: str) -> Any:
    done = cluster.cli(*command, "--json")
    assert done.returncode in (0, 3), done.stderr
    return json.loads(done.stdout)


def states(cluster: Cluster) -> dict[str, str]:
    return {node["name"]: node["state"] for node in listed(cluster, "nodes")}


def wait_for_state(cluster: Cluster, name: str, *wanted: str) -> None:
    wait_until(lambda: states(cluster)[name] in wanted, SLOW_S, what=f"{name} to be {wanted}")


def test_a_node_is_dead() -> None:
    with Cluster(stores=1, dram_bytes=16 * MIB, master_flags=PROMPT) as cluster:
        (store,) = cluster.stores
        with cluster.client() as client:
            client.put("key", payload_of("key", 5000))
        for end, back, seen in (
            (store.kill, store.restart, ("dead",)),
            (store.pause, store.resume, ("dead",)),  # suspended: SIGSTOP, a debugger, a frozen VM
            (store.stop, store.restart, ("detached",)),
        ):
            end()
            wait_for_state(cluster, "s0", *seen)
            gone = listed(cluster, "explain", "key")
            assert gone["state"] == "unreachable"
            assert cluster.cli("get", "key").returncode == 3  # a miss, not an error
            back()
            wait_for_state(cluster, "s0", "alive")
            with cluster.client(deadline_s=20.0) as client:
                assert client.get("key") == payload_of("key", 5000)
        # A daemon without a master says so, and goes on looking.
        cluster.master.kill()
        wait_until(
            lambda: "not in touch with a master" in store.log_text(), SLOW_S, what="the warning"
        )
        cluster.master.restart()
        wait_for_state(cluster, "s0", "alive")


def fill_with_pins(client: Client) -> NoSpace:
    """What a put is told at the end."""
    for number in range(100):
        try:
            client.put(f"key-{number}", bytes(MIB), deadline_s=5.0)
        except NoSpace as error:
            return error
        client.pin([f"key-{number}"])
    raise AssertionError("it was never full")


def test_the_pool_is_full_of_what_must_stay() -> None:
    with Cluster(stores=1, dram_bytes=16 * MIB, master_flags=PROMPT) as cluster:
        assert cluster.cli("config", "set", "pinned_share_max=1", "--yes").returncode == 0
        with cluster.client() as client:
            error = fill_with_pins(client)
            assert "pin" in error.message + error.remedy
            told = cluster.cli("status").stdout.decode()
            (held,) = [line for line in told.splitlines() if line.strip().startswith("held")]
            assert "pinned" in held
            pins = listed(cluster, "pins")
            assert pins
            unpinned = cluster.cli("unpin", *(f"key-{number}" for number in range(4)))
            assert unpinned.returncode == 0, unpinned.stderr
            assert client.put("more", bytes(MIB), deadline_s=10.0).stored
            assert cluster.cli("evict", "--all", "--yes").returncode == 0
        assert cluster.cli("config", "unset", "pinned_share_max", "--yes").returncode == 0


def test_nobody_answers() -> None:
    with Cluster(stores=1, dram_bytes=16 * MIB) as cluster:
        with cluster.client() as client:
            client.put("key", b"value")
        cluster.master.kill()
        for command in (("status",), ("nodes",), ("get", "key")):
            began_s = time.monotonic()
            asked = cluster.cli(*command, "--deadline", "2")
            assert asked.returncode == 4, (command, asked.stderr)
            assert time.monotonic() - began_s < SLOW_S
        judged = cluster.cli("doctor", "--json", "--deadline", "2")
        assert judged.returncode == 1
        failed = {f["check"] for f in json.loads(judged.stdout) if f["verdict"] == "fail"}
        assert f"master {cluster.lane}" in failed
        cluster.master.restart()
        cluster.wait_alive(1)
        assert cluster.cli("get", "key").stdout == b"value"


def test_who_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command, an engine and a daemon with the wrong token, or none."""
    with secured_pool(tmp_path, monkeypatch, stores=1, dram_bytes=16 * MIB) as pool:
        cluster = pool.cluster
        for token, why in (
            ("", "wants a token"),
            ("cenote_0123456789ab_" + "x" * 43, "not one of this pool's"),
            (pool.tokens["node"], "PermissionDenied"),  # of another role
        ):
            environment = cluster.environment | {"CENOTE_CLIENT_TOKEN": token}
            asked = run_cenote("rebalance", "--yes", environment=environment)
            if asked.returncode == 2:  # it asks nothing
                asked = run_cenote("rebalance", environment=environment)
            assert asked.returncode == 1, asked.stderr
            assert why in asked.stderr.decode() or "token" in asked.stderr.decode()
        assert "cenote.security refused port=grpc" in cluster.master.log_text()
        listed_tokens = run_cenote("token", "list", "--tokens", str(pool.tokens.path))
        assert b"root" in listed_tokens.stdout
        # Doctor has a token of a file, as engines do.
        file = tmp_path / "root.token"
        file.write_text(pool.tokens["root"])
        environment = {
            name: value
            for name, value in cluster.environment.items()
            if name != "CENOTE_CLIENT_TOKEN"
        }
        judged = run_cenote(
            "doctor", "--json", environment=environment | {"CENOTE_CLIENT_TOKEN_FILE": str(file)}
        )
        found = {f["check"]: f for f in json.loads(judged.stdout)}
        assert found[f"master {cluster.lane}"]["verdict"] == "ok", found
        judged = run_cenote("doctor", "--json", environment=environment)
        found = {f["check"]: f for f in json.loads(judged.stdout)}
        assert found[f"master {cluster.lane}"]["verdict"] == "fail"
        assert "token" in found[f"master {cluster.lane}"]["found"]
