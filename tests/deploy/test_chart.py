"""The Helm chart, judged by helm itself and by the schemas of Kubernetes, and by what it is for."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cenote.runtime.harness import STOP_TIMEOUT_S
from cenote.security.token_set import FIRST_TOKENS, TOKENS_FILE
from cenote.security.tokens import TokenFile
from deployment import (
    CHART,
    RELEASE,
    containers_of,
    image_is_short,
    is_selected,
    labels_of,
    pods_of,
    refuse_wrong_flags,
    rendered,
    strictly_valid,
)

ENDPOINTS = ["10.0.1.1:2379", "10.0.1.2:2379", "10.0.1.3:2379"]
EXTERNAL = {"etcd": {"endpoints": ENDPOINTS}}
INTERNAL = {"etcd": {"internal": {"enabled": True}}}
VARIANTS: dict[str, dict[str, Any]] = {
    "external": EXTERNAL,
    "internal": INTERNAL | {"serviceMonitor": {"enabled": True, "labels": {"release": "prom"}}},
    "secured": {
        "etcd": {
            "endpoints": ENDPOINTS,
            "tls": {"secretName": "etcd-client", "clientCertificate": True},
            "auth": {"secretName": "etcd-user"},
        },
        "auth": {"secretName": "kv-auth", "isolation": "pool"},
        "store": {"drain": {"onStop": True}},
    },
    "everything": {
        "etcd": {"endpoints": ["[fd00::1]:2379"], "prefix": "pools/a"},
        "ipv6": True,
        "image": {"digest": "sha256:" + "0" * 64},
        "imagePullSecrets": [{"name": "pull"}],
        "podLabels": {"team": "inference"},
        "podAnnotations": {"note": "x"},
        "master": {
            "replicas": 3,
            "extraArgs": ["--node-dead-s=10s"],
            "nodeSelector": {"role": "infra"},
            "tolerations": [{"operator": "Exists"}],
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "system-cluster-critical",
        },
        "store": {
            "dramGiB": 256,
            "extraArgs": ["--rdma-gid-index=3"],
            "segments": {"type": "hugetlbfs", "hugepages": {"size": "1Gi"}},
            "ssd": {"enabled": True, "sizeGiB": 2048},
            "rdma": {"enabled": True, "resourceName": "rdma/hca_shared", "devices": "mlx5_0"},
            "drain": {"onStop": True, "timeoutSeconds": 600},
            "maxUnavailable": "10%",
            "nodeSelector": {"gpu": "true"},
            "affinity": {"nodeAffinity": {}},
            "priorityClassName": "system-node-critical",
        },
        "serviceMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "labels": {"release": "prom"}},
        "dashboard": {"enabled": True},
    },
    "insecure": EXTERNAL | {"auth": {"insecure": True}},
    "host network": EXTERNAL
    | {
        "store": {"hostNetwork": True, "rdma": {"enabled": True}, "runAsUser": 2000},
        "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False},
    },
    "one of each": {
        "etcd": {"internal": {"enabled": True, "replicas": 1}},
        "master": {"replicas": 1},
        "store": {"prepare": {"enabled": False}},
    },
}
every_variant = pytest.mark.parametrize("values", VARIANTS.values(), ids=VARIANTS.keys())

pytest.importorskip("helm_python", reason="needs helm-python-sdk: make check-deploy installs it")


def lint(values: Mapping[str, Any]) -> list[str]:
    """What `helm lint --strict` has to say, advice left out."""
    from helm_python.chart import lint

    report = lint(CHART, dict(values), strict=True)
    return [*report["errors"], *(m["error"] for m in report["messages"] if m["severity"] > 1)]


def by_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in manifests if document["kind"] == kind]


def refusal(values: Mapping[str, Any]) -> str:
    from helm_python.errors import HelmError

    with pytest.raises(HelmError) as caught:
        rendered(values)
    return str(caught.value)


@every_variant
def test_helm_lint_finds_nothing(values: dict[str, Any]) -> None:
    assert lint(values) == []


def test_helm_lint_can_find_something() -> None:
    assert lint({"etcd": {"endpoints": ENDPOINTS, "endpoint": "x"}})


@every_variant
def test_the_schemas_of_kubernetes_hold(values: dict[str, Any]) -> None:
    manifests = rendered(values)
    assert len(manifests) >= 4
    for document in manifests:
        if document["apiVersion"] != "monitoring.coreos.com/v1":
            strictly_valid(document)


def test_the_schemas_of_kubernetes_can_fail() -> None:
    from kubernetes_validate import ValidationError

    (deployment,) = by_kind(rendered(EXTERNAL), "Deployment")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 10
    with pytest.raises(ValidationError):
        strictly_valid(deployment)


@every_variant
def test_the_daemons_take_their_flags(values: dict[str, Any]) -> None:
    commands = [
        [*container["command"], *container["args"]]
        for pod in pods_of(rendered(values))
        for container in pod["spec"]["containers"]
    ]
    ours = [c for c in commands if c[0] != "etcd"]
    assert sorted(c[0] for c in ours) == ["cenote-master", "cenote-store"]
    for command in ours:
        refuse_wrong_flags(command)
        assert "--etcd-password" not in " ".join(command)


@every_variant
def test_what_holds_for_every_pod(values: dict[str, Any]) -> None:
    for pod in pods_of(rendered(values)):
        spec = pod["spec"]
        # A Service named after us would set CENOTE_MASTER_PORT, which is refused as a setting.
        assert spec["enableServiceLinks"] is False
        assert spec["automountServiceAccountToken"] is False
        assert spec["terminationGracePeriodSeconds"] > STOP_TIMEOUT_S + 1
        for container in containers_of(pod):
            assert image_is_short(container["image"])
            assert not container["image"].endswith(":latest")
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            claims = {"data"} if container["name"] == "etcd" else set()
            assert mounted <= {v["name"] for v in spec.get("volumes", [])} | claims
            assert container["resources"]["limits"]["memory"]


@every_variant
def test_selectors_select_the_pods_of_one_component_each(values: dict[str, Any]) -> None:
    manifests = rendered(values)
    pods = list(pods_of(manifests))
    selectors = []
    for document in manifests:
        spec = document.get("spec", {})
        selectors += {
            "Service": lambda s: [s["selector"]],
            "PodDisruptionBudget": lambda s: [s["selector"]["matchLabels"]],
            "NetworkPolicy": lambda s: [s["podSelector"]["matchLabels"]],
        }.get(document["kind"], lambda s: [])(spec)
        if document["kind"] in ("Deployment", "DaemonSet", "StatefulSet"):
            selectors.append(spec["selector"]["matchLabels"])
    assert len(selectors) >= 4
    for selector in selectors:
        assert sum(is_selected(labels_of(pod), selector) for pod in pods) == 1
    for monitor in by_kind(manifests, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        services = by_kind(manifests, "Service")
        (service,) = [s for s in services if is_selected(s["metadata"]["labels"], wanted)]
        names = [port["name"] for port in service["spec"]["ports"]]
        assert monitor["spec"]["endpoints"][0]["port"] in names


@every_variant
def test_policies_name_ports_that_their_pods_have(values: dict[str, Any]) -> None:
    manifests = rendered(values)
    policies = by_kind(manifests, "NetworkPolicy")
    wanted = values.get("networkPolicy", {"enabled": True})["enabled"]
    assert bool(policies) == wanted
    for policy in policies:
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        selector = policy["spec"]["podSelector"]["matchLabels"]
        (pod,) = [p for p in pods_of(manifests) if is_selected(labels_of(p), selector)]
        ports = {p["name"] for c in pod["spec"]["containers"] for p in c["ports"]}
        for rule in policy["spec"]["ingress"]:
            assert rule["from"], "an empty list of peers admits everybody"
            assert {port["port"] for port in rule["ports"]} <= ports


def test_who_is_not_named_reaches_nothing() -> None:
    closed: dict[str, Any] = {"networkPolicy": {"clients": [], "monitoring": []}}
    for policy in by_kind(rendered(INTERNAL | closed), "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for peer in rule["from"]:
                labels = peer["podSelector"]["matchLabels"]
                assert labels["app.kubernetes.io/instance"] == RELEASE[0]


def test_masters_have_standbys_and_end_one_at_a_time() -> None:
    manifests = rendered(EXTERNAL)
    (masters,) = by_kind(manifests, "Deployment")
    assert masters["spec"]["replicas"] == 2
    assert masters["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    (budget,) = by_kind(manifests, "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    for service in by_kind(manifests, "Service"):
        assert service["spec"]["clusterIP"] == "None"


def store_of(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The store daemon's pod and its container."""
    (daemons,) = by_kind(rendered(values), "DaemonSet")
    spec = daemons["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def paths_of(spec: Mapping[str, Any]) -> dict[str, str]:
    return {v["name"]: v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v}


def test_memory_and_sockets_outlive_the_pod_and_are_asked_for() -> None:
    spec, container = store_of(EXTERNAL)
    assert paths_of(spec) == {"shm": "/dev/shm/cenote", "sockets": "/run/cenote"}
    assert "--name=$(NODE_NAME)" in container["args"]  # the pod's name changes
    assert container["resources"]["limits"]["memory"] == "68Gi"
    assert "add" not in container["securityContext"]["capabilities"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["terminationGracePeriodSeconds"] == 10


def test_rdma_hugepages_and_ssd() -> None:
    spec, container = store_of(VARIANTS["everything"])
    paths = paths_of(spec)
    assert paths["hugepages"] == "/dev/hugepages/cenote"
    assert paths["shm"] == "/dev/shm/cenote"  # locks and slot tables are there
    assert "--dram-dir=/dev/hugepages" in container["args"]
    limits = container["resources"]["limits"]
    assert limits == {"memory": "4Gi", "hugepages-1Gi": "256Gi", "rdma/hca_shared": 1}
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    # A capability that is added counts for root alone.
    assert spec["securityContext"]["runAsUser"] == 0
    assert "--listen=[$(POD_IP)]:5120" in container["args"]


def test_a_drain_before_the_end_fits_the_time_that_kubernetes_gives() -> None:
    spec, container = store_of(EXTERNAL | {"store": {"drain": {"onStop": True}}})
    command = " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
    assert 'timeout --signal=INT 900 cenote drain "$NODE_NAME" --wait' in command
    assert spec["terminationGracePeriodSeconds"] > 900 + STOP_TIMEOUT_S + 1
    assert [c["name"] for c in spec["initContainers"]] == ["prepare", "undrain"]
    # What these two commands do is tried in test_compose_pool.py.
    assert spec["initContainers"][1]["args"] == ['cenote undrain "$NODE_NAME" || test $? -eq 3']
    names = {variable["name"] for variable in container["env"]}
    assert {"NODE_NAME", "CENOTE_MASTER"} <= names


def test_secrets_come_from_secrets() -> None:
    for pod in pods_of(rendered(VARIANTS["secured"])):
        (container,) = pod["spec"]["containers"]
        variables = {v["name"]: v for v in container["env"]}
        prefix = container["command"][0].upper().replace("-", "_") + "_"
        for name in (f"{prefix}ETCD_PASSWORD", "CENOTE_CLIENT_ETCD_PASSWORD"):
            assert variables[name]["valueFrom"]["secretKeyRef"]["name"] == "etcd-user"
        assert "--etcd-key=/etc/cenote/etcd/tls.key" in container["args"]


def flags_of(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Of the daemons, by the name of their container."""
    return {
        container["name"]: container["args"]
        for pod in pods_of(rendered(values))
        for container in pod["spec"]["containers"]
        if container["name"] != "etcd"
    }


def test_who_has_no_token_is_refused_unless_told_otherwise() -> None:
    flags = flags_of(EXTERNAL)
    assert "--tokens=/etc/cenote/auth/tokens.json" in flags["master"]
    assert "--token-file=/etc/cenote/auth/store.token" in flags["store"]
    assert not any("--insecure" in each for each in flags.values())
    flags = flags_of(VARIANTS["insecure"])
    assert all("--insecure" in each for each in flags.values())
    assert by_kind(rendered(VARIANTS["insecure"]), "Secret") == []
    both = {"auth": {"insecure": True, "secretName": "x"}}
    assert "leave one of them out" in refusal(EXTERNAL | both)


def test_the_charts_own_tokens_are_those_that_masters_take(tmp_path: Path) -> None:
    (secret,) = by_kind(rendered(EXTERNAL), "Secret")
    assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    files = {name: base64.b64decode(text) for name, text in secret["data"].items()}
    assert set(files) == {TOKENS_FILE, *(f"{name}.token" for name in FIRST_TOKENS)}
    (tmp_path / TOKENS_FILE).write_bytes(files[TOKENS_FILE])
    tokens = TokenFile(tmp_path / TOKENS_FILE)
    for name, role in FIRST_TOKENS.items():
        who = tokens.authenticate(files[f"{name}.token"].strip())
        assert (who.name, who.role, who.is_pool_wide) == (name, role, True)
    (other,) = by_kind(rendered(EXTERNAL), "Secret")
    assert other["data"] != secret["data"]
    assert by_kind(rendered(EXTERNAL | {"auth": {"secretName": "kv-auth"}}), "Secret") == []


@every_variant
def test_pods_have_the_tokens_that_they_need_and_no_other(values: dict[str, Any]) -> None:
    manifests = rendered(values)
    drains = values.get("store", {}).get("drain", {}).get("onStop", False)
    wanted = {
        "master": {"tokens.json", "admin.token"},
        "store": {"store.token", "admin.token"} if drains else {"store.token"},
    }
    for pod in pods_of(manifests):
        (container,) = pod["spec"]["containers"]
        volumes = [v for v in pod["spec"].get("volumes", []) if v["name"] == "auth"]
        name = container["name"]
        if name == "etcd" or values.get("auth", {}).get("insecure"):
            assert volumes == []
            continue
        (volume,) = volumes
        assert volume["secret"]["secretName"] == values.get("auth", {}).get(
            "secretName", "kv-cenote-auth"
        )
        files = {item["path"] for item in volume["secret"]["items"]}
        assert files == wanted[name]
        given = [*container["args"], *(str(v.get("value")) for v in container["env"])]
        named = re.findall(r"/etc/cenote/auth/(\S+)", " ".join(given))
        assert set(named) <= files
        assert len(named) == 2


def test_wrong_values_are_refused_with_what_to_do() -> None:
    assert "etcd.endpoints" in refusal({})
    assert "not both" in refusal({"etcd": {"endpoints": ENDPOINTS, "internal": {"enabled": True}}})
    assert "neither TLS nor users" in refusal(
        {"etcd": {"internal": {"enabled": True}, "auth": {"secretName": "x"}}}
    )
    assert "store.rdma.resourceName" in refusal(EXTERNAL | {"store": {"rdma": {"enabled": True}}})
    assert "replica" in refusal(EXTERNAL | {"master": {"replica": 3}})
    assert "policy" in refusal(EXTERNAL | {"master": {"policy": "random"}})
    assert "dramGiB" in refusal(EXTERNAL | {"store": {"dramGiB": "64GiB"}})


@pytest.mark.parametrize("label", ["llm-d.ai/inferenceServing", "app", "llm-d.ai/model"])
def test_pods_do_not_get_labels_that_an_inference_pool_selects_by(label: str) -> None:
    assert "podLabels" in refusal(EXTERNAL | {"podLabels": {label: "true"}})


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(values: Any, schema: Any, place: str) -> None:
        if not isinstance(values, dict) or schema.get("additionalProperties") is not False:
            return
        assert set(schema["properties"]) - {"global", "requests", "limits", "claims"} == set(
            values
        ) - {"requests", "limits"}, place
        for name, value in values.items():
            compare(value, schema["properties"][name], f"{place}.{name}")

    import yaml

    compare(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")
