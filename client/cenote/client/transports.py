"""The transports that a client may be told to use, by name; each is loaded when it is wanted."""

from __future__ import annotations

import importlib
from typing import Final

from cenote.api.errors import ConfigError
from cenote.transport.base import Transport

__all__ = ["make_transport"]

_TRANSPORTS: Final = {
    "shm": ("cenote.transport.shm", "ShmTransport"),
    "tcp": ("cenote.transport.tcp", "TcpTransport"),
}


def make_transport(name: str) -> Transport:
    """The transport of this name. Raises ConfigError where there is none."""
    try:
        module, kind = _TRANSPORTS[name]
    except KeyError:
        raise ConfigError(
            f"there is no transport {name!r}", remedy="one of: " + ", ".join(_TRANSPORTS)
        ) from None
    made: Transport = getattr(importlib.import_module(module), kind)()
    return made
