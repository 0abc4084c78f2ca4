"""NIC paths that fail and come back, against a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cenote.transport.nics.health import PAUSE_MAX_S, PAUSE_MIN_S, PathHealth


def test_a_failed_path_is_left_out_probed_and_used_again() -> None:
    health = PathHealth(2, 0.0)
    assert health.working == [0, 1]
    assert health.next_probe_s() is None
    health.failed(0, "retries exceeded", 10.0)
    assert health.working == [1]
    assert health.begin_probe(10.0) is None
    (failed,) = health.out_of_use(10.0)
    assert (failed.index, failed.reason, failed.probe_in_s) == (0, "retries exceeded", PAUSE_MIN_S)
    assert health.next_probe_s() == 10.0 + PAUSE_MIN_S
    assert health.begin_probe(10.0 + PAUSE_MIN_S) == 0
    assert health.begin_probe(99.0) is None  # one at a time
    health.recovered(0, 11.0)
    assert health.working == [0, 1]
    assert health.out_of_use(11.0) == []


def test_all_gone_is_tcp_and_the_way_back() -> None:
    health = PathHealth(2, 0.0)
    health.failed(0, "x", 1.0)
    health.failed(1, "x", 1.0)
    assert health.working == []
    health.port_active(1, 1.1)
    assert health.begin_probe(1.1) == 1
    health.recovered(1, 1.2)
    assert health.working == [1]


def test_the_pause_doubles_up_to_a_limit_and_is_forgiven() -> None:
    health = PathHealth(1, 0.0)
    now = 0.0
    pauses = []
    for _ in range(10):
        health.failed(0, "x", now)
        due = health.next_probe_s()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert health.begin_probe(now) == 0
    assert pauses[:3] == [PAUSE_MIN_S, 2 * PAUSE_MIN_S, 4 * PAUSE_MIN_S]
    assert max(pauses) == pauses[-1] == PAUSE_MAX_S
    health.recovered(0, now)
    health.failed(0, "x", now + 1.0)  # at once again: it has not earned a short pause
    due = health.next_probe_s()
    assert due == now + 1.0 + PAUSE_MAX_S
    assert health.begin_probe(due) == 0
    health.recovered(0, due)
    health.failed(0, "x", due + 3600.0)
    assert health.next_probe_s() == due + 3600.0 + PAUSE_MIN_S


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "probe", "well", "ill", "active"]),
        st.integers(0, 2),
        st.floats(0.0, 5.0),
    ),
    max_size=60,
)


@given(STEPS)
def test_never_a_failed_path_and_always_a_way_back(steps: list[tuple[str, int, float]]) -> None:
    health = PathHealth(3, 0.0)
    down: set[int] = set()
    probing: set[int] = set()
    now = 0.0
    for what, index, pause in steps:
        now += pause
        if what == "fail":
            health.failed(index, "x", now)
            down.add(index)
            probing.discard(index)
        elif what == "probe":
            found = health.begin_probe(now)
            if found is not None:
                assert found in down - probing
                probing.add(found)
        elif what == "active":
            health.port_active(index, now)
        elif index in probing:
            probing.discard(index)
            if what == "well":
                health.recovered(index, now)
                down.discard(index)
            else:
                health.failed(index, "x", now)
        assert health.working == [i for i in range(3) if i not in down]
        assert {failed.index for failed in health.out_of_use(now)} == down
    for index in probing:
        health.failed(index, "x", now)
    for _ in range(3):  # whatever happened, within a bounded time each of them is tried
        now += PAUSE_MAX_S
        while (found := health.begin_probe(now)) is not None:
            health.recovered(found, now)
    assert health.working == [0, 1, 2]
