"""Rules and dashboard as they are deployed: judged by promtool, and the same everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployment import COMPOSE, DEPLOY, rendered
from expressions import DASHBOARD, RULES, rules
from prometheus import promtool

UNIT_TESTS = DEPLOY / "monitoring" / "rules.test.yml"
EXTERNAL: dict[str, Any] = {"etcd": {"endpoints": ["10.0.1.1:2379"]}}


def test_promtool_takes_the_rules() -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", RULES)


def test_promtool_can_refuse(tmp_path: Path) -> None:
    wrong = tmp_path / "rules.yml"
    wrong.write_text(RULES.read_text().replace("sum by (pool)", "sum by pool", 1))
    with pytest.raises(AssertionError, match="parse error"):
        promtool("check", "rules", wrong)


def test_the_alerts_pass_their_unit_tests() -> None:
    assert "SUCCESS" in promtool("test", "rules", UNIT_TESTS)


def test_promtool_takes_the_compose_files_prometheus(tmp_path: Path) -> None:
    """As in its container, where the chart's rules lie beside it."""
    here = COMPOSE.parent
    shutil.copy(here / "prometheus.yml", tmp_path)
    mounted = yaml.safe_load(COMPOSE.read_text())["services"]["prometheus"]["volumes"]
    for volume in mounted:
        source, _, target = volume.partition(":")
        if source.endswith("rules.yml"):
            assert (here / source).resolve() == RULES
            shutil.copy(here / source, tmp_path / Path(target.split(":")[0]).name)
    said = promtool("check", "config", tmp_path / "prometheus.yml")
    assert f"{len(rules())} rules found" in said


def of_kind(values: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [document for document in rendered(EXTERNAL | values) if document["kind"] == kind]


def test_the_chart_brings_the_rules_where_asked_for() -> None:
    pytest.importorskip("helm_python", reason="needs helm-python-sdk: make check-deploy")
    assert of_kind({}, "PrometheusRule") == []
    wanted = {"prometheusRule": {"enabled": True, "labels": {"release": "prom"}}}
    (rule,) = of_kind(wanted, "PrometheusRule")
    assert rule["metadata"]["labels"]["release"] == "prom"
    assert rule["spec"] == yaml.safe_load(RULES.read_text())


def test_the_chart_brings_the_dashboard_where_asked_for() -> None:
    pytest.importorskip("helm_python", reason="needs helm-python-sdk: make check-deploy")
    assert of_kind({}, "ConfigMap") == []
    (found,) = of_kind({"dashboard": {"enabled": True}}, "ConfigMap")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["cenote.json"]) == json.loads(DASHBOARD.read_text())


def test_the_charts_jobs_and_pools_are_those_of_the_rules() -> None:
    pytest.importorskip("helm_python", reason="needs helm-python-sdk: make check-deploy")
    jobs = {}
    for monitor in of_kind({"serviceMonitor": {"enabled": True}}, "ServiceMonitor"):
        (endpoint,) = monitor["spec"]["endpoints"]
        labels = {r["targetLabel"]: r.get("replacement") for r in endpoint["relabelings"]}
        jobs[labels["job"]] = labels["pool"]
    assert set(jobs) == {"cenote-master", "cenote-store"}
    assert len(set(jobs.values())) == 1
    compose = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"] for job in compose} == {*jobs, "etcd"}
