"""A client that may not pin memory: `unpinned_client.py NODE_IN_HEX LIBRARY`, started with a low
limit of locked memory and without CAP_IPC_LOCK. Tells what became of it as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cenote.api.errors import ResourceUnavailable
from cenote.transport.rdma import RdmaTransport
from cenote.transport.rdma_nics import find_nics
from cenote.transport.testing_support import DEADLINE_S, LocalMemory
from cenote.v1 import common_pb2
from data_daemon import SEGMENT_ID
from rdma_daemon import IDENTITY, patient

SIZE_BYTES = 1 << 20
ONE_BYTES = 4096


def main() -> None:
    node = common_pb2.NodeView.FromString(bytes.fromhex(sys.argv[1]))
    transport = RdmaTransport(find_nics(sys.argv[2]), settings=patient)
    memory = LocalMemory(SIZE_BYTES)
    refusal = None
    try:
        transport.register(memory.address, SIZE_BYTES, memory)
    except ResourceUnavailable as error:
        refusal = error
    assert refusal is not None
    channel = transport.connect(node, IDENTITY, 1, DEADLINE_S)
    pattern = bytes(range(256)) * 16
    memory.bytes[:ONE_BYTES] = memoryview(pattern)
    place = (SEGMENT_ID, 0, ONE_BYTES, memory.address)
    assert channel.write_one(*place, 7, DEADLINE_S, True)[0] == 0
    memory.bytes[:] = 0
    assert channel.read_one(*place, DEADLINE_S, True)[0] == 0
    assert memory.bytes[:ONE_BYTES].tobytes() == pattern
    counters = transport.counters
    print(
        json.dumps(
            {
                "refusal": refusal.message,
                "remedy": refusal.remedy,
                "obstacle": channel.obstacle,
                "rdma_bytes": counters.read_bytes + counters.written_bytes,
                "tcp_calls": counters.tcp_calls,
            }
        )
    )
    channel.close()
    transport.close()


if __name__ == "__main__":
    main()
