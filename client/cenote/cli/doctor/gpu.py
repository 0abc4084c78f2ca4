"""GPUs: whether this process reaches them, and whether NICs do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cenote.api.errors import CenoteError
from cenote.runtime.cuda import GPU_REMEDY
from cenote.runtime.gpu_copies import STAGING_REMEDY, open_cuda

from .findings import Check, Finding, Verdict

__all__ = ["GpuFacts", "gpu_checks", "judge_gpus"]

_DEV: Final = Path("/dev")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """`has_files`: device files of NVIDIA's driver. `refusal`: why no GPU can be used, "" where one
    can. `devices`: for each, where it sits on PCIe and whether it exports dma-bufs."""

    has_files: bool
    refusal: str = ""
    devices: tuple[tuple[str, bool], ...] = ()


def gpu_checks() -> list[Check]:
    return [Check("GPU", lambda _: [judge_gpus(_read_gpus(_DEV))])]


def _read_gpus(dev: Path) -> GpuFacts:
    has_files = next(dev.glob("nvidia[0-9]*"), None) is not None
    try:
        cuda = open_cuda()
    except CenoteError as error:
        return GpuFacts(has_files, error.message)
    try:
        found = [
            (cuda.bus_address(number), cuda.exports_dmabufs(number))
            for number in range(cuda.device_count())
        ]
    finally:
        cuda.close()
    return GpuFacts(has_files, "", tuple(found))


def judge_gpus(facts: GpuFacts) -> Finding:
    """One finding for all: memory of GPUs is put and read through the host at least."""
    if facts.refusal or not facts.devices:
        if not facts.has_files:
            return Finding("GPU", Verdict.SKIPPED, "this host shows no NVIDIA GPU")
        return Finding("GPU", Verdict.WARN, facts.refusal or "no GPU is visible", STAGING_REMEDY)
    where = ", ".join(address or "?" for address, _ in facts.devices)
    without = [address or "?" for address, exports in facts.devices if not exports]
    if without:
        return Finding(
            "GPU",
            Verdict.WARN,
            f"NICs can't reach the memory of {', '.join(without)}: it is copied through the host",
            GPU_REMEDY,
        )
    return Finding("GPU", Verdict.OK, f"{len(facts.devices)} that NICs can reach: {where}")
