"""What a user may write in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from cenote.runtime.config import load_config, option

__all__ = ["ENV_PREFIX", "ConnectorOptions", "make_options"]

ENV_PREFIX: Final = "CENOTE_VLLM_"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """Options of the connector; each may also come from the environment, as CENOTE_VLLM_MASTER."""

    master: str = field(
        default="127.0.0.1:5110",
        metadata=option(help="masters of the pool, with commas between, or etcd's address"),
    )
    namespace: str = field(
        default="vllm",
        metadata=option(
            help="what the namespace's name begins with: instances that differ in it share nothing"
        ),
    )
    weights_id: str = field(
        default="",
        metadata=option(help="names the weights, instead of a digest of their files"),
    )
    load: bool = field(default=True, metadata=option(help="look prefixes up, and load them"))
    save: bool = field(default=True, metadata=option(help="save what is computed"))
    save_output: bool = field(
        default=True, metadata=option(help="save blocks of generated tokens as well")
    )
    lookup_deadline_s: float = field(
        default=0.1,
        metadata=option(unit="duration", minimum=0.001, maximum=60, help="later is a miss"),
    )
    load_deadline_s: float = field(
        default=0.3,
        metadata=option(
            unit="duration",
            minimum=0.01,
            maximum=600,
            help="for bytes to arrive, beside a second for each 200 MB; what is late is a miss",
        ),
    )
    load_share: float = field(
        default=0.5,
        metadata=option(
            minimum=0,
            maximum=100,
            help="of the time that computing takes, a load may take so much; 0: no such limit",
        ),
    )
    save_deadline_s: float = field(
        default=5.0,
        metadata=option(unit="duration", minimum=0.01, maximum=600, help="later is not saved"),
    )
    load_min_tokens: int = field(
        default=1,
        metadata=option(minimum=1, maximum=1 << 20, help="shorter gains are computed, not loaded"),
    )
    staging_bytes: int = field(
        default=1 << 30,
        metadata=option(
            unit="size",
            minimum=1 << 20,
            maximum=1 << 42,
            help="host memory of each worker for bytes on their way; bounds what one request loads",
        ),
    )
    lease_ttl_s: float = field(
        default=10.0,
        metadata=option(unit="duration", minimum=0.1, maximum=600, help="of what is being loaded"),
    )
    replicas: int = field(default=1, metadata=option(minimum=1, maximum=8, help="copies to place"))
    layout: str = field(
        default="BLHNC",
        metadata=option(
            help="of the KV cache on GPUs, as vLLM names it, where the attention backend has it; "
            "'': vLLM's own choice"
        ),
    )
    transports: tuple[str, ...] = field(
        default=("shm", "rdma", "tcp"), metadata=option(help="in order of preference")
    )


def make_options(given: Mapping[str, object]) -> ConnectorOptions:
    """The options from `kv_connector_extra_config`, then the environment, then the defaults.

    Raises ConfigError, naming what is wrong and the nearest option that exists.
    """
    return load_config(
        ConnectorOptions, env_prefix=ENV_PREFIX, overrides=dict(given), overrides_are="keywords"
    )
