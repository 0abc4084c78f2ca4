"""Reading the facts from /sys. Whatever can't be read is left out or empty, never an error.

A host may have no RDMA at all, a container sees part of it, and drivers leave out files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from ipaddress import AddressValueError, IPv6Address
from pathlib import Path
from typing import Final

from .facts import Gid, NicPort, Place

__all__ = [
    "LOSS_COUNTERS",
    "has_devices",
    "read_counters",
    "read_loss_counters",
    "read_netdevs",
    "read_numa_cpus",
    "read_numa_node",
    "read_pci_place",
    "read_port_state",
    "read_ports",
    "read_traffic_bytes",
]

SYS: Final = Path("/sys")
_DEVICES_MAX: Final = 128
_PORTS_MAX: Final = 16
_GIDS_MAX: Final = 1024
_UNSET: Final = ":".join(["0000"] * 8)
_UNSET_MAX: Final = 64
"""So many in a row, and the table is taken to end: it has up to 1024 entries, filled from the
front, and each is a file to open."""
_FILE_BYTES_MAX: Final = 4096
_COUNTERS_MAX: Final = 512
_COUNTED_BYTES: Final = 4
"""What the specification's counters of data count in."""

LOSS_COUNTERS: Final = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "roce_adp_retrans",
    "retry_exceeded_err",
    "out_of_seq_request",
    "symbol_error",
    "link_downed",
    "rx_icrc_encapsulated",
)
"""Each of them counts bytes that had to be sent once more, or a link that was lost."""


def read_ports(root: Path = SYS) -> list[NicPort]:
    """All ports of all RDMA devices, by name. Empty where the kernel has none."""
    devices = _entries(root / "class" / "infiniband", _DEVICES_MAX)
    return [
        _read_port(root, device, int(port.name))
        for device in devices
        for port in _entries(device / "ports", _PORTS_MAX)
        if port.name.isdigit()
    ]


def has_devices(root: Path = SYS) -> bool:
    """Whether there is any RDMA device."""
    return bool(_entries(root / "class" / "infiniband", 1))


def read_netdevs(root: Path = SYS) -> frozenset[str]:
    """Names of the network devices in this network namespace."""
    return frozenset(entry.name for entry in _entries(root / "class" / "net", 65_536))


def read_pci_place(bus_address: str, root: Path = SYS) -> Place:
    """Where a PCIe device sits, such as a GPU; `bus_address` as in "0000:3b:00.0".

    A place of which nothing is known where there is no such device.
    """
    device = root / "bus" / "pci" / "devices" / bus_address.lower()
    return Place(read_numa_node(device), _pci_path(root, device))


def read_numa_node(device: Path) -> int | None:
    """Of the device in this /sys directory; None where it is not told."""
    node = _integer(_text(device / "numa_node"), -1)
    return node if node >= 0 else None


def read_numa_cpus(root: Path = SYS) -> dict[int, frozenset[int]]:
    """The processors of each NUMA node; empty where it is not told."""
    found: dict[int, frozenset[int]] = {}
    for entry in _entries(root / "devices" / "system" / "node", 4096):
        number = entry.name.removeprefix("node")
        if number != entry.name and number.isdigit():
            found[int(number)] = frozenset(_cpus(_text(entry / "cpulist")))
    return found


