"""What a daemon shows of its NICs, from the files that a kernel keeps."""

from __future__ import annotations

from pathlib import Path

from cenote.runtime.metrics import Metrics
from cenote.store.store_metrics import register_nics
from cenote.transport.nics.sysfs import read_ports
from fake_sys import FakeSys


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
