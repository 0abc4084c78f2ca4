"""Whether this daemon serves over RDMA: as it was told, and as the machine has it."""

from __future__ import annotations

from cenote.api.errors import ResourceUnavailable
from cenote.runtime.log import get_logger
from cenote.transport.nics.advertised import encode_ports
from cenote.transport.nics.choice import advertised
from cenote.transport.nics.filters import DeviceFilter
from cenote.transport.nics.sysfs import read_ports
from cenote.transport.rdma_nics import find_nics
from cenote.v1 import common_pb2

from .config import StoreConfig
from .rdma_host import RdmaHost
from .segment import SegmentSet

__all__ = ["open_rdma", "rdma_endpoint"]

_log = get_logger("cenote.store.rdma")


def open_rdma(config: StoreConfig, segments: SegmentSet) -> RdmaHost | None:
    """The RDMA end, not started; None where there is none and none was demanded.

    Raises ResourceUnavailable where `--rdma on` can't be had.
    """
    if config.rdma == "off":
        return None
    gid_index = None if config.rdma_gid_index < 0 else config.rdma_gid_index
    try:
        nics = find_nics(config.verbs, DeviceFilter.parse(config.rdma_devices), gid_index=gid_index)
        try:
            host = RdmaHost(segments, nics)
        except ResourceUnavailable:
            nics.close()
            raise
    except ResourceUnavailable as error:
        if config.rdma == "on":
            raise
        tell = _log.info if read_ports() else _log.debug
        tell("not served over RDMA", why=error.message)
        return None
    for refusal in nics.refusals:
        _log.info("an RDMA port is not used", port=refusal.name, why=refusal.reason)
    return host


def rdma_endpoint(host: RdmaHost, address: str) -> common_pb2.Endpoint:
    """What clients are told: where the side channel is, and which ports there are."""
    return common_pb2.Endpoint(
        kind=common_pb2.TRANSPORT_KIND_RDMA,
        address=address,
        device_info=encode_ports(advertised(host.nics.ports)),
    )
