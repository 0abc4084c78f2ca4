"""What a client can be told, from arguments, `CENOTE_CLIENT_*` variables or a TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from cenote.api.errors import ConfigError
from cenote.kv.directory import EtcdDirectory, etcd_url_in
from cenote.kv.etcd_options import parse_etcd_url
from cenote.runtime.config import load_config, option
from cenote.security.tls import Tls, TlsFiles
from cenote.security.tokens import read_token
from cenote.v1 import common_pb2

__all__ = ["ADDRESS_DEFAULT", "ENV_PREFIX", "ClientConfig", "make_config"]

ENV_PREFIX: Final = "CENOTE_CLIENT_"
ADDRESS_DEFAULT: Final = "127.0.0.1:5110"

Verify = Literal["auto", "lease", "checksum"]
VerbsName = Literal["auto", "ibverbs", "pyverbs"]
DurabilityName = Literal["default", "relaxed", "journaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Options of a `Client`; each is an argument of `Client(...)` of the same name."""

    addresses: tuple[str, ...] = field(
        default=(ADDRESS_DEFAULT,),
        metadata=option(
            help="masters: host:port or unix:///path, the first that leads is used; or the etcd "
            "that they are registered in: etcd://host:2379,host:2379/prefix"
        ),
    )
    namespace: str = field(
        default="default",
        metadata=option(help="namespace of Client's own methods; '': none, and they fail"),
    )
    fingerprint: str = field(
        default="", metadata=option(help="what the namespace's bytes depend on (model, dtype ...)")
    )
    name: str = field(default="", metadata=option(help="shown by `cenote status`"))
    deadline_s: float = field(
        default=5.0,
        metadata=option(
            unit="duration", minimum=0.001, maximum=86400, help="for calls without one"
        ),
    )
    transports: tuple[str, ...] = field(
        default=("shm", "rdma", "tcp"), metadata=option(help="in order of preference")
    )
    rdma_devices: tuple[str, ...] = field(
        default=(),
        metadata=option(help="to use, such as mlx5_0,mlx5_2:1 or mlx5_*,!mlx5_3; default: all"),
    )
    rdma_gid_index: int = field(
        default=-1, metadata=option(minimum=-1, maximum=1023, help="of all ports; -1: chosen")
    )
    verbs: VerbsName = field(default="auto", metadata=option(help="library for RDMA"))
    verify: Verify = field(
        default="auto",
        metadata=option(
            help="what proves a read: checksum; auto: over shm a lease; lease: for small ones, too"
        ),
    )
    replicas: int = field(default=1, metadata=option(minimum=1, maximum=8, help="copies to place"))
    min_replicas: int = field(
        default=1, metadata=option(minimum=1, maximum=8, help="fewer than these: the put fails")
    )
    durability: DurabilityName = field(
        default="default", metadata=option(help="default: what the namespace was created with")
    )
    dedup: bool = field(
        default=False,
        metadata=option(help="put no bytes that the namespace holds already: a reference instead"),
    )
    local_first: bool = field(default=False, metadata=option(help="place on this host if it can"))
    tenant: str = field(default="", metadata=option(help="credentials: who this is"))
    token: str = field(default="", repr=False, metadata=option(help="credentials: the proof"))
    token_file: str = field(default="", metadata=option(help="a file that holds it"))
    tls_ca: str = field(
        default="",
        metadata=option(
            help="PEM file with the CA of the servers' certificates: masters are spoken to over TLS"
        ),
    )
    tls_cert: str = field(default="", metadata=option(help="our certificate, where they ask"))
    tls_key: str = field(default="", metadata=option(help="the key of tls_cert"))
    tls_server_name: str = field(
        default="",
        metadata=option(help="that their certificates are for; default: the host connected to"),
    )
    etcd_ca: str = field(
        default="", metadata=option(help="file with the CA that signed etcd's certificate")
    )
    etcd_cert: str = field(default="", metadata=option(help="our certificate for etcd"))
    etcd_key: str = field(default="", metadata=option(help="the key of etcd_cert"))
    etcd_user: str = field(default="", metadata=option(help="name to log in to etcd with"))
    etcd_password: str = field(
        default="", repr=False, metadata=option(help="better in the environment or a file")
    )
    location_cache_entries: int = field(
        default=65536,
        metadata=option(minimum=0, maximum=1 << 22, help="per namespace, about 250 bytes each"),
    )
    device_staging_bytes: int = field(
        default=256 << 20,
        metadata=option(
            unit="size",
            minimum=1 << 16,
            maximum=1 << 40,
            help="host memory for what lies on GPUs, in four parts; an object fits into one",
        ),
    )
    gives_way: bool = field(
        default=False,
        metadata=option(
            help="give up the GIL around every copy, and never spin: for processes whose main work "
            "is Python, such as engines; counts for the whole process"
        ),
    )
    transfer_threads: int = field(
        default=4, metadata=option(minimum=1, maximum=64, help="for several nodes at once")
    )

    metrics_listen: str = field(
        default="",
        metadata=option(
            help="host:port where this process shows Prometheus what its clients count; '' for none"
        ),
    )
    tracing: bool = field(
        default=False,
        metadata=option(help="an OpenTelemetry span for each call; needs cenote[otel]"),
    )

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ConfigError("no master address", remedy=f"pass one, such as {ADDRESS_DEFAULT}")
        if not self.transports:
            raise ConfigError("no transport", remedy="pass transports=('shm', 'rdma', 'tcp')")
        if self.min_replicas > self.replicas:
            raise ConfigError(
                f"min_replicas={self.min_replicas} is more than replicas={self.replicas}",
                remedy="raise replicas or lower min_replicas",
            )
        self.tls_files().check_client()
        self.directory()  # a typing mistake shows now

    def credentials(self) -> common_pb2.Credentials:
        """What masters are shown. Raises ConfigError."""
        token = read_token(self.token, self.token_file)
        return common_pb2.Credentials(tenant=self.tenant, token=token.encode())

    def tls_files(self) -> TlsFiles:
        """What is said about TLS."""
        return TlsFiles(
            cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca, server_name=self.tls_server_name
        )

    def tls(self) -> Tls | None:
        """How to speak TLS; None: not at all. Raises ConfigError."""
        return Tls.for_client(self.tls_files())

    def directory(self) -> EtcdDirectory | None:
        """Where masters are looked up; None: `addresses` are theirs. Raises ConfigError."""
        url = etcd_url_in(self.addresses)
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


def make_config(
    addresses: str | Sequence[str] | None, overrides: dict[str, object]
) -> ClientConfig:
    """The configuration of a client from its arguments, then the environment, then the defaults.

    Raises ConfigError.
    """
    given = dict(overrides)
    if addresses is not None:
        given["addresses"] = addresses if isinstance(addresses, str) else list(addresses)
    return load_config(
        ClientConfig, env_prefix=ENV_PREFIX, overrides=given, overrides_are="keywords"
    )
