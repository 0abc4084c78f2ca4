"""The RDMA devices of this host that are used: found, judged, opened once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, final

from cenote.api.errors import ResourceUnavailable

from .nics.choice import Refusal, usable_ports
from .nics.facts import NicPort
from .nics.filters import DeviceFilter
from .nics.sysfs import read_netdevs, read_ports
from .verbs import load_verbs
from .verbs.base import Device, Verbs, VerbsError

__all__ = ["Nics", "find_nics"]

_ANY: Final = DeviceFilter()


@final
class Nics:
    """Ports and their open devices. Closed by whoever made it, after all that was made of it."""

    def __init__(
        self, verbs: Verbs, ports: Sequence[NicPort], refusals: Sequence[Refusal] = ()
    ) -> None:
        """Open the ports' devices; one that can't be opened is left out, with the reason."""
        self.verbs = verbs
        self.devices: dict[str, Device] = {}
        self.ports: tuple[NicPort, ...] = ()
        self.refusals = tuple(refusals)
        """Ports that are not used, and why."""
        self.add(ports)

    def add(
        self, ports: Sequence[NicPort], prepare: Callable[[Device], None] | None = None
    ) -> tuple[NicPort, ...]:
        """Use more ports; those that can be.

        `prepare` is called with each device that is new, before others can see it; should it raise
        VerbsError, the device is left out. `devices` and `ports` are replaced, not changed: other
        threads may be going through them.
        """
        added: list[NicPort] = []
        for port in ports:
            if port.device not in self.devices:
                try:
                    device = self.verbs.open(port.device)
                except VerbsError as error:
                    self._refuse(port, error)
                    continue
                try:
                    if prepare is not None:
                        prepare(device)
                except VerbsError as error:
                    device.close()
                    self._refuse(port, error)
                    continue
                self.devices = {**self.devices, port.device: device}
            added.append(port)
        names = {port.name for port in added}
        self.refusals = tuple(refusal for refusal in self.refusals if refusal.name not in names)
        self.ports = (*self.ports, *added)
        return tuple(added)

    def _refuse(self, port: NicPort, error: VerbsError) -> None:
        others = (refusal for refusal in self.refusals if refusal.name != port.name)
        self.refusals = (*others, Refusal(port.name, str(error.strerror or error)))

    def close(self) -> None:
        """Close the devices. Idempotent."""
        while self.devices:
            _, device = self.devices.popitem()
            with suppress(VerbsError):  # something of it is in use still: it ends with the process
                device.close()


def find_nics(
    choice: str = "auto", allowed: DeviceFilter = _ANY, *, gid_index: int | None = None
) -> Nics:
    """The usable ports of this host, open with the verbs library of that name.

    Raises ResourceUnavailable where there is no library or no such port; it says why for each.
    """
    usable, refusals = usable_ports(
        read_ports(), allowed, netdevs=read_netdevs(), gid_index=gid_index
    )
    nics = None
    if usable:  # else there is no need of a library
        nics = Nics(load_verbs(choice), usable, refusals)
        refusals = list(nics.refusals)
    if nics is None or not nics.ports:
        why = "; ".join(map(str, refusals)) or "this host has none"
        raise ResourceUnavailable(
            f"no RDMA device can be used: {why}", remedy="`cenote doctor` looks into it"
        )
    return nics
