"""A client's life: open, close, threads, forks, and what happens in the background."""

from __future__ import annotations

import gc
import os
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    ConfigError,
    FingerprintMismatch,
    ForkedClient,
    InvalidArgument,
    Unavailable,
)
from cenote.client import Client
from cenote.client.plan.peers import Peers
from cenote.v1 import common_pb2
from fake_pool import FakeMaster, FakeTransport
from waiting import wait_until

MakeClient = Callable[..., Client]


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("cenote")]


def test_closing_leaves_nothing(master: FakeMaster) -> None:
    transport = FakeTransport(master.nodes)
    with Client.embedded(master, [transport]) as client:
        client.put_batch(["a", "b"], [b"x", b"y"], replicas=2)
        assert client.get("a") == b"x"
        buffer = client.alloc(100)
        client.register(bytearray(10))
        assert len(transport.regions) == 2
        assert not client.closed
    assert client.closed
    assert client_threads() == []
    assert transport.closed
    assert all(channel.closed for channel in transport.channels)
    assert transport.regions == []
    assert len(buffer) == 100
    assert master.known_sessions == set()
    client.close()
    for use in (
        lambda: client.get("a"),
        lambda: client.put("a", b"x"),
        lambda: client.exists("a"),
        lambda: client.alloc(1),
        lambda: client.register(bytearray(1)),
        lambda: client.namespace("x"),
    ):
        with pytest.raises(ClientClosed):
            use()


def test_registrations_end_once(client: Client) -> None:
    transport = client._transports[0]
    assert isinstance(transport, FakeTransport)
    with client.register(bytearray(10)) as registration:
        assert transport.regions[0].length == 10
    assert transport.regions == []
    registration.deregister()


def test_a_failed_start_leaves_nothing(master: FakeMaster) -> None:
    for method, error in (
        ("hello", Unavailable("no master")),
        ("open_namespace", FingerprintMismatch("other")),
    ):
        transport = FakeTransport(master.nodes)
        master.faults[method] = [error]
        with pytest.raises(type(error)):
            Client.embedded(master, [transport])
        assert transport.closed
    assert client_threads() == []


def test_a_master_that_is_gone_does_not_stop_close(master: FakeMaster) -> None:
    client = Client.embedded(master, [FakeTransport(master.nodes)])
    client.put("a", b"x")
    master.faults["close_session"] = [Unavailable("gone")]
    client.close()
    assert client_threads() == []


def test_a_dropped_client_is_closed(master: FakeMaster) -> None:
    client = Client.embedded(master, [FakeTransport(master.nodes)])
    client.put("a", b"x")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del client
        gc.collect()
    assert [str(each.message) for each in caught] == ["a cenote Client was not closed"]
    caught.clear()  # a warning keeps its source alive
    wait_until(lambda: client_threads() == [], what="the background thread closes the session")
    assert master.known_sessions == set()


def test_many_threads(client: Client, master: FakeMaster) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(20):
                keys = [f"{number}-{i}-{j}" for j in range(5)]
                values = [key.encode() * 3 for key in keys]
                assert client.put_batch(keys, values).ok
                assert client.get_batch(keys) == values
                assert client.get(keys[0]) == values[0]
                assert client.exists_batch(keys).all()
        except BaseException as error:  # whatever it is: the main thread looks
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(master.objects) == 400


def test_closing_ends_calls_of_other_threads(client: Client, master: FakeMaster) -> None:
    started = threading.Event()
    outcome: list[object] = []

    def wait_for_close() -> None:
        started.set()
        wait_until(lambda: client.closed, what="the client is closed")
        raise ClientClosed

    master.hooks["acquire"] = wait_for_close

    def read() -> None:
        try:
            outcome.append(client.get("a"))
        except CenoteError as error:
            outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    started.wait(5)
    client.close()
    thread.join()
    assert isinstance(outcome[0], ClientClosed)


def test_a_forked_child_is_told(client: Client, master: FakeMaster) -> None:
    client.put("a", b"x")
    client.get("a")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads: that's it
        child = os.fork()
    if not child:
        code = 1
        try:
            client.get("a")
        except ForkedClient:
            try:
                client.close()
                code = 0
            finally:
                os._exit(code)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert client.get("a") == b"x"


def test_the_session_is_renewed(master: FakeMaster, make_client: MakeClient) -> None:
    client = make_client()
    client._session.state.limits.session_ttl_s = 0.15
    client._session.housekeeper._renew_at_s = 0.0
    client._session.housekeeper.wake()
    wait_until(lambda: master.calls["renew_session"] >= 3, what="the session is renewed")


def test_a_lost_session_is_opened_again_in_the_background(
    master: FakeMaster, make_client: MakeClient
) -> None:
    client = make_client()
    master.known_sessions.clear()
    client._session.housekeeper._renew_at_s = 0.0
    client._session.housekeeper.wake()
    wait_until(lambda: bool(master.known_sessions), what="hello is said again")
    assert master.calls["open_namespace"] == 2


def test_a_new_view_reaches_the_client(master: FakeMaster, make_client: MakeClient) -> None:
    client = make_client()
    master.view_version = 2
    client._session.housekeeper._renew_at_s = 0.0
    client._session.housekeeper.wake()
    wait_until(lambda: client._session.state.peers.view_version == 2, what="the view is fetched")


