"""`cenote replay` on a pool with SSDs: hits of both tiers, and what was written for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cenote.cli.cmd_demo import SAMPLE
from cluster import run_cenote

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

KIB = 1 << 10
BLOCK = 16 * KIB
MEMORY_BLOCKS, SSD_BLOCKS = 500, 3_500


def cenote(*arguments: object) -> str:
    result = run_cenote(*map(str, arguments), timeout_s=300)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def replayed(tmp_path: Path, *more: object) -> dict[str, Any]:
    options = ["--pool", "--nodes", 1, "--block-size", BLOCK, "--ssd-dir", tmp_path, "--json"]
    sizes = ["--capacity-objects", MEMORY_BLOCKS, "--ssd-objects", SSD_BLOCKS]
    report: dict[str, Any] = json.loads(cenote("replay", SAMPLE, *options, *sizes, *more))
    assert (report["errors"], report["wrong_bytes"]) == (0, 0)
    assert not list(tmp_path.iterdir())
    return report


def simulated(blocks: int) -> float:
    words = ["--json", "--capacity", blocks, "--policy", "lru"]
    (result,) = json.loads(cenote("simulate", SAMPLE, *words))["results"]
    return float(result["hit_rate"])


def test_an_ssd_brings_hits_that_memory_alone_has_not(tmp_path: Path) -> None:
    report = replayed(tmp_path)
    tiers = report["hit_rate_blocks_dram"], report["hit_rate_blocks_ssd"]
    assert report["hit_rate_blocks"] == pytest.approx(sum(tiers))
    assert report["ssd_hit_blocks"] > 0
    alone, together = simulated(MEMORY_BLOCKS), simulated(MEMORY_BLOCKS + SSD_BLOCKS)
    # How close it comes to the latter depends on how fast the disk is.
    assert alone + 0.01 < report["hit_rate_blocks"] < together + 0.02
    assert 0 < report["demoted_share"] <= 1
    assert report["demoted_share"] == report["demoted_bytes"] / report["written_bytes"]


def test_what_ssds_may_be_written_a_day_is_kept(tmp_path: Path) -> None:
    report = replayed(tmp_path, "--ssd-daily-writes", "1GiB", "--limit", 400)
    assert 0 < report["ssd_charged_bytes"] <= report["ssd_budget_bytes"]
    assert report["demoted_objects"] * BLOCK <= report["ssd_charged_bytes"]
    assert report["demoted_share"] < 0.9
