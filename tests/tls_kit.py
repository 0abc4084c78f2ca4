"""Certificates for tests: made in the test, by CAs of its own."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any, final

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cenote.security.tls import ClientAuth, Tls, TlsFiles

__all__ = ["Authority", "Issued", "write"]


@final
class Issued:
    """A certificate with its key, in files that `replace_by` changes as a person would."""

    def __init__(self, folder: Path, name: str, leaf: trustme.LeafCert) -> None:
        self.cert = folder / f"{name}.pem"
        self.key = folder / f"{name}.key"
        self.put(leaf)

    def put(self, leaf: trustme.LeafCert) -> None:
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        write(self.key, leaf.private_key_pem.bytes())
        write(self.cert, chain)
        self.serial = x509.load_pem_x509_certificate(chain).serial_number

    def replace_by(self, other: Issued) -> None:
        """Its files are the other's from now on."""
        write(self.key, other.key.read_bytes())
        write(self.cert, other.cert.read_bytes())


def write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)


@final
class Authority:
    """A CA, whose certificate is in `ca`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._trust = trustme.CA(organization_name=name)
        self.ca = folder / f"{name}.pem"
        write(self.ca, self.pem)

    @property
    def pem(self) -> bytes:
        return self._trust.cert_pem.bytes()

    def issue(self, name: str, *identities: str, cn: str = "", expired: bool = False) -> Issued:
        """For 127.0.0.1, ::1, localhost and these names."""
        past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        leaf = self._trust.issue_cert(
            *("127.0.0.1", "::1", "localhost", *identities),
            common_name=cn or None,
            not_after=past if expired else None,
        )
        return Issued(self._folder, name, leaf)

    def revoke(self, *issued: Issued) -> None:
        """From now on `ca` has a list of revoked certificates, too."""
        key = serialization.load_pem_private_key(self._trust.private_key_pem.bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(x509.load_pem_x509_certificate(self.pem).subject)
            .last_update(now - datetime.timedelta(hours=1))
            .next_update(now + datetime.timedelta(days=1))
        )
        for one in issued:
            builder = builder.add_revoked_certificate(
                x509.RevokedCertificateBuilder()
                .serial_number(one.serial)
                .revocation_date(now - datetime.timedelta(hours=1))
                .build()
            )
        crl = builder.sign(key, hashes.SHA256())
        write(self.ca, self.pem + crl.public_bytes(serialization.Encoding.PEM))

    def adopt(self, other: Authority) -> None:
        """Be the other one from now on: its CA takes the place of ours, in our file."""
        self._trust = other._trust
        write(self.ca, self.pem)

    # ---- as settings --------------------------------------------------------------------------

    def server(self, issued: Issued, client_auth: ClientAuth = "required", **more: Any) -> Tls:
        """Of a program that shows this certificate, and trusts this CA."""
        files = TlsFiles(
            cert=str(issued.cert), key=str(issued.key), ca=str(self.ca), client_auth=client_auth
        )
        return Tls(files, **more)

    def client(self, issued: Issued | None = None, server_name: str = "", **more: Any) -> Tls:
        """The same, of a client that may show none."""
        cert, key = ("", "") if issued is None else (str(issued.cert), str(issued.key))
        files = TlsFiles(cert=cert, key=key, ca=str(self.ca), server_name=server_name)
        return Tls(files, **more)

    def flags(self, issued: Issued) -> dict[str, object]:
        """Of a daemon."""
        return {"tls-cert": issued.cert, "tls-key": issued.key, "tls-ca": self.ca}

    def options(self, issued: Issued | None = None) -> dict[str, str]:
        """Of a `Client`."""
        options = {"tls_ca": str(self.ca)}
        if issued is not None:
            options |= {"tls_cert": str(issued.cert), "tls_key": str(issued.key)}
        return options
