"""The loop that looks for the next request before it sleeps."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cenote.rpc.lane_client import LaneClient
from cenote.rpc.lane_limits import LaneLimits, LaneStats
from cenote.rpc.loop_spinner import LoopSpinner
from cenote.runtime.scheduling import STEP_CONTENDED_S, CoreContention
from unit.rpc.lane_testing import ECHO, LaneThread
from waiting import loop_turns, wait_until


class FakeTime:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        self.step_aside_s = 0.0
        monkeypatch.setattr("cenote.rpc.loop_spinner.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("cenote.rpc.loop_spinner.os.sched_yield", self._step_aside)
        monkeypatch.setattr("cenote.rpc.loop_spinner.CONTENTION", CoreContention())

    def _step_aside(self) -> None:
        self.now_s += self.step_aside_s


def test_it_spins_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock = FakeTime(monkeypatch)
        spinner = LoopSpinner(0.001, LaneStats())
        spinner.served()
        await loop_turns(50)
        assert spinner.spinning
        clock.now_s += 0.0009
        spinner.served()  # a request came: from here on anew
        clock.now_s += 0.0009
        await loop_turns(2)
        assert spinner.spinning
        clock.now_s += 0.0002
        await loop_turns(2)
        assert not spinner.spinning

    asyncio.run(run())


def test_in_vain_again_and_again_it_spins_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[bool]:
        clock = FakeTime(monkeypatch)
        spinner = LoopSpinner(0.001, LaneStats())
        spun = []
        for _ in range(100):
            spinner.served()
            spun.append(spinner.spinning)
            clock.now_s += 1.0
            await loop_turns(2)
        return spun

    spun = asyncio.run(run())
    assert spun[:2] == [True, True]  # once in vain has no consequence
    assert 6 < sum(spun) < 12, spun
    assert sum(spun[-32:]) == 2


def test_where_others_want_the_core_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        clock = FakeTime(monkeypatch)
        spinner = LoopSpinner(1.0, LaneStats())
        clock.step_aside_s = 2 * STEP_CONTENDED_S
        spinner.served()
        await loop_turns(2)
        assert not spinner.spinning
        clock.step_aside_s = 0.0
        spinner.served()
        assert not spinner.spinning  # not for a while
        clock.now_s += 0.011
        spinner.served()
        assert spinner.spinning

    asyncio.run(run())


def test_zero_never_spins() -> None:
    async def run() -> None:
        spinner = LoopSpinner(0.0, LaneStats())
        spinner.served()
        assert not spinner.spinning

    asyncio.run(run())


def test_a_server_that_spins_serves_sleeps_and_closes(tmp_path: Path) -> None:
    # Longer than the pause between two looks of `wait_until`, and so between two requests.
    with LaneThread(tmp_path, LaneLimits(spin_s=0.1)) as lane:
        stats = lane.server.stats
        with LaneClient(lane.address, b"test") as client:

            def asked_while_it_spun() -> bool:
                assert client.call(ECHO, b"x", 5) == b"x"
                return stats.requests_spun_for > 0

            wait_until(asked_while_it_spun, what="a request that came while the loop spun")
        assert stats.spins
        wait_until(lambda: not lane.server.spinner.spinning, what="the loop to sleep")
