"""RDMA: library, devices, addresses, what got lost on the way."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from cenote.transport.nics.choice import Refusal, usable_ports
from cenote.transport.nics.facts import NicPort
from cenote.transport.nics.filters import DeviceFilter
from cenote.transport.nics.sysfs import LOSS_COUNTERS, read_counters, read_netdevs, read_ports

from .findings import Check, Finding, Verdict

__all__ = ["judge_counters", "judge_library", "judge_ports", "rdma_checks"]

_SYS: Final = Path("/sys")
_DEVICE_FILES: Final = Path("/dev/infiniband")
_LIBRARIES: Final = ("ibverbs", "pyverbs")


def rdma_checks(allowed: DeviceFilter, root: Path = _SYS) -> list[Check]:
    """All that can be told without opening a device. One check: it reads hundreds of files."""

    def look(_: float) -> list[Finding]:
        ports, netdevs = read_ports(root), read_netdevs(root)
        usable, _refused = usable_ports(ports, allowed, netdevs=netdevs)
        return [
            *judge_library(bool(ports), _loads("libibverbs.so.1"), _installed(), _openable()),
            *judge_ports(ports, allowed, netdevs),
            *judge_counters({port.name: read_counters(port, root) for port in usable}),
        ]

    return [Check("rdma", look)]


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _installed() -> list[str]:
    return [name for name in _LIBRARIES if importlib.util.find_spec(name) is not None]


def _openable() -> bool | None:
    """Whether a device file can be opened; None where there is none."""
    files = sorted(_DEVICE_FILES.glob("uverbs*"))
    return all(os.access(file, os.R_OK | os.W_OK) for file in files) if files else None


def judge_library(
    has_device: bool, has_libibverbs: bool, modules: Sequence[str], openable: bool | None
) -> list[Finding]:
    """Whether this program could use a device, were there one."""
    check = "rdma library"
    if not has_device:
        return [Finding(check, Verdict.SKIPPED, "this host has no RDMA device")]
    if not has_libibverbs:
        return [
            Finding(
                check,
                Verdict.WARN,
                "libibverbs.so.1 can't be loaded: bytes go over TCP",
                "apt-get install ibverbs-providers (dnf install libibverbs)",
            )
        ]
    if not modules:
        return [
            Finding(
                check,
                Verdict.WARN,
                "no verbs library for Python is installed: bytes go over TCP",
                "pip install 'cenote[rdma]', or the distribution's python3-pyverbs",
            )
        ]
    if not openable:
        what = "can't be opened" if openable is False else "are not there"
        return [
            Finding(
                check,
                Verdict.WARN,
                f"the devices' files in {_DEVICE_FILES} {what}: bytes go over TCP",
                "in a container --device=/dev/infiniband; else check owner and mode",
            )
        ]
    return [Finding(check, Verdict.OK, f"{' and '.join(modules)}, libibverbs")]


def judge_ports(
    ports: Sequence[NicPort], allowed: DeviceFilter, netdevs: Collection[str]
) -> list[Finding]:
    """A finding for each port."""
    check = "rdma devices"
    missing = allowed.unmatched(ports)
    wrong = [
        Finding(
            check,
            Verdict.FAIL,
            f"no device matches {pattern!r} of --rdma-devices",
            "ls /sys/class/infiniband; in a container the host's /sys must be visible",
        )
        for pattern in missing
    ]
    if not ports:
        return wrong or [
            Finding(check, Verdict.SKIPPED, "none: bytes go over shared memory and TCP")
        ]
    usable, refused = usable_ports(ports, allowed, netdevs=netdevs)
    by_name = {port.name: port for port in usable}
    reasons = {refusal.name: refusal for refusal in refused}
    found = [_judge_port(port, by_name, reasons, allowed) for port in ports]
    if not usable:
        found.append(
            Finding(check, Verdict.WARN, "no port can be used: bytes go over TCP", "see above")
        )
    return [*found, *wrong]


def _judge_port(
    port: NicPort,
    usable: Mapping[str, NicPort],
    reasons: Mapping[str, Refusal],
    allowed: DeviceFilter,
) -> Finding:
    check = f"rdma {port.name}"
    if port.name in usable:
        gids = ", ".join(f"{gid.index}: {gid.address}" for gid in usable[port.name].gids)
        node = "" if port.numa_node is None else f", NUMA node {port.numa_node}"
        text = f"{port.link_layer}, {port.rate_gbps:g} Gb/s{node}, GID {gids}"
        return Finding(check, Verdict.OK, text)
    refusal = reasons[port.name]
    verdict = Verdict.WARN if allowed.allows(port) else Verdict.SKIPPED
    return Finding(check, verdict, refusal.reason, refusal.remedy)


def judge_counters(counters: Mapping[str, Mapping[str, int]]) -> list[Finding]:
    """Whether ports lose packets; counted since the driver was loaded."""
    check = "rdma losses"
    if not counters:
        return [Finding(check, Verdict.SKIPPED, "there is no RDMA port in use")]
    found = [
        Finding(
            check,
            Verdict.WARN,
            f"{port} since its driver was loaded: {lost}",
            "where they grow, the network drops: PFC or ECN is missing somewhere on the way"
            " (docs/rdma.md)",
        )
        for port, values in counters.items()
        if (lost := ", ".join(f"{n} {values[n]}" for n in LOSS_COUNTERS if values.get(n)))
    ]
    told = any(n in values for values in counters.values() for n in LOSS_COUNTERS)
    nothing = "none since the drivers were loaded" if told else "the drivers don't count any"
    return found or [Finding(check, Verdict.OK, nothing)]
