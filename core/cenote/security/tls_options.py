"""What programs that serve can be told about TLS, alike for all of them.

Each has the fields in its own configuration, where they stand in its own order; help and meaning
are here.
"""

from __future__ import annotations

from typing import Final

from cenote.runtime.config import option

from .tls import ClientAuth, TlsFiles

__all__ = ["TLS_CA", "TLS_CLIENT_AUTH", "TLS_KEY", "TLS_SERVER_NAME", "ServerTlsOptions"]

TLS_KEY: Final = option(help="PEM file with the key of --tls-cert")
TLS_CA: Final = option(
    help="PEM file with the CAs that signed others' certificates; revocation lists may be in it,"
    " too"
)
TLS_CLIENT_AUTH: Final = option(
    help="with --tls-cert: whether clients have to show a certificate; optional: one that is shown"
    " is checked (gRPC asks for none then)"
)
TLS_SERVER_NAME: Final = option(
    help="that servers' certificates have to be for; default: the host that is connected to"
)


class ServerTlsOptions:
    """For a configuration that has these fields."""

    __slots__ = ()

    tls_cert: str
    tls_key: str
    tls_ca: str
    tls_client_auth: ClientAuth
    tls_server_name: str

    def tls_files(self) -> TlsFiles:
        """What is said about TLS."""
        return TlsFiles(
            cert=self.tls_cert,
            key=self.tls_key,
            ca=self.tls_ca,
            server_name=self.tls_server_name,
            client_auth=self.tls_client_auth,
        )
