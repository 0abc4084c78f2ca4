"""What a client spends on an extent over RDMA: one core's time, from the call to its return.

    python benchmarks/micro/bench_rdma.py [--rounds 5] [--json] [--check]

It needs no NIC: under the real `ibverbs` package lies a libibverbs whose device does nothing, at
once (`standin_verbs.c`; built with cc and the headers of libibverbs-dev). All above it is what runs
in production, the daemon's end included: the channel's call, work requests, posts, completions.
Registered memory, extents in gaps so that none merge, or back to back so that they all do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).with_name("standin_verbs.c")
EXTENT_US_MAX = 3.0
BATCHES = (1, 8, 32, 64, 256, 1024)
SEGMENT_ID = 7
SEGMENT_BYTES = 64 << 20
EXTENT_BYTES = 16 << 10
CHECKED_FROM = 32


def with_standin() -> None:
    """Build the library and start this program anew over it."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libibverbs.so.1")
        build = ["cc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"]
        subprocess.run([*build, "-o", str(library), str(SOURCE)], check=True, timeout=60)
        environment = {**os.environ, "LD_LIBRARY_PATH": folder, "CENOTE_STANDIN": "1"}
        done = subprocess.run([sys.executable, *sys.argv], env=environment, timeout=600)
    sys.exit(done.returncode)


class Ends:
    """A data server and a channel to it, in this process."""

    def __init__(self) -> None:
        from cenote.store.rdma_host import RdmaHost
        from cenote.store.server import DataServer
        from cenote.store.sessions import SessionTable
        from cenote.transport.base import SessionIdentity
        from cenote.transport.fake_segment import FakeSegment, FakeSegments
        from cenote.transport.nics.advertised import encode_ports
        from cenote.transport.nics.choice import advertised
        from cenote.transport.nics.facts import ETHERNET, ROCE_V2, Gid, NicPort
        from cenote.transport.nics.routing import Route
        from cenote.transport.rdma import RdmaTransport
        from cenote.transport.rdma_nics import Nics
        from cenote.transport.verbs import load_verbs
        from cenote.v1 import common_pb2

        def nics() -> Nics:
            gid = Gid(1, IPv6Address(b"\x02" * 16), ROCE_V2)
            port = NicPort("standin0", 1, ETHERNET, "ACTIVE", gids=(gid,))
            return Nics(load_verbs("ibverbs"), [port])

        segments = FakeSegments([FakeSegment(SEGMENT_ID, SEGMENT_BYTES)])
        self.host = RdmaHost(segments, nics())
        self.host.register_more()
        self.server = DataServer(
            segments, SessionTable(segments), tcp=("127.0.0.1", 0), rdma=self.host
        )
        self.server.start()
        assert self.server.tcp_address is not None
        self.transport = RdmaTransport(nics(), ask_route=lambda query: Route.DIRECT)
        node = common_pb2.NodeView(
            node_id=1,
            endpoints=[
                common_pb2.Endpoint(
                    kind=common_pb2.TRANSPORT_KIND_RDMA,
                    address=f"127.0.0.1:{self.server.tcp_address[1]}",
                    device_info=encode_ports(advertised(self.host.nics.ports)),
                )
            ],
        )
        identity = SessionIdentity(b"session of bench", "", 1, common_pb2.Credentials())
        self.channel = self.transport.connect(node, identity, 1, 5.0)
        self.memory = np.zeros(SEGMENT_BYTES, np.uint8)
        address = self.memory.ctypes.data
        self.transport.register(address, SEGMENT_BYTES, self.memory)

    def batch(self, count: int, merged: bool) -> tuple[Any, Any]:
        from cenote.api.rows import EXTENT

        step = EXTENT_BYTES if merged else 2 * EXTENT_BYTES
        extents = np.zeros(count, EXTENT)
        extents["segment"], extents["length"] = SEGMENT_ID, EXTENT_BYTES
        extents["offset"] = np.arange(count, dtype=np.uint64) * np.uint64(step)
        addresses = extents["offset"] + np.uint64(self.memory.ctypes.data)
        return extents, addresses

    def close(self) -> None:
        assert self.transport.counters.tcp_calls == 0
        self.channel.close()
        self.transport.close()
        self.server.close()
        self.host.close()


def extent_us(ends: Ends, count: int, merged: bool, write: bool) -> float:
    """Processor time of this thread for each extent."""
    extents, addresses = ends.batch(count, merged)
    channel = ends.channel
    calls = max(20, 20_000 // count)
    begun = time.thread_time_ns()
    if write:
        for _ in range(calls):
            channel.write(extents, addresses, 7, 5.0)
    else:
        for _ in range(calls):
            channel.read(extents, addresses, 5.0)
    return (time.thread_time_ns() - begun) / calls / count / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true", help=f"fail above {EXTENT_US_MAX} us")
    options = parser.parse_args()
    if "CENOTE_STANDIN" not in os.environ:
        with_standin()
    ends = Ends()
    found: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for count in BATCHES:
            for merged in (False, True):
                for write in (False, True):
                    name = f"{'put' if write else 'get'} {count} {'merged' if merged else 'apart'}"
                    found.setdefault(name, []).append(extent_us(ends, count, merged, write))
    ends.close()
    medians = {name: round(statistics.median(values), 3) for name, values in found.items()}
    if options.json:
        print(json.dumps(medians))
    else:
        for name, value in medians.items():
            print(f"{name:22} {value:8.3f} us an extent")
    checked = {n: v for n, v in medians.items() if int(n.split()[1]) >= CHECKED_FROM}
    too_slow = {name: value for name, value in checked.items() if value > EXTENT_US_MAX}
    if options.check and too_slow:
        print(f"more than {EXTENT_US_MAX} us: {too_slow}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
