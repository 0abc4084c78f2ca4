"""What a store daemon can be told: flags, `CENOTE_STORE_*` variables, a TOML file."""

from __future__ import annotations

import os
import socket as socket_module
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from cenote.api.errors import ConfigError, InvalidArgument, ResourceUnavailable
from cenote.kv.directory import EtcdDirectory, etcd_url_in
from cenote.kv.etcd_options import parse_etcd_url
from cenote.rpc.address import (
    UNIX_PATH_BYTES_MAX,
    host_and_port,
    is_loopback,
    joined,
    parse_address,
    refuse_open_ports,
)
from cenote.runtime.config import option
from cenote.security.tls import ClientAuth
from cenote.security.tls_options import (
    TLS_CA,
    TLS_CLIENT_AUTH,
    TLS_KEY,
    TLS_SERVER_NAME,
    ServerTlsOptions,
)
from cenote.transport.nics.filters import DeviceFilter

from .dram import SEGMENT_BYTES_MIN
from .node_files import NODE_NAME, NodeFiles
from .ssd import OBJECT_BYTES

__all__ = [
    "ANY_HOST",
    "ENV_PREFIX",
    "StoreConfig",
    "advertised_address",
    "pool_path",
    "socket_path",
]

ENV_PREFIX: Final = "CENOTE_STORE_"
ANY_HOST: Final = frozenset({"0.0.0.0", "::", "*"})


