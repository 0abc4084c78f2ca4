"""Asking a node whether it is alive, where a client could not reach it.

That its port accepts a connection says nothing: the kernel does that for a stopped process, too. So
a probe says hello, as a client's data connection does, and any answer counts, a refusal included.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import Callable
from typing import Any, Final, final

from cenote.api.errors import ConfigError
from cenote.rpc.address import host_and_port
from cenote.runtime.log import get_logger
from cenote.security.tls import Tls
from cenote.transport import wire
from cenote.transport.opening import TLS_SCHEME
from cenote.v1 import store_pb2

__all__ = ["PROBE_TIMEOUT_S", "Prober", "answers"]

PROBE_TIMEOUT_S: Final = 0.3
LATE_S: Final = 2.0
"""How much longer an answer is waited for: a node of a slow machine, or one that was stopped for a
moment, is back with it, and not only when a later probe is answered in time."""
PROBES_MAX: Final = 64
_log = get_logger("cenote.master")


@final
class Prober:
    """One probe a node at a time, PROBES_MAX in all. `ticket(session_id)`: what a hello shows.

    `endpoint_of(node_id)`: its data address, "" where it told none. `note(node_id, answered)` gets
    what came of a probe: False after PROBE_TIMEOUT_S, then True should it answer late. A node that
    is asked for while it is probed is probed again: the answer may have been under way before
    whatever made somebody ask.
    """

    def __init__(
        self,
        endpoint_of: Callable[[int], str],
        note: Callable[[int, bool], None],
        ticket: Callable[[bytes], bytes] = lambda _: b"",
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._ticket = ticket
        self._endpoint_of = endpoint_of
        self._note = note
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._again: set[int] = set()
        self._closed = False

    def probe(self, node_id: int) -> None:
        """Begin; on the running loop."""
        if self._closed:
            return
        if node_id in self._tasks:
            self._again.add(node_id)
        elif len(self._tasks) < PROBES_MAX:
            task = asyncio.get_running_loop().create_task(self._probe(node_id))
            self._tasks[node_id] = task
            task.add_done_callback(lambda _: self._done(node_id))

    def _done(self, node_id: int) -> None:
        self._tasks.pop(node_id, None)
        if node_id in self._again:
            self._again.discard(node_id)
            self.probe(node_id)

    async def _probe(self, node_id: int) -> None:
        address = self._endpoint_of(node_id)
        try:
            host, port = host_and_port(address.removeprefix(TLS_SCHEME), "endpoint")
        except ConfigError:
            return  # it has not said where it listens: its heartbeats tell whether it lives
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asking = loop.create_task(
            answers(
                host,
                port,
                PROBE_TIMEOUT_S + LATE_S,
                self._ticket,
                self._tls if address.startswith(TLS_SCHEME) else None,
            )
        )
        try:
            in_time, _ = await asyncio.wait([asking], timeout=PROBE_TIMEOUT_S)
            if not in_time:
                self._note(node_id, False)
            answered = await asking
        finally:
            asking.cancel()
        if in_time or answered:
            self._note(node_id, answered)
        took = round(loop.time() - began_s, 3)
        _log.info("probed", node=node_id, address=address, answered=answered, seconds=took)

    def close(self) -> None:
        """End all probes, and begin none any more."""
        self._closed = True
        self._again.clear()
        for task in list(self._tasks.values()):
            task.cancel()


async def answers(
    host: str,
    port: int,
    timeout_s: float,
    ticket: Callable[[bytes], bytes] = lambda _: b"",
    tls: Tls | None = None,
) -> bool:
    """Whether a store daemon answers a hello there in time. Where it speaks TLS, and `tls` does not
    say how, that it refuses to go on without is an answer, too."""
    session_id = secrets.token_bytes(16)
    hello = wire.encode_hello(
        store_pb2.DataHelloRequest(session_id=session_id, ticket=ticket(session_id))
    )
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            options: dict[str, Any] = {}
            if tls is not None and tls.files.ca:
                options = {"ssl": tls.client_context(), "server_hostname": tls.server_name(host)}
            reader, writer = await asyncio.open_connection(host, port, **options)
            writer.write(hello)
            await reader.readexactly(wire.HELLO_REPLY.size)
        return True
    except ssl.SSLError as error:
        # It lives: whoever refuses a certificate, or shows one that is refused, has answered.
        _log.warning("probed without TLS", address=f"{host}:{port}", why=error)
        return True
    except (OSError, asyncio.IncompleteReadError):  # TimeoutError is an OSError
        return False
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()
