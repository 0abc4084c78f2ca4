"""A request's way through lookup, transfer and load: every way ends, and says how."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cenote.connectors.vllm.fetches import Fetch, FetchLimits, Found, Outcome, Phase, Want
from cenote.connectors.vllm.pace import ComputePace

LIMITS = FetchLimits(
    lookup_s=0.1,
    transfer_s=1.0,
    bytes_per_s=1e6,
    hold_s=5.0,
    gain_tokens_min=16,
    compute_share=0.5,
)
FOUND: Found[str] = Found(64, "lease", 100.0)


def fetch() -> Fetch[str]:
    made: Fetch[str] = Fetch(1, 0.0, LIMITS)
    assert made.wants == [Want.LOOK_UP]
    made.wants.clear()
    return made


def ready() -> Fetch[str]:
    made = fetch()
    made.looked_up(FOUND)
    assert made.ask(0.0, 16, 1000) is None
    made.staged(0.5, 64)
    assert made.wants == [Want.STAGE, Want.RELEASE]
    made.wants.clear()
    return made


def test_the_whole_way() -> None:
    made = fetch()
    assert made.ask(0.05, 16, 0) is None
    made.looked_up(FOUND)
    assert made.ask(0.06, 16, 1000) is None
    assert made.wants == [Want.STAGE]
    assert made.ask(0.07, 16, 1000) is None
    made.staged(0.1, 64)
    assert made.ask(0.2, 16, 0) == 48
    assert made.ask(0.2, 32, 0) == 32
    assert made.allocated(48)
    assert made.ask(0.3, 16, 0) == 0
    made.loaded()
    assert made.over
    assert made.outcome is Outcome.LOADED
    assert made.wants == [Want.STAGE, Want.RELEASE]


def test_a_late_answer_is_a_miss_and_its_lease_is_given_back() -> None:
    made = fetch()
    assert made.ask(0.2, 0, 0) == 0
    assert made.outcome is Outcome.LOOKUP_LATE
    assert made.wants == []
    made.looked_up(FOUND)
    assert made.wants == [Want.RELEASE]
    assert made.ask(0.3, 0, 0) == 0


def test_no_answer_and_a_miss() -> None:
    made = fetch()
    made.looked_up(None)
    assert made.outcome is Outcome.LOOKUP_FAILED
    made = fetch()
    made.looked_up(Found(0, None, 0.0))
    assert made.outcome is Outcome.MISS
    assert made.ask(0.0, 0, 0) == 0


def test_what_the_engine_has_itself_is_not_fetched() -> None:
    made = fetch()
    made.looked_up(FOUND)
    assert made.ask(0.0, 64, 0) == 0
    assert made.outcome is Outcome.NO_GAIN
    assert made.wants == [Want.RELEASE]


def test_a_transfer_may_take_a_share_of_what_computing_takes() -> None:
    limits = replace(LIMITS, pace=ComputePace())
    assert limits.transfer_limit_s(1_000_000, 100) == 2.0, "nothing is known of computing yet"
    limits.pace.ended(1.0, limits.pace.began(0.0, 100))
    assert limits.transfer_limit_s(1_000_000, 100) == 0.5
    assert limits.transfer_limit_s(1_000_000, 1000) == 2.0
    assert limits.transfer_limit_s(1_000_000, 1) == 0.05, "a busy machine's hiccups are allowed for"
    assert replace(limits, compute_share=0).transfer_limit_s(1_000_000, 100) == 2.0
    made: Fetch[str] = Fetch(1, 0.0, limits)
    made.looked_up(FOUND)
    assert made.ask(0.0, 16, 1000) is None
    assert made.limit_s == 0.24
    assert made.ask(0.36, 16, 1000) is None
    assert made.ask(0.37, 16, 1000) == 0, "the workers' report is waited for half as long again"
    assert made.outcome is Outcome.TRANSFER_LATE


def test_a_late_transfer_is_given_up_and_dropped() -> None:
    made = fetch()
    made.looked_up(FOUND)
    assert made.ask(0.0, 0, 1_000_000) is None
    assert made.ask(2.2, 0, 0) is None, "a second and one for its size, and some grace"
    assert made.ask(2.3, 0, 0) == 0
    assert made.outcome is Outcome.TRANSFER_LATE
    assert made.wants == [Want.STAGE, Want.DROP, Want.RELEASE]
    made.staged(2.4, 64)
    assert made.over


def test_a_transfer_that_brought_less() -> None:
    made = fetch()
    made.looked_up(FOUND)
    made.ask(0.0, 16, 1000)
    made.staged(0.1, 48)
    assert made.ask(0.1, 16, 0) == 32
    made = fetch()
    made.looked_up(FOUND)
    made.ask(0.0, 16, 1000)
    made.staged(0.1, 0)
    assert made.outcome is Outcome.TRANSFER_FAILED
    assert Want.DROP in made.wants


def test_blocks_that_the_engine_lost_meanwhile_leave_a_gap() -> None:
    made = ready()
    assert made.ask(1.0, 0, 0) == 0
    assert made.outcome is Outcome.UNUSED
    assert made.wants == [Want.DROP]


def test_a_request_that_gets_no_blocks_is_given_up() -> None:
    made = ready()
    made.expire(5.0)
    assert not made.over
    made.expire(6.0)
    assert made.over
    assert made.wants == [Want.DROP]


def test_another_connector_was_chosen() -> None:
    made = ready()
    assert not made.allocated(0)
    assert made.outcome is Outcome.UNUSED
    assert made.wants == [Want.DROP]


def test_a_lease_that_ran_out_in_the_queue_is_taken_anew_a_few_times() -> None:
    made = fetch()
    for turn in range(1, 4):
        made.looked_up(FOUND)
        made.wants.clear()
        now_s = 200.0 * turn
        answer = made.ask(now_s, 0, 0)
        if turn < 3:
            assert answer is None
            assert made.wants == [Want.RELEASE, Want.LOOK_UP]
        else:
            assert answer == 0
            assert made.outcome is Outcome.UNUSED


def test_the_end_of_a_request_ends_all_but_a_load() -> None:
    made = ready()
    made.allocated(48)
    made.abandon()
    assert made.phase is Phase.LOADING
    made.loaded()
    assert made.over
    made = ready()
    made.abandon()
    assert made.wants == [Want.DROP]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ask", "found", "none", "staged", "allocated", "loaded", "expire"]),
            st.integers(0, 6),
        ),
        max_size=30,
    )
)
def test_leases_and_slots_are_given_back_whatever_happens(events: list[tuple[str, int]]) -> None:
    made = fetch()
    now_s, leased, staged, asked = 0.0, 0, 0, 1
    for event, value in events:
        now_s += value * 0.3
        match event:
            case "ask":
                answer = made.ask(now_s, value * 16, 1000)
                assert answer is None or answer >= 0
                assert not made.over or answer == 0
            case "found" if asked:
                asked -= 1
                leased += 1
                made.looked_up(Found(64, "lease", now_s + 1))
            case "none" if asked:
                asked -= 1
                made.looked_up(None)
            case "staged" if staged:
                made.staged(now_s, value * 16)
            case "allocated":
                made.allocated(value * 16)
            case "loaded":
                if made.phase is Phase.LOADING:
                    staged -= 1
                made.loaded()
            case "expire":
                made.expire(now_s)
        for want in made.wants:
            leased -= want is Want.RELEASE
            asked += want is Want.LOOK_UP
            staged += (want is Want.STAGE) - (want is Want.DROP)
        made.wants.clear()
        assert leased >= 0
        assert staged >= 0
    if made.phase is Phase.LOADING:
        made.loaded()
        staged -= 1
    made.abandon()
    for want in made.wants:
        leased -= want is Want.RELEASE
        staged -= want is Want.DROP
    assert made.over
    assert leased == 0
    assert staged == 0
