"""etcd that wants TLS, a password, a certificate of ours; and that forgets who we are."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest

from cenote.api.errors import CenoteError, ResourceUnavailable
from cenote.client.config import make_config
from cenote.kv.etcd import EtcdKv
from cenote.kv.service import Put
from cenote.master.metadata import MasterRow, MetadataOptions, open_backend
from etcd import EtcdCluster
from kv_kit import follow_all, numbers, records
from waiting import wait_until

pytestmark = pytest.mark.integration

TIMEOUT_S = 20.0
TENURE_S = 1.0


def run_openssl(directory: Path, *arguments: str) -> None:
    try:
        subprocess.run(
            ["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("needs openssl to make certificates")


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """ca.pem, and a certificate for 127.0.0.1 signed by it."""
    directory = tmp_path / "tls"
    directory.mkdir()
    new_key = ("-newkey", "rsa:2048", "-nodes")
    run_openssl(
        directory, "req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
        "-subj", "/CN=test ca",
    )  # fmt: skip
    run_openssl(
        directory, "req", *new_key, "-keyout", "key.pem", "-out", "req.pem", "-subj", "/CN=root"
    )
    (directory / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    run_openssl(
        directory, "x509", "-req", "-in", "req.pem", "-CA", "ca.pem", "-CAkey", "ca.key",
        "-CAcreateserial", "-out", "cert.pem", "-days", "2", "-extfile", "san",
    )  # fmt: skip
    return directory


def test_tls_and_a_password(tmp_path: Path, certificates: Path) -> None:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    tls = [f"--cert-file={cert}", f"--key-file={key}"]
    extra = ["--auth-token=simple"]
    with EtcdCluster(tmp_path / "etcd", tls=tls, scheme="https", extra=extra) as etcd:
        flags = [f"--cacert={ca}"]
        etcd.ctl("user", "add", "root:secret", flags=flags)
        etcd.ctl("user", "grant-role", "root", "root", flags=flags)
        etcd.ctl("auth", "enable", flags=flags)
        good = MetadataOptions(
            tenure_s=TENURE_S, etcd_ca=ca, etcd_user="root", etcd_password="secret"
        )
        backend = open_backend(etcd.url, good)
        try:
            backend.join(MasterRow("a", ("a:1",)))
            assert backend.campaign(TIMEOUT_S), backend.refusal
            list(backend.open().records)
            backend.append(records(1, 3))
            backend.sync(3).result(TIMEOUT_S)
            # Whoever looks for the masters there needs the same.
            access: dict[str, object] = {"etcd_ca": ca, "etcd_user": "root"}
            directory = make_config(etcd.url, {**access, "etcd_password": "secret"}).directory()
            assert directory is not None
            assert [place.addresses for place in directory.wait(TIMEOUT_S)] == [("a:1",)]
            refused = make_config(etcd.url, {**access, "etcd_password": "wrong"}).directory()
            assert refused is not None
            with pytest.raises(CenoteError, match="can't be looked up"):
                refused.look_up(TIMEOUT_S)
            reader = open_backend(etcd.url, good)
            try:
                assert numbers(follow_all(reader, through=3)) == [1, 2, 3]
            finally:
                reader.close()
            for wrong in (
                MetadataOptions(etcd_ca=ca, etcd_user="root", etcd_password="wrong"),
                MetadataOptions(etcd_ca=ca),
            ):
                stranger = open_backend(etcd.url, wrong)
                try:
                    assert not stranger.follow(0.1).caught_up
                    assert stranger.refusal is not None
                    assert "secret" not in str(stranger.refusal)
                finally:
                    stranger.close()
        finally:
            backend.close()


def test_a_login_that_has_ended_is_made_again(tmp_path: Path, certificates: Path) -> None:
    """etcd forgets who one is after some minutes, and when it is restarted."""
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    tls = [f"--cert-file={cert}", f"--key-file={key}"]
    with EtcdCluster(tmp_path / "etcd", tls=tls, scheme="https") as etcd:
        flags = [f"--cacert={ca}"]
        etcd.ctl("user", "add", "root:secret", flags=flags)
        etcd.ctl("user", "grant-role", "root", "root", flags=flags)
        etcd.ctl("auth", "enable", flags=flags)
        kv = EtcdKv(etcd.options(ca=ca, user="root", password="secret"))
        try:
            kv.txn((), (Put(b"a", b"1"),), timeout_s=5.0)
            (member,) = etcd.members
            member.kill()
            member.start()

            def is_back() -> bool:
                with contextlib.suppress(ResourceUnavailable):
                    return bool(kv.range(b"a", timeout_s=5.0).rows)
                return False

            wait_until(is_back, TIMEOUT_S, what="etcd to let us in again")
            kv.txn((), (Put(b"a", b"2"),), timeout_s=5.0)
        finally:
            kv.close()


def test_a_login_of_before_users_changed_is_made_again(tmp_path: Path, certificates: Path) -> None:
    """Signed tokens say of which revision of etcd's users they are."""
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    public = str(certificates / "public.pem")
    run_openssl(certificates, "rsa", "-in", key, "-pubout", "-out", public)
    tls = [f"--cert-file={cert}", f"--key-file={key}"]
    extra = [f"--auth-token=jwt,pub-key={public},priv-key={key},sign-method=RS256,ttl=10m"]
    with EtcdCluster(tmp_path / "etcd", tls=tls, scheme="https", extra=extra) as etcd:
        flags = [f"--cacert={ca}"]
        etcd.ctl("user", "add", "root:secret", flags=flags)
        etcd.ctl("user", "grant-role", "root", "root", flags=flags)
        etcd.ctl("auth", "enable", flags=flags)
        kv = EtcdKv(etcd.options(ca=ca, user="root", password="secret"))
        try:
            revision = kv.txn((), (Put(b"a", b"1"),), timeout_s=TIMEOUT_S).revision
            etcd.ctl("user", "add", "other:word", flags=[*flags, "--user=root:secret"])
            watch = kv.watch(b"a", b"b", revision=revision)
            with contextlib.suppress(ResourceUnavailable):  # it is begun anew by who watches
                watch.poll(TIMEOUT_S)
            kv.txn((), (Put(b"a", b"2"),), timeout_s=TIMEOUT_S)
            again = kv.watch(b"a", b"b", revision=revision)
            assert [event.value for event in again.poll(TIMEOUT_S)][:1] == [b"1"]
        finally:
            kv.close()


def test_a_client_certificate_is_shown(tmp_path: Path, certificates: Path) -> None:
    ca, cert, key = (str(certificates / name) for name in ("ca.pem", "cert.pem", "key.pem"))
    tls = [
        f"--cert-file={cert}",
        f"--key-file={key}",
        "--client-cert-auth",
        f"--trusted-ca-file={ca}",
    ]
    with EtcdCluster(tmp_path / "etcd", tls=tls, scheme="https") as etcd:
        kv = EtcdKv(etcd.options(ca=ca, cert=cert, key=key))
        try:
            kv.txn((), (Put(b"a", b"1"),), timeout_s=10.0)
        finally:
            kv.close()
        stranger = EtcdKv(etcd.options(ca=ca))
        try:
            with pytest.raises(ResourceUnavailable):
                stranger.range(b"a", timeout_s=1.0)
        finally:
            stranger.close()
