"""What goes wrong, on real verbs: the scenarios of `rdma_scenarios`, the daemon in another process.

Cables are pulled between two machines: see `test_rdma_guests`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cenote.api.errors import GrantRevoked
from cenote.transport.testing_support import DEADLINE_S, GUARD
from rdma_daemon import RdmaFarEnd, StoppableWriter, rdma_far_end
from rdma_scenarios import Far, RdmaScenarios
from waiting import wait_until


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


def kernel_resources(kind: str) -> list[dict[str, Any]]:
    """User-space objects of all devices, as the kernel counts them."""
    text = subprocess.run(
        ["rdma", "-j", "resource", "show", kind],
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    ).stdout
    found: list[dict[str, Any]] = json.loads(text or "[]")
    return [row for row in found if "pid" in row]


@pytest.mark.rdma
@pytest.mark.timeout(3600)
class TestFaultsWithIbverbs(OnDevices):
    library = "ibverbs"


@pytest.mark.rdma
@pytest.mark.timeout(3600)
class TestFaultsWithPyverbs(OnDevices):
    library = "pyverbs"
