"""Where a pool's masters are, looked up in its etcd: for clients, daemons and commands that are
given etcd's address instead of the masters'.

    <prefix>/leader            who leads, as JSON: name, addresses, grpc
    <prefix>/masters/<name>    each master that runs, likewise

What is found is a hint: whoever follows it asks the masters themselves who leads. So any member of
etcd may answer from what it has, also one that has lost touch with the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from cenote.api.errors import ConfigError, Unauthenticated, Unavailable

from .etcd_options import SCHEME, EtcdOptions
from .service import KvRefused, KvRow, KvUnavailable, prefix_end

__all__ = [
    "LOOK_EVERY_S",
    "LOOK_UP_S",
    "EtcdDirectory",
    "MasterPlace",
    "etcd_url_in",
    "leader_key",
    "masters_key",
    "places_in",
]

LOOK_UP_S: Final = 1.0
"""How long one look into etcd may take, where several fit in."""
LOOK_EVERY_S: Final = 0.5
"""Between two looks of one program: etcd has more to do when masters change."""
ROWS_MAX: Final = 64
_PAUSE_S: Final = 0.1


def leader_key(prefix: str) -> bytes:
    """Of the row that says who leads."""
    return prefix.encode().rstrip(b"/") + b"/leader"


def masters_key(prefix: str) -> bytes:
    """What the keys of all masters' rows begin with."""
    return prefix.encode().rstrip(b"/") + b"/masters/"


def etcd_url_in(addresses: Sequence[str]) -> str:
    """The URL that these are, put together again where it was split at its commas; '' where they
    are masters' own addresses. Raises ConfigError for a mixture."""
    joined = ",".join(addresses)
    if SCHEME not in joined:
        return ""
    if not joined.startswith(SCHEME) or SCHEME in joined[1:]:
        raise ConfigError(
            f"{joined!r} names masters and etcd, or etcd twice",
            remedy="give either the masters' addresses or one etcd://host:2379,host:2379/prefix",
        )
    return joined


@dataclass(frozen=True, slots=True)
class MasterPlace:
    """A master that is registered in etcd."""

    name: str
    addresses: tuple[str, ...]
    """Of its lane; at least one."""
    grpc: str
    """host:port; '' where it has no gRPC server."""


def places_in(rows: Iterable[KvRow], prefix: str) -> list[MasterPlace]:
    """Masters by their rows, the leader first, each once. Rows that say nothing are left out."""
    leader = leader_key(prefix)
    ordered = sorted(rows, key=lambda row: row.key != leader)
    found = (_place(row.value) for row in ordered)
    places: dict[tuple[str, ...], MasterPlace] = {}
    for place in found:
        if place is not None:
            places.setdefault(place.addresses, place)
    return list(places.values())


def _place(value: bytes) -> MasterPlace | None:
    fields: object = None
    with contextlib.suppress(ValueError):
        fields = json.loads(value)
    if not isinstance(fields, dict):
        return None
    addresses = fields.get("addresses")
    if not isinstance(addresses, list) or not addresses:
        return None
    return MasterPlace(
        str(fields.get("name", "")), tuple(map(str, addresses)), str(fields.get("grpc") or "")
    )


@final
class EtcdDirectory:
    """The masters that are registered in one etcd. Holds no connection between its calls.

    One thread at a time.
    """

    def __init__(
        self,
        options: EtcdOptions,
        *,
        shuffled: Callable[[Sequence[tuple[str, int]]], Sequence[tuple[str, int]]] | None = None,
    ) -> None:
        """`shuffled` orders the endpoints of each look; by default randomly, so that a member which
        does not answer, or knows only what was long ago, is not asked first again and again."""
        self._options = options
        self._shuffled = shuffled or (lambda all_: random.sample(all_, len(all_)))
        self._next_s = float("-inf")

    @property
    def url(self) -> str:
        """Without secrets."""
        return self._options.url

    @property
    def is_due(self) -> bool:
        """Whether the last look is long enough ago for another one."""
        return time.monotonic() >= self._next_s

    def look_up(self, timeout_s: float = LOOK_UP_S) -> list[MasterPlace]:
        """The masters that run, the leader first; ends within `timeout_s` and 0.1 s.

        Raises Unavailable where etcd does not answer or no master is registered, Unauthenticated
        where it refuses us, ConfigError where etcd3 is not installed or a certificate's file is
        not there.
        """
        from .etcd import EtcdKv  # a library that only those load who use it

        options = self._options
        endpoints = tuple(self._shuffled(options.endpoints))
        first, end = leader_key(options.prefix), prefix_end(masters_key(options.prefix))
        kv = EtcdKv(dataclasses.replace(options, endpoints=endpoints))
        try:
            reply = kv.range(first, end, limit=ROWS_MAX, stale_ok=True, timeout_s=timeout_s)
        except KvRefused as error:
            raise Unauthenticated(
                f"the masters can't be looked up in {self.url}: {error.message}",
                remedy="check the name, password and certificate that are given for etcd",
            ) from error
        except KvUnavailable as error:
            raise Unavailable(
                f"the masters can't be looked up in {self.url}: {error.message}",
                remedy="check that etcd runs and can be reached, or name the masters themselves",
            ) from error
        finally:
            kv.close()
            self._next_s = time.monotonic() + LOOK_EVERY_S
        places = places_in(reply.rows, options.prefix)
        if not places:
            raise Unavailable(
                f"no master is registered in {self.url}",
                remedy=f"start one: cenote-master --metadata {self.url}",
            )
        return places

    def wait(self, timeout_s: float) -> list[MasterPlace]:
        """`look_up`, again and again while there is time."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                return self.look_up(min(LOOK_UP_S, max(end_s - time.monotonic(), 0.01)))
            except Unavailable:
                if time.monotonic() + _PAUSE_S >= end_s:
                    raise
            time.sleep(_PAUSE_S)
