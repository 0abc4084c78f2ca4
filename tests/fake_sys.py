"""A directory that looks like /sys of a host with RDMA devices, for whatever reads such a one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

__all__ = ["FakeSys", "gid_text"]


def gid_text(address: str) -> str:
    """The GID of an IP address, as the kernel writes it."""
    parsed = ip_address(address)
    value = int(parsed) if parsed.version == 6 else (0xFFFF << 32) + int(parsed)
    digits = f"{value:032x}"
    return ":".join(digits[at : at + 4] for at in range(0, 32, 4))


class FakeSys:
    """`root` is what stands for /sys."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "class" / "infiniband").mkdir(parents=True)
        (root / "class" / "net").mkdir()
        (root / "bus" / "pci" / "devices").mkdir(parents=True)

    def pci(self, *path: str, numa_node: int = -1) -> Path:
        """A PCIe device below a host bridge: pci("pci0000:3a", "0000:3a:00.0", "0000:3b:00.0")."""
        device = self.root.joinpath("devices", *path)
        device.mkdir(parents=True, exist_ok=True)
        (device / "numa_node").write_text(f"{numa_node}\n")
        link = self.root / "bus" / "pci" / "devices" / path[-1]
        if not link.exists():
            link.symlink_to(device)
        return device

    def netdev(self, name: str) -> None:
        """A network device of this namespace."""
        (self.root / "class" / "net" / name).mkdir(exist_ok=True)

    def nic(
        self,
        name: str,
        *,
        gids: Sequence[tuple[str, str]] = (),
        netdev: str = "",
        device: Path | None = None,
        state: str = "4: ACTIVE",
        physical_state: str = "5: LinkUp",
        rate: str = "400 Gb/sec (4X NDR)",
        link_layer: str = "Ethernet",
        lid: str = "0x0",
        counters: Mapping[str, int] | None = None,
    ) -> None:
        """A device of one port. `gids`: (address, type) from entry 0 on; ("", "") is not set."""
        directory = self.root / "class" / "infiniband" / name
        port = directory / "ports" / "1"
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs", "counters", "hw_counters"):
            (port / folder).mkdir(parents=True)
        if device is not None:
            (directory / "device").symlink_to(device)
        if netdev:
            (directory / "parent").write_text(netdev)
            self.netdev(netdev)
        for file, text in (
            ("state", state),
            ("phys_state", physical_state),
            ("rate", rate),
            ("link_layer", link_layer),
            ("lid", lid),
        ):
            (port / file).write_text(text + "\n")
        for index, (address, kind) in enumerate(gids):
            (port / "gids" / str(index)).write_text(gid_text(address or "::") + "\n")
            if address:  # the kernel refuses to read these of an entry that is not set
                (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")
                (port / "gid_attrs" / "ndevs" / str(index)).write_text(netdev + "\n")
        for counter, value in (counters or {}).items():
            (port / "hw_counters" / counter).write_text(f"{value}\n")
