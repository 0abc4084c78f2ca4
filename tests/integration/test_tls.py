"""TLS on every port of running daemons: who can't prove who he is gets nowhere, and is told why."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cenote.api.errors import CenoteError, PermissionDenied, TlsFailed, Unauthenticated
from cenote.client import Client
from cenote.client.aio import AsyncClient
from cenote.security.tokens import Role, TokenFile
from cluster import Cluster, run_cenote
from promptness import ends_within
from security_kit import DataSocket
from tls_kit import Authority, Issued, write
from waiting import wait_until

pytestmark = pytest.mark.integration

SECRET = b"what only ann's engines may read " * 4096
HOLDERS = {
    "root": (Role.ADMIN, ["*"], "cn:root"),
    "ann": (Role.WRITE, ["ann/*"], "dns:engine.ann"),
    "bob": (Role.WRITE, ["bob/*"], "cn:bob"),
    "node": (Role.STORE, ["*"], "cn:node"),
}


class Pool(NamedTuple):
    cluster: Cluster
    ours: Authority
    others: Authority
    certificates: dict[str, Issued]
    tokens: TokenFile
    folder: Path

    def client(self, holder: str, namespace: str, **options: Any) -> Client:
        given = {**self.ours.options(self.certificates[holder]), **options}
        return self.cluster.client(namespace=namespace, transports=("tcp",), **given)

    @property
    def data(self) -> str:
        return str(self.cluster.stores[0].ready["data"])

    def environment(self, holder: str = "root", **more: object) -> dict[str, str]:
        options = self.ours.options(self.certificates[holder])
        told = {f"CENOTE_CLIENT_{name.upper()}": value for name, value in options.items()}
        return {
            **self.cluster.environment,
            **told,
            **{name: str(value) for name, value in more.items()},
        }

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for process in self.cluster.processes:
            with urllib.request.urlopen(str(process.ready["metrics"]), timeout=20) as reply:
                for line in reply.read().decode().splitlines():
                    if "_refusals_total{" in line:
                        name, _, value = line.rpartition(" ")
                        found[name] = found.get(name, 0.0) + float(value)
        return found


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    folder = tmp_path_factory.mktemp("tls")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    tokens = TokenFile(folder / "tokens.json", must_exist=False)
    certificates = {
        "master": ours.issue("master"),
        "root": ours.issue("root", cn="root"),
        "ann": ours.issue("ann", "engine.ann"),
        "bob": ours.issue("bob", cn="bob"),
        "node": ours.issue("node", cn="node"),
        "nobody": ours.issue("nobody", cn="nobody"),
    }
    for name, (role, namespaces, identity) in HOLDERS.items():
        tokens.create(name, role, namespaces, certificate=identity)
    common: dict[str, object] = {"metrics-listen": "127.0.0.1:0"}
    with Cluster(
        stores=2,
        master_flags={
            **common,
            **ours.flags(certificates["master"]),
            "tokens": folder / "tokens.json",
        },
        store_flags={
            **common,
            **ours.flags(certificates["node"]),
            "tls-data": True,
            "tls-identity": True,
        },
    ) as cluster:
        made = Pool(cluster, ours, others, certificates, tokens, folder)
        with made.client("ann", "ann/llama", replicas=2) as ann:
            ann.put("secret", SECRET)
        yield made


def test_a_certificate_is_who_one_is(pool: Pool) -> None:
    with pool.client("ann", "ann/llama") as ann, pool.client("bob", "bob/llama") as bob:
        assert ann.get("secret") == SECRET
        keys = [f"small-{n}" for n in range(200)]
        values = [bytes([n]) * (n * 61) + b"." for n in range(200)]
        ann.put_batch(keys, values)
        assert [bytes(value or b"") for value in ann.get_batch(keys)] == values
        with pytest.raises(PermissionDenied, match="not one of token bob"):
            bob.namespace("ann/llama")
        bob.put("own", b"bob's")
        assert bob.get("own") == b"bob's"
    with pytest.raises(Unauthenticated, match=r"cn:nobody.*--certificate"):
        pool.client("nobody", "ann/llama")


def test_coroutines_use_it_too(pool: Pool) -> None:
    async def work() -> bytes | None:
        options: dict[str, Any] = {**pool.ours.options(pool.certificates["ann"])}
        async with await AsyncClient.connect(
            pool.cluster.lane, namespace="ann/llama", transports=("tcp",), **options
        ) as client:
            return await client.get("secret")

    assert asyncio.run(work()) == SECRET


def test_who_is_not_proven_gets_nowhere(pool: Pool) -> None:
    before = pool.metrics()
    stranger = pool.others.issue("stranger")
    expired = pool.ours.issue("expired", "engine.ann", expired=True)
    ours = {"tls_ca": str(pool.ours.ca)}
    for options, words in (
        (pool.others.options(stranger), "is of no CA in"),
        ({**ours, "tls_cert": str(stranger.cert), "tls_key": str(stranger.key)}, "a CA that it"),
        ({**ours, "tls_cert": str(expired.cert), "tls_key": str(expired.key)}, "has expired"),
        (ours, "wants a certificate"),
        ({}, "this port speaks TLS"),
    ):
        with ends_within(4.0), pytest.raises(TlsFailed, match=words):
            pool.cluster.client(namespace="ann/llama", **options)
    with (
        DataSocket(pool.data.removeprefix("tls://")) as plain,
        pytest.raises(TlsFailed, match="this port speaks TLS"),
    ):
        plain.hello(os.urandom(16), b"")
    after = pool.metrics()
    for port, least in (("lane", 4), ("tcp", 1)):
        name = next(n for n in after if f'port="{port}",reason="TlsFailed"' in n)
        assert after[name] >= before[name] + least, name


@pytest.mark.parametrize("command", ["status", "nodes"])
def test_commands_go_by_their_environment(pool: Pool, command: str) -> None:
    done = run_cenote(command, environment=pool.environment())
    assert done.returncode == 0, done.stderr


def test_commands_are_told_what_is_wrong(pool: Pool) -> None:
    stranger = pool.others.issue("stranger")
    for environment in (
        pool.environment(CENOTE_CLIENT_TLS_CA=pool.others.ca),
        pool.environment(CENOTE_CLIENT_TLS_CERT=stranger.cert, CENOTE_CLIENT_TLS_KEY=stranger.key),
        pool.environment(CENOTE_CLIENT_TLS_CERT="", CENOTE_CLIENT_TLS_KEY=""),
    ):
        done = run_cenote("status", environment=environment)
        assert done.returncode != 0
        assert b"TLS" in done.stderr, done.stderr
        assert b"Traceback" not in done.stderr
    done = run_cenote("status", environment=pool.environment("ann"))
    assert done.returncode == 0, done.stderr
    done = run_cenote("drain", "s0", environment=pool.environment("ann"))
    assert done.returncode != 0
    assert b"has the role write" in done.stderr or b"some namespaces only" in done.stderr


def test_daemons_copy_from_each_other(pool: Pool) -> None:
    with pool.client("root", "moved", replicas=1) as client:
        keys = [f"k{n}" for n in range(20)]
        client.put_batch(keys, [key.encode() * 5000 for key in keys])
        done = run_cenote("drain", "s1", environment=pool.environment())
        assert done.returncode == 0, done.stderr

        def left() -> bool:
            told = run_cenote("nodes", "--json", environment=pool.environment())
            return b"drained" in told.stdout

        try:
            wait_until(left, 60.0, what="s1 to be drained")
            for key in keys:
                assert client.get(key) == key.encode() * 5000
        finally:
            run_cenote("undrain", "s1", environment=pool.environment())


def test_reloading_fails_no_call(pool: Pool) -> None:
    """Certificates of all daemons are renewed, then those of a new CA take their place, in the
    steps that one takes: trust both, show the new ones, trust the new one alone."""
    newer = Authority(pool.folder, "newer")
    stop = threading.Event()
    failed: list[BaseException] = []
    served = [0]

    def work(number: int) -> None:
        with pool.client("ann", "ann/load") as client:
            for n in count():
                if stop.is_set():
                    return
                try:
                    client.put(f"{number}-{n}", SECRET[:5000])
                    got = client.get(f"{number}-{n}")
                except CenoteError as error:
                    failed.append(error)
                    return
                if got != SECRET[:5000]:
                    failed.append(AssertionError(f"call {n} read {got!r}"))
                    return
                served[0] += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: served[0] > 10 or failed, 20.0, what="calls")
    try:
        old = pool.ours.pem
        for ca, issuer in (
            (old, pool.ours),
            (old + newer.pem, pool.ours),
            (old + newer.pem, newer),
            (newer.pem, newer),
        ):
            before = _reloads(pool)
            write(pool.ours.ca, ca)
            for name, one in pool.certificates.items():
                identities = ["engine.ann"] if name == "ann" else []
                one.replace_by(issuer.issue(f"{name}-new", *identities, cn=name))
            calls = served[0] + 20
            wait_until(partial(_have_reloaded, pool, before), 20.0, what="all to reload")
            wait_until(partial(_has_served, served, failed, calls), 20.0, what="calls")
        if failed:
            for p in pool.cluster.processes:
                print("----", p.name, p.log_text()[-6000:])
        assert not failed, failed
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
        pool.ours.adopt(newer)
    assert not failed, failed
    with pool.client("ann", "ann/llama") as ann:
        assert ann.get("secret") == SECRET
    done = run_cenote("status", environment=pool.environment())
    assert done.returncode == 0, done.stderr


def _have_reloaded(pool: Pool, before: list[int]) -> bool:
    return all(now > then for now, then in zip(_reloads(pool), before, strict=True))


def _has_served(served: list[int], failed: list[BaseException], calls: int) -> bool:
    return bool(failed) or served[0] >= calls


def _reloads(pool: Pool) -> list[int]:
    """Of each daemon."""
    return [p.log_text().count("certificates read anew") for p in pool.cluster.processes]


def test_a_revoked_entry_ends_what_there_is(pool: Pool) -> None:
    with pool.client("bob", "bob/llama") as bob:
        bob.put("own", b"bob's")
        entry = next(e for e in pool.tokens.entries.values() if e.name == "bob")
        pool.tokens.revoke(entry.token_id)

        def refused() -> bool:
            try:
                bob.exists("own")
            except Unauthenticated:
                return True
            return False

        wait_until(refused, 20.0, what="bob to be refused")
    with pytest.raises(Unauthenticated, match="is revoked"):
        pool.client("bob", "bob/llama")
    pool.tokens.create("bob", *HOLDERS["bob"][:2], certificate=HOLDERS["bob"][2])
    with pool.client("bob", "bob/llama") as bob:
        assert bob.get("own") == b"bob's"


def test_no_key_is_in_a_log(pool: Pool) -> None:
    secrets = [one.key.read_text().splitlines()[1] for one in pool.certificates.values()]
    for process in pool.cluster.processes:
        text = process.log_text()
        assert "PRIVATE KEY" not in text
        assert not any(secret in text for secret in secrets)


def test_tls_where_there_is_none() -> None:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder())
        authority = Authority(folder)
        cluster = stack.enter_context(Cluster(stores=0, metadata="memory"))
        with ends_within(4.0), pytest.raises(TlsFailed, match="does not speak TLS"):
            cluster.client(**authority.options())


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as name:
        yield Path(name)
