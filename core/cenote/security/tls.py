"""Certificates of a program, for both ends of its connections, read again whenever they change.

    cert, key   what this program shows: servers always, clients where the other side asks
    ca          who signed the others' certificates; may hold certificate revocation lists, too

TLS 1.3 alone: every lane and data connection has an end of ours on both sides. Session tickets are
off: connections are pooled and long, and nothing may arrive on an idle one but its end.

Files are looked at LOOK_S after the last look, when a connection begins. What can't be read or does
not fit together changes nothing: what was read before goes on counting, and the log says so. So a
certificate and its key may be replaced one after the other.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, Literal, final

from cenote.api.errors import ConfigError
from cenote.runtime.log import get_logger

__all__ = ["ClientAuth", "Tls", "TlsFiles", "identities_of"]

ClientAuth = Literal["required", "optional", "off"]
LOOK_S: Final = 1.0
_FILE_BYTES_MAX: Final = 4 << 20
_CRL: Final = b"-----BEGIN X509 CRL-----"
_log = get_logger("cenote.security")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Settings, as flags and arguments have them: paths of PEM files, "" for none."""

    cert: str = ""
    key: str = ""
    ca: str = ""
    server_name: str = ""
    """That servers' certificates are to be for; "": the host that is connected to."""
    client_auth: ClientAuth = "required"
    """Whether servers ask clients for certificates."""

    @property
    def wanted(self) -> bool:
        """Whether anything is said about TLS at all."""
        return bool(self.cert or self.key or self.ca or self.server_name)

    @property
    def asks_clients(self) -> bool:
        """Whether servers refuse who has no certificate."""
        return self.client_auth == "required" and bool(self.cert and self.ca)

    def check_server(self) -> None:
        """Raises ConfigError where a server can't go by these."""
        if self.wanted and not self.cert:
            raise ConfigError("TLS without a certificate", remedy="give --tls-cert and --tls-key")
        if self.cert and self.client_auth != "off" and not self.ca:
            raise ConfigError(
                "there is no --tls-ca to check clients' certificates by",
                remedy="give it, or ask for none: --tls-client-auth off",
            )
        self.check_client(ca_needed=False)

    def check_client(self, *, ca_needed: bool = True) -> None:
        """Raises ConfigError where a client can't go by these."""
        if bool(self.cert) != bool(self.key):
            given, other = ("cert", "key") if self.cert else ("key", "cert")
            raise ConfigError(f"tls_{given} without tls_{other}", remedy="give both, or none")
        if ca_needed and self.wanted and not self.ca:
            raise ConfigError(
                "TLS without tls_ca: nobody's certificate could be checked",
                remedy="give the file with the CA that signed the servers' certificates",
            )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Of one reading."""

    cert: bytes
    key: bytes
    ca: bytes
    server: ssl.SSLContext | None
    client: ssl.SSLContext | None


@final
class Tls:
    """Safe from several threads. Raises ConfigError where the files can't be used."""

    def __init__(self, files: TlsFiles, *, clock: Callable[[], float] = monotonic) -> None:
        self.files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._seen = self._stamps()
        self._loaded = self._load()
        self._look_at_s = clock() + LOOK_S
        self.generation = 0
        """How often other files were taken up."""
        self.trust_generation = 0
        """How often that changed whom they trust."""

    @classmethod
    def for_server(cls, files: TlsFiles) -> Tls | None:
        """None where nothing is said about TLS. Raises ConfigError."""
        files.check_server()
        return cls(files) if files.wanted else None

    @classmethod
    def for_client(cls, files: TlsFiles) -> Tls | None:
        """None where nothing is said about TLS. Raises ConfigError."""
        files.check_client()
        return cls(files) if files.wanted else None

    # ---- contexts -----------------------------------------------------------------------------

    def server_context(self) -> ssl.SSLContext:
        """For connections that are accepted now."""
        self.refresh()
        context = self._loaded.server
        if context is None:
            raise ConfigError("no certificate to serve with", remedy="give --tls-cert, --tls-key")
        return context

    def client_context(self) -> ssl.SSLContext:
        """For connections that are made now. Raises ConfigError where no CA was named."""
        self.refresh()
        context = self._loaded.client
        if context is None:
            raise ConfigError("no CA to check a server's certificate by", remedy="give it: tls_ca")
        return context

    def pem(self) -> tuple[bytes, bytes, bytes]:
        """(certificate, key, CA), for libraries that want them so."""
        self.refresh()
        loaded = self._loaded
        return loaded.cert, loaded.key, loaded.ca

    def server_name(self, host: str) -> str:
        """What a server reached at `host` has to prove that it is."""
        return self.files.server_name or host

    @property
    def asks_clients(self) -> bool:
        """Whether who has no certificate is refused."""
        return self.files.asks_clients

    # ---- files --------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take up files that have changed, at most once in LOOK_S."""
        if self._clock() < self._look_at_s or not self._lock.acquire(blocking=False):
            return
        try:
            self._look_at_s = self._clock() + LOOK_S
            try:
                stamps = self._stamps()
                if stamps == self._seen:
                    return
                self._seen = stamps
                loaded = self._load()
            except ConfigError as error:
                _log.error("the certificates of before go on counting", why=error)
                return
            trust = loaded.ca != self._loaded.ca
            self._loaded = loaded
            self.generation += 1
            self.trust_generation += trust
            _log.info("certificates read anew", cert=self.files.cert, ca=self.files.ca)
        finally:
            self._lock.release()

    def _paths(self) -> dict[str, str]:
        files = self.files
        named = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
        return {name: path for name, path in named.items() if path}

    def _stamps(self) -> dict[str, tuple[int, int, int]]:
        stamps = {}
        for name, path in self._paths().items():
            try:
                found = Path(path).expanduser().stat()
            except OSError as error:
                raise _unreadable(name, path, error) from error
            stamps[name] = found.st_mtime_ns, found.st_size, found.st_ino
        return stamps

    def _load(self) -> _Loaded:
        read = {name: _read(name, path) for name, path in self._paths().items()}
        ca = read.get("tls_ca", b"")
        server = client = None
        if self.files.cert:
            server = _context(ssl.PROTOCOL_TLS_SERVER)
            server.num_tickets = 0
            self._show(server)
            if self.files.client_auth != "off":
                self._trust(server, ca)
                required = self.files.client_auth == "required"
                server.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        if ca:
            client = _context(ssl.PROTOCOL_TLS_CLIENT)
            self._trust(client, ca)
            if self.files.cert:
                self._show(client)
        return _Loaded(read.get("tls_cert", b""), read.get("tls_key", b""), ca, server, client)

    def _show(self, context: ssl.SSLContext) -> None:
        cert, key = self.files.cert, self.files.key
        try:
            context.load_cert_chain(
                Path(cert).expanduser(), Path(key).expanduser(), password=_no_password
            )
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"the key in {key} is not that of the certificate in {cert}",
                    remedy="give the two that belong together",
                ) from error
            raise ConfigError(
                f"{cert} and {key} are no certificate and key: {error.reason or error}",
                remedy="give files in PEM, the server's own certificate first",
            ) from error
        except OSError as error:
            raise _unreadable("tls_key", key, error) from error

    def _trust(self, context: ssl.SSLContext, ca: bytes) -> None:
        path = self.files.ca
        try:
            context.load_verify_locations(Path(path).expanduser())
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{path} holds no certificates of CAs: {error.strerror or error}",
                remedy="give a file in PEM",
            ) from error
        if _CRL in ca:
            context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Frames say how long they are, so no end can make half a one seem whole. And after its client's
    # side has ended, a server still has to say why it ends the rest.
    context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
    return context


def _no_password() -> str:
    raise ConfigError("the key is encrypted", remedy="give one that is not, readable by us alone")


def _read(name: str, path: str) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unreadable(name, path, error) from error
    if not data or len(data) > _FILE_BYTES_MAX:
        raise ConfigError(f"{name} {path} is no PEM file: it has {len(data)} bytes")
    return data


def _unreadable(name: str, path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"can't read {name} {path}: {error.strerror}",
        remedy="name a file that is there, and that this program's user may read",
    )


def identities_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Whom a certificate that was checked is for: `uri:...`, `dns:...`, `cn:...`, in this order."""
    if not certificate:
        return ()
    found: dict[str, list[str]] = {"uri": [], "dns": [], "cn": []}
    for kind, value in certificate.get("subjectAltName", ()):
        if kind.lower() in ("uri", "dns"):
            found[kind.lower()].append(value.lower() if kind == "DNS" else value)
    for part in certificate.get("subject", ()):
        found["cn"].extend(value for name, value in part if name == "commonName")
    return tuple(f"{kind}:{value}" for kind, values in found.items() for value in values)
