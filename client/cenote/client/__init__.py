"""The Python SDK of cenote, a pool of DRAM and SSD for the KV caches of LLM inference.

from cenote.client import Client

with Client("127.0.0.1:5110", namespace="demo") as client:
    client.put("key", b"bytes")
    assert client.get("key") == b"bytes"
"""

from cenote.api.keys import chain_keys
from cenote.api.types import (
    AcquiredLease,
    ClientStats,
    GetStatus,
    MatchResult,
    PutResult,
    PutStatus,
    RawBuffer,
    Sameness,
)

from .buffers import Buffer
from .client import Client, Registration
from .config import ClientConfig
from .namespace import Namespace
from .results import GetResults, PutResults
from .views import View

__all__ = [
    "AcquiredLease",
    "Buffer",
    "Client",
    "ClientConfig",
    "ClientStats",
    "GetResults",
    "GetStatus",
    "MatchResult",
    "Namespace",
    "PutResult",
    "PutResults",
    "PutStatus",
    "RawBuffer",
    "Registration",
    "Sameness",
    "View",
    "chain_keys",
]
