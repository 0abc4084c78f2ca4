"""What goes wrong, on real verbs: the scenarios of `rdma_scenarios`, the daemon in another process.

Cables are pulled between two machines: see `test_rdma_guests`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from cenote.api.errors import BufferInUse, CenoteError, GrantRevoked
from cenote.transport.testing_support import GRACE_S, GUARD
from cenote.transport.verbs.base import VerbsError
from rdma.links import kernel_resources
from rdma_daemon import RdmaFarEnd, StoppableWriter, rdma_far_end
from rdma_scenarios import ITEM_BYTES, ITEMS, Far, RdmaScenarios, Traffic, the_lane
from waiting import wait_until

HERE = Path(__file__).resolve().parent
BYTES = ITEMS * ITEM_BYTES
SLOW_S = 120.0


class Stuck:
    """A queue pair that the device neither moves to error nor destroys."""

    def __init__(self, pair: Any) -> None:
        self.pair = pair

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pair, name)

    def fail(self) -> None:
        raise VerbsError(errno.EIO, "the device is in trouble")

    close = fail


class OnDevices(RdmaScenarios):
    library = ""
    connects = int(os.environ.get("CENOTE_TEST_CONNECTS", "1000"))

    @contextmanager
    def far_end(self, **options: Any) -> Iterator[Far]:
        with rdma_far_end(self.library, **options) as far:
            yield far

    def test_a_nic_whose_link_is_down(self) -> None:
        pytest.skip("a device that talks to itself needs no cable: see test_rdma_guests")

    def test_a_link_that_goes_down_in_the_middle(self) -> None:
        pytest.skip("a device that talks to itself needs no cable: see test_rdma_guests")

    def queue_pairs(self, far: Far) -> int:
        return len(kernel_resources("qp"))

    def resources(self, far: Far) -> object:
        assert isinstance(far, RdmaFarEnd)
        wait_until(lambda: not far.daemon.ask("counters").connections, what="connections to end")
        own = len(os.listdir("/proc/self/fd"))
        theirs = len(os.listdir(f"/proc/{far.daemon.pid}/fd"))
        return own, theirs, len(kernel_resources("mr")), len(kernel_resources("cq"))

    def test_a_writer_that_is_stopped_while_it_is_cut_off(self) -> None:
        """It goes on later with what it had posted or not, and nothing of it lands."""
        with (
            rdma_far_end(self.library) as far,
            StoppableWriter(self.library, far.node) as writer,
        ):
            for turn in range(3):
                writer.pause()
                if turn:
                    far.poke(0, bytes([turn]) * writer.size_bytes)
                    assert far.peek(0, 1) == bytes([turn])
                writer.resume()
                writer.wait_for_writes()
            writer.pause()
            far.cut(writer.session_id)
            far.poke(0, bytes([GUARD]) * writer.size_bytes)
            writer.resume()
            assert writer.error() == GrantRevoked.__name__
            assert far.peek(0, writer.size_bytes) == bytes([GUARD]) * writer.size_bytes

    def test_a_deadline_while_the_peer_is_silent(self) -> None:
        """When the call has returned nothing of it lands any more; the next one is well."""
        with self.channel() as (far, channel):
            assert isinstance(far, RdmaFarEnd)
            traffic = Traffic(far)
            data = traffic.write(channel)
            far.silence()
            begun = monotonic()
            with pytest.raises(CenoteError):
                channel.read(traffic.extents, traffic.addresses, 0.5)
            assert monotonic() - begun < 0.5 + GRACE_S
            traffic.memory.bytes[:] = GUARD
            assert not self.pairs_in_use(far)
            assert traffic.memory.untouched(0, BYTES)
            wait_until(lambda: self._is_read(channel, traffic, data), SLOW_S, what="a read")
            traffic.close()

    def test_a_device_that_does_not_let_go(self) -> None:
        """The buffer is named, and stays registered; other buffers are moved as before."""
        with self.channel() as (far, channel):
            assert isinstance(far, RdmaFarEnd)
            traffic = Traffic(far)
            data = traffic.write(channel)
            lane = the_lane(channel)
            stuck = [Stuck(queue.pair) for queue in lane.readers]
            for queue, pair in zip(lane.readers, stuck, strict=True):
                queue.pair = pair
            far.silence()
            begun = monotonic()
            with pytest.raises(BufferInUse, match="did not let go"):
                channel.read(traffic.extents, traffic.addresses, 0.5)
            assert monotonic() - begun < 0.5 + GRACE_S
            assert far.transport.memory.registered_bytes >= BYTES
            assert kernel_resources("mr")
            other = Traffic(far)
            wait_until(lambda: self._is_read(channel, other, data), SLOW_S, what="a read")
            other.close()
            # The device comes to its senses. What it kept, the pair for writing with it, would
            # stay until this process ends, and others count what is left.
            for queue, pair in zip(lane.readers, stuck, strict=True):
                queue.pair = pair.pair
            assert lane.close()
            traffic.close()

    def pairs_in_use(self, far: RdmaFarEnd) -> list[dict[str, Any]]:
        """Queue pairs of this process that could still work."""
        return [
            row
            for row in kernel_resources("qp")
            if row.get("pid") == os.getpid() and row.get("state") not in ("ERR", "RESET")
        ]

    def _is_read(self, channel: Any, traffic: Traffic, data: bytes) -> bool:
        try:
            traffic.read(channel, data)
        except CenoteError:
            return False
        return True

    def test_registration_that_is_refused(self) -> None:
        """A client that may not pin memory: an error that names the limit, and TCP instead."""
        if os.geteuid() or shutil.which("setpriv") is None:
            pytest.skip("needs root and setpriv: a client without CAP_IPC_LOCK is started")
        with rdma_far_end(self.library) as far:
            node = far.node.SerializeToString().hex()
            done = subprocess.run(
                [
                    *("prlimit", "--memlock=65536", "setpriv", "--bounding-set", "-ipc_lock"),
                    *(sys.executable, str(HERE / "unpinned_client.py"), node, self.library),
                ],
                capture_output=True,
                text=True,
                timeout=SLOW_S,
            )
            assert done.returncode == 0, done.stderr
            told = json.loads(done.stdout)
            assert "RLIMIT_MEMLOCK" in told["refusal"]
            assert "ulimit -l" in told["remedy"]
            assert (told["rdma_bytes"], told["tcp_calls"]) == (0, 2)
            assert "RLIMIT_MEMLOCK" in told["obstacle"]
            assert far.peek(0, 4096) == bytes(range(256)) * 16


@pytest.mark.rdma
@pytest.mark.timeout(3600)
class TestFaultsWithIbverbs(OnDevices):
    library = "ibverbs"


@pytest.mark.rdma
@pytest.mark.timeout(3600)
class TestFaultsWithPyverbs(OnDevices):
    library = "pyverbs"
