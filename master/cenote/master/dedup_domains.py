"""Which namespaces may hold each other's bytes: as an administrator says, when masters are started.

    NAME=namespace,namespace;NAME=namespace,...

Namespaces of one domain trust each other so far that one may learn whether another has put bytes
which it has itself. No namespace is in two.
"""

from __future__ import annotations

from functools import cache

from cenote.api.errors import InvalidArgument

__all__ = ["domain_of", "members_of"]


@cache
def _parsed(text: str) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Raises InvalidArgument."""
    domains: dict[str, str] = {}
    members: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (each.strip() for each in text.split(";"))):
        domain, equals, names = part.partition("=")
        several = tuple(name.strip() for name in names.split(",") if name.strip())
        if not equals or not domain.strip() or not several:
            raise InvalidArgument(
                f"{part!r} is no dedup domain", remedy="write NAME=namespace,namespace;NAME=..."
            )
        domain = domain.strip()
        if domain in members:
            raise InvalidArgument(f"dedup domain {domain!r} is there twice")
        members[domain] = several
        for name in several:
            if name in domains:
                raise InvalidArgument(f"namespace {name!r} is in dedup domains twice")
            domains[name] = domain
    return domains, members


def domain_of(text: str, namespace: str) -> str:
    """The domain of a namespace; "" without any. Raises InvalidArgument."""
    return _parsed(text)[0].get(namespace, "")


def members_of(text: str, namespace: str) -> tuple[str, ...]:
    """Names of the other namespaces of its domain. Raises InvalidArgument."""
    domain = domain_of(text, namespace)
    return tuple(n for n in _parsed(text)[1].get(domain, ()) if n != namespace)
