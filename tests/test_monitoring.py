"""Rules, dashboard and the page about them speak of what is really shown, and of all of it."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from deployment import DEPLOY
from exported import PAGE, Exported, exported, process_names, with_table
from expressions import DASHBOARD, alerts, asked_in, dashboard_expressions, rules

SCRAPED = frozenset(("pool", "job", "instance", "node"))
"""Labels that a scrape adds."""
UNIT_TESTS = DEPLOY / "monitoring" / "rules.test.yml"


@pytest.fixture(scope="module")
def metrics() -> dict[str, Exported]:
    return exported()


def known_names(metrics: dict[str, Exported]) -> dict[str, frozenset[str] | None]:
    """Labels of each series; None where they are not known here."""
    found: dict[str, frozenset[str] | None] = dict.fromkeys(process_names(), frozenset())
    found["up"] = frozenset()
    for one in metrics.values():
        found |= dict.fromkeys(one.names, frozenset(one.labels))
    return found | {rule["record"]: None for rule in rules() if "record" in rule}


def faults(expression: str, known: dict[str, frozenset[str] | None]) -> list[str]:
    """What an expression asks for that nobody shows."""
    asked, grouped = asked_in(expression)
    found = [] if asked else [f"no metric of ours in {expression}"]
    labels: set[str] = set(SCRAPED)
    for name, matched in asked:
        has = known.get(name, frozenset())
        if name not in known:
            found.append(f"nobody shows {name}")
            continue
        if has is None:
            return found
        labels |= has
        found += [f"{name} has no label {label}" for label in matched - has - SCRAPED]
    return found + [f"no series here has the label {label}" for label in grouped - labels]


def test_faults_are_found(metrics: dict[str, Exported]) -> None:
    known = known_names(metrics)
    assert faults("rate(cenote_pool_acquired_keys_total[5m])", known) == []
    assert faults("sum by (pool, le) (rate(cenote_master_tick_seconds_bucket[5m]))", known) == []
    assert faults("cenote_pool_objekts > 1", known) == ["nobody shows cenote_pool_objekts"]
    assert faults('cenote_pool_objects{tier="dram"}', known) == [
        "cenote_pool_objects has no label tier"
    ]
    assert faults("sum by (tear) (cenote_pool_objects)", known) == [
        "no series here has the label tear"
    ]
    assert faults("cenote_master_tick_seconds > 1", known) == [
        "nobody shows cenote_master_tick_seconds"
    ]
    assert faults("vector(1)", known) == ["no metric of ours in vector(1)"]


OF_ETCD = {"CenoteEtcdQuota"}
"""Ask for series that etcd shows: `integration/test_cli_doctor.py` finds them in a real one."""


def test_rules_ask_for_what_is_shown(metrics: dict[str, Exported]) -> None:
    known = known_names(metrics)
    found = [
        f"{r.get('alert', r.get('record'))}: {f}"
        for r in rules()
        if r.get("alert") not in OF_ETCD
        for f in faults(r["expr"], known)
    ]
    assert found == []
    assert len(rules()) > 20


def test_the_dashboard_asks_for_what_is_shown(metrics: dict[str, Exported]) -> None:
    known = known_names(metrics)
    found = [f"{title}: {f}" for title, e in dashboard_expressions() for f in faults(e, known)]
    assert found == []
    assert len(list(dashboard_expressions())) > 40


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    found = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in found["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies upon another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", "it must work with any Prometheus"
            assert panel["targets"]
    assert [v["name"] for v in found["templating"]["list"]] == ["datasource", "pool"]


def test_alerts_say_what_to_look_at() -> None:
    for name, rule in alerts().items():
        assert set(rule["annotations"]) == {"summary", "description"}, name
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), name


def test_each_alert_has_unit_tests_that_fire_and_that_do_not() -> None:
    fired: dict[str, set[bool]] = {}
    for test in yaml.safe_load(UNIT_TESTS.read_text())["tests"]:
        for one in test.get("alert_rule_test", []):
            fired.setdefault(one["alertname"], set()).add(bool(one["exp_alerts"]))
    assert fired == {name: {True, False} for name in alerts()}


def test_the_page_has_the_table_of_today() -> None:
    text = PAGE.read_text()
    assert with_table(text) == text, "run: python tests/exported.py"


def test_the_page_explains_each_alert_and_no_other() -> None:
    explained = re.findall(r"^### (Cenote\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(explained) == sorted(alerts())
    assert len(explained) == len(set(explained))


def test_every_metric_says_what_it_is(metrics: dict[str, Exported]) -> None:
    for name, one in metrics.items():
        assert len(one.family.help) > 10, name
        assert one.family.help.endswith((".", "why.", "more.")), f"{name}: {one.family.help}"
        assert "|" not in one.family.help, name
