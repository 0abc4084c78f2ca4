"""Where `cenote doctor` knows from what a store daemon here is to be given."""

from __future__ import annotations

from pathlib import Path

import pytest

from cenote.api.errors import InvalidArgument
from cenote.cli.doctor.findings import Verdict
from cenote.cli.doctor.planned import Planned, planned
from cenote.store.node_files import NodeFiles

GIB = 1 << 30


def plan(file: Path | str = "", **typed: str) -> Planned:
    directory = typed.pop("dram_dir", "")
    words = {"dram": "", "ssd": "", "ssd_size": "", "rdma_devices": ""} | typed
    return planned(str(file), dram_dir=Path(directory) if directory else None, **words)


def test_without_settings_it_is_what_was_typed() -> None:
    nothing = plan()
    assert (nothing.dram_dir, nothing.dram_bytes, nothing.master) == (Path("/dev/shm"), None, None)
    assert nothing.etcd_tls == ("", "", "")
    assert not nothing.checks
    typed = plan(dram="2GiB", ssd="/x/ssd", ssd_size="3GiB", dram_dir="/y")
    assert (typed.dram_bytes, typed.dram_dir) == (2 * GIB, Path("/y"))
    assert (typed.ssd, typed.ssd_bytes) == ("/x/ssd", 3 * GIB)
    with pytest.raises(InvalidArgument):
        plan(dram="much")


def test_settings_say_what_was_not_typed(tmp_path: Path) -> None:
    file = tmp_path / "store.toml"
    file.write_text(
        'name = "n7"\nmaster = ["a:1", "b:2"]\ndram = "4GiB"\ndram_dir = "/m"\n'
        'ssd = "/d/ssd"\nssd_size = "8GiB"\nrdma_devices = ["mlx5_0"]\netcd_ca = "ca.pem"\n'
    )
    found = plan(file)
    assert (found.dram_bytes, found.dram_dir) == (4 * GIB, Path("/m"))
    assert (found.ssd, found.ssd_bytes) == ("/d/ssd", 8 * GIB)
    assert found.rdma_devices == ("mlx5_0",)
    assert found.master == "a:1,b:2"
    assert found.etcd_tls == ("ca.pem", "", "")
    (finding,) = found.checks[0].look(1.0)
    assert finding.verdict is Verdict.OK
    assert "node n7, 4 GiB in /m, SSD /d/ssd" in finding.found
    other = plan(file, dram="1GiB", ssd="/e/ssd", rdma_devices="mlx5_1")
    assert (other.dram_bytes, other.ssd, other.rdma_devices) == (GIB, "/e/ssd", "mlx5_1")


@pytest.mark.parametrize("text", ["sdd = 1", "dram = [", 'name = "a b"', None])
def test_settings_that_are_wrong_are_a_finding_and_no_end(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "store.toml"
    if text is not None:
        file.write_text(text)
    found = plan(file, dram="1GiB")
    assert found.dram_bytes == GIB
    (finding,) = found.checks[0].look(1.0)
    assert finding.verdict is Verdict.FAIL
    assert finding.remedy


def test_daemons_that_run_say_what_they_have(tmp_path: Path) -> None:
    files = NodeFiles(tmp_path, "n1", ssd="/none/ssd")
    files.announce(files.node_uuid)
    try:
        (check,) = plan(dram_dir=str(tmp_path)).ssd_checks()
        (named,) = plan(dram_dir=str(tmp_path), ssd="/none/other").ssd_checks()
    finally:
        files.close()
    assert check.name == "ssd n1"
    assert "/none" in check.look(1.0)[0].found
    assert named.name == "ssd"
    (nobody,) = plan(dram_dir=str(tmp_path)).ssd_checks()
    assert nobody.look(1.0)[0].verdict is Verdict.SKIPPED
    (nowhere,) = plan(dram_dir=str(tmp_path / "none")).ssd_checks()
    assert nowhere.look(1.0)[0].verdict is Verdict.SKIPPED
