"""A connection to the master that another thread gives up, since it opens the session anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cenote.api.errors import ClientClosed, Unavailable
from cenote.client.driver import BlockingDriver
from cenote.client.master_stub import LaneMaster
from cenote.client.plan.steps import AskMany, AskRaw
from cenote.v1 import master_pb2 as pb

CALL: Any = None
RAW = AskRaw("exists", b"", 1.0)
MANY = AskMany("exists", [pb.ExistsRequest, pb.ExistsRequest], 1.0)


def closed_under_us(*arguments: object) -> bytes:
    raise ClientClosed()


def a_driver(refusal: ClientClosed | None) -> tuple[BlockingDriver, Any]:
    master: Any = LaneMaster(["127.0.0.1:1"], pb.HelloRequest())  # connects when it is called
    master.call_lane = closed_under_us
    return BlockingDriver(cast("Any", SimpleNamespace(master=master, refusal=refusal))), master


def test_is_asked_again_in_an_open_client() -> None:
    """It was ClientClosed for a put beside which housekeeping had found the session lost."""
    driver, master = a_driver(None)
    with pytest.raises(Unavailable) as caught:
        driver.ask_raw(CALL, RAW)
    assert caught.value.maybe_executed
    master.call_many = closed_under_us
    with pytest.raises(Unavailable):
        driver.ask_many(CALL, MANY)
    reply = pb.ExistsResponse()
    master.call_many = lambda *arguments: [reply, ClientClosed()]
    first, second = driver.ask_many(CALL, MANY)
    assert first is reply
    assert isinstance(second, Unavailable)


def test_is_the_end_in_a_closed_one() -> None:
    driver, master = a_driver(ClientClosed("the client was closed"))
    with pytest.raises(ClientClosed):
        driver.ask_raw(CALL, RAW)
    master.call_many = lambda *arguments: [ClientClosed()]
    (only,) = driver.ask_many(CALL, MANY)
    assert isinstance(only, ClientClosed)