def _cpus(text: str) -> Iterator[int]:
    """Of "0-3,8,10-11"."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            yield from range(int(first), int(last or first) + 1)


def read_counters(port: NicPort, root: Path = SYS) -> dict[str, int]:
    """The port's counters by name, those of the hardware and those of the specification.

    At most some hundred files, each of them one question to the driver.
    """
    directory = root / "class" / "infiniband" / port.device / "ports" / str(port.port)
    found: dict[str, int] = {}
    for folder in ("counters", "hw_counters"):
        for entry in _entries(directory / folder, _COUNTERS_MAX):
            text = _text(entry)
            if text.isdigit():
                found[entry.name] = int(text)
    return found


def read_loss_counters(port: NicPort, root: Path = SYS) -> dict[str, int]:
    """Those of `LOSS_COUNTERS` that the port has: a file each, not the hundreds of all counters."""
    directory = root / "class" / "infiniband" / port.device / "ports" / str(port.port)
    found: dict[str, int] = {}
    for name in LOSS_COUNTERS:
        for folder in ("hw_counters", "counters"):
            text = _text(directory / folder / name)
            if text.isdigit():
                found[name] = int(text)
                break
    return found


def read_port_state(port: NicPort, root: Path = SYS) -> str:
    """What the port's state is now, such as "ACTIVE"; "" where it can't be read."""
    directory = root / "class" / "infiniband" / port.device / "ports" / str(port.port)
    return _state(_text(directory / "state"))


def read_traffic_bytes(port: NicPort, root: Path = SYS) -> tuple[int, int]:
    """(received, sent) over the port since its driver was loaded; zeros where it does not count
    bytes, as software devices don't."""
    folder = root / "class" / "infiniband" / port.device / "ports" / str(port.port) / "counters"
    received, sent = (
        _COUNTED_BYTES * max(0, _integer(_text(folder / name), 0))
        for name in ("port_rcv_data", "port_xmit_data")
    )
    return received, sent


def _read_port(root: Path, device: Path, number: int) -> NicPort:
    directory = device / "ports" / str(number)
    hardware = _hardware(root, device)
    return NicPort(
        device=device.name,
        port=number,
        link_layer=_text(directory / "link_layer"),
        state=_state(_text(directory / "state")),
        physical_state=_state(_text(directory / "phys_state")),
        rate_gbps=_rate_gbps(_text(directory / "rate")),
        lid=_integer(_text(directory / "lid"), 0),
        gids=tuple(_read_gids(directory)),
        numa_node=read_numa_node(hardware),
        pci_path=_pci_path(root, hardware),
    )


def _hardware(root: Path, device: Path) -> Path:
    """The directory of the device below an RDMA device; a software one sits on a netdev."""
    own = device / "device"
    if own.exists():
        return own
    parent = _text(device / "parent")
    return root / "class" / "net" / parent / "device" if parent else own


def _read_gids(directory: Path) -> Iterator[Gid]:
    attributes = directory / "gid_attrs"
    unset = 0
    for entry in _entries(directory / "gids", _GIDS_MAX):
        text = _text(entry)
        if text == _UNSET:
            unset += 1
            if unset > _UNSET_MAX:
                return
            continue
        unset = 0
        try:
            index, value = int(entry.name), IPv6Address(text)
        except (ValueError, AddressValueError):
            continue
        if int(value):
            yield Gid(
                index,
                value,
                _text(attributes / "types" / entry.name),
                _text(attributes / "ndevs" / entry.name),
            )


def _pci_path(root: Path, device: Path) -> tuple[str, ...]:
    try:
        parts = device.resolve(strict=True).relative_to((root / "devices").resolve()).parts
    except (OSError, ValueError, RuntimeError):
        return ()
    start = next((i for i, part in enumerate(parts) if part.startswith("pci")), None)
    if start is None:
        return ()
    return tuple(part for part in parts[start:] if part.startswith("pci") or part.count(":") == 2)


def _state(text: str) -> str:
    """ "ACTIVE" of "4: ACTIVE"."""
    return text.partition(":")[2].strip() or text


def _rate_gbps(text: str) -> float:
    """400.0 of "400 Gb/sec (4X NDR)"."""
    try:
        return max(0.0, float(text.split()[0]))
    except (IndexError, ValueError):
        return 0.0


def _integer(text: str, default: int) -> int:
    """Decimal, or hexadecimal with 0x; `default` for what is no number."""
    try:
        return int(text, 0)
    except ValueError:
        return default


def _text(path: Path) -> str:
    """The file's text; "" where it can't be read: the kernel refuses entries that aren't set."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _FILE_BYTES_MAX).decode("ascii", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _entries(directory: Path, limit: int) -> list[Path]:
    """What is in the directory, numbers in their order; empty where there is none."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    names.sort(key=lambda name: (0, int(name), "") if name.isdigit() else (1, 0, name))
    return [directory / name for name in names[:limit]]
