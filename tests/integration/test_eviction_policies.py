"""Eviction policies in a real pool, beside what `cenote simulate` says of them; `cenote mrc`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cenote.cli.cmd_demo import SAMPLE
from cluster import Cluster, run_cenote
from waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

MIB = 1 << 20
HIT_RATE_TOLERANCE = 0.006
"""0.5 points, and what a pool's free reserve is short of the capacity."""
can_draw = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None or importlib.util.find_spec("plotille") is None,
    reason="cenote[plot] is not installed",
)


def cenote(*arguments: object, environment: dict[str, str] | None = None) -> str:
    words = [str(argument) for argument in arguments]
    result = run_cenote(*words, environment=environment, timeout_s=300)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def simulated(*arguments: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(cenote("simulate", SAMPLE, "--json", *arguments))[
        "results"
    ]
    return found


@pytest.mark.parametrize("policy", ["arc", "s3fifo"])
def test_a_pool_hits_as_often_as_the_simulator_says(policy: str) -> None:
    options = ["--capacity-objects", 4_000, "--block-size", "8KiB", "--policy", policy, "--json"]
    report = json.loads(cenote("replay", SAMPLE, "--pool", *options))
    assert (report["errors"], report["wrong_bytes"]) == (0, 0)
    assert report["policy"] == policy
    assert report["evicted_objects"] > 0
    (expected,) = simulated("--capacity", 4_000, "--policy", policy)
    assert report["hit_rate_blocks"] == pytest.approx(expected["hit_rate"], abs=HIT_RATE_TOLERANCE)


def test_simulate_has_a_row_for_each_policy_and_a_column_for_each_capacity() -> None:
    options = ["--capacity", "500,4000", "--limit", 100]
    rows = simulated(*options)
    assert len(rows) == 14
    assert {row["capacity_blocks"] for row in rows} == {500, 4_000}
    table = cenote("simulate", SAMPLE, *options)
    for name in ("lru", "arc-chain", "s3fifo", "auto", "4,000"):
        assert name in table


@can_draw
def test_simulate_draws(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    options = ["--capacity", "500,4000", "--limit", 60, "--policy", "lru,arc"]
    text = cenote("simulate", SAMPLE, *options, "--plot", "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "Hit rate of" in text
    assert "2 arc" in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--policy", "belady"], "no policy 'belady'"),
        (["--capacity", "many"], "no list of numbers"),
        (["--capacity", "0"], "no list of numbers"),
    ],
)
def test_simulate_says_what_is_wrong(arguments: list[str], what: str) -> None:
    result = run_cenote("simulate", str(SAMPLE), *arguments, timeout_s=60)
    assert result.returncode != 0
    assert what in result.stderr.decode()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(stores=1, dram_bytes=32 * MIB, master_flags={"policy": "auto"}) as started:
        started.wait_alive(1)
        yield started


def test_mrc_tells_what_more_capacity_would_bring(cluster: Cluster, tmp_path: Path) -> None:
    environment = cluster.environment
    assert (
        "nothing is known yet"
        in run_cenote("mrc", environment=environment, timeout_s=60).stderr.decode()
    )
    options = ["--block-size", "8KiB", "--limit", 300]

    def followed() -> Any:
        """Nothing is sampled before it is known, each second, how many objects fit: a fast machine
        has played all of it by then. And samples are followed by ticks, a bounded number each."""
        cenote("replay", SAMPLE, *options, environment=environment)
        told = json.loads(cenote("mrc", "--json", environment=environment))
        return told if any(one["references"] > 1_000 for one in told["curves"][1:]) else None

    found = wait_until(followed, 60.0, what="samples are followed")
    assert found["policy"] == "auto"
    assert set(found["policies"]) == {"lru", "arc", "arc-chain", "s3fifo", "s3fifo-chain"}
    assert 3_000 < found["capacity_objects"] < 5_000
    everything, one = found["curves"]
    assert everything["namespace"] is None
    assert one["namespace"].startswith("replay-")
    assert one["references"] > 1_000
    assert one["hit_rates"] == sorted(one["hit_rates"])
    table = cenote("mrc", environment=environment)
    assert "twice" in table
    assert "would hit" in table
    status = json.loads(cenote("status", "--json", environment=environment))
    assert status["eviction_policy_wanted"] == "auto"
    assert status["eviction_policy"]
    if importlib.util.find_spec("matplotlib") is not None:
        picture = tmp_path / "mrc.png"
        cenote("mrc", "--png", picture, environment=environment)
        assert picture.stat().st_size > 1_000
    unknown = run_cenote("mrc", "--namespace", "nobody", environment=environment, timeout_s=60)
    assert unknown.returncode != 0
