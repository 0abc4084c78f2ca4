"""The packed, batched policies against plain implementations, on request traces.

The sample that cenote brings is always played; the whole traces where CENOTE_TRACES names their
directory (some minutes).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cenote.cli.cmd_demo import SAMPLE
from cenote.cli.replay.trace import load_trace
from cenote.policy.base import Keys
from cenote.policy.model import spread
from cenote.policy.names import AUTO, POLICIES
from cenote.policy.simulation import simulate
from reference_caches import (
    ArcReference,
    LruReference,
    ReferenceCache,
    S3FifoReference,
    hit_rate,
)

TOLERANCE = 0.005
AUTO_TOLERANCE = 0.01
FULL_TRACES = os.environ.get("CENOTE_TRACES", "")
REFERENCES: dict[str, Callable[[int], ReferenceCache]] = {
    "lru": LruReference,
    "arc": ArcReference,
    "s3fifo": S3FifoReference,
}
WHOLE = [
    *(("conversation", capacity) for capacity in (2_000, 5_000, 10_000, 20_000, 40_000, 80_000)),
    *(("synthetic", capacity) for capacity in (2_000, 10_000, 20_000, 40_000)),
]
needs_traces = pytest.mark.skipif(
    not FULL_TRACES, reason="CENOTE_TRACES names no directory of whole traces"
)


def path_of(name: str) -> Path:
    return SAMPLE if name == "sample" else Path(FULL_TRACES) / f"{name}_trace.jsonl"


@cache
def requests_of(name: str) -> tuple[list[NDArray[np.int64]], Keys]:
    trace = load_trace(path_of(name))
    ids, blocks = np.unique(trace.block_ids, return_inverse=True)
    return [
        blocks[a:b] for a, b in zip(trace.starts, trace.starts[1:], strict=False) if b > a
    ], spread(ids)


@cache
def rate(name: str, policy: str, capacity: int) -> float:
    requests, keys = requests_of(name)
    outcome = simulate(requests, keys, policy, capacity)
    assert outcome.blocks == sum(map(len, requests))
    return outcome.hit_rate


def check(name: str, policy: str, capacity: int) -> None:
    requests, _ = requests_of(name)
    expected = hit_rate(REFERENCES[policy](capacity), [blocks.tolist() for blocks in requests])
    assert rate(name, policy, capacity) == pytest.approx(expected, abs=TOLERANCE)


def check_auto(name: str, capacity: int) -> None:
    best = max(rate(name, policy, capacity) for policy in POLICIES)
    assert rate(name, AUTO, capacity) >= best - AUTO_TOLERANCE


@pytest.mark.parametrize("capacity", [500, 2_000, 4_000])
@pytest.mark.parametrize("policy", REFERENCES)
def test_the_sample_hits_as_often_as_the_textbook(policy: str, capacity: int) -> None:
    check("sample", policy, capacity)


@pytest.mark.parametrize("capacity", [500, 2_000, 4_000])
def test_on_the_sample_auto_is_about_as_good_as_the_best(capacity: int) -> None:
    check_auto("sample", capacity)


@needs_traces
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "capacity"), WHOLE)
@pytest.mark.parametrize("policy", REFERENCES)
def test_whole_traces_hit_as_often_as_the_textbook(name: str, policy: str, capacity: int) -> None:
    check(name, policy, capacity)


@needs_traces
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "capacity"), WHOLE)
def test_on_whole_traces_auto_is_about_as_good_as_the_best(name: str, capacity: int) -> None:
    check_auto(name, capacity)
