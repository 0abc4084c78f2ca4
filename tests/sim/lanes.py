"""Connections to masters: what a client and a daemon have in their hands."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import Message

from cenote.api.errors import (
    CenoteError,
    ClientClosed,
    DeadlineExceeded,
    NotLeader,
    PoolMismatch,
    Unavailable,
)
from cenote.client.master_stub import METHODS
from cenote.rpc.address import Address
from cenote.v1 import master_pb2 as pb
from sim.loop import Party, Signal
from sim.masters import HELLO, MASTER, LaneConnection, MasterProcess

if TYPE_CHECKING:
    from sim.world import World

__all__ = ["Lane", "SimLaneClient", "SimLaneSocket", "SimMaster", "StoreLink"]

_EVERY_VIEW: Final = (1 << 64) - 1


class Lane:
    """A process's connections to the master: each says hello first, as `LaneClient` does."""

    def __init__(
        self,
        world: World,
        party: Party,
        hello: bytes,
        on_hello: Callable[[bytes], None],
        name: str = MASTER,
    ) -> None:
        self._world = world
        self.name = name
        """Of the master's party."""
        self.connect_s = float("inf")
        """How long a hello may take."""
        self._party = party
        self.hello = hello
        self._on_hello = on_hello
        self._master: MasterProcess | None = None
        self._connection = LaneConnection()
        self._closed = Signal(world.loop)
        self._open: dict[Signal, None] = {}

    def close(self) -> None:
        self._closed.set()

    def end_calls(self) -> None:
        """Close, and end what is under way with ClientClosed."""
        self.close()
        for signal in list(self._open):
            signal.set()

    def disconnect(self) -> None:
        """The next call connects, and says hello."""
        self._master = None

    def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        """One request. Raises what the master raises, Unavailable, DeadlineExceeded."""
        loop = self._world.loop
        if not deadline_s > 0:
            raise DeadlineExceeded(f"no time is left: deadline_s is {deadline_s}")
        until_s = loop.now_s + deadline_s
        self._world.step()
        master = self._world.masters.get(self.name)
        if self._master is not master or master is None:
            self._master = None
            answer = self.greet(until_s)
            self._on_hello(answer)
            self._world.oracle.following.followed(
                self._party, pb.HelloResponse.FromString(answer).epoch
            )
            self._master = master
        reply = self._exchange(method, body, until_s)
        self._world.step()
        return reply

    def greet(self, until_s: float) -> bytes:
        """Connect, and say hello."""
        self._connection = LaneConnection()
        connected_s = self._world.loop.now_s + self.connect_s
        try:
            answer = self._exchange(HELLO, self.hello, min(until_s, connected_s))
            self._world.oracle.following.heard(
                self._party, pb.HelloResponse.FromString(answer).epoch
            )
            return answer
        except DeadlineExceeded:
            if until_s <= connected_s:
                raise
            raise Unavailable(f"{self.name} did not answer the connection in time") from None

    def _exchange(self, method: int, body: bytes, until_s: float) -> bytes:
        world, loop, network = self._world, self._world.loop, self._world.network
        if self._closed.is_set:
            raise ClientClosed("the lane is closed")
        name, there = self._party.name, self.name
        master = world.masters.get(there)
        if master is None or not master.party.alive:
            loop.sleep(min(network.delay_s(), max(0.0, until_s - loop.now_s)))
            raise Unavailable("nobody listens at the master's address")
        signal = Signal(loop)
        connection, weather = self._connection, network.weather

        def reply(answer: bytes | CenoteError) -> None:
            network.send(there, name, self._party, lambda: signal.set(answer), lost)

        def lost() -> None:
            self._world.loop.after(0.0, lambda: signal.set(_broken()), self._party)

        def arrive() -> None:
            master.receive(connection, method, body, reply, name)

        slow_s = world.faults.attach_delay_s() if method == pb.MASTER_METHOD_ATTACH else 0.0
        if slow_s:
            loop.after(slow_s, lambda: network.send(name, there, master.party, arrive, lost))
        else:
            network.send(name, there, master.party, arrive, lost)
        if weather.doubled and loop.dice.random() < weather.doubled:
            # One on a connection that was given up, read late: nobody waits for its reply.
            again = loop.dice.random() * 2 * max(weather.late_s, 0.01)
            loop.after(
                again,
                partial(self._arrive_again, master, method, body),
                master.party,
            )
        if method == pb.MASTER_METHOD_ATTACH and world.faults.repeats_attach():
            loop.after(
                loop.dice.random() * 3,
                partial(self._arrive_again, master, method, body),
                master.party,
            )
        if weather.broken and loop.dice.random() < weather.broken:
            loop.after(network.delay_s() * 2, lambda: signal.set(_broken()), self._party)
        master.open_calls[signal] = name
        self._open[signal] = None
        ended = signal.wait(max(0.0, until_s - loop.now_s))
        master.open_calls.pop(signal, None)
        self._open.pop(signal, None)
        if self._closed.is_set:
            closed = ClientClosed("the lane was closed during the call")
            closed.maybe_executed = True
            raise closed
        if not ended:
            self.disconnect()
            error = DeadlineExceeded("the master did not answer in time")
            error.maybe_executed = True
            raise error
        if isinstance(signal.value, CenoteError):
            if signal.value.maybe_executed:
                self.disconnect()
            raise signal.value
        answer: bytes = signal.value
        return answer

    def _arrive_again(self, master: MasterProcess, method: int, body: bytes) -> None:
        master.receive(self._connection, method, body, lambda _: None, self._party.name)


