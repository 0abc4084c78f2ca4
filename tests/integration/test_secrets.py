"""What a pool with tokens writes down: who changed what, and nobody's secrets."""

from __future__ import annotations

import json
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from cenote.api.errors import CenoteError, Unauthenticated
from cenote.client import Client
from cluster import Cluster, run_cenote
from secured_pool import SecuredPool, secured_pool
from security_kit import HOLDERS
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
ETCD_PASSWORD = "hunter2-of-etcd-0123456789"
MISTYPED = "cenote_0123456789ab_" + "mistyped" * 5
METRICS = {"metrics-listen": "127.0.0.1:0"}


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecuredPool]:
    """It logs all that it can, and has every secret that a daemon may be given."""
    config = tmp_path / "daemon.toml"
    config.write_text(f'etcd_password = "{ETCD_PASSWORD}"\nlog_level = "debug"\n')
    flags = {**METRICS, "config": config, "key-rotation-s": 5}
    with secured_pool(
        tmp_path,
        monkeypatch,
        stores=2,
        dram_bytes=16 * MIB,
        master_flags=flags,
        store_flags={**METRICS, "config": config},
    ) as made:
        yield made


def try_everything(pool: SecuredPool) -> None:
    """Whatever may come by a secret, and by somebody who has none."""
    with pool.client("ann", "ann/llama") as ann, pool.client("wide", "shared") as wide:
        for client in (ann, wide):
            client.put_batch(["a", "b"], [b"x" * 70_000, b"y" * 100]).raise_for_errors()
            assert client.get("a") == b"x" * 70_000
        for token in (MISTYPED, pool.tokens["ann"][:-1], ""):
            with pytest.raises(Unauthenticated) as refused:
                pool.cluster.client(token=token)
            assert not token or token not in str(refused.value)
        with pytest.raises(CenoteError):
            pool.client("bob", "ann/llama")
    pool.cluster.stores[0].restart()
    pool.tokens.revoke("ann-reader")
    pool.cluster.wait_alive(2)
    wait_until(
        lambda: any("token revoked" in line for line in audited(pool.cluster)),
        20.0,
        what="the master to take up the revocation",
    )


def secrets_of(pool: SecuredPool) -> dict[str, bytes]:
    tokens = {name: pool.tokens[name].split("_", 2)[2].encode() for name in HOLDERS}
    _, ticket = pool.ticket("ann")
    return {
        **tokens,
        "mistyped": MISTYPED.split("_", 2)[2].encode(),
        "etcd": ETCD_PASSWORD.encode(),
        "ticket": ticket[-32:],
        "ticket as hex": ticket[-32:].hex().encode(),
    }


def written_down(cluster: Cluster, tmp_path: Path) -> dict[str, bytes]:
    """All that somebody may read who is neither a daemon nor its user, by where it is."""
    found = {}
    for directory in (cluster.directory, cluster.dram_directory):
        for path in directory.rglob("*"):
            if path.is_file() and not path.is_socket():
                found[str(path)] = path.read_bytes()
    assert any(path.endswith(".log") for path in found)
    for process in cluster.processes:
        found[f"command line of {process.name}"] = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        with urllib.request.urlopen(str(process.ready["metrics"]), timeout=10) as reply:
            found[f"metrics of {process.name}"] = reply.read()
    for command in (
        ("config", "get", "--json"),
        ("status", "--json"),
        ("leases", "--json"),
        ("nodes", "--json"),
    ):
        asked = cluster.cli(*command)
        assert asked.returncode == 0, asked.stderr
        found[" ".join(command)] = asked.stdout + asked.stderr
    dump = tmp_path / "dump.tar.gz"
    assert cluster.cli("debug", "dump", str(dump)).returncode == 0
    with tarfile.open(dump) as archive:
        for member in archive.getmembers():
            opened = archive.extractfile(member)
            if opened is not None:
                found[f"dump: {member.name}"] = opened.read()
    assert len(found) > 20
    return found


