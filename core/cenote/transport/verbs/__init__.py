"""Verbs libraries behind one seam: see `base`. `load_verbs` chooses one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cenote.api.errors import ConfigError, ResourceUnavailable

from .base import Verbs
from .with_ibverbs import load_ibverbs
from .with_pyverbs import load_pyverbs

__all__ = ["VERBS_CHOICES", "load_verbs"]

VERBS_CHOICES: Final = ("auto", "ibverbs", "pyverbs")
_LOADERS: Final[dict[str, Callable[[], Verbs]]] = {
    "ibverbs": load_ibverbs,
    "pyverbs": load_pyverbs,
}


def load_verbs(choice: str = "auto") -> Verbs:
    """The library of that name; "auto": the first that is installed, the cheaper one first.

    Raises ResourceUnavailable where it isn't installed, ConfigError for another name.
    """
    if choice not in VERBS_CHOICES:
        raise ConfigError(
            f"there is no verbs library {choice!r}", remedy=f"use one of {', '.join(VERBS_CHOICES)}"
        )
    names = list(_LOADERS) if choice == "auto" else [choice]
    reasons = []
    for name in names:
        try:
            return _LOADERS[name]()
        except ImportError as error:
            reasons.append(f"{name}: {error}")
    raise ResourceUnavailable(
        f"no verbs library can be loaded ({'; '.join(reasons)})",
        remedy="pip install 'cenote[rdma]' and the system's libibverbs1 and ibverbs-providers,"
        " or the distribution's python3-pyverbs",
    )
