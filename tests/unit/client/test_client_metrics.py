"""What clients count, and show: parts that add up, for every call and every way that it can end."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from cenote.api.errors import ConfigError, InvalidBuffer, Unavailable
from cenote.client import Client
from cenote.client.metrics import client_metrics, register, serve, serve_once
from cenote.client.tally import TALLY, Tally
from fake_pool import FakeMaster

MakeClient = Callable[..., Client]


def tally_of(*clients: Client) -> Tally:
    tally = Tally()
    for client in clients:
        tally.opened(client.session)
    return tally


def shown(tally: Tally) -> dict[str, float]:
    return client_metrics(tally).snapshot()


def stages(found: dict[str, float], namespace: str = "default") -> list[float]:
    prefix = "cenote_client_funnel_keys_total"
    names = ("asked", "present", "fetched", "verified")
    return [found[f'{prefix}{{namespace="{namespace}",stage="{name}"}}'] for name in names]


def result(found: dict[str, float], name: str, namespace: str = "default") -> float:
    return found[f'cenote_client_read_keys_total{{namespace="{namespace}",result="{name}"}}']


@pytest.mark.parametrize("by_lease", [True, False])
def test_the_funnel_has_all_keys_of_all_reads(make_client: MakeClient, by_lease: bool) -> None:
    client = make_client(by_lease=by_lease)
    client.put("a", b"x" * 100)
    client.put_batch(["b", "c"], [b"y" * 50, b"z" * 50]).raise_for_errors()
    for _ in range(2):  # by the master's word, then from where it was a moment ago
        assert client.get("a") == b"x" * 100
    assert client.get("none") is None
    assert client.get_into("b", bytearray(50)) == 50
    assert client.get_batch(["a", "none", "c"])[1] is None
    buffers = np.empty((3, 100), np.uint8)
    assert client.get_into_batch(["a", "b", "no"], list(buffers)).sizes.tolist() == [100, 50, 0]
    with client.view(["a", "no", "c"]) as views:
        assert [view is None for view in views] == [False, True, False]
    with pytest.raises(InvalidBuffer):
        client.get_into("c", bytearray(1))
    assert client.get_into_batch(["b"], [bytearray(2)]).sizes.tolist() == [0]
    found = shown(tally_of(client))
    # 2 + 1 + 1 + 3 + 3 + 3 asked one way or the other, of which 4 absent, and 2 for small buffers.
    assert stages(found) == [15, 11, 9, 9]
    assert result(found, "absent") == 4
    assert result(found, "unreachable") == 0
    assert result(found, "dram") + result(found, "ssd") == 9
    name = 'operation="read",stage="fetch",reason="InvalidBuffer"'
    assert found[f"cenote_client_failed_keys_total{{{name}}}"] == 2
    assert found['cenote_client_stored_keys_total{namespace="default"}'] == 3
    assert found['cenote_client_written_bytes_total{namespace="default"}'] == 200
    assert client.stats().hits == 9


def test_keys_that_nobody_tells_of_fail_at_the_lookup(
    make_client: MakeClient, master: FakeMaster
) -> None:
    client = make_client()
    client.put("a", b"x")

    def gone() -> None:
        raise Unavailable("nobody there")

    client.forget_locations()
    master.hooks["acquire"] = gone
    with pytest.raises(Exception, match="nobody"):
        client.get("a", deadline_s=0.05)
    with pytest.raises(Exception, match="nobody"):
        client.get_batch(["a", "b"], deadline_s=0.05)
    found = shown(tally_of(client))
    assert stages(found) == [3, 0, 0, 0]
    failed = {k: v for k, v in found.items() if k.startswith("cenote_client_failed_keys_total")}
    assert sum(failed.values()) == 3
    assert all('operation="read",stage="lookup"' in name for name in failed)


def test_calls_are_counted_and_timed_by_kind(make_client: MakeClient) -> None:
    client = make_client()
    client.put("a", b"x")
    for _ in range(17):
        client.get("a")
    client.exists("a")
    found = shown(tally_of(client))
    assert found['cenote_client_calls_total{call="get"}'] == 17
    assert found['cenote_client_calls_total{call="put"}'] == 1
    assert found['cenote_client_calls_total{call="exists"}'] == 1
    assert found['cenote_client_call_seconds_count{call="get"}'] == 2  # the first, the seventeenth
    assert 0 < found['cenote_client_call_seconds_sum{call="get"}'] < 10
    moved = sum(v for k, v in found.items() if k.startswith("cenote_client_moved_bytes_total"))
    assert moved == 18


def test_closed_clients_still_count(make_client: MakeClient) -> None:
    client = make_client()
    tally = tally_of(client)
    client.put("a", b"x")
    assert shown(tally)["cenote_client_clients"] == 1
    tally.closed(client.session)
    tally.closed(client.session)
    found = shown(tally)
    assert found["cenote_client_clients"] == 0
    assert found['cenote_client_calls_total{call="put"}'] == 1
    assert found['cenote_client_stored_keys_total{namespace="default"}'] == 1


def test_a_client_is_in_the_tally_while_it_is_open(make_client: MakeClient) -> None:
    before = TALLY.take()[1]
    client = make_client()
    assert TALLY.take()[1] == before + 1
    client.close()
    assert TALLY.take()[1] == before


def test_a_forked_process_begins_with_none(make_client: MakeClient) -> None:
    tally = tally_of(make_client())
    tally._lock.acquire()  # as another thread may hold it in that moment
    tally.begin()
    assert tally.take()[1:] == (0, 0)


def test_a_registry_shows_them_once() -> None:
    registry = CollectorRegistry()
    register(registry)
    register(registry)
    text = generate_latest(registry).decode()
    assert text.count("# TYPE cenote_client_clients gauge") == 1


def test_they_are_served_where_asked_for() -> None:
    with pytest.raises(ConfigError, match="no address"):
        serve_once("9400")
    server = serve(0)
    try:
        url = f"http://127.0.0.1:{server.port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        assert "cenote_client_clients" in text
        serve_once(f"127.0.0.1:{server.port}")  # taken: a warning
    finally:
        server.close()
