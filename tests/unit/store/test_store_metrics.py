"""What a daemon shows of its NICs, from the files that a kernel keeps, and of its SSD."""

from __future__ import annotations

from pathlib import Path

from cenote.runtime.metrics import Metrics
from cenote.store.ssd import FAILURES_MAX
from cenote.store.store_metrics import register_disk, register_nics
from cenote.transport.nics.sysfs import read_ports
from fake_sys import FakeSys
from faulty_device import io_error
from ssd_node import SsdNode, fill, read


def test_nics_tell_of_their_errors_and_links(tmp_path: Path) -> None:
    host = FakeSys(tmp_path)
    host.nic("mlx5_0", counters={"out_of_sequence": 7, "lifespan": 10})
    metrics = Metrics()
    ports = tuple(read_ports(tmp_path))
    register_nics(metrics, lambda: ports, tmp_path)
    found = metrics.snapshot()
    errors = 'cenote_store_nic_errors_total{port="mlx5_0:1",counter="out_of_sequence"}'
    assert found[errors] == 7
    assert not any("lifespan" in name for name in found)
    assert found['cenote_store_nic_up{port="mlx5_0:1"}'] == 1
    (tmp_path / "class/infiniband/mlx5_0/ports/1/state").write_text("1: DOWN\n")
    assert metrics.snapshot()['cenote_store_nic_up{port="mlx5_0:1"}'] == 0


def test_without_nics_nothing_is_shown() -> None:
    metrics = Metrics()
    register_nics(metrics, tuple)
    assert metrics.snapshot() == {}


def test_an_ssd_tells_what_was_asked_of_it_and_what_failed(tmp_path: Path) -> None:
    with SsdNode(tmp_path) as node:
        metrics = Metrics()
        register_disk(metrics, node.ssd.disk, node.segments.ssd())
        made = fill(node)
        read(node, [(at, len(data)) for data, at in made], shm=False)
        found = metrics.snapshot()
        size_bytes = sum(len(data) for data, _ in made)
        for operation in ("read", "write"):
            assert found[f'cenote_store_ssd_requests_total{{operation="{operation}"}}'] > 0
            moved = found[f'cenote_store_ssd_bytes_total{{operation="{operation}"}}']
            assert moved >= size_bytes
        assert found['cenote_store_ssd_requests_total{operation="flush"}'] > 0
        assert found["cenote_store_ssd_errors_total"] == 0
        assert found["cenote_store_ssd_given_up"] == 0
        assert found["cenote_store_ssd_waiting_requests"] == 0

        node.device.on_read = io_error
        while node.ssd.disk.failures < FAILURES_MAX:
            read(node, [(made[0][1], 1)], shm=False)
        assert metrics.snapshot()["cenote_store_ssd_errors_total"] >= FAILURES_MAX
        assert node.segments.give_up_failed()
        assert metrics.snapshot()["cenote_store_ssd_given_up"] == 1
