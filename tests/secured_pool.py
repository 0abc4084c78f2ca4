"""A pool of real daemons that asks everybody for a token: `with secured_pool(...) as pool`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest

from cenote.api.errors import PermissionDenied
from cenote.api.rows import EXTENT
from cenote.client import Client
from cenote.transport import wire
from cluster import Cluster, Process
from security_kit import DataSocket, Tokens, hello_over_grpc

__all__ = ["SecuredPool", "secured_pool"]

PIECE = 4096
PIECES_AT_ONCE = 4096


@final
class SecuredPool:
    """A cluster and its tokens."""

    def __init__(self, cluster: Cluster, tokens: Tokens) -> None:
        self.cluster = cluster
        self.tokens = tokens

    def client(self, holder: str, namespace: str, **options: Any) -> Client:
        """Of the SDK, with the token of `holder`; the caller closes it."""
        return self.cluster.client(token=self.tokens[holder], namespace=namespace, **options)

    def ticket(self, holder: str) -> tuple[bytes, bytes]:
        """(a new session's id, its ticket) from the leader."""
        session_id = os.urandom(16)
        grpc = str(self.cluster.leader().ready["grpc"])
        return session_id, hello_over_grpc(grpc, self.tokens[holder], session_id).ticket

    def stolen(self, holder: str, store: Process, size_bytes: int, segments: int) -> bytes:
        """All that a socket of `holder` reads where it guesses the addresses of a daemon's segments
        (whose ids are below `segments`)."""
        session_id, ticket = self.ticket(holder)
        found = []
        with DataSocket(str(store.ready["data"]).removeprefix("tcp://")) as raw:
            raw.hello(session_id, ticket)
            for segment in range(1, segments):
                for first in range(0, size_bytes, PIECE * PIECES_AT_ONCE):
                    last = min(size_bytes, first + PIECE * PIECES_AT_ONCE)
                    pieces = [(segment, 0, at, PIECE) for at in range(first, last, PIECE)]
                    rows = np.array(pieces, EXTENT).tobytes()
                    statuses, payload = raw.ask(wire.OP_READ, len(pieces), rows)
                    if payload:
                        assert PermissionDenied.code not in statuses or len(payload) < last - first
                    found.append(payload)
        return b"".join(found)


@contextmanager
def secured_pool(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    master_flags: Mapping[str, object] | None = None,
    store_flags: Mapping[str, object] | None = None,
    **options: Any,
) -> Iterator[SecuredPool]:
    """Tokens lie in `folder`; commands and administration of this process are `root`'s. `options`:
    of `Cluster`."""
    tokens = Tokens(folder)
    monkeypatch.setenv("CENOTE_CLIENT_TOKEN", tokens["root"])
    with Cluster(
        master_flags={"tokens": tokens.path, **(master_flags or {})},
        store_flags={"token-file": tokens.node_file, **(store_flags or {})},
        admin_token=tokens["root"],
        **options,
    ) as cluster:
        yield SecuredPool(cluster, tokens)
