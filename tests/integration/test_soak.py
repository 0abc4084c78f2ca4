"""`make soak`, for a moment: that it runs, that faults happen, and that its rules hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from etcd import etcd_program

SOAK = Path(__file__).resolve().parents[2] / "benchmarks" / "soak" / "soak.py"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        os.environ.get("CENOTE_TEST_FULL") != "1", reason="takes a minute: CENOTE_TEST_FULL=1"
    ),
]


@pytest.mark.parametrize("metadata", ["file", "etcd"])
def test_a_short_soak_breaks_no_rule(tmp_path: Path, seed: int, metadata: str) -> None:
    if metadata == "etcd":
        etcd_program()  # skips where there is none
    more = ["--etcd-members", "3"] if metadata == "etcd" else []
    done = subprocess.run(
        [sys.executable, SOAK, "--minutes", "0.5", "--seed", str(seed), "--dir", tmp_path, *more],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert sum(report["faults"].values()) > 2
    assert report["totals"]["hit"] > 100
