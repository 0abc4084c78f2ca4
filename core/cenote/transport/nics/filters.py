"""Which devices may be used, as an operator writes it: "mlx5_0,mlx5_2:1", "mlx5_*,!mlx5_bond_0"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Self

from cenote.api.errors import ConfigError

from .facts import NicPort

__all__ = ["DeviceFilter"]

_REMEDY = 'write names as in /sys/class/infiniband: "mlx5_0,mlx5_2:1", "mlx5_*,!mlx5_3"'


@dataclass(frozen=True, slots=True)
class DeviceFilter:
    """Patterns of `device` or `device:port`, with * and ?; one that begins with ! excludes.

    A port is allowed where no pattern excludes it and one includes it, or none includes anything.
    """

    included: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @classmethod
    def parse(cls, patterns: str | Sequence[str]) -> Self:
        """From text with commas, or its parts. Raises ConfigError."""
        parts = patterns.split(",") if isinstance(patterns, str) else patterns
        stripped = [part.strip() for part in parts if part.strip()]
        for part in stripped:
            name, colon, port = part.removeprefix("!").partition(":")
            if not name or "/" in part or (colon and not (port.isdigit() or port == "*")):
                raise ConfigError(f"{part!r} names no RDMA device", remedy=_REMEDY)
        return cls(
            tuple(part for part in stripped if not part.startswith("!")),
            tuple(part[1:] for part in stripped if part.startswith("!")),
        )

    def allows(self, port: NicPort) -> bool:
        """Whether this port may be used."""
        if any(_matches(port, pattern) for pattern in self.excluded):
            return False
        return not self.included or any(_matches(port, pattern) for pattern in self.included)

    def unmatched(self, ports: Sequence[NicPort]) -> list[str]:
        """Patterns that no port of this host matches: typing mistakes, most likely."""
        return [
            pattern
            for pattern in (*self.included, *self.excluded)
            if not any(_matches(port, pattern) for port in ports)
        ]

    def __str__(self) -> str:
        return ",".join((*self.included, *("!" + pattern for pattern in self.excluded)))


def _matches(port: NicPort, pattern: str) -> bool:
    return fnmatchcase(port.name if ":" in pattern else port.device, pattern)
