"""By namespace: few series, none that ever falls, and nothing lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cenote.runtime.metrics_top import OTHER, TopNamespaces


def total(folded: dict[str, list[float]]) -> float:
    return sum(values[0] for values in folded.values())


def test_few_namespaces_are_shown_as_they_are() -> None:
    top = TopNamespaces(3)
    assert top.fold({}) == {}
    assert top.fold({"a": (5, 1), "b": (2, 0)}) == {"a": [5, 1], "b": [2, 0]}
    assert top.fold({"a": (6, 2), "b": (2, 0)}) == {"a": [6, 2], "b": [2, 0]}
    assert top.gather({"a": (7,), "b": (8,)}) == {"a": [7], "b": [8]}


def test_the_rest_is_one() -> None:
    top = TopNamespaces(2)
    folded = top.fold({f"n{i}": (i,) for i in range(10)})
    assert folded == {"n9": [9], "n8": [8], OTHER: [28]}
    assert top.gather({f"n{i}": (1,) for i in range(10)}) == {"n9": [1], "n8": [1], OTHER: [8]}


def test_who_becomes_busy_is_shown_from_then_on() -> None:
    top = TopNamespaces(1)
    top.fold({"a": (10,), "b": (1,)})
    folded = top.fold({"a": (11,), "b": (500,)})
    assert folded == {"b": [499], OTHER: [2]}  # what each counted before stays where it was
    assert "a" not in folded
    folded = top.fold({"a": (12,), "b": (501,)})
    assert folded == {"b": [500], OTHER: [3]}


def test_a_count_that_begins_anew_goes_on_growing() -> None:
    top = TopNamespaces(2)
    top.fold({"a": (10,)})
    assert top.fold({"a": (3,)}) == {"a": [13]}


def test_who_is_gone_is_not_shown() -> None:
    top = TopNamespaces(2)
    top.fold({"a": (10,), "b": (2,), "c": (1,)})
    assert set(top.fold({"b": (3,), "c": (1,)})) == {"b", "c", OTHER}


@given(
    st.lists(st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 100)), max_size=30),
    st.integers(1, 4),
)
def test_no_series_falls_and_there_are_never_more(steps: list[dict[str, int]], shown: int) -> None:
    top = TopNamespaces(shown)
    counts = dict.fromkeys("abcdef", 0)
    before: dict[str, list[float]] = {}
    for step in steps:
        for name, more in step.items():
            counts[name] += more
        folded = top.fold({name: (n,) for name, n in counts.items()})
        assert len(folded) <= shown + 1
        for name, values in folded.items():
            # One that was shown before, and is so again, begins anew: Prometheus allows for that.
            assert values[0] >= (before[name][0] if name in before else 0)
        before = folded
    hidden = sum(counts.values()) - total(before)
    assert hidden >= 0
