"""What rules and the dashboard ask for: their expressions, and the names and labels in them.

A reader of PromQL that knows as much of it as these files use; Prometheus itself judges the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

from deployment import CHART

__all__ = ["DASHBOARD", "RULES", "Asked", "alerts", "asked_in", "dashboard_expressions", "rules"]

RULES = CHART / "monitoring" / "rules.yml"
DASHBOARD = CHART / "monitoring" / "dashboard.json"
_SELECTOR = re.compile(r"([a-zA-Z_][a-zA-Z0-9_:]*)\s*(\{[^}]*\})?(\[[^\]]*\])?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")
_NAMES = re.compile(r"^(?:cenote_|process_|up$|pool:|namespace:)")


class Asked(NamedTuple):
    """A metric that an expression selects."""

    name: str
    labels: frozenset[str]
    """That it is matched by."""


def rules() -> list[dict[str, Any]]:
    """All of them."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """By name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """(title of the panel, expression), with what Grafana fills in filled in."""
    found = json.loads(DASHBOARD.read_text())
    for panel in found["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], _filled(target["expr"])
    for annotation in found["annotations"]["list"]:
        yield annotation["name"], _filled(annotation["expr"])


def _filled(expression: str) -> str:
    return expression.replace("$__rate_interval", "30s").replace("$pool", ".*")


def asked_in(expression: str) -> tuple[list[Asked], set[str]]:
    """(the metrics that it selects, the labels that it groups or joins by)."""
    grouped = {
        label.strip()
        for labels in _GROUPING.findall(expression)
        for label in labels.split(",")
        if label.strip()
    }
    bare = _GROUPING.sub(" ", expression)
    found = [
        Asked(name, frozenset(_MATCHER.findall(matchers)))
        for name, matchers, _ in _SELECTOR.findall(bare)
        if _NAMES.match(name)
    ]
    return found, grouped
