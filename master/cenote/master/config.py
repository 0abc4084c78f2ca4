"""What a master can be told: flags, `CENOTE_MASTER_*` variables, a TOML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from cenote.api.errors import ConfigError, InvalidArgument
from cenote.policy.names import AUTO, POLICIES
from cenote.rpc.address import host_and_port, refuse_open_ports
from cenote.runtime.config import option
from cenote.security.tls import ClientAuth
from cenote.security.tls_options import (
    TLS_CA,
    TLS_CLIENT_AUTH,
    TLS_KEY,
    TLS_SERVER_NAME,
    ServerTlsOptions,
)

from .dedup_domains import domain_of
from .metadata import MetadataOptions
from .state_config import StateConfig

__all__ = ["ENV_PREFIX", "MasterConfig"]

ENV_PREFIX: Final = "CENOTE_MASTER_"


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig(ServerTlsOptions):
    """Each field is a flag, with `-` for `_`."""

    listen: str = field(
        default="127.0.0.1:5110",
        metadata=option(help="host:port of the metadata lane; others than loopback only if told"),
    )
    grpc: str = field(
        default="127.0.0.1:5111", metadata=option(help="host:port of the gRPC server; '' for none")
    )
    socket: str = field(
        default="", metadata=option(help="path of a Unix socket for the lane, too; '' for none")
    )
    metadata: str = field(
        default="file:~/.local/state/cenote/master",
        metadata=option(
            help="where the journal is kept: file:DIR, etcd://host:2379,host:2379/prefix to have "
            "standbys, or memory: to keep none"
        ),
    )
    tenure_s: float = field(
        default=1.5,
        metadata=option(
            unit="duration",
            minimum=0.3,
            maximum=60,
            help="with etcd: how long a master leads after etcd last confirmed it, and how long a "
            "standby waits before it takes over",
        ),
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
    tokens: str = field(
        default="",
        metadata=option(
            help="file of tokens (`cenote token create` makes it): who has none of them is refused"
            " on every port; read again when it changes"
        ),
    )
    tls_cert: str = field(
        default="",
        metadata=option(
            help="PEM file with our certificate: lane and gRPC speak TLS then; read again when it"
            " changes, as the other two"
        ),
    )
    tls_key: str = field(default="", metadata=TLS_KEY)
    tls_ca: str = field(default="", metadata=TLS_CA)
    tls_client_auth: ClientAuth = field(default="required", metadata=TLS_CLIENT_AUTH)
    tls_server_name: str = field(default="", metadata=TLS_SERVER_NAME)
    isolation: Literal["strict", "pool"] = field(
        default="strict",
        metadata=option(
            help="with --tokens: strict: who has not all namespaces moves bytes over TCP only,"
            " where each extent is checked; pool: all who have a token may map memory and use RDMA"
        ),
    )
    key_rotation_s: float = field(
        default=300.0,
        metadata=option(
            unit="duration",
            minimum=5,
            maximum=86400,
            help="with --tokens: how often the keys are renewed with which tickets and grants are"
            " signed; what was signed counts for two to three times as long",
        ),
    )
    insecure: bool = field(
        default=False,
        metadata=option(
            help="listen beyond loopback without tokens: whoever reaches the ports reads and"
            " writes the pool"
        ),
    )
    cluster_name: str = field(default="cenote", metadata=option(help="shown by `cenote status`"))
    advertise: tuple[str, ...] = field(
        default=(), metadata=option(help="addresses that clients are told; default: --listen")
    )
    policy: Literal["lru", "lru-chain", "arc", "arc-chain", "s3fifo", "s3fifo-chain", "auto"] = (
        field(
            default="lru",
            metadata=option(
                help="what goes where room is needed: "
                + ", ".join(POLICIES)
                + "; auto: whichever of "
                "these would have hit most often lately"
            ),
        )
    )
    sampling: bool = field(
        default=True,
        metadata=option(
            help="follow the use of some keys, for `cenote mrc`; --policy auto needs it"
        ),
    )
    dedup_domains: str = field(
        default="",
        metadata=option(
            help="namespaces that may hold each other's bytes (content dedup), as "
            "NAME=namespace,namespace;NAME=...; the same for all masters"
        ),
    )
    lease_ttl_s: float = field(
        default=5.0,
        metadata=option(
            unit="duration", minimum=0.1, maximum=600, help="of leases that name no duration"
        ),
    )
    lease_ttl_max_s: float = field(
        default=10.0,
        metadata=option(
            unit="duration",
            minimum=0.1,
            maximum=600,
            help="longest lease",
        ),
    )
    session_ttl_s: float = field(
        default=10.0,
        metadata=option(
            unit="duration", minimum=0.5, maximum=600, help="silence that ends a session"
        ),
    )
    location_ttl_s: float = field(
        default=10.0,
        metadata=option(
            unit="duration", minimum=0, maximum=600, help="how long clients cache locations"
        ),
    )
    heartbeat_s: float = field(
        default=1.0,
        metadata=option(
            unit="duration", minimum=0.05, maximum=60, help="between a daemon's heartbeats"
        ),
    )
    node_dead_s: float = field(
        default=5.0,
        metadata=option(
            unit="duration", minimum=0.2, maximum=600, help="silence that hides a node's objects"
        ),
    )
    node_forget_s: float = field(
        default=3600.0,
        metadata=option(
            unit="duration", minimum=1, maximum=1e7, help="silence that gives up its objects"
        ),
    )
    repair_after_s: float = field(
        default=30.0,
        metadata=option(
            unit="duration",
            minimum=0.2,
            maximum=1e7,
            help="silence after which what else has a replica on a node gets another one elsewhere",
        ),
    )
    hot_bytes_per_s: int = field(
        default=256 << 20,
        metadata=option(
            unit="size",
            minimum=0,
            help="read of one object for each of its replicas: above this it gets another one as "
            "long as that lasts; 0: never",
        ),
    )
    leased_share_max: float = field(
        default=0.5, metadata=option(minimum=0, maximum=1, help="of the capacity, for leases")
    )
    pinned_share_max: float = field(
        default=0.25, metadata=option(minimum=0, maximum=1, help="of the capacity, for pins")
    )
    sessions_max: int = field(
        default=100_000, metadata=option(minimum=1, maximum=10_000_000, help="of clients, at once")
    )
    connections_max: int = field(
        default=4096, metadata=option(minimum=1, maximum=1_000_000, help="of the lane")
    )
    spin_s: float = field(
        default=0.0002,
        metadata=option(
            unit="duration",
            minimum=0,
            maximum=0.01,
            help="of looking for the next request before sleeping, where requests follow closely; "
            "0 for a machine whose cores have better things to do",
        ),
    )
    objects_max: int = field(
        default=1 << 27, metadata=option(minimum=1024, maximum=1 << 31, help="in the pool")
    )
    decisions_max: int = field(
        default=1 << 16,
        metadata=option(
            minimum=0,
            maximum=1 << 28,
            help="evictions and removals that `cenote explain` remembers, of one key each; "
            "32 bytes each",
        ),
    )
    tick_s: float = field(
        default=0.02, metadata=option(unit="duration", minimum=0.005, maximum=0.5, help="of upkeep")
    )
    metrics_listen: str = field(
        default="", metadata=option(help="host:port for Prometheus; '' for none")
    )
    log_level: Literal["debug", "info", "warning", "error"] = field(
        default="info", metadata=option(help="least level that is logged")
    )
    log_json: bool = field(default=False, metadata=option(help="log JSON lines"))

    def __post_init__(self) -> None:
        host_and_port(self.listen, "listen")
        if self.grpc:
            host_and_port(self.grpc, "grpc")
        if self.metrics_listen:
            host_and_port(self.metrics_listen, "metrics-listen")
        if self.socket and not Path(self.socket).is_absolute():
            raise ConfigError(f"--socket {self.socket!r} is no absolute path")
        if self.lease_ttl_s > self.lease_ttl_max_s:
            raise ConfigError("--lease-ttl-s is above --lease-ttl-max-s")
        self.tls_files().check_server()
        if self.policy == AUTO and not self.sampling:
            raise ConfigError("--policy auto chooses by samples", remedy="leave --no-sampling out")
        try:
            domain_of(self.dedup_domains, "")
        except InvalidArgument as error:
            raise ConfigError(f"--dedup-domains: {error.message}", remedy=error.remedy) from error
        if not self.has_credentials and not self.insecure:
            refuse_open_ports(self._ports(), "--tokens, or --tls-cert and --tls-ca")
        if self.heartbeat_s * 2 > self.node_dead_s:
            raise ConfigError(
                f"--node-dead-s {self.node_dead_s:g} is less than two heartbeats",
                remedy="raise it, or lower --heartbeat-s",
            )

    @property
    def has_credentials(self) -> bool:
        """Whether everybody is asked who he is."""
        return bool(self.tokens) or self.tls_files().asks_clients

    def _ports(self) -> list[tuple[str, str, str]]:
        """(flag, what it was given, its host) of each port that serves the pool."""
        given = (("listen", self.listen), ("grpc", self.grpc))
        return [
            (f"--{name}", address, host_and_port(address, name)[0])
            for name, address in given
            if address
        ]

    def metadata_options(self) -> MetadataOptions:
        """What the metadata backend may need besides its URL."""
        return MetadataOptions(
            tenure_s=self.tenure_s,
            etcd_ca=self.etcd_ca,
            etcd_cert=self.etcd_cert,
            etcd_key=self.etcd_key,
            etcd_user=self.etcd_user,
            etcd_password=self.etcd_password,
        )

    def state_config(self) -> StateConfig:
        """The part that the state decides by."""
        return StateConfig(
            policy=self.policy,
            dedup_domains=self.dedup_domains,
            sampling=self.sampling,
            objects_max=self.objects_max,
            decisions_max=self.decisions_max,
            session_ttl_s=self.session_ttl_s,
            sessions_max=self.sessions_max,
            lease_ttl_default_s=self.lease_ttl_s,
            lease_ttl_max_s=self.lease_ttl_max_s,
            leased_share_max=self.leased_share_max,
            pinned_share_max=self.pinned_share_max,
            node_dead_s=self.node_dead_s,
            node_forget_s=self.node_forget_s,
            repair_after_s=self.repair_after_s,
            hot_bytes_per_s=self.hot_bytes_per_s,
        )
