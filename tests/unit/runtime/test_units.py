import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cenote.api.errors import InvalidArgument
from cenote.runtime.units import format_duration, format_size, parse_duration_s, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (4096, 4096),
        ("7B", 7),
        ("1.5GiB", 1610612736),
        ("1.5 gib", 1610612736),
        (" 4Gi ", 4 << 30),
        ("2MB", 2_000_000),
        ("3PiB", 3 << 50),
        ("0.1KiB", 102),
    ],
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_size_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5.1", "GiB", "1 GiB 2", "4XB", "1e3", "9999PiB", "1" * 200, "\u0661"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_size_bytes(text)


@pytest.mark.parametrize("value", [-1, 2**63, True, 1.5, None, b"1"])
def test_values_that_are_no_sizes(value: object) -> None:
    with pytest.raises(InvalidArgument):
        parse_size_bytes(value)  # type: ignore[arg-type]


def test_an_ambiguous_size_says_how_to_write_it() -> None:
    with pytest.raises(InvalidArgument, match=r"write 4GiB \(1024\) or 4GB \(1000\)"):
        parse_size_bytes("4g")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        ((1 << 20) - 1, "1 MiB"),
        (5 << 30, "5 GiB"),
        (1 << 60, "1024 PiB"),
        (-5000, "-4.88 KiB"),
    ],
)
def test_formatted_sizes(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(min_value=0, max_value=2**62))
def test_a_formatted_size_reads_back_within_its_two_decimals(size_bytes: int) -> None:
    again = parse_size_bytes(format_size(size_bytes))
    assert math.isclose(again, size_bytes, rel_tol=0.006, abs_tol=1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("1m30s", 90.0),
        ("1h 30m", 5400.0),
        ("2", 2.0),
        ("0.5", 0.5),
        (3, 3.0),
        (0.25, 0.25),
        ("10us", 1e-5),
        ("10µs", 1e-5),
        ("5min", 300.0),
        ("1D", 86400.0),
    ],
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "5q", "-3s", "1s2", "s", "1..5s", "1s" * 100])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(InvalidArgument, match="250ms"):
        parse_duration_s(text)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, True, None])
def test_values_that_are_no_durations(value: object) -> None:
    with pytest.raises(InvalidArgument):
        parse_duration_s(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ns"),
        (1e-30, "0 ns"),
        (2.5e-7, "250 ns"),
        (0.0009996, "1 ms"),
        (0.25, "250 ms"),
        (59.99, "60 s"),
        (100, "1 m 40 s"),
        (3600, "1 h"),
        (3661, "1 h 1 m"),
        (90_000, "1 d 1 h"),
        (math.inf, "forever"),
        (-0.5, "-500 ms"),
    ],
)
def test_formatted_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(min_value=0, max_value=1e8))
def test_a_formatted_duration_is_a_duration_again(seconds: float) -> None:
    again = parse_duration_s(format_duration(seconds))
    assert math.isclose(again, seconds, rel_tol=0.05, abs_tol=1e-8)
