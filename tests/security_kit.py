"""Tokens for tests, and sockets that show daemons whatever a test wants them to."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import grpc

from cenote.rpc.grpc_auth import token_metadata
from cenote.rpc.grpc_util import typed_error
from cenote.security.tokens import Role, TokenFile
from cenote.transport import wire
from cenote.v1 import master_pb2, master_pb2_grpc, store_pb2

__all__ = ["DataSocket", "Tokens", "hello_over_grpc"]

HOLDERS = {
    "root": (Role.ADMIN, ["*"]),
    "wide": (Role.WRITE, ["*"]),
    "ann": (Role.WRITE, ["ann/*"]),
    "bob": (Role.WRITE, ["bob/*"]),
    "ann-reader": (Role.READ, ["ann/*"]),
    "node": (Role.STORE, ["*"]),
}


@final
class Tokens:
    """A file of tokens, and what they are, by the names of their holders."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.json"
        self.file = TokenFile(self.path, must_exist=False)
        self.ids: dict[str, str] = {}
        self._tokens: dict[str, str] = {}
        for name, (role, namespaces) in HOLDERS.items():
            self.add(name, role, namespaces)
        self.node_file = folder / "node.token"
        self.node_file.write_text(self["node"] + "\n")

    def add(self, name: str, role: Role, namespaces: list[str], *, ttl_s: float = 0.0) -> str:
        entry, token = self.file.create(name, role, namespaces, ttl_s=ttl_s)
        self.ids[name], self._tokens[name] = entry.token_id, token
        return token

    def revoke(self, name: str) -> None:
        self.file.revoke(self.ids[name])

    def __getitem__(self, name: str) -> str:
        return self._tokens[name]


@contextlib.contextmanager
def typed() -> Iterator[None]:
    """What a gRPC call fails with is raised as the error that it stands for."""
    try:
        yield
    except grpc.RpcError as error:
        raise typed_error(error) from None


def call(stub: Any, address: str, method: str, request: Any, metadata: Any = ()) -> Any:
    """One gRPC call. Raises CenoteError."""
    with grpc.insecure_channel(address) as channel, typed():
        return getattr(stub(channel), method)(request, timeout=20.0, metadata=metadata)


def hello_over_grpc(address: str, token: str, session_id: bytes) -> master_pb2.HelloResponse:
    """A session, and its ticket. Raises CenoteError."""
    request = master_pb2.HelloRequest(session_id=session_id, client_name="test")
    reply: master_pb2.HelloResponse = call(
        master_pb2_grpc.MasterServiceStub, address, "Hello", request, token_metadata(token)
    )
    return reply


@final
class DataSocket:
    """A socket to a data server that says what it is told to, and no more."""

    def __init__(self, address: str) -> None:
        """host:port, or the path of a Unix socket."""
        if address.startswith("/"):
            self._sock = socket.socket(socket.AF_UNIX)
            self._sock.settimeout(20)
            self._sock.connect(address)
        else:
            host, _, port = address.rpartition(":")
            self._sock = socket.create_connection((host, int(port)), 20)

    def __enter__(self) -> DataSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def _receive(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            more = self._sock.recv(length - len(data))
            if not more:
                raise ConnectionResetError(f"{len(data)} bytes of {length} came")
            data += more
        return data

    def hello(self, session_id: bytes, ticket: bytes, **more: Any) -> store_pb2.DataHelloResponse:
        """Raises what it is refused with."""
        request = store_pb2.DataHelloRequest(
            session_id=session_id, ticket=ticket, writer=True, **more
        )
        self._sock.sendall(wire.encode_hello(request))
        code, length = wire.hello_reply_length(self._receive(wire.HELLO_REPLY.size))
        return wire.decode_hello_reply(code, self._receive(length))

    def ask(
        self, op: int, count: int, body: bytes, *, epoch: int = 0, grant_id: int = 0
    ) -> tuple[list[int], bytes]:
        """(statuses, payload). Raises what it is refused with."""
        head = wire.REQUEST.pack(op, 0, 0, count, 1, epoch, grant_id, len(body))
        self._sock.sendall(head + body)
        _, _, code, items, _, _, length = wire.REPLY.unpack(self._receive(wire.REPLY_BYTES))
        answer = self._receive(length)
        if code:
            raise wire.decode_error(code, answer)
        return list(answer[:items]), answer[items:]
