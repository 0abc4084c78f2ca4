"""vLLM: a store connector, so that instances find the prefixes that others have computed.

Installed beside vLLM it registers itself (entry point `vllm.general_plugins`); a user writes

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CenoteStoreConnector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"master": "10.0.0.1:5110"}}'

Nothing here imports vLLM before vLLM asks for the connector; then `connector`, `engine_facts`,
`kv_events` and `stats` do, and they alone.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

__all__ = ["CONNECTOR_NAME", "register"]

CONNECTOR_NAME: Final = "CenoteStoreConnector"


def register() -> None:
    """Make the connector known to vLLM by its name; vLLM calls it in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered already: plug-ins may be loaded twice
        KVConnectorFactory.register_connector(
            CONNECTOR_NAME, f"{__name__}.connector", CONNECTOR_NAME
        )