def test_a_reply_tells_of_a_newer_view(master: FakeMaster, make_client: MakeClient) -> None:
    client = make_client()
    client.put("a", b"x")
    client._session.state.suspects[1] = (time.monotonic() + 60.0, 5.0)  # away, for long
    assert client.get("a") is None
    for use in (lambda: client.get("a"), lambda: client.put_batch(["b"], [b"x"])):
        master.view_version += 1  # it came back
        use()
        wait_until(
            lambda: client._session.state.peers.view_version == master.view_version,
            what="the view is fetched",
        )
        assert client._session.state.suspects == {}
        assert client.get("a") == b"x"


def test_nodes_that_a_restarted_master_has_not_heard_of_yet_are_where_they_were() -> None:
    where = common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address="127.0.0.1:1")
    view = common_pb2.ClusterView(
        view_version=7, nodes=[common_pb2.NodeView(node_id=3, endpoints=[where])]
    )
    before = Peers(view)
    restarted = common_pb2.ClusterView(
        view_version=8,
        nodes=[common_pb2.NodeView(node_id=3), common_pb2.NodeView(node_id=4)],
    )
    after = Peers(restarted, before)
    assert list(after.nodes[3].endpoints) == [where]
    assert not after.nodes[4].endpoints
    moved = common_pb2.Endpoint(kind=common_pb2.TRANSPORT_KIND_TCP, address="127.0.0.1:2")
    attached = common_pb2.ClusterView(
        view_version=9, nodes=[common_pb2.NodeView(node_id=3, endpoints=[moved])]
    )
    assert list(Peers(attached, after).nodes[3].endpoints) == [moved]


def test_leases_of_long_reads_are_renewed(master: FakeMaster, make_client: MakeClient) -> None:
    client = make_client()
    client.put("a", b"x" * (100 << 10))  # smaller ones are read without a lease
    master.lease_ttl_ms = 200

    def renewed() -> None:
        housekeeper = client._session.housekeeper
        housekeeper._renew_at_s = 0.0
        wait_until(lambda: master.calls["renew_session"] >= 1, what="the lease is renewed")
        wait_until(
            lambda: all(h.end_s > end_s for h in client._session.state.holds.values()),
            what="the read may take longer",
        )

    end_s = client._session.state.now() + 0.18
    master.nodes[1].on_copy = renewed
    assert client.get("a") == b"x" * (100 << 10)
    request = master.requests["renew_session"][0]
    assert len(np.frombuffer(request.lease_ids, "<u8")) == 1
    assert client._session.state.holds == {}


def test_news_waits_for_a_master(client: Client, master: FakeMaster) -> None:
    client.put("a", b"x")
    client.get_batch(["a"])
    lease = client.acquire(["a"], 5.0)
    master.faults["release"] = [Unavailable("not now")] * 2
    master.faults["touch"] = [Unavailable("not now")] * 2
    client.release(lease)
    wait_until(lambda: not master.leases, what="the leases are released after all")


def test_the_thread_sleeps_when_there_is_nothing_to_tell(client: Client) -> None:
    client.put("a", b"x")
    client.get("a")
    housekeeper = client._session.housekeeper
    wait_until(lambda: housekeeper._asleep, what="the thread sleeps")
    client.get("a")
    wait_until(lambda: housekeeper._asleep, what="it sleeps again")


@pytest.mark.parametrize(
    "options",
    [
        {"verify": "hope"},
        {"deadline_s": 0},
        {"deadline_s": "soon"},
        {"replicas": 0},
        {"replicas": 1, "min_replicas": 2},
        {"transports": ()},
        {"colour": "red"},
        {"durability": "forever"},
    ],
)
def test_wrong_options_are_named(master: FakeMaster, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        Client.embedded(master, [FakeTransport(master.nodes)], **options)  # type: ignore[arg-type]


def test_options_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, make_client: MakeClient
) -> None:
    monkeypatch.setenv("CENOTE_CLIENT_DEADLINE_S", "250ms")
    monkeypatch.setenv("CENOTE_CLIENT_NAMESPACE", "from-env")
    monkeypatch.setenv("CENOTE_CLIENT_ADDRESSES", "a:1,b:2")
    client = make_client()
    assert client.config.deadline_s == 0.25
    assert client.name == "from-env"
    assert client.config.addresses == ("a:1", "b:2")
    assert make_client(namespace="given").name == "given"
    monkeypatch.setenv("CENOTE_CLIENT_DEADLIN_S", "1")
    with pytest.raises(ConfigError, match="DEADLINE_S"):
        make_client()


def test_a_binary_fingerprint_survives(make_client: MakeClient, master: FakeMaster) -> None:
    raw = bytes(range(256))
    assert make_client(fingerprint=raw).fingerprint == raw
    assert master.fingerprints["default"] == raw
    assert "secret" not in repr(make_client(namespace="x", token="secret").config)


def test_unknown_transports_are_named() -> None:
    with pytest.raises(ConfigError, match="carrier pigeon"):
        Client("127.0.0.1:1", transports=("carrier pigeon",), deadline_s=0.1)


def test_who_names_its_namespaces_needs_none_of_its_own(make_client: MakeClient) -> None:
    """A tenant's token is not for `default`."""
    client = make_client(namespace="")
    assert client.session.spaces == {}
    space = client.namespace("ann/llama")
    assert space.put("key", b"value").stored
    assert space.get("key") == b"value"
    for use in (
        lambda: client.get("key"),
        lambda: client.get_batch(["key", "other"]),
        lambda: client.put_batch(["key"], [b"value"]).raise_for_errors(),
        lambda: client.put("key", b"value").raise_for_error(),
        lambda: client.exists("key"),
        lambda: client.namespace(""),
    ):
        with pytest.raises(InvalidArgument, match="name"):
            use()
    client.session.reopen_session(5.0)
