"""Calls of AdminService that look closer and reach deeper; see `connect` for the rest."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from cenote.api.errors import CenoteError

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from cenote.v1 import admin_pb2

__all__ = ["AdminCalls"]


class AdminCalls(ABC):
    """All raise what a call of the leader raises, besides what they name."""

    _addresses: list[str]
    _deadline_s: float

    @abstractmethod
    def _call(self, method: str, request: Message, deadline_s: float | None = None) -> Any: ...

    @abstractmethod
    def _ask(self, address: str, method: str, request: Message, deadline_s: float) -> Any: ...

    @abstractmethod
    def status(self, *, deadline_s: float | None = None) -> admin_pb2.GetStatusResponse: ...

    def delete_namespace(self, name: str) -> int:
        """How many objects it had. Raises NamespaceNotFound."""
        from cenote.v1 import admin_pb2

        reply = self._call("DeleteNamespace", admin_pb2.DeleteNamespaceRequest(name=name))
        return int(reply.objects)

    def explain(self, namespace: str, key: bytes) -> admin_pb2.ExplainResponse:
        """Raises NamespaceNotFound."""
        from cenote.v1 import admin_pb2

        request = admin_pb2.ExplainRequest(namespace=namespace, key=key)
        return cast("admin_pb2.ExplainResponse", self._call("Explain", request))

    def sessions(self, limit: int) -> admin_pb2.ListSessionsResponse:
        """Clients, those that hold most first; 0: all."""
        from cenote.v1 import admin_pb2

        reply = self._call("ListSessions", admin_pb2.ListSessionsRequest(limit=limit))
        return cast("admin_pb2.ListSessionsResponse", reply)

    def evict(
        self, namespace: str, *, keys: Sequence[bytes] = (), **what: Any
    ) -> admin_pb2.EvictObjectsResponse:
        """One step; `what`: fields of the request. Raises NamespaceNotFound."""
        from cenote.api.codec import pack_keys
        from cenote.v1 import admin_pb2

        packed, lengths = pack_keys(keys)
        request = admin_pb2.EvictObjectsRequest(
            namespace=namespace, keys=packed, key_lengths=lengths, **what
        )
        return cast("admin_pb2.EvictObjectsResponse", self._call("EvictObjects", request))

    def config(self) -> Sequence[admin_pb2.ConfigValue]:
        """The leader's settings, by name."""
        from cenote.v1 import admin_pb2

        reply: admin_pb2.GetConfigResponse = self._call("GetConfig", admin_pb2.GetConfigRequest())
        return reply.values

    def set_config(
        self, *, values: Mapping[str, str] | None = None, unset: Sequence[str] = ()
    ) -> Sequence[admin_pb2.ConfigValue]:
        """All settings afterwards. Raises InvalidArgument."""
        from cenote.v1 import admin_pb2

        request = admin_pb2.SetConfigRequest(values=values or {}, unset=unset)
        reply: admin_pb2.SetConfigResponse = self._call("SetConfig", request)
        return reply.values

    def snapshot(self, *, only_look: bool = False) -> admin_pb2.TakeSnapshotResponse:
        """Have one made of the metadata. Raises InvalidArgument where none are kept."""
        from cenote.v1 import admin_pb2

        request = admin_pb2.TakeSnapshotRequest(only_look=only_look)
        return cast("admin_pb2.TakeSnapshotResponse", self._call("TakeSnapshot", request))

    def all_addresses(self) -> list[str]:
        """Of all masters that were named, and that the leader knows."""
        known: list[str] = []
        with contextlib.suppress(CenoteError):
            known = [master.grpc for master in self.status().masters if master.grpc]
        return list(dict.fromkeys((*known, *self._addresses)))

    def debug_of(self, address: str) -> str:
        """What one master, whichever its role, says of its process: JSON."""
        from cenote.v1 import admin_pb2

        request = admin_pb2.DebugDumpRequest()
        return str(self._ask(address, "DebugDump", request, self._deadline_s).json)