def _broken() -> CenoteError:
    error = Unavailable("the connection to the master broke")
    error.maybe_executed = True
    return error


class SimLaneClient:
    """What `LaneClient` is to a `LaneMaster`: the lane to one of several masters."""

    connections = 1

    def __init__(
        self,
        world: World,
        address: str,
        hello: bytes,
        *,
        on_hello: Callable[[bytes], None],
        connect_timeout_s: float,
        **_: Any,
    ) -> None:
        party = world.loop.present_party()
        self._lane = Lane(world, party, hello, on_hello, address.partition(":")[0])
        self._lane.connect_s = connect_timeout_s

    def call(self, method: int, body: bytes, deadline_s: float) -> bytes:
        return self._lane.call(method, body, deadline_s)

    def call_many(
        self, method: int, bodies: list[bytes], deadline_s: float
    ) -> list[bytes | CenoteError]:
        found: list[bytes | CenoteError] = []
        for body in bodies:
            try:
                found.append(self._lane.call(method, body, deadline_s))
            except CenoteError as error:
                found.append(error)
        return found

    def close(self) -> None:
        self._lane.end_calls()


class SimLaneSocket:
    """What `LaneSocket` is to a `LaneMaster` that asks around: one hello."""

    def __init__(self, hello_reply: bytes) -> None:
        self.hello_reply = hello_reply

    @staticmethod
    def open(
        world: World, address: Address, hello: bytes, until_s: float, clock: Callable[[], float]
    ) -> SimLaneSocket:
        party = world.loop.present_party()
        lane = Lane(world, party, hello, lambda _: None, address.host)
        return SimLaneSocket(lane.greet(world.loop.now_s + max(0.0, until_s - clock())))

    def close(self) -> None:
        pass


class SimMaster:
    """`MasterApi` over a `Lane`, for a client: what `LaneMaster` is for a real one."""

    def __init__(
        self,
        world: World,
        party: Party,
        hello: pb.HelloRequest,
        greeted: Callable[[pb.HelloResponse], None],
    ) -> None:
        self._said = pb.HelloResponse()
        self._greeted = greeted
        self._lane = Lane(world, party, hello.SerializeToString(), self._on_hello)

    def _on_hello(self, body: bytes) -> None:
        self._said = pb.HelloResponse.FromString(body)
        if not self._said.is_leader:
            raise NotLeader("this master is a standby")
        self._greeted(self._said)

    def hello(self, request: pb.HelloRequest, deadline_s: float) -> pb.HelloResponse:
        self._lane.hello = request.SerializeToString()
        self._lane.disconnect()
        view = pb.GetClusterViewRequest(known_view_version=_EVERY_VIEW)
        self._call("get_cluster_view", view, deadline_s)
        return self._said

    def _call(self, method: str, request: Message, deadline_s: float) -> Message:
        number, _, reply_type = METHODS[method]
        answer = self._lane.call(number, request.SerializeToString(), deadline_s)
        return reply_type.FromString(answer)

    def call_many(
        self, method: str, requests: list[Message], deadline_s: float
    ) -> list[Message | CenoteError]:
        found: list[Message | CenoteError] = []
        for request in requests:
            try:
                found.append(self._call(method, request, deadline_s))
            except CenoteError as error:
                found.append(error)
        return found

    def __getattr__(self, method: str) -> Any:
        if method not in METHODS:
            raise AttributeError(method)
        return lambda request, deadline_s: self._call(method, request, deadline_s)


class StoreLink:
    """`cenote.store.master_link.MasterLink` over a `Lane`."""

    def __init__(
        self, world: World, party: Party, hello: pb.HelloRequest, name: str = MASTER
    ) -> None:
        self._greeting = pb.HelloResponse()
        self._world, self._name = world, party.name
        self._said = pb.HelloRequest.FromString(hello.SerializeToString())
        self._lane = Lane(world, party, hello.SerializeToString(), self._on_hello, name)

    def _on_hello(self, body: bytes) -> None:
        self._greeting = pb.HelloResponse.FromString(body)

    def hello(self, deadline_s: float) -> pb.HelloResponse:
        view = pb.GetClusterViewRequest(known_view_version=_EVERY_VIEW)
        self._call("get_cluster_view", view, deadline_s)
        greeting = self._greeting
        strange = self._said.pool_id not in (b"", greeting.pool_id)
        if strange and greeting.epoch < self._said.last_epoch:
            self._world.faults.wipe_store(self._name)  # as its operator is told to
        return greeting

    def _call(self, method: str, request: Message, deadline_s: float) -> Any:
        number, _, reply_type = METHODS[method]
        return reply_type.FromString(
            self._lane.call(number, request.SerializeToString(), deadline_s)
        )

    def attach(self, request: pb.AttachRequest, deadline_s: float) -> Any:
        try:
            return self._call("attach", request, deadline_s)
        except PoolMismatch:
            self._world.faults.wipe_store(self._name)
            raise

    def heartbeat(self, request: pb.HeartbeatRequest, deadline_s: float) -> Any:
        return self._call("heartbeat", request, deadline_s)

    def detach(self, request: pb.DetachRequest, deadline_s: float) -> Any:
        return self._call("detach", request, deadline_s)

    def close(self) -> None:
        self._lane.close()