def _default_name() -> str:
    name = "".join(c if c.isascii() and c.isalnum() else "-" for c in socket_module.gethostname())
    return name.strip("-")[:64].strip("-") or "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig(ServerTlsOptions):
    """Each field is a flag, with `-` for `_`."""

    master: tuple[str, ...] = field(
        default=("127.0.0.1:5110",),
        metadata=option(
            help="host:port of the master's lane, or unix:///path; several with commas; or the "
            "etcd that they are registered in, etcd://host:2379,host:2379/prefix"
        ),
    )
    name: str = field(
        default_factory=_default_name,
        metadata=option(help="of this node in the pool and in its file names; default: the host's"),
    )
    dram: int = field(
        default=1 << 30,
        metadata=option(
            unit="size",
            minimum=SEGMENT_BYTES_MIN,
            help="memory to contribute, slot tables included, such as 64GiB",
        ),
    )
    dram_dir: Path = field(
        default=Path("/dev/shm"),
        metadata=option(help="where it is taken from: a tmpfs or hugetlbfs mount"),
    )
    dram_allow_less: bool = field(
        default=False, metadata=option(help="go on where there is less memory than --dram")
    )
    huge_pages: bool = field(
        default=True,
        metadata=option(
            help="put huge pages behind memory of a tmpfs, whatever the system's setting for those"
            " (Linux 6.1 and later)"
        ),
    )
    ssd: str = field(
        default="",
        metadata=option(
            help="a file (made where there is none) or block device for what has no room in memory"
        ),
    )
    ssd_size: int = field(
        default=0,
        metadata=option(
            unit="size", help="of it to use, such as 1TiB; default: all of a block device"
        ),
    )
    ssd_object_size: int = field(
        default=OBJECT_BYTES,
        metadata=option(
            unit="size",
            minimum=4 << 10,
            help="usual size of objects: for each so much there is a slot, 192 bytes of SSD and of"
            " memory; an SSD with another number of slots than before begins empty",
        ),
    )
    ssd_staging: int = field(
        default=64 << 20,
        metadata=option(
            unit="size", minimum=4 << 20, help="memory that bytes pass through from and to the SSD"
        ),
    )
    ssd_write_limit: int = field(
        default=0,
        metadata=option(unit="size", help="most bytes a second to write there; 0: no limit"),
    )
    ssd_daily_writes: int = field(
        default=0,
        metadata=option(
            unit="size",
            help="endurance mode: most bytes to write there in any 24 hours, such as 2TiB; what is"
            " worth them is chosen; 0: no budget",
        ),
    )
    wipe_on_exit: bool = field(
        default=False,
        metadata=option(help="remove the memory's files at the end: a restart begins empty"),
    )
    listen: str = field(
        default="127.0.0.1:0",
        metadata=option(help="host:port for data; others than loopback only if told, port 0: any"),
    )
    advertise: str = field(
        default="",
        metadata=option(help="host or host:port that clients are told; default: --listen"),
    )
    socket: str = field(
        default="",
        metadata=option(
            help="path of the Unix socket for clients on this host; default: in --socket-dir"
        ),
    )
    socket_dir: str = field(
        default="",
        metadata=option(help="default: $XDG_RUNTIME_DIR, or a private directory in /tmp"),
    )
    failure_domain: str = field(
        default="",
        metadata=option(help="replicas lie in different ones; default: the host's boot id"),
    )
    grpc: str = field(
        default="127.0.0.1:0",
        metadata=option(help="host:port of the gRPC server (status, health); '' for none"),
    )
    metrics_listen: str = field(
        default="", metadata=option(help="host:port for Prometheus; '' for none")
    )
    connections_max: int = field(
        default=256, metadata=option(minimum=1, maximum=65_536, help="data connections at once")
    )
    rdma: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=option(help="serve over RDMA; auto: where there is a device; on: or don't start"),
    )
    rdma_devices: tuple[str, ...] = field(
        default=(),
        metadata=option(help="to use, such as mlx5_0,mlx5_2:1 or mlx5_*,!mlx5_3; default: all"),
    )
    rdma_gid_index: int = field(
        default=-1, metadata=option(minimum=-1, maximum=1023, help="of all ports; -1: chosen")
    )
    verbs: Literal["auto", "ibverbs", "pyverbs"] = field(
        default="auto", metadata=option(help="library for RDMA")
    )
    etcd_ca: str = field(
        default="", metadata=option(help="file with the CA that signed etcd's certificate")
    )
    etcd_cert: str = field(default="", metadata=option(help="our certificate for etcd"))
    etcd_key: str = field(default="", metadata=option(help="the key of --etcd-cert"))
    etcd_user: str = field(default="", metadata=option(help="name to log in to etcd with"))
    etcd_password: str = field(
        default="", repr=False, metadata=option(help="better in the environment or a file")
    )
    token: str = field(
        default="",
        repr=False,
        metadata=option(flag=False, help="of the role store; see --token-file"),
    )
    token_file: str = field(
        default="",
        metadata=option(
            help="file with this daemon's token, of the role store, for a pool with tokens; then"
            " it asks everybody, too, what its master gave them"
        ),
    )
    tls_cert: str = field(
        default="",
        metadata=option(
            help="PEM file with our certificate: gRPC speaks TLS then, and what we ask of masters;"
            " read again when it changes, as the other two"
        ),
    )
    tls_key: str = field(default="", metadata=TLS_KEY)
    tls_ca: str = field(default="", metadata=TLS_CA)
    tls_client_auth: ClientAuth = field(default="required", metadata=TLS_CLIENT_AUTH)
    tls_server_name: str = field(default="", metadata=TLS_SERVER_NAME)
    tls_data: bool = field(
        default=False,
        metadata=option(
            help="with --tls-cert: data over TCP goes over TLS, too (not over shared memory, nor"
            " RDMA); costs half the bandwidth or more"
        ),
    )
    tls_identity: bool = field(
        default=False,
        metadata=option(
            help="our certificate stands for a token of the role store: as with --token-file, this"
            " daemon asks everybody, too, what its master gave them"
        ),
    )
    insecure: bool = field(
        default=False,
        metadata=option(
            help="listen beyond loopback without a token: whoever reaches the ports reads and"
            " writes what is here"
        ),
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata=option(help="least level that is logged")
    )
    log_json: bool = field(default=False, metadata=option(help="log JSON lines"))

    def __post_init__(self) -> None:
        if not self.master:
            raise ConfigError("--master names no address", remedy="write host:port")
        for address in () if etcd_url_in(self.master) else self.master:
            try:
                parse_address(address)
            except InvalidArgument as error:
                raise ConfigError(f"--master: {error.message}", remedy=error.remedy) from error
        if not NODE_NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name {self.name!r} can't stand in a file name",
                remedy="use 1 to 64 letters, digits, dots, dashes and underscores",
            )
        files = self.tls_files()
        files.check_client()
        if files.cert:
            files.check_server()
        if self.tls_data and not files.cert:
            raise ConfigError("--tls-data without a certificate", remedy="give --tls-cert")
        if self.tls_identity and not files.cert:
            raise ConfigError("--tls-identity without a certificate", remedy="give --tls-cert")
        host, _ = host_and_port(self.listen, "listen")
        if host in ANY_HOST and not self.advertise:
            raise ConfigError(
                f"--listen {self.listen} is no address that clients could connect to",
                remedy="say with --advertise how this node is reached",
            )
        DeviceFilter.parse(self.rdma_devices)
        for name in ("grpc", "metrics_listen"):
            if address := getattr(self, name):
                host_and_port(address, name.replace("_", "-"))
        if self.ssd_size and not self.ssd:
            raise ConfigError("--ssd-size without --ssd", remedy="name a file or device with --ssd")
        if self.ssd_daily_writes and not self.ssd:
            raise ConfigError(
                "--ssd-daily-writes without --ssd", remedy="name a file or device with --ssd"
            )
        for name in ("socket", "socket_dir", "ssd"):
            path = getattr(self, name)
            flag = "--" + name.replace("_", "-")
            if path and not Path(path).is_absolute():
                raise ConfigError(f"{flag} {path!r} is no absolute path")
        self.directory()  # a typing mistake shows now
        if self.token and self.token_file:
            raise ConfigError("token and token_file are both given", remedy="give one of them")
        if not self.has_credentials and not self.insecure:
            refuse_open_ports(self._ports(), "--token-file")

    @property
    def has_credentials(self) -> bool:
        """Whether everybody is asked who he is."""
        by_tls = self.tls_data and self.tls_files().asks_clients
        return bool(self.token or self.token_file or self.tls_identity or by_tls)

    @property
    def is_open(self) -> bool:
        """Whether whoever reaches the data port from elsewhere is let in."""
        return not self.has_credentials and not is_loopback(host_and_port(self.listen, "listen")[0])

    def _ports(self) -> list[tuple[str, str, str]]:
        """(flag, what it was given, its host) of each port that serves the pool."""
        given = (("listen", self.listen), ("grpc", self.grpc))
        return [
            (f"--{name}", address, host_and_port(address, name)[0])
            for name, address in given
            if address
        ]

    def directory(self) -> EtcdDirectory | None:
        """Where masters are looked up; None: `master` has their addresses. Raises ConfigError."""
        url = etcd_url_in(self.master)
        if not url:
            return None
        options = parse_etcd_url(
            url,
            ca=self.etcd_ca,
            cert=self.etcd_cert,
            key=self.etcd_key,
            user=self.etcd_user,
            password=self.etcd_password,
        )
        return EtcdDirectory(options)


