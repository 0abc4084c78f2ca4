"""Tokens where a pool does more than hold bytes: another master leads, an SSD holds what has no
room in memory, daemons copy from each other, an engine's helper process moves blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mover_calls
from cenote.api.errors import CenoteError, PermissionDenied, Unauthenticated, Unavailable
from cenote.api.rows import EXTENT
from cenote.cli.connect import Admin
from cenote.connectors.vllm.mover import Mover
from cenote.connectors.vllm.options import make_options
from cenote.connectors.vllm.orders import SpaceName
from cenote.transport import wire
from etcd import EtcdCluster
from payloads import payload_of
from secured_pool import SecuredPool, secured_pool
from security_kit import DataSocket
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

MIB = 1 << 20
SIZE = 256 << 10
MARK = b"what only ann's engines may read"
BODY = MARK * (SIZE // len(MARK) - 1)
SLOW_S = 30.0


def value_of(key: str) -> bytes:
    return payload_of(key, 2 * len(MARK)) + BODY


def check(pool: SecuredPool, keys: list[str]) -> None:
    """All is there for its tenant, as it was put."""
    with pool.client("ann", "ann/llama", deadline_s=20.0) as ann:
        for key in keys:
            assert ann.get(key) == value_of(key), key


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def test_another_master_takes_over(
    etcd: EtcdCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions, tickets, data connections and revocations go on; its keys are others."""
    with secured_pool(
        tmp_path, monkeypatch, masters=2, stores=1, metadata=etcd.url, dram_bytes=32 * MIB
    ) as pool:
        keys = [f"key-{number}" for number in range(20)]
        old_id, old_ticket = pool.ticket("ann")
        data = str(pool.cluster.stores[0].ready["data"]).removeprefix("tcp://")
        with (
            pool.client("ann", "ann/llama", deadline_s=20.0) as ann,
            pool.client("bob", "bob/llama", deadline_s=20.0) as bob,
            DataSocket(data) as held,
        ):
            held.hello(old_id, old_ticket)
            ann.put_batch(keys, [value_of(key) for key in keys]).raise_for_errors()
            bob.put("own", b"bob's")
            pool.cluster.leader().kill()
            pool.cluster.leader()
            pool.cluster.wait_alive(1)  # before, what was put last is a miss
            for key in keys:
                assert ann.get(key) == value_of(key)
            more = [f"later-{number}" for number in range(20)]
            ann.put_batch(more, [value_of(key) for key in more]).raise_for_errors()
            assert bob.get("own") == b"bob's"
            with pytest.raises(PermissionDenied):
                pool.client("bob", "ann/llama", deadline_s=20.0)
            # What the old leader's key signed: good where it was shown already, soon nowhere else.
            one = np.array([(1, 0, 0, 64)], EXTENT).tobytes()
            assert held.ask(wire.OP_READ, 1, one)[0] in ([0], [PermissionDenied.code])

            def is_unknown() -> bool:
                with DataSocket(data) as raw:
                    try:
                        raw.hello(old_id, old_ticket)
                    except Unavailable:
                        return True
                return False

            wait_until(is_unknown, SLOW_S, what="the daemon to forget the old leader's keys")
            for channel in list(ann._session.channels.values()):  # so that it connects anew
                ann._session.drop_channel(channel.node_id, channel)
            assert ann.get(keys[0]) == value_of(keys[0])
            assert MARK not in pool.stolen("bob", pool.cluster.stores[0], 32 * MIB, 2)
            pool.tokens.revoke("bob")

            def is_out() -> bool:
                try:
                    bob.put(os.urandom(8), b"x")
                except Unauthenticated:
                    return True
                except CenoteError:
                    return False
                return False

            wait_until(is_out, SLOW_S, what="the new leader to end the session")
        check(pool, [*keys, *more])


def demoted(pool: SecuredPool) -> int:
    with Admin([pool.cluster.grpc], deadline_s=20.0) as admin:
        return int(admin.status().demoted_objects)


def wait_for_copies(pool: SecuredPool, goal: int) -> None:
    wait_until(lambda: demoted(pool) >= goal, SLOW_S, what=f"{goal} copies on the SSD")


