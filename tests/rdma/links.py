"""In an emulated machine: links of NICs down and up, and what the kernel counts of RDMA."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

__all__ = ["kernel_resources", "set_links"]


def set_links(netdevs: Sequence[str], state: str) -> None:
    """`state`: "up" or "down"."""
    for netdev in netdevs:
        subprocess.run(["ip", "link", "set", netdev, state], check=True, timeout=30)


def kernel_resources(kind: str) -> list[dict[str, Any]]:
    """User-space objects of all devices, as the kernel counts them: "qp", "mr", "cq".

    A row's "pid" is the thread that made it; it has none where that thread has ended.
    """
    text = subprocess.run(
        ["rdma", "-j", "resource", "show", kind],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    found: list[dict[str, Any]] = json.loads(text or "[]")
    return [row for row in found if row.get("comm", "").strip("[]") != "ib_core"]
