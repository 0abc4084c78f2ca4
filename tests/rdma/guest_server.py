"""A data server with RDMA, for another machine: `guest_server.py HOST LIBRARY`.

Prints its NodeView in hex, then serves until it is killed.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cenote.store.rdma_host import RdmaHost
from cenote.store.server import DataServer
from cenote.store.sessions import SessionTable
from cenote.transport.fake_segment import FakeSegment, FakeSegments
from cenote.transport.nics.advertised import encode_ports
from cenote.transport.nics.choice import advertised
from cenote.transport.rdma_nics import find_nics
from cenote.v1 import common_pb2

SEGMENT_ID = 7
SEGMENT_BYTES = 8 << 20


def main() -> None:
    host_name, library = sys.argv[1:]
    segments = FakeSegments([FakeSegment(SEGMENT_ID, SEGMENT_BYTES)])
    host = RdmaHost(segments, find_nics(library))
    while not host.register_more():
        pass
    server = DataServer(segments, SessionTable(segments), tcp=(host_name, 0), rdma=host)
    server.start()
    assert server.tcp_address is not None
    address = f"{host_name}:{server.tcp_address[1]}"
    node = common_pb2.NodeView(node_id=1, name="far")
    node.endpoints.add(
        kind=common_pb2.TRANSPORT_KIND_RDMA,
        address=address,
        device_info=encode_ports(advertised(host.nics.ports)),
    )
    print(node.SerializeToString().hex(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
