"""What a daemon tells of its ports in `Endpoint.device_info`, as bytes and back."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv6Address
from typing import Final

from google.protobuf.message import DecodeError

from cenote.api.errors import ProtocolError
from cenote.v1 import store_pb2

from .facts import ETHERNET, ROCE_V2, Gid, PeerPort

__all__ = ["decode_ports", "encode_ports"]

_PORTS_MAX: Final = 64
_GIDS_MAX: Final = 16
_GID_BYTES: Final = 16


def encode_ports(ports: Iterable[PeerPort]) -> bytes:
    """`device_info` of an endpoint."""
    return store_pb2.RdmaPorts(
        ports=[
            store_pb2.RdmaPort(
                device=port.device,
                port=port.port,
                link_layer=port.link_layer,
                gids=[store_pb2.RdmaGid(index=g.index, gid=g.value.packed) for g in port.gids],
                rate_gbps=port.rate_gbps,
                lid=port.lid,
            )
            for port in ports
        ]
    ).SerializeToString()


def decode_ports(device_info: bytes) -> tuple[PeerPort, ...]:
    """The reverse of `encode_ports`. Raises ProtocolError."""
    try:
        message = store_pb2.RdmaPorts.FromString(device_info)
    except DecodeError as error:
        raise ProtocolError("a node's RDMA ports are not what they should be") from error
    if len(message.ports) > _PORTS_MAX or any(len(p.gids) > _GIDS_MAX for p in message.ports):
        raise ProtocolError(
            f"a node tells of more than {_PORTS_MAX} RDMA ports, or {_GIDS_MAX} GIDs of one"
        )
    return tuple(_decode(port) for port in message.ports)


def _decode(port: store_pb2.RdmaPort) -> PeerPort:
    if any(len(gid.gid) != _GID_BYTES for gid in port.gids):
        raise ProtocolError(f"a node's RDMA port {port.device}:{port.port} has a GID of wrong size")
    kind = ROCE_V2 if port.link_layer == ETHERNET else ""
    gids = tuple(Gid(gid.index, IPv6Address(gid.gid), kind) for gid in port.gids)
    return PeerPort(port.device, port.port, port.link_layer, gids, port.rate_gbps, port.lid)
