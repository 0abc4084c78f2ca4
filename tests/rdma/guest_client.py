"""Writes and reads over RDMA all the time, and tells of each turn as a line of JSON:
`guest_client.py NODE_IN_HEX LIBRARY`. Wrong bytes end it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from time import monotonic

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cenote.api.errors import CenoteError
from cenote.transport.base import SessionIdentity
from cenote.transport.rdma import RdmaTransport
from cenote.transport.rdma_lane import LaneSettings
from cenote.transport.rdma_nics import find_nics
from cenote.transport.testing_support import LocalMemory, batch
from cenote.v1 import common_pb2

SEGMENT_ID = 7
ITEMS = 32
ITEM_BYTES = 32 << 10
CALL_S = 8.0
GRACE_S = 3.0
"""An emulated machine is slow to notice that time is over."""


def main() -> None:
    node = common_pb2.NodeView.FromString(bytes.fromhex(sys.argv[1]))
    transport = RdmaTransport(find_nics(sys.argv[2]), settings=LaneSettings(probe_s=1.0))
    identity = SessionIdentity(b"session of tests", "", 1, common_pb2.Credentials())
    channel = transport.connect(node, identity, 1, 60.0)
    size = ITEMS * ITEM_BYTES
    memory = LocalMemory(size)
    transport.register(memory.address, size, memory)
    steps = np.arange(ITEMS, dtype=np.uint64) * np.uint64(ITEM_BYTES)
    extents = batch([(SEGMENT_ID, 2 * i * ITEM_BYTES, ITEM_BYTES) for i in range(ITEMS)])
    addresses = steps + np.uint64(memory.address)
    turn = 0
    while True:
        turn += 1
        told: dict[str, object] = {"turn": turn}
        begun = monotonic()
        try:
            data = np.random.default_rng(turn).integers(0, 256, size, np.uint8)
            memory.bytes[:] = data
            assert not channel.write(extents, addresses, 7, CALL_S).any()
            memory.bytes[:] = 0
            begun = monotonic()
            assert not channel.read(extents, addresses, CALL_S).any()
            if not np.array_equal(memory.bytes, data):
                print(json.dumps({**told, "wrong": True}), flush=True)
                return
        except CenoteError as error:
            told["error"] = type(error).__name__
        told["late"] = monotonic() - begun > CALL_S + GRACE_S
        lanes = list(channel._lanes._lanes.values())
        told["paths"] = max((len(lane.readers) for lane in lanes), default=0)
        told["tcp_calls"] = transport.counters.tcp_calls
        told["failed_paths"] = transport.counters.failed_paths
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
