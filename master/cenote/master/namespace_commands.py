"""Commands about whole namespaces; a part of `commands`, where they are imported from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NamespaceReply", "OpenNamespace", "ResetNamespace", "SetQuota"]


@dataclass(slots=True)
class OpenNamespace:
    name: str
    fingerprint: bytes
    create: bool
    durability: int
    seed_if_new: int
    """Random digest seed, drawn by the shell: the state rolls no dice."""


@dataclass(slots=True)
class SetQuota:
    """None: as it is. Reply: a QuotaSet effect."""

    name: str
    dram_bytes: int | None = None
    ssd_bytes: int | None = None
    objects: int | None = None
    priority: int | None = None


@dataclass(slots=True)
class ResetNamespace:
    name: str
    seed_if_new: int


@dataclass(slots=True)
class NamespaceReply:
    name: str
    namespace_id: int
    generation: int
    digest_seed: int
    fingerprint: bytes
    durability: int
    created: bool
