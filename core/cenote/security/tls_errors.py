"""What a TLS handshake failed for, in words that name the file to look at."""

from __future__ import annotations

import ssl
from typing import Final

from cenote.api.errors import TlsFailed, Unavailable

from .tls import TlsFiles

__all__ = ["no_tls_here", "tls_failed", "wants_tls"]

_X509_EXPIRED: Final = 10
_X509_NOT_YET: Final = 9
_X509_REVOKED: Final = 23
_X509_NAME: Final = frozenset((62, 64))
_X509_ISSUER: Final = frozenset((2, 18, 19, 20, 21))
_NO_TLS: Final = frozenset(
    ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE",
     "PACKET_LENGTH_TOO_LONG", "BAD_RECORD_TYPE", "UNEXPECTED_MESSAGE", "RECORD_TOO_SMALL",
     "DATA_LENGTH_TOO_LONG")
)  # fmt: skip
_ALERTS: Final = {
    "CERTIFICATE_REQUIRED": "it wants a certificate of ours, and was shown none",
    "UNKNOWN_CA": "our certificate is of a CA that it does not know",
    "CERTIFICATE_EXPIRED": "our certificate has expired",
    "CERTIFICATE_REVOKED": "our certificate is revoked",
    "CERTIFICATE_UNKNOWN": "it does not accept our certificate",
    "BAD_CERTIFICATE": "it does not accept our certificate",
    "UNSUPPORTED_CERTIFICATE": "our certificate is not one for clients",
    "HANDSHAKE_FAILURE": "it does not accept our certificate, or no cipher is known to both",
    "PROTOCOL_VERSION": "it does not speak TLS 1.3",
    "DECRYPT_ERROR": "our certificate and its key don't belong together",
    "ACCESS_DENIED": "it does not accept our certificate",
}


def wants_tls() -> TlsFailed:
    """What a port that speaks TLS alone says to who does not."""
    return TlsFailed(
        "this port speaks TLS, and nothing else",
        remedy="give tls_ca, the CA that signed its certificate (CENOTE_CLIENT_TLS_CA, --tls-ca)",
    )


def no_tls_here(peer: object) -> TlsFailed:
    """`peer` answered with something that is not TLS."""
    return TlsFailed(
        f"{peer} does not speak TLS",
        remedy="give it --tls-cert and --tls-key, or leave tls_ca out here",
    )


def tls_failed(error: BaseException, peer: object, files: TlsFiles | None) -> Unavailable:
    """The typed error for a handshake with `peer` that failed on this side, or was refused:
    TlsFailed, or Unavailable where nothing was said."""
    files = files or TlsFiles()
    if isinstance(error, ssl.SSLCertVerificationError):
        return _distrusted(error, peer, files)
    reason = (getattr(error, "reason", None) or "") if isinstance(error, ssl.SSLError) else ""
    if reason in _NO_TLS:
        return no_tls_here(peer)
    for alert, meaning in _ALERTS.items():
        if reason.endswith(f"ALERT_{alert}"):
            shown = f"tls_cert (now {files.cert})" if files.cert else "tls_cert and tls_key"
            return TlsFailed(
                f"{peer} refused the TLS handshake: {meaning}",
                remedy=f"give {shown}, signed by a CA in the other side's tls_ca",
            )
    why = reason.lower().replace("_", " ") or str(error) or type(error).__name__
    # Who only hangs up has too many handshakes to do, or is at its end: another try may help.
    hung_up = isinstance(error, ssl.SSLEOFError | ConnectionError)
    return (Unavailable if hung_up else TlsFailed)(
        f"no TLS connection to {peer}: {'it hung up' if hung_up else why}",
        remedy="does it speak TLS? its log says what it refused; compare tls_ca on both sides",
    )


def _distrusted(error: ssl.SSLCertVerificationError, peer: object, files: TlsFiles) -> TlsFailed:
    code = error.verify_code
    why = error.verify_message or str(error)
    if code in _X509_NAME:
        return TlsFailed(
            f"the certificate of {peer} is not for that name: {why}",
            remedy="give the name that it is for (tls_server_name), or connect to that name",
        )
    if code == _X509_EXPIRED:
        return TlsFailed(
            f"the certificate of {peer} has expired", remedy="renew the files behind its tls_cert"
        )
    if code == _X509_NOT_YET:
        return TlsFailed(
            f"the certificate of {peer} is not valid yet", remedy="compare the clocks of both hosts"
        )
    if code == _X509_REVOKED:
        return TlsFailed(f"the certificate of {peer} is revoked", remedy="give it another one")
    if code in _X509_ISSUER:
        return TlsFailed(
            f"the certificate of {peer} is of no CA in {files.ca or 'tls_ca'}: {why}",
            remedy="give the CA that signed it (tls_ca)",
        )
    return TlsFailed(f"the certificate of {peer} is not accepted: {why}")
