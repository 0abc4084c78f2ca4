"""Puts of the same bytes under several keys, for content dedup, and writers who claim others'.

No key gets the same bytes twice, so that bytes and a key name one put; but whatever was put lately
is put under other keys, too. In half of the worlds these are of two namespaces of one dedup domain.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Any, Final

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from cenote.client.plan.steps import HashWide
from sim.loop import Violation
from sim.values import PutRecord, make_value, wrong_bytes

if TYPE_CHECKING:
    from cenote.client import Client
    from sim.world import World

__all__ = ["DEDUP", "DOMAIN", "KEYS_EACH", "Contents", "draw_namespaces"]

DEDUP = "dedup"
"""Among the kinds of faults: no fault, but it changes who holds what."""
NAMESPACES: Final = ("a", "b")
DOMAIN: Final = f"both={','.join(NAMESPACES)}"
KEYS_EACH: Final = 100
"""The second namespace's keys begin there: a key is of one namespace."""
LATELY = 6
_SMALL_BYTES = 5_000
"""What has room in any memory, however small it is in worlds with SSDs."""
CLAIMED_SHARE = 0.2
"""Of clients, those that claim what they can't know."""


def draw_namespaces(faults: frozenset[str], dice: Random) -> tuple[str, ...]:
    """Of one world. Where these are several, they may refer to each other's bytes."""
    return NAMESPACES if DEDUP in faults and dice.random() < 0.5 else NAMESPACES[:1]


class Contents:
    """Which bytes the puts of a world have."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._puts: dict[int, list[PutRecord]] = {}
        """By checksum."""
        self._lately: deque[bytes] = deque(maxlen=LATELY)
        self._first_of: dict[bytes, int] = {}
        """The number of the namespace in which these bytes were put first."""
        self._had: dict[int, set[bytes]] = {}
        """By key."""

    def new_put(
        self, serial: int, key: int, client: int, size: int, min_replicas: int
    ) -> PutRecord:
        """What a put is to store."""
        value = make_value(serial, key, client, size)
        if DEDUP in self._world.options.faults:
            value = self._maybe_known(key, value)
        put = PutRecord(serial, key, client, value, min_replicas)
        self._puts.setdefault(xxh3_64_intdigest(value), []).append(put)
        return put

    def _maybe_known(self, key: int, value: bytes) -> bytes:
        had = self._had.setdefault(key, set())
        most = 1 << 30 if self._world.tiers is None else max(len(value), _SMALL_BYTES)
        known = [each for each in self._lately if each not in had and len(each) <= most]
        dice, space = self._world.loop.dice, key // KEYS_EACH
        if known and dice.random() < 0.7:
            foreign = [each for each in known if self._first_of[each] != space]
            value = dice.choice(foreign or known)
        else:
            self._lately.append(value)
            self._first_of[value] = space
        had.add(value)
        return value

    def of(self, checksum: int) -> list[PutRecord]:
        """The puts of bytes with this checksum, of one key each."""
        return self._puts.get(checksum, [])

    def read(self, key: int, data: bytes) -> PutRecord:
        """The put that gave these bytes: of this key, if there is one. Raises Violation."""
        puts = [put for put in self.of(xxh3_64_intdigest(data)) if put.value == data]
        if not puts:
            meant = self._world.oracle.puts.get(int.from_bytes(data[4:8], "little"))
            raise Violation(wrong_bytes(key, meant, data))
        return next((put for put in puts if put.key == key), puts[0])

    def set_out(self, client: Client) -> None:
        """Have a new client put with dedup, and some of them claim all bytes of a size to be
        alike: a digest that they have heard, and bytes that they have not."""
        if self._world.loop.dice.random() >= CLAIMED_SHARE:
            return
        do = client._driver.do
        real = do[HashWide]

        def claimed(call: Any, step: HashWide) -> bytes:
            if step.seed != call.space.seed:
                hashed: bytes = real(call, step)
                return hashed
            return b"".join(self._heard(size, step) for size in step.sizes.tolist())

        do[HashWide] = claimed

    def _heard(self, size: int, step: HashWide) -> bytes:
        for value in self._lately:
            if len(value) == size and step.key:
                return blake2b(value, digest_size=16, key=step.key).digest()
            if len(value) == size:
                return xxh3_128_digest(value, step.seed)
        return size.to_bytes(16, "little")
