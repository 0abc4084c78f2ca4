"""gRPC over TLS: its own library does the handshakes, with the certificates that `Tls` has read."""

from __future__ import annotations

from typing import Any

import grpc

from cenote.security.tls import Tls

__all__ = ["channel_credentials", "channel_tls_options", "server_credentials"]


def server_credentials(tls: Tls) -> Any:
    """For a server: it asks for what has changed at each handshake.

    gRPC either demands a certificate or asks for none: with `client_auth="optional"` for none.
    """
    demanded = tls.asks_clients
    used = -1

    def configuration() -> Any:
        cert, key, ca = tls.pem()
        return grpc.ssl_server_certificate_configuration(
            [(key, cert)], root_certificates=ca if demanded else None
        )

    def renewed() -> Any:
        nonlocal used
        tls.refresh()
        if tls.generation == used:
            return None
        used = tls.generation
        return configuration()

    used = tls.generation
    return grpc.dynamic_ssl_server_credentials(configuration(), renewed, demanded)


def channel_credentials(tls: Tls) -> Any:
    """For a channel that is made now."""
    cert, key, ca = tls.pem()
    return grpc.ssl_channel_credentials(ca or None, key or None, cert or None)


def channel_tls_options(tls: Tls) -> list[tuple[str, str]]:
    """Options of such a channel."""
    name = tls.files.server_name
    return [("grpc.ssl_target_name_override", name)] if name else []
