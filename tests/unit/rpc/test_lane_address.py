"""Addresses of the lane."""

from __future__ import annotations

import pytest

from cenote.api.errors import InvalidArgument
from cenote.rpc.address import Address, is_loopback, parse_address


@pytest.mark.parametrize(
    ("text", "address", "again"),
    [
        ("tcp://host:1", Address(host="host", port=1), "tcp://host:1"),
        ("127.0.0.1:65535", Address(host="127.0.0.1", port=65535), "tcp://127.0.0.1:65535"),
        ("[::1]:80", Address(host="::1", port=80), "tcp://[::1]:80"),
        ("tcp://[fe80::1%eth0]:80", Address(host="fe80::1%eth0", port=80), None),
        ("unix:///run/x.sock", Address(path="/run/x.sock"), "unix:///run/x.sock"),
        ("unix:/run/x.sock", Address(path="/run/x.sock"), "unix:///run/x.sock"),
    ],
)
def test_what_is_an_address(text: str, address: Address, again: str | None) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address
    assert again in (None, str(address))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        "host:",
        ":80",
        "host:0",
        "host:65536",
        "host:-1",
        "host:8o",
        "host:\uff18\uff10",
        "::1:80",
        "[::1]80",
        "[::1",
        "http://host:80",
        "unix://relative/x.sock",
        "unix://",
        "unix:///" + "x" * 120,
    ],
)
def test_what_is_none(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_address(text)


def test_what_nobody_but_this_host_can_reach() -> None:
    inside = ("127.0.0.1", "127.1.2.3", "::1", "localhost", "::ffff:127.0.0.1")
    assert all(map(is_loopback, inside))
    outside = ("0.0.0.0", "::", "*", "10.0.0.1", "fd00::1", "127.0.0.1.example", "node-1", "")
    assert not any(map(is_loopback, outside))