def test_what_lies_on_an_ssd_is_its_tenants_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is copied there and back by the daemon, which goes on knowing whose it is, also over its
    restart."""
    dram, ssd = 16 * MIB, 64 * MIB
    flags = {"ssd": str(tmp_path / "ssd"), "ssd-size": ssd}
    with secured_pool(tmp_path, monkeypatch, stores=1, dram_bytes=dram, store_flags=flags) as pool:
        store = pool.cluster.stores[0]
        keys = [f"key-{number}" for number in range(120)]  # about twice the memory
        with pool.client("ann", "ann/llama", deadline_s=20.0) as ann:
            for first in range(0, len(keys), 10):
                some = keys[first : first + 10]
                ann.put_batch(some, [value_of(key) for key in some]).raise_for_errors()
                # What has no copy yet still has room in memory.
                wait_for_copies(pool, first - 30)
            assert demoted(pool) > 0
        check(pool, keys)
        assert MARK not in pool.stolen("bob", store, ssd, 3)
        assert MARK in pool.stolen("wide", store, ssd, 3)
        store.restart()
        check(pool, keys)
        assert MARK not in pool.stolen("bob", store, ssd, 3)


def holds(pool: SecuredPool, name: str) -> int:
    """Bytes that are in use on a node."""
    with Admin([pool.cluster.grpc], deadline_s=20.0) as admin:
        return next(int(n.used_bytes) for n in admin.nodes() if n.view.name == name)


def test_what_daemons_copy_from_each_other_is_its_tenants_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a drain, and by the repair after a death: both with tickets of the role store."""
    keys = [f"key-{number}" for number in range(12)]
    flags = {"repair-after-s": 0.5, "node-dead-s": 1, "heartbeat-s": 0.2}
    size = 16 * MIB
    with secured_pool(tmp_path, monkeypatch, stores=0, master_flags=flags) as pool:
        cluster = pool.cluster
        first, second, third = (
            cluster.add_store(dram_bytes=size, flags={"failure-domain": f"domain{number}"})
            for number in range(3)
        )
        cluster.wait_alive(3)
        with pool.client("ann", "ann/llama", deadline_s=20.0) as ann:
            for key in keys:
                assert ann.put(key, value_of(key), replicas=2, min_replicas=2).stored
        drained = cluster.cli("drain", "s0", "--wait", timeout_s=60)
        assert drained.returncode == 0, drained.stderr
        first.stop()
        check(pool, keys)
        for store in (second, third):  # each has a copy of everything
            assert MARK not in pool.stolen("bob", store, size, 4)
            assert MARK in pool.stolen("wide", store, size, 4)
        second.kill()
        first.restart()
        assert cluster.cli("undrain", "s0").returncode == 0
        whole = holds(pool, "s2")
        wait_until(lambda: holds(pool, "s0") >= whole, SLOW_S, what="the repair")
        third.kill()
        check(pool, keys)
        assert MARK not in pool.stolen("bob", first, size, 4)
        assert MARK in pool.stolen("wide", first, size, 4)


BLOCK = 64 << 10
COUNT = 8
KEYS = [b"%032d" % number for number in range(COUNT)]
LENGTHS = np.full(COUNT, BLOCK, np.uint64)
OFFSETS = np.arange(COUNT, dtype=np.uint64) * np.uint64(BLOCK)


def moved(mover: Mover, space: SpaceName, what: str) -> bool:
    """Whether all blocks were; False where no pool is reached yet. Raises what the pool says."""
    move = mover_calls.put if what == "put" else mover_calls.get
    try:
        return bool(move(mover, space, KEYS, OFFSETS, LENGTHS, 20.0).done.all())
    except Unavailable:
        return False


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_an_engines_helper_moves_blocks_of_its_own_namespaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """It has the engine's token from its environment, as engines are given it."""
    with secured_pool(tmp_path, monkeypatch, stores=1, dram_bytes=32 * MIB) as pool:
        monkeypatch.setenv("CENOTE_CLIENT_TOKEN", pool.tokens["ann"])
        chosen = {} if transport == "auto" else {"transports": [transport]}
        options = make_options({"master": pool.cluster.lane, **chosen})
        mover = Mover(options, "mover", COUNT * BLOCK)
        mover.start()
        try:
            data = np.random.default_rng(1).integers(0, 256, COUNT * BLOCK, np.uint8)
            mover.array[:] = data
            own = SpaceName("ann/vllm", b"f")
            wait_until(lambda: moved(mover, own, "put"), SLOW_S, what="the pool to be reached")
            mover.array[:] = 0
            assert moved(mover, own, "get")
            assert (mover.array == data).all()
            with pytest.raises(PermissionDenied):
                moved(mover, SpaceName("bob/vllm", b"f"), "put")
            pool.tokens.revoke("ann")

            def is_out() -> bool:
                try:
                    moved(mover, own, "get")
                except Unauthenticated:
                    return True
                except CenoteError:
                    return False
                return False

            wait_until(is_out, SLOW_S, what="the revoked token to count no more")
        finally:
            mover.close()


def test_isolation_of_the_pool_lets_tenants_map_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has a token is trusted with bytes then, and with keys still not."""
    flags = {"isolation": "pool"}
    with secured_pool(
        tmp_path, monkeypatch, stores=1, dram_bytes=16 * MIB, master_flags=flags
    ) as pool:
        with pool.client("ann", "ann/llama") as ann:
            ann.put("key", b"x" * 5000)
            with ann.view(["key"]) as views:
                (view,) = views
                assert view is not None
                assert bytes(view) == b"x" * 5000
            assert [path.path for path in ann.paths()] == ["shm"]
        with pytest.raises(PermissionDenied):
            pool.client("bob", "ann/llama")
        with (
            DataSocket(str(pool.cluster.stores[0].ready["socket"]).removeprefix("unix://")) as raw,
            pytest.raises(Unauthenticated),
        ):
            raw.hello(os.urandom(16), b"", want_descriptors=True)