def advertised_address(config: StoreConfig, bound: tuple[str, int]) -> str:
    """host:port that clients are told, where data connections are accepted at `bound`."""
    if not config.advertise:
        return joined(*bound)
    advertise = config.advertise
    if ":" not in advertise or (advertise.startswith("[") and advertise.endswith("]")):
        advertise += ":0"
    host, port = host_and_port(advertise, "advertise")
    return joined(host, port or bound[1])


def socket_path(config: StoreConfig) -> str:
    """Where the daemon's Unix socket goes; its directory exists when this returns.

    Raises ConfigError for a path too long for a socket, ResourceUnavailable for a directory that
    can't be made, or is not this user's alone.
    """
    path = config.socket
    if not path:
        directory = Path(config.socket_dir) if config.socket_dir else _private_directory()
        path = str(directory / f"cenote-{config.name}.sock")
    if path.split() != [path]:
        raise ConfigError(
            f"the Unix socket's path {path!r} has a space in it",
            remedy="give another one with --socket or --socket-dir",
        )
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(
            f"the Unix socket's path {path} has more than {UNIX_PATH_BYTES_MAX} bytes",
            remedy="give a shorter one with --socket or --socket-dir",
        )
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceUnavailable(
            f"can't make the directory of the Unix socket {path}: {error.strerror}",
            remedy="give another one with --socket-dir",
        ) from error
    return path


def pool_path(config: StoreConfig, files: NodeFiles) -> Path:
    """Where the copy of the pool is kept: it must last as long as what it is about. (Beside a block
    device nothing can be: there it lasts until the next boot.)"""
    ssd = Path(config.ssd) if config.ssd else None
    if ssd is None or ssd.is_block_device():
        return files.pool_path
    return ssd.with_name(ssd.name + ".pool")


def _private_directory() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime)
    directory = Path(tempfile.gettempdir()) / f"cenote-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ResourceUnavailable(
            f"can't make {directory}: {error.strerror}", remedy="give a directory with --socket-dir"
        ) from error
    # In /tmp anybody could have made it first, and would then own the socket's name.
    private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not private or found.st_uid != os.getuid():
        raise ResourceUnavailable(
            f"{directory} is not a directory of this user alone",
            remedy="remove it, or give another one with --socket-dir",
        )
    return directory
