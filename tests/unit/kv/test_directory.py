"""What is made of addresses and of the rows that etcd has of masters."""

from __future__ import annotations

import json

import pytest

from cenote.api.errors import ConfigError
from cenote.client.config import make_config
from cenote.kv.directory import MasterPlace, etcd_url_in, leader_key, masters_key, places_in
from cenote.kv.service import KvRow
from cenote.master.kv_keys import Keys, LeaderRow, master_bytes
from cenote.master.metadata import MasterRow
from cenote.store.config import StoreConfig

KEYS = Keys("/pool")


def row(key: bytes, value: bytes) -> KvRow:
    return KvRow(key, value, 1, 1)


def registered(*names: str, leader: str = "") -> list[KvRow]:
    """Rows as masters write them, in the order of their keys."""
    rows = []
    if leader:
        told = LeaderRow(3, "n", MasterRow(leader, (f"{leader}:1",), f"{leader}:2"))
        rows.append(row(KEYS.leader, told.to_bytes()))
    for name in sorted(names):
        told_of = MasterRow(name, (f"{name}:1",), f"{name}:2", {"pid": 7})
        rows.append(row(KEYS.master(name), master_bytes(told_of, "standby", 5)))
    return rows


def place(name: str) -> MasterPlace:
    return MasterPlace(name, (f"{name}:1",), f"{name}:2")


def test_masters_and_the_directory_agree_on_keys() -> None:
    assert (KEYS.leader, KEYS.masters[0]) == (leader_key("/pool"), masters_key("/pool"))
    assert leader_key("/pool/") == b"/pool/leader"


def test_the_leader_comes_first_and_each_master_once() -> None:
    rows = registered("a", "b", "c", leader="b")
    assert places_in(rows, "/pool") == [place("b"), place("a"), place("c")]
    assert places_in(registered("a", "b"), "/pool") == [place("a"), place("b")]
    assert places_in([], "/pool") == []


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[]", b"7", b"\xff", b"{}", b'{"addresses": []}', b'{"addresses": "a:1"}']
)
def test_rows_that_say_nothing_are_left_out(value: bytes) -> None:
    rows = [row(KEYS.leader, value), *registered("a"), row(KEYS.master("z"), value)]
    assert places_in(rows, "/pool") == [place("a")]


def test_a_master_without_grpc() -> None:
    value = json.dumps({"addresses": ["a:1"], "grpc": None}).encode()
    assert places_in([row(KEYS.master("a"), value)], "/pool") == [MasterPlace("", ("a:1",), "")]


def test_a_url_that_was_split_at_its_commas() -> None:
    assert etcd_url_in(["etcd://a:1", "b:2/pool"]) == "etcd://a:1,b:2/pool"
    assert etcd_url_in(["a:1", "b:2"]) == ""
    for mixture in (["a:1", "etcd://b:2"], ["etcd://a:1/x", "etcd://b:2"]):
        with pytest.raises(ConfigError, match="etcd"):
            etcd_url_in(mixture)


def test_clients_and_daemons_take_it_for_an_address() -> None:
    config = make_config("etcd://a:1,b:2/pool", {})
    directory = config.directory()
    assert directory is not None
    assert directory.url == "etcd://a:1,b:2/pool"
    assert make_config("a:1,b:2", {}).directory() is None
    store = StoreConfig(master=("etcd://a", "b/pool")).directory()
    assert store is not None
    assert store.url == "etcd://a:2379,b:2379/pool"
    assert StoreConfig(master=("a:1",)).directory() is None


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("etcd://", "no etcd URL"),
        ("etcd://user:pw@a:1", "no password"),
        ("etcd://a:x", "no endpoint"),
        ("etcd://a:1/pool,127.0.0.1:5110", "no prefix"),
        ("127.0.0.1:5110,etcd://a:1", "names masters and etcd"),
    ],
)
def test_what_is_no_such_address_is_refused_at_once(address: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        make_config(address, {})
    with pytest.raises(ConfigError, match=what):
        StoreConfig(master=tuple(address.split(",")))


def test_an_error_names_what_was_given() -> None:
    with pytest.raises(ConfigError, match="etcd_cert and"):
        make_config("etcd://a:1", {"etcd_cert": "x", "etcd_ca": "y"})
