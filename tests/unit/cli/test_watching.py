"""`--watch`, `cenote top`'s rates, and questions before something is changed."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from cenote.api.errors import InvalidArgument, Unavailable
from cenote.cli import cmd_top
from cenote.cli.asking import agreed
from cenote.cli.cmd_top import Sample, rates
from cenote.cli.watching import watched
from cenote.v1 import admin_pb2 as pb


def test_it_shows_again_and_again_until_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[int] = []

    def show() -> None:
        shown.append(len(shown))
        if len(shown) == 2:
            raise Unavailable("the pool is away for a moment")
        if len(shown) == 4:
            raise KeyboardInterrupt

    assert watched(0.001, show) == 0
    assert shown == [0, 1, 2, 3]
    assert "away for a moment" in capsys.readouterr().err


def test_without_watch_it_shows_once_and_its_errors_are_errors() -> None:
    assert watched(None, lambda: 3) == 3

    def fail() -> None:
        raise Unavailable("gone")

    with pytest.raises(Unavailable):
        watched(None, fail)


def test_so_many_times_and_no_more_and_wrong_usage_ends_it() -> None:
    shown: list[int] = []
    assert watched(0.001, lambda: shown.append(1), count=3, at_once=False) == 0
    assert len(shown) == 3

    def fail() -> None:
        raise InvalidArgument("no such thing")

    with pytest.raises(InvalidArgument):
        watched(0.001, fail)


def sample(at_s: float, *, epoch: int = 1, **fields: Any) -> Sample:
    return Sample(at_s, pb.GetStatusResponse(epoch=epoch, **fields), [], [])


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = sample(10.0, acquired_keys=100, acquired_hits=50, evicted_objects=7)
    now = sample(12.0, acquired_keys=300, acquired_hits=200, evicted_objects=7)
    found = rates(before, now)
    assert (found["acquired_keys"], found["evicted_objects"]) == (100.0, 0.0)
    assert found["hit_rate"] == 0.75
    assert rates(None, now)["acquired_keys"] is None
    assert rates(before, sample(12.0, epoch=2))["acquired_keys"] is None
    assert rates(now, now)["hit_rate"] is None


def test_shares_of_namespaces_are_shares_whatever_changed_between_two_questions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The pool's use was asked for when it was empty still."""
    namespaces = [pb.NamespaceStatus(name="a", used_bytes=3 << 20, ssd_used_bytes=0)]
    namespaces.append(pb.NamespaceStatus(name="b", used_bytes=3 << 20, ssd_used_bytes=2 << 20))
    cmd_top._print_namespaces(
        Sample(1.0, pb.GetStatusResponse(used_bytes=0, ssd_capacity_bytes=1), [], namespaces)
    )
    out = capsys.readouterr().out
    assert "75.0 %" in out
    assert "25.0 %" in out


@pytest.mark.parametrize(("answer", "expected"), [("y\n", True), ("n\n", False), ("", False)])
def test_what_cant_be_taken_back_is_asked(
    answer: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
    assert agreed("Really?", yes=False) is expected
    assert agreed("Really?", yes=True)
    assert agreed("Really?", yes=False, harmless=True), "no terminal: a script's drain goes on"
