"""A `fake_pool.FakeMaster` behind a lane, for tests of who is asked and followed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Self

from cenote.api.errors import TenureEnded
from cenote.client.master_stub import METHODS
from cenote.rpc.lane_server import LaneConnection, LaneServer
from cenote.v1 import master_pb2 as pb
from fake_pool import FakeMaster

__all__ = ["MasterThread"]


class MasterThread:
    """A `FakeMaster` behind a lane, on a loop of its own."""

    def __init__(self, master: FakeMaster, path: Path) -> None:
        self.master = master
        self.address = f"unix://{path}"
        self.leader = ""
        """Not empty: a standby that names this leader."""
        self.garbage = False
        self.past_tenure = False
        self.epoch = 0
        """Not 0: instead of the fake master's."""
        self.silent = False
        """As a stopped process: it takes connections and says nothing."""
        self.hellos: list[bytes] = []
        self._path = str(path)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = LaneServer(self._dispatch, self._hello)
        await server.listen_unix(self._path)
        self.server = server
        self._ready.set()
        await self._stop.wait()
        await server.close()

    def _hello(self, connection: LaneConnection, payload: bytes) -> bytes | Awaitable[bytes]:
        if self.silent:
            return self._nothing()
        request = pb.HelloRequest.FromString(payload)
        self.hellos.append(request.session_id)
        reply = self.master.hello(request, 1.0)
        if self.leader:
            reply.is_leader = False
            del reply.leader_addresses[:]
            reply.leader_addresses.append(self.leader)
        reply.past_tenure = self.past_tenure
        reply.epoch = self.epoch or reply.epoch
        return reply.SerializeToString()

    async def _nothing(self) -> bytes:
        await self._stop.wait()
        return b""

    def _dispatch(
        self, connection: LaneConnection, method: int, body: bytes, deadline_ms: int
    ) -> bytes | Awaitable[bytes]:
        if self.silent:
            return self._nothing()
        if self.garbage:
            return b"\xff\xff\xff"
        name, (_, request_type, _) = next(
            (name, entry) for name, entry in METHODS.items() if entry[0] == method
        )
        if self.past_tenure and name == "renew_session":
            raise TenureEnded("no word from etcd")
        reply = getattr(self.master, name)(request_type.FromString(body), deadline_ms / 1000)
        if self.past_tenure and name in ("exists", "match", "acquire"):
            reply.past_tenure = True
            if name == "acquire":
                reply.ClearField("lease")
        answer: bytes = reply.SerializeToString()
        return answer

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
