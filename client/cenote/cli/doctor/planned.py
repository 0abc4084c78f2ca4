"""What a store daemon on this host is to be given: by its own settings, or as it is typed here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cenote.api.errors import ConfigError
from cenote.runtime.config import load_config
from cenote.runtime.units import format_size, parse_size_bytes
from cenote.store.config import ENV_PREFIX, StoreConfig
from cenote.store.node_files import running_nodes

from .findings import Check, Finding, Verdict
from .ssd import ssd_checks

__all__ = ["Planned", "planned"]

_CHECK: Final = "store settings"
_DRAM_DIR: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Planned:
    """Of one daemon, as far as it is known."""

    dram_dir: Path
    dram_bytes: int | None
    ssd: str
    ssd_bytes: int
    """0: not said."""
    rdma_devices: str | Sequence[str]
    settings: StoreConfig | None
    """As it would have them, where a file was named and is right."""
    checks: tuple[Check, ...]
    """Of the settings themselves."""

    @property
    def master(self) -> str | None:
        """The daemon's masters, as on a command line; None where nobody says."""
        return ",".join(self.settings.master) if self.settings is not None else None

    @property
    def etcd_tls(self) -> tuple[str, str, str]:
        """Files for etcd: CA, certificate, key; "" for none."""
        has = self.settings
        return ("", "", "") if has is None else (has.etcd_ca, has.etcd_cert, has.etcd_key)

    def ssd_checks(self) -> list[Check]:
        """Of the SSD that is named, else of those that daemons on this host have."""
        if self.ssd:
            return ssd_checks(Path(self.ssd), self.ssd_bytes)
        running = running_nodes(self.dram_dir) if self.dram_dir.is_dir() else []
        found = [ssd_checks(Path(node.ssd), 0, node.name) for node in running if node.ssd]
        if found:
            return [check for checks in found for check in checks]
        text = "none is named, and no store daemon that runs here has one"
        skipped = Finding("ssd", Verdict.SKIPPED, text, "--ssd PATH, where one is to have it")
        return [Check("ssd", lambda _: [skipped])]


def planned(
    file: str, *, dram: str, dram_dir: Path | None, ssd: str, ssd_size: str, rdma_devices: str
) -> Planned:
    """`file`: a daemon's settings, "" for none; the rest, as it was typed, comes first. Raises
    InvalidArgument (no size)."""
    settings, checks = _settings(file) if file else (None, ())
    if settings is None:
        return Planned(
            dram_dir or _DRAM_DIR,
            parse_size_bytes(dram) if dram else None,
            ssd,
            parse_size_bytes(ssd_size) if ssd_size else 0,
            rdma_devices,
            None,
            checks,
        )
    return Planned(
        dram_dir or settings.dram_dir,
        parse_size_bytes(dram) if dram else settings.dram,
        ssd or settings.ssd,
        parse_size_bytes(ssd_size) if ssd_size else settings.ssd_size,
        rdma_devices or settings.rdma_devices,
        settings,
        checks,
    )


def _settings(file: str) -> tuple[StoreConfig | None, tuple[Check, ...]]:
    try:
        settings = load_config(StoreConfig, env_prefix=ENV_PREFIX, file=file)
    except ConfigError as error:
        wrong = Finding(_CHECK, Verdict.FAIL, error.message, error.remedy or "cenote-store --help")
        return None, (Check(_CHECK, lambda _: [wrong]),)
    text = f"{file}: node {settings.name}, {format_size(settings.dram)} in {settings.dram_dir}"
    text += f", SSD {settings.ssd}" if settings.ssd else ", no SSD"
    right = Finding(_CHECK, Verdict.OK, text)
    return settings, (Check(_CHECK, lambda _: [right]),)
