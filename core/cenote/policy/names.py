"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from .arc import ArcPolicy
from .base import STEP, EvictionPolicy
from .chains import ChainMode
from .lru import LruPolicy
from .s3fifo import S3FifoPolicy

__all__ = ["AUTO", "POLICIES", "new_policy", "successor"]

AUTO: Final = "auto"
"""Not a policy: whichever of `POLICIES` does best (`chooser`)."""

_MAKERS: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "lru": LruPolicy,
    "lru-chain": lambda clock: ChainMode(LruPolicy(clock)),
    "arc": ArcPolicy,
    "arc-chain": lambda clock: ChainMode(ArcPolicy(clock)),
    "s3fifo": S3FifoPolicy,
    "s3fifo-chain": lambda clock: ChainMode(S3FifoPolicy(clock)),
}
POLICIES: Final = tuple(_MAKERS)


def new_policy(name: str, clock: int = STEP) -> EvictionPolicy:
    """The policy of this name (one of `POLICIES`), which gives stamps from `clock` on.

    Raises KeyError for other names.
    """
    return _MAKERS[name](clock)


def successor(policy: EvictionPolicy, name: str) -> EvictionPolicy:
    """The policy of this name, which goes on from where another one is: stamps stay as they are,
    and what was evicted lately is remembered as far as both remember anything."""
    inner = policy.inner if isinstance(policy, ChainMode) else policy
    heir = new_policy(name, policy.clock)
    plain = heir.inner if isinstance(heir, ChainMode) else heir
    if type(plain) is type(inner):
        assert isinstance(inner, LruPolicy | ArcPolicy | S3FifoPolicy)
        return ChainMode(inner) if isinstance(heir, ChainMode) else inner
    if isinstance(plain, ArcPolicy | S3FifoPolicy):
        remembered = inner.ghosts if isinstance(inner, ArcPolicy | S3FifoPolicy) else None
        plain.take_over(remembered)
    return heir
