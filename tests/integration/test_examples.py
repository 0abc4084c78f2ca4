"""The examples do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from cluster import Cluster

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_quickstart(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Cluster(stores=1) as cluster:
        cluster.wait_alive(1)
        monkeypatch.setenv("CENOTE_MASTER", cluster.lane)
        for _ in range(2):  # the second time everything is there already
            runpy.run_path(str(EXAMPLES / "quickstart.py"))
            assert capsys.readouterr().out == "3 of 4 blocks came from the pool, equal: True\n"
