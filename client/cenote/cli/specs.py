"""The command lines of a pool's daemons: the one place that knows their flags."""

from __future__ import annotations

from pathlib import Path

from .daemons import DaemonSpec

__all__ = ["HOST", "free_port_flag", "master_spec", "store_spec"]

HOST = "127.0.0.1"


def free_port_flag(port: int) -> str:
    """`127.0.0.1:port`; port 0 is any free one."""
    return f"{HOST}:{port}"


def master_spec(
    *,
    metadata: str,
    lane_port: int = 0,
    grpc_port: int = 0,
    extra: dict[str, object] | None = None,
) -> DaemonSpec:
    """A master on loopback. `metadata`: `memory:` or `file:DIRECTORY`."""
    flags: dict[str, object] = {
        "listen": free_port_flag(lane_port),
        "grpc": free_port_flag(grpc_port),
        "metadata": metadata,
    }
    return DaemonSpec("master", "cenote.master", flags | (extra or {}))


def store_spec(
    name: str,
    *,
    master: str,
    dram_bytes: int,
    dram_directory: Path,
    socket_directory: Path,
    extra: dict[str, object] | None = None,
) -> DaemonSpec:
    """A store daemon on loopback. `master`: address of the master's lane."""
    flags: dict[str, object] = {
        "name": name,
        "master": master,
        "dram": dram_bytes,
        "dram-dir": dram_directory,
        "socket-dir": socket_directory,
        "listen": free_port_flag(0),
        "grpc": free_port_flag(0),
    }
    return DaemonSpec(name, "cenote.store", flags | (extra or {}))
