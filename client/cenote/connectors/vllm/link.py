"""A connection to a pool that may not be there yet: made in the background, sooner or later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, final

from cenote.api.errors import CenoteError, ConfigError, FingerprintMismatch, Unavailable
from cenote.client import Client, Namespace
from cenote.runtime.log import get_logger

from .options import ConnectorOptions
from .orders import SpaceName

__all__ = ["PoolLink"]

_log: Final = get_logger("cenote.vllm")
_CONNECT_S: Final = 2.0
_PAUSE_MIN_S: Final = 0.25
_PAUSE_MAX_S: Final = 2.0
_CLOSE_S: Final = 3.0


@final
class PoolLink:
    """Nobody waits for a pool that isn't there: `space` says Unavailable at once then."""

    def __init__(
        self,
        options: ConnectorOptions,
        name: str,
        prepare: Callable[[Client], None] = lambda client: None,
        tell: Callable[[bool], None] = lambda connected: None,
        gives_way: bool = False,
    ) -> None:
        """`prepare`: what is to be done, in the thread, before the client counts as there. `tell`:
        hears that it is (True), or that the first attempt failed (False). `gives_way`: see
        `Client`."""
        self._options = options
        self._prepare = prepare
        self._tell = tell
        self._gives_way = gives_way
        self._name = name
        self._client: Client | None = None
        self._ended = threading.Event()
        self._tried = threading.Event()
        """The first attempt to connect has ended."""
        self._thread = threading.Thread(target=self._connect, name=f"{name}-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def client(self) -> Client | None:
        """The client, once there is one; it finds its way back to the pool by itself."""
        return self._client

    @property
    def hopeful(self) -> bool:
        """There is a client, or the first attempt to make one is under way."""
        return self._client is not None or not self._tried.is_set()

    def space(self, space: SpaceName, deadline_s: float) -> Namespace:
        """The namespace, opened (at the first time, a round trip).

        Raises Unavailable where no pool was met yet, FingerprintMismatch, what a call raises.
        """
        until_s = time.monotonic() + deadline_s
        self._tried.wait(deadline_s)
        client = self._client
        if client is None:
            raise Unavailable("no pool was reached yet", remedy="start one, or check `master`")
        return client.namespace(
            space.name, fingerprint=space.fingerprint, deadline_s=remaining_s(until_s)
        )

    def close(self) -> None:
        """End the client and the thread, within about the time of one attempt to connect."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self) -> None:
        pause_s = _PAUSE_MIN_S
        told = False
        while not self._ended.is_set():
            try:
                client = self._make_client()
            except ConfigError as error:
                _log.error("the pool can't be used", why=error)
                self._tried.set()
                return
            except CenoteError as error:
                if not told:
                    told = True
                    self._tell(False)
                    _log.warning(
                        "no pool yet, looking for it", master=self._options.master, why=error
                    )
                self._tried.set()
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
                continue
            try:
                self._prepare(client)
            except Exception:  # a driver's error, for example: the engine goes on without a pool
                _log.exception("the pool can't be used")
                self._tried.set()
                client.close()
                return
            if self._ended.is_set():
                client.close()
                return
            self._client = client
            self._tried.set()
            self._tell(True)
            _log.info("connected to the pool", master=self._options.master, who=self._name)
            return

    def _make_client(self) -> Client:
        addresses = self._options.master
        return Client(
            addresses if addresses.startswith("etcd://") else addresses.split(","),
            name=self._name,
            namespace="",  # a tenant's token is for the namespaces of its models alone
            deadline_s=_CONNECT_S,
            transports=self._options.transports,
            replicas=self._options.replicas,
            gives_way=self._gives_way,
        )


def remaining_s(until_s: float) -> float:
    """What is left until `until_s`. Raises nothing: a call is given a millisecond at least."""
    return max(0.001, until_s - time.monotonic())


REFUSALS: Final = (FingerprintMismatch, ConfigError)
"""Errors that time does not heal."""
