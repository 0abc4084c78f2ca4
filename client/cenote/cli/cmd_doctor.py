"""`cenote doctor`: is this host fit, and does it reach the pool?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from .cmd_paths import TRANSPORTS_DEFAULT, Transports, split_transports
from .exits import EXIT_ERROR, EXIT_OK
from .options import MASTER_DEFAULT, AsJson, GrpcAddress

if TYPE_CHECKING:
    from .doctor.findings import Check, Finding

__all__ = ["doctor"]

_ETCD_SCHEME: Final = "etcd://"
_Tls = tuple[str, str, str]


_Master = Annotated[
    str | None,
    typer.Option(
        envvar="CENOTE_MASTER",
        metavar="HOST:PORT",
        help="The master's lane; several with commas; or etcd://HOST:PORT,... Default: the store"
        " daemon's, else one on this host, if there is.",
    ),
]
_Etcd = Annotated[
    str, typer.Option(metavar="URL", help="etcd://HOST:PORT,...; by default the master's.")
]
_EtcdCa = Annotated[str, typer.Option(metavar="FILE", help="CA of etcd, for TLS.")]
_EtcdCert = Annotated[str, typer.Option(metavar="FILE", help="Our certificate for it.")]
_EtcdKey = Annotated[str, typer.Option(metavar="FILE", help="Its key.")]
_StoreConfigFile = Annotated[
    str,
    typer.Option(
        envvar="CENOTE_STORE_CONFIG",
        metavar="FILE",
        help="A store daemon's settings: what is not given here is taken from there.",
    ),
]
_Dram = Annotated[
    str, typer.Option(metavar="SIZE", help="What a store daemon here is to give: 64GiB.")
]
_DramDir = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Where it is taken from; default: /dev/shm.")
]
_Ssd = Annotated[
    str,
    typer.Option(
        envvar="CENOTE_STORE_SSD",
        metavar="PATH",
        help="A store daemon's file or block device; default: those of daemons that run here.",
    ),
]
_SsdSize = Annotated[
    str,
    typer.Option(
        envvar="CENOTE_STORE_SSD_SIZE", metavar="SIZE", help="What it is to use of it: 1TiB."
    ),
]
_RdmaDevices = Annotated[
    str,
    typer.Option(metavar="LIST", help="RDMA devices to use: mlx5_0,mlx5_2:1 or mlx5_*,!mlx5_3"),
]
_Deadline = Annotated[
    float, typer.Option(min=0.1, max=600, metavar="SECONDS", help="Of each check.")
]


def doctor(
    master: _Master = None,
    grpc: GrpcAddress = None,
    etcd: _Etcd = "",
    etcd_ca: _EtcdCa = "",
    etcd_cert: _EtcdCert = "",
    etcd_key: _EtcdKey = "",
    store_config: _StoreConfigFile = "",
    dram: _Dram = "",
    dram_dir: _DramDir = None,
    ssd: _Ssd = "",
    ssd_size: _SsdSize = "",
    rdma_devices: _RdmaDevices = "",
    transports: Transports = TRANSPORTS_DEFAULT,
    json: AsJson = False,
    deadline: _Deadline = 3.0,
) -> int:
    """Check this host and its way to the pool: each finding with a verdict and a remedy.

    Nothing is changed; an SSD that nobody uses is measured for two seconds. Exit code 1 where
    something fails; warnings alone are 0.
    """
    from cenote.transport.nics.filters import DeviceFilter
    from cenote.transport.nics.sysfs import has_devices

    from .doctor.clock import clock_checks
    from .doctor.findings import Verdict, run_checks
    from .doctor.gpu import gpu_checks
    from .doctor.host import host_checks
    from .doctor.planned import planned
    from .doctor.rdma import rdma_checks

    plan = planned(
        store_config,
        dram=dram,
        dram_dir=dram_dir,
        ssd=ssd,
        ssd_size=ssd_size,
        rdma_devices=rdma_devices,
    )
    tls = (etcd_ca, etcd_cert, etcd_key) if etcd_ca else plan.etcd_tls
    ways = split_transports(transports)
    checks = [
        *plan.checks,
        *host_checks(plan.dram_dir, plan.dram_bytes, has_rdma=has_devices()),
        *plan.ssd_checks(),
        *gpu_checks(),
        *clock_checks(),
        *rdma_checks(DeviceFilter.parse(plan.rdma_devices)),
        *_pool_checks(master or plan.master, grpc, ways, (etcd, tls), deadline),
    ]
    findings = run_checks(checks, deadline)
    _print(findings, as_json=json)
    return EXIT_ERROR if any(each.verdict is Verdict.FAIL for each in findings) else EXIT_OK


def _pool_checks(
    master: str | None,
    grpc: str | None,
    transports: Sequence[str],
    etcd: tuple[str, _Tls],
    deadline_s: float,
) -> list[Check]:
    """Of masters, etcd and nodes; what is where is looked up here, within `deadline_s` each."""
    from cenote.api.errors import DeadlineExceeded, Unavailable

    from .connect import grpc_addresses_of
    from .doctor.findings import Check, Finding, Verdict
    from .doctor.pool import pool_checks

    address = master or MASTER_DEFAULT
    url, tls = etcd
    if address.startswith(_ETCD_SCHEME):
        url = url or address
    if master is None and (skipped := _without_a_master(address)) is not None:
        return [*skipped, *(_etcd(url, tls, (), deadline_s) if url else ())]
    try:
        grpc_addresses = grpc_addresses_of(address, grpc, deadline_s)
        lanes = _lanes(address, deadline_s)
    except (Unavailable, DeadlineExceeded) as error:  # of a look for masters in etcd
        remedy = error.remedy or "is etcd running? does the URL name its prefix?"
        lost = Finding("masters", Verdict.FAIL, error.message, remedy)
        return [Check("masters", lambda _: [lost]), *_etcd(url, tls, (), deadline_s)]
    checks = pool_checks(address.split(","), lanes, grpc_addresses, transports)
    return [*checks, *_etcd(url, tls, grpc_addresses, deadline_s)]


def _lanes(master: str, deadline_s: float) -> list[str]:
    """Addresses of the masters' lanes, looked up where etcd is named instead."""
    if not master.startswith(_ETCD_SCHEME):
        return master.split(",")
    from cenote.client.config import make_config

    directory = make_config(master, {}).directory()
    places = directory.wait(deadline_s) if directory is not None else ()
    return [address for place in places for address in place.addresses]


