"""The engines' manifests in deploy/examples fit the chart, the connector, and each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cenote.connectors.vllm.options import make_options
from deployment import (
    DEPLOY,
    containers_of,
    documents,
    image_is_short,
    is_selected,
    labels_of,
    pods_of,
    rendered,
    strictly_valid,
)

EXAMPLES = DEPLOY / "examples"
ENGINES = [EXAMPLES / "vllm" / "deployment.yaml", EXAMPLES / "llm-d" / "modelserver.yaml"]
FLAG = "--kv-transfer-config="
INTERNAL = {"etcd": {"internal": {"enabled": True}}}  # as the examples install the chart
every_engine = pytest.mark.parametrize("file", ENGINES, ids=lambda f: f.parent.name)


def engine_of(file: Path) -> dict[str, Any]:
    (document,) = documents(file.read_text())
    return document


@every_engine
def test_the_schemas_of_kubernetes_hold(file: Path) -> None:
    strictly_valid(engine_of(file))


@every_engine
def test_a_load_that_fails_is_computed_and_the_connector_takes_its_options(file: Path) -> None:
    (pod,) = pods_of([engine_of(file)])
    (container,) = containers_of(pod)
    (argument,) = [a for a in container["args"] if a.startswith(FLAG)]
    config = json.loads(argument.removeprefix(FLAG))
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector"] == "CenoteStoreConnector"
    options = make_options(config["kv_connector_extra_config"])
    assert options.master.startswith("etcd://")
    assert image_is_short(container["image"])


@every_engine
def test_the_engine_is_let_in_and_shares_the_sockets(file: Path) -> None:
    manifests = rendered(INTERNAL)
    (pod,) = pods_of([engine_of(file)])
    clients = {"cenote-client": "true"}
    assert is_selected(labels_of(pod), clients)
    policies = [d for d in manifests if d["kind"] == "NetworkPolicy"]
    assert len(policies) == 3
    for policy in policies:
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
        assert {"podSelector": {"matchLabels": clients}} in peers
    (daemon,) = [d["spec"]["template"] for d in manifests if d["kind"] == "DaemonSet"]
    # The daemon tells clients the socket's path: it must be the same in both pods.
    assert shared_directory(pod) == shared_directory(daemon) == ("/run/cenote", "/run/cenote")


def shared_directory(pod: Any) -> tuple[str, str]:
    """Where the sockets lie on the node, and in the (last) container."""
    (volume,) = [
        v for v in pod["spec"]["volumes"] if v.get("hostPath", {}).get("path") == "/run/cenote"
    ]
    mounts = {m["name"]: m["mountPath"] for m in containers_of(pod)[-1]["volumeMounts"]}
    return volume["hostPath"]["path"], mounts[volume["name"]]


@every_engine
def test_the_engine_shows_a_token_of_the_charts_secret(file: Path) -> None:
    (pod,) = pods_of([engine_of(file)])
    (container,) = containers_of(pod)
    (variable,) = [v for v in container["env"] if v["name"] == "CENOTE_CLIENT_TOKEN_FILE"]
    (volume,) = [v["secret"] for v in pod["spec"]["volumes"] if "secret" in v]
    (secret,) = [d for d in rendered(INTERNAL) if d["kind"] == "Secret"]
    # The examples install the release `kv`, as these tests do.
    assert volume["secretName"] == secret["metadata"]["name"]
    (item,) = volume["items"]
    assert item["key"] in secret["data"]
    (mount,) = [m for m in container["volumeMounts"] if m["name"] == "token"]
    assert variable["value"] == f"{mount['mountPath']}/{item['path']}"


@every_engine
def test_the_engine_asks_the_etcd_of_the_chart(file: Path) -> None:
    """Host names are shorter by the namespace, which is the engine's own."""
    (pod,) = pods_of([engine_of(file)])
    (argument,) = [a for a in containers_of(pod)[-1]["args"] if a.startswith(FLAG)]
    url = json.loads(argument.removeprefix(FLAG))["kv_connector_extra_config"]["master"]
    (masters,) = [d for d in rendered(INTERNAL) if d["kind"] == "Deployment"]
    args = masters["spec"]["template"]["spec"]["containers"][0]["args"]
    (metadata,) = [a for a in args if a.startswith("--metadata=")]
    assert metadata.removeprefix("--metadata=").replace(".llm.svc:", ":") == url


def test_the_router_is_told_of_blocks_by_the_pods_address() -> None:
    (pod,) = pods_of([engine_of(EXAMPLES / "llm-d" / "modelserver.yaml")])
    (container,) = containers_of(pod)
    flag = "--kv-events-config="
    (argument,) = [a for a in container["args"] if a.startswith(flag)]
    config = json.loads(argument.removeprefix(flag))
    assert config["enable_kv_cache_events"] is True
    kind, address, model = config["topic"].split("@")
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert (kind, address) == ("kv", f"$(POD_IP):{ports['http']}")
    assert model == container["args"][0]
    assert config["endpoint"] == f"tcp://*:{ports['kv-events']}"
    (variable,) = [e for e in container["env"] if e["name"] == "POD_IP"]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


def test_the_inference_pool_selects_engines_and_nothing_of_ours() -> None:
    (pool,) = documents((EXAMPLES / "llm-d" / "inferencepool.yaml").read_text())
    selector = pool["spec"]["selector"]["matchLabels"]
    (engine,) = pods_of([engine_of(EXAMPLES / "llm-d" / "modelserver.yaml")])
    assert is_selected(labels_of(engine), selector)
    ports = {p["containerPort"] for p in containers_of(engine)[0]["ports"]}
    assert {port["number"] for port in pool["spec"]["targetPorts"]} <= ports
    ours = list(pods_of(rendered(INTERNAL)))
    assert len(ours) == 3
    for pod in ours:
        assert not is_selected(labels_of(pod), selector)
        # Nor by any other selector that names what engines are known by.
        assert not any(name.startswith("llm-d.ai/") or name == "app" for name in labels_of(pod))
