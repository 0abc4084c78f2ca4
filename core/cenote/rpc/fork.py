"""Detects use after os.fork() without a system call per use."""

from __future__ import annotations

import os

from cenote.api.errors import ForkedClient

__all__ = ["ForkGuard"]

_forks = 0  # how many forks lie between the first process and this one


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class ForkGuard:
    """Remembers the process it was made in.

    A forked child shares its parent's sockets: two processes reading the same connection would take
    each other's replies. So clients refuse to work there.
    """

    __slots__ = ("_made_at",)

    def __init__(self) -> None:
        self._made_at = _forks

    @property
    def forked(self) -> bool:
        """True in a child that was forked after this guard was made."""
        return self._made_at != _forks

    def check(self) -> None:
        """Raises ForkedClient in a child."""
        if self._made_at != _forks:
            raise ForkedClient(f"this client was made by another process than {os.getpid()}")