def _without_a_master(address: str) -> list[Check] | None:
    """Where nobody named a master and none is on this host, there is no pool to look at."""
    import socket

    from .doctor.findings import Check, Finding, Verdict

    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        text = f"no master is named, and none is at {address}"
        skipped = Finding("pool", Verdict.SKIPPED, text, "--master HOST:PORT, or CENOTE_MASTER")
        return [Check("pool", lambda _: [skipped])]
    return None


def _etcd(url: str, tls: _Tls, grpc: Sequence[str], deadline_s: float) -> list[Check]:
    """Checks of the etcd that is named, else of the one that the master names."""
    from cenote.kv.etcd_options import parse_etcd_url

    from .doctor.findings import Check, Finding, Verdict
    from .doctor.pool import etcd_checks, metadata_url

    if not url and grpc:
        url = metadata_url(grpc, deadline_s)
    if not url.startswith(_ETCD_SCHEME):
        text = "the master's metadata are elsewhere" if url else "none is named (--etcd)"
        skipped = Finding("etcd", Verdict.SKIPPED, text)
        return [Check("etcd", lambda _: [skipped])]
    ca, cert, key = tls
    return etcd_checks(parse_etcd_url(url, ca=ca, cert=cert, key=key))


def _print(findings: Sequence[Finding], *, as_json: bool) -> None:
    from .doctor.findings import Verdict
    from .output import counted, note, print_json, print_report

    if as_json:
        print_json(
            [
                {
                    "check": f.check,
                    "verdict": f.verdict.value,
                    "found": f.found,
                    "remedy": f.remedy,
                }
                for f in findings
            ]
        )
        return
    print_report((f.verdict.value, f.check, f.found, f.remedy) for f in findings)
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    note(
        f"{counts[Verdict.FAIL]} failed, {counted(counts[Verdict.WARN], 'warning')},"
        f" {counts[Verdict.SKIPPED]} skipped, {counts[Verdict.OK]} fine"
    )
