"""Network namespaces: real networks between processes, whose links can be cut.

with network_of(masters=2) as network:
    network.etcd, network.users, network.masters   # a Place each: for Cluster, EtcdCluster, Remote
    network.cut(0)           # master 0 and etcd hear nothing of each other, and nobody is told
    network.heal(0)          # connections from before go on, where they still live

Each master has one link to etcd's namespace and one to that of the users (clients and daemons),
where the other master is heard, too; users and etcd have none. All links lie in the namespaces, so
that nothing on the host is touched. Needs root and iproute2; a test skips without.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

__all__ = ["Network", "Place", "network_of"]

IP_TIMEOUT_S = 20.0
FIRST_HOST = 10
BRIDGE = "bridge"


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace and the address by which it is known to the others."""

    namespace: str
    host: str

    @property
    def launcher(self) -> tuple[str, ...]:
        """In front of a command, which then becomes this one, in the same process."""
        return ("ip", "netns", "exec", self.namespace)


@dataclass(frozen=True, slots=True)
class Network:
    """Where everybody is; other processes may be given it. See the module's docstring."""

    etcd: Place
    users: Place
    masters: tuple[Place, ...]

    def cut(self, master: int) -> None:
        """The link between this master and etcd; when it returns, nothing passes any more."""
        _ip("-n", self.etcd.namespace, "link", "set", f"m{master}", "down")

    def heal(self, master: int) -> None:
        _ip("-n", self.etcd.namespace, "link", "set", f"m{master}", "up")


@contextmanager
def network_of(*, masters: int) -> Iterator[Network]:
    """A new network, whose namespaces are removed at the end; skips where it can't be made."""
    _skip_without_tools()
    prefix = f"cenote-{os.getpid()}-{secrets.token_hex(3)}"
    network = Network(
        Place(f"{prefix}-etcd", "10.1.0.1"),
        Place(f"{prefix}-users", "10.2.0.1"),
        tuple(Place(f"{prefix}-m{i}", f"10.2.0.{FIRST_HOST + i}") for i in range(masters)),
    )
    etcd, users = network.etcd, network.users
    with ExitStack() as stack:
        for place in (etcd, users, *network.masters):
            _add(place.namespace)
            stack.callback(_ip, "netns", "del", place.namespace)
            _ip("-n", place.namespace, "link", "set", "lo", "up")
        for hub in (etcd, users):
            _ip("-n", hub.namespace, "link", "add", BRIDGE, "type", "bridge")
            _up(hub.namespace, BRIDGE, hub.host)
        for number, master in enumerate(network.masters):
            for hub, link, host in (
                (etcd, "etcd", f"10.1.0.{FIRST_HOST + number}"),
                (users, "users", master.host),
            ):
                _join(master.namespace, link, host, hub.namespace, f"m{number}")
        yield network


def _skip_without_tools() -> None:
    if shutil.which("ip") is None:
        pytest.skip("needs `ip`: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")


def _add(namespace: str) -> None:
    """Skips where root may not do so after all, as in a container without privileges."""
    try:
        _ip("netns", "add", namespace)
    except AssertionError as error:
        with contextlib.suppress(AssertionError):
            _ip("netns", "del", namespace)
        pytest.skip(f"needs to be allowed to make network namespaces: {error}")


def _up(namespace: str, link: str, host: str) -> None:
    _ip("-n", namespace, "address", "add", f"{host}/24", "dev", link)
    _ip("-n", namespace, "link", "set", link, "up")


def _join(namespace: str, link: str, host: str, hub: str, port: str) -> None:
    """A cable from `link` in a namespace to a new port of a hub's bridge."""
    _ip("-n", namespace, "link", "add", link, "type", "veth", "peer", "name", port, "netns", hub)
    _ip("-n", hub, "link", "set", port, "master", BRIDGE, "up")
    _up(namespace, link, host)


def _ip(*words: str) -> None:
    done = subprocess.run(
        ["ip", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=IP_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr.strip()}"
