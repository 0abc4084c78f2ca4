"""Namespaces, their generations, and what is stored under each.

An *incarnation* is one generation of one namespace; object rows carry its number. Resetting makes a
new incarnation, so that everything of the old one is unreachable at once, whatever its size; rows
of dead incarnations are swept later, and their number is used anew when none is left. Numbers of
namespaces are never reused.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cenote.api.errors import (
    FingerprintMismatch,
    InvalidArgument,
    NamespaceNotFound,
    NamespaceReset,
    ResourceUnavailable,
)

from .effects import NamespaceOpened

__all__ = ["Namespace", "Namespaces"]

INCARNATIONS_MAX = 0xFFFF
_NAME_BYTES_MAX = 256
_FINGERPRINT_BYTES_MAX = 4096
_SHOWN_CHARACTERS_MAX = 64


@dataclass(slots=True)
class Namespace:
    name: str
    namespace_id: int
    generation: int
    fingerprint: bytes
    digest_seed: int
    durability: int
    incarnation: int

    def opened(self) -> NamespaceOpened:
        return NamespaceOpened(
            self.name,
            self.namespace_id,
            self.generation,
            self.fingerprint,
            self.digest_seed,
            self.durability,
        )


def _shown(fingerprint: bytes) -> str:
    """As the user wrote it, where it is text: the difference should be seen."""
    try:
        text = fingerprint.decode()
        text = repr(text) if text.isprintable() else fingerprint.hex()
    except UnicodeDecodeError:
        text = fingerprint.hex()
    if len(text) <= _SHOWN_CHARACTERS_MAX:
        return text
    return f"{text[:_SHOWN_CHARACTERS_MAX]}..., {len(fingerprint)} bytes"


class Namespaces:
    """All namespaces. Columns are indexed by incarnation; number 0 is nobody's."""

    __slots__ = (
        "_ids_max",
        "alive",
        "asked",
        "by_id",
        "by_name",
        "count",
        "found",
        "found_ssd",
        "ids_after",
        "objects",
        "owner",
        "ssd_units",
        "units",
        "version",
    )

    def __init__(self) -> None:
        self.by_name: dict[str, Namespace] = {}
        self.by_id: dict[int, Namespace] = {}
        self._ids_max = 0
        self.version = 0
        """Rises with each that appears or moves on."""
        self.ids_after = 0
        """Where the first id comes from: another place for each pool, so that a client which knew
        a pool that is gone means nothing here."""
        self.count = 1
        """Incarnations so far, number 0 included."""
        self.alive: NDArray[np.bool_] = np.zeros(16, np.bool_)
        self.owner: NDArray[np.uint32] = np.zeros(16, np.uint32)
        """Namespace id of each incarnation."""
        self.objects: NDArray[np.int64] = np.zeros(16, np.int64)
        self.units: NDArray[np.int64] = np.zeros(16, np.int64)
        """Of all copies, wherever they are."""
        self.ssd_units: NDArray[np.int64] = np.zeros(16, np.int64)
        """Of those on SSDs."""
        # Lists: to add to one costs a third of what it costs in an array.
        self.asked = [0] * 16
        """Keys that readers asked for, since this master leads; those of the generations before
        are carried over."""
        self.found = [0] * 16
        """Of them, present ones."""
        self.found_ssd = [0] * 16
        """Of these, those on SSDs alone."""

    def check(self, namespace_id: int, generation: int) -> Namespace:
        """The namespace, if this is its current generation. Raises NamespaceReset."""
        namespace = self.by_id.get(namespace_id)
        if namespace is None:
            # Of metadata that were lost, or opened before the daemons came.
            raise NamespaceReset(f"no namespace has id {namespace_id} here; open it by its name")
        if namespace.generation != generation:
            raise NamespaceReset(
                f"namespace {namespace.name!r} is at generation {namespace.generation}, "
                f"the request is of generation {generation}"
            )
        return namespace

    def open(
        self, name: str, fingerprint: bytes, create: bool, durability: int, seed: int, limit: int
    ) -> tuple[Namespace, bool]:
        """(the namespace, whether it is new).

        Raises FingerprintMismatch, NamespaceNotFound, InvalidArgument, ResourceUnavailable.
        """
        namespace = self.by_name.get(name)
        if namespace is not None:
            if namespace.fingerprint != fingerprint:
                raise FingerprintMismatch(
                    f"namespace {name!r} has fingerprint {_shown(namespace.fingerprint)}, "
                    f"not {_shown(fingerprint)}"
                )
            return namespace, False
        if not create:
            raise NamespaceNotFound(f"no namespace is called {name!r}")
        if not name or len(name.encode()) > _NAME_BYTES_MAX:
            raise InvalidArgument(f"a namespace's name has 1 to {_NAME_BYTES_MAX} bytes")
        if len(fingerprint) > _FINGERPRINT_BYTES_MAX:
            raise InvalidArgument(f"a fingerprint has at most {_FINGERPRINT_BYTES_MAX} bytes")
        if len(self.by_name) >= limit:
            raise ResourceUnavailable(f"there are {limit} namespaces already")
        namespace_id = max(self._ids_max, self.ids_after) + 1
        opened = NamespaceOpened(name, namespace_id, 1, fingerprint, seed, durability or 1)
        return self.apply(opened), True

    def named(self, name: str) -> Namespace:
        """Raises NamespaceNotFound."""
        namespace = self.by_name.get(name)
        if namespace is None:
            raise NamespaceNotFound(
                f"no namespace is called {name!r}",
                remedy="`cenote namespaces` lists them, `cenote namespaces create` makes one",
            )
        return namespace

    def apply(self, opened: NamespaceOpened) -> Namespace:
        """A namespace appears or moves on to a new generation; an older or known one is ignored."""
        known = self.by_id.get(opened.namespace_id)
        if known is not None and known.generation >= opened.generation:
            return known
        other = self.by_name.get(opened.name)
        if other is not None:  # its generation before, or one that was opened too early
            self.alive[other.incarnation] = False
            del self.by_id[other.namespace_id]
        namespace = Namespace(
            opened.name,
            opened.namespace_id,
            opened.generation,
            opened.fingerprint,
            opened.digest_seed,
            opened.durability,
            self._new_incarnation(opened.namespace_id),
        )
        if other is not None:
            for counts in (self.asked, self.found, self.found_ssd):
                counts[namespace.incarnation] = counts[other.incarnation]
        self.by_name[opened.name] = namespace
        self.by_id[opened.namespace_id] = namespace
        self.version += 1
        self._ids_max = max(self._ids_max, opened.namespace_id)
        return namespace

    def delete(self, namespace_id: int) -> Namespace | None:
        """A namespace is no more; what it held is swept. None where it is not known."""
        self._ids_max = max(self._ids_max, namespace_id)
        namespace = self.by_id.pop(namespace_id, None)
        if namespace is not None:
            del self.by_name[namespace.name]
            self.alive[namespace.incarnation] = False
            self.version += 1
        return namespace

    @property
    def highest_deleted(self) -> int:
        """The highest number that was ever given, if it is nobody's now; else 0."""
        return 0 if self._ids_max in self.by_id else self._ids_max

    def _new_incarnation(self, namespace_id: int) -> int:
        idle = np.flatnonzero(~self.alive[1 : self.count] & (self.objects[1 : self.count] == 0))
        if len(idle):
            number = int(idle[0]) + 1
            self.asked[number] = self.found[number] = self.found_ssd[number] = 0
            self.alive[number] = True
            self.owner[number] = namespace_id
            return number
        number = self.count
        if number > INCARNATIONS_MAX:
            raise ResourceUnavailable(f"{number} namespaces and resets hold objects")
        if number == len(self.alive):
            self.alive = np.concatenate((self.alive, np.zeros(number, np.bool_)))
            self.owner = np.concatenate((self.owner, np.zeros(number, np.uint32)))
            self.objects = np.concatenate((self.objects, np.zeros(number, np.int64)))
            self.units = np.concatenate((self.units, np.zeros(number, np.int64)))
            self.ssd_units = np.concatenate((self.ssd_units, np.zeros(number, np.int64)))
            for counts in (self.asked, self.found, self.found_ssd):
                counts.extend([0] * number)
        self.count = number + 1
        self.alive[number] = True
        self.owner[number] = namespace_id
        return number

    def account(
        self, incarnations: NDArray[np.integer], units: NDArray[np.int64], sign: int
    ) -> None:
        """Add (sign 1) or take off (-1) objects with these incarnations and units."""
        if not len(incarnations):
            return
        first = int(incarnations[0])
        if self.count == 2 or (incarnations == first).all():
            self.objects[first] += sign * len(incarnations)
            self.units[first] += sign * int(units.sum())
            return
        counts = np.bincount(incarnations, minlength=len(self.objects))
        sums = np.bincount(incarnations, weights=units, minlength=len(self.units))
        self.objects += sign * counts
        self.units += sign * sums.astype(np.int64)

    def add_units(self, incarnations: NDArray[np.integer], units: NDArray[np.int64]) -> None:
        """Objects that stay became larger by so many units (negative: smaller)."""
        sums = np.bincount(incarnations, weights=units, minlength=len(self.units))
        self.units += sums.astype(np.int64)

    def add_ssd_units(self, incarnations: NDArray[np.integer], units: NDArray[np.int64]) -> None:
        """The same, of what objects have on SSDs."""
        sums = np.bincount(incarnations, weights=units, minlength=len(self.ssd_units))
        self.ssd_units += sums.astype(np.int64)

    @property
    def stale_objects(self) -> int:
        """Objects of dead incarnations, not swept yet."""
        total = int(self.objects.sum())
        return total - int(self.objects[self.alive].sum())
