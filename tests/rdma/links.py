"""Links of NICs that are taken down and up again: in an emulated machine only."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

__all__ = ["set_links"]


def set_links(netdevs: Sequence[str], state: str) -> None:
    """`state`: "up" or "down"."""
    for netdev in netdevs:
        subprocess.run(["ip", "link", "set", netdev, state], check=True, timeout=30)
