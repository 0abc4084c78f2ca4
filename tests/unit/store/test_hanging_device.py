"""A device that hangs, and a daemon that is to follow another leader."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from ssd_node import DRAM_ID, EPOCH, SSD_ID, SsdNode, payload_of


def test_a_device_that_hangs_keeps_no_daemon_from_its_next_leader(tmp_path: Path) -> None:
    """While slots of a copy are being written, and the header after that."""
    hung, go_on = threading.Event(), threading.Event()
    with SsdNode(tmp_path) as node:
        table_end = node.ssd.plan.data_at

        def hang(offset: int, _length: int) -> None:
            if offset < table_end:
                hung.set()
                go_on.wait(20)

        node.device.on_write = hang
        node.put(0, payload_of(1, 100_000), [(0, 100_032)])
        node.copy([0], 3, 0, 128 << 10)
        assert hung.wait(10)
        began_s = time.monotonic()
        node.segments.fence(EPOCH + 1)
        node.copier.fence(EPOCH + 1)
        node.segments.attached(1, [DRAM_ID, SSD_ID + 5])
        assert time.monotonic() - began_s < 5
        assert node.segments.by_id(SSD_ID + 5) is node.ssd
        go_on.set()
    with SsdNode(tmp_path) as node:
        assert node.ssd.header.last_epoch == EPOCH + 1