def test_nobodys_secrets_are_written_down(pool: SecuredPool, tmp_path: Path) -> None:
    try_everything(pool)
    secrets = secrets_of(pool)
    told = written_down(pool.cluster, tmp_path)
    assert any(b"DEBUG" in text for text in told.values())
    found = [
        (name, place, text[max(0, text.index(secret) - 200) : text.index(secret)])
        for place, text in told.items()
        for name, secret in secrets.items()
        if secret in text
    ]
    assert found == []
    # The file of tokens itself has none of them either.
    kept = pool.tokens.path.read_bytes()
    assert [name for name, secret in secrets.items() if secret in kept] == []
    # Not in a vacuum: what no secret is, is found.
    assert any(pool.tokens.ids["ann-reader"].encode() in text for text in told.values())


def test_a_client_that_is_shown_shows_no_token(pool: SecuredPool) -> None:
    secret = pool.tokens["ann"].split("_", 2)[2]
    with pool.client("ann", "ann/llama") as client:
        for text in (repr(client), repr(client.config), str(client.stats())):
            assert secret not in text
    with pytest.raises(CenoteError) as error:
        Client(pool.cluster.lane, token=pool.tokens["ann"], token_file="/nowhere")
    assert secret not in str(error.value)


ACTIONS = {
    "namespace created": ("namespaces", "create", "audited"),
    "quota set": ("namespaces", "set-quota", "audited", "--dram", "1MiB"),
    "namespace reset": ("namespaces", "reset", "audited", "--yes"),
    "objects evicted": ("evict", "-n", "audited", "--all", "--yes"),
    "namespace deleted": ("namespaces", "delete", "audited", "--yes"),
    "limits changed": ("config", "set", "pinned_share_max=0.2", "--yes"),
    "snapshot asked for": ("snapshot",),
    "rebalance": ("rebalance",),
    "drain": ("drain", "s0"),
}


def audited(cluster: Cluster) -> list[str]:
    lines = cluster.master.log_text().splitlines()
    return [line for line in lines if " cenote.audit " in line]


def test_what_administrators_change_is_in_the_audit_log(pool: SecuredPool) -> None:
    """With who it was: the holder and the id of the token, never the token."""
    cluster = pool.cluster
    for action, command in ACTIONS.items():
        done = cluster.cli(*command)
        assert done.returncode == 0, (command, done.stderr)
        (line,) = [line for line in audited(cluster) if f" cenote.audit {action} " in line]
        assert "holder=root" in line
        assert f"token={pool.tokens.ids['root']}" in line
        assert "request=" in line  # that the command's own log has, too
    assert cluster.cli("namespaces", "create", "shared").returncode == 0
    count = len(audited(cluster))
    # What is refused changes nothing, and is with the refusals.
    pool.tokens.add("cleo", *HOLDERS["wide"])
    environment = cluster.environment | {"CENOTE_CLIENT_TOKEN": pool.tokens["cleo"]}
    refused = run_cenote("namespaces", "reset", "shared", "--yes", environment=environment)
    assert refused.returncode == 1
    assert b"PermissionDenied" in refused.stderr or b"role" in refused.stderr
    named = [line for line in audited(cluster)[count:] if "cleo" in line]
    assert all("token made" in line for line in named)
    assert "cleo" in next(
        line
        for line in cluster.master.log_text().splitlines()
        if "cenote.security refused" in line and "ResetNamespace" in line
    )


def test_tokens_that_come_and_go_are_in_the_audit_log(pool: SecuredPool) -> None:
    """The leader says when it took a change of the file up: from then on it counts."""
    pool.tokens.add("dora", *HOLDERS["wide"])
    pool.tokens.revoke("bob")

    def are_told() -> bool:
        lines = audited(pool.cluster)
        made = [line for line in lines if "token made" in line and "holder=dora" in line]
        gone = [line for line in lines if "token revoked" in line and "holder=bob" in line]
        return bool(made and gone)

    wait_until(are_told, 20.0, what="the audit log to have both")
    listed = json.loads(pool.cluster.cli("status", "--json").stdout)
    assert listed["role"] == "leader"
