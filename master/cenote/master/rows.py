"""Rows for people: what the pool consists of, as they read it with etcdctl.

Derived from durable effects, and published where the metadata backend has a place for them. Nothing
reads them back: the journal is the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, final

from .effects import (
    DurableEffect,
    NamespaceOpened,
    NodeKnown,
    NodeServes,
    Pinned,
    SegmentGone,
    SegmentKnown,
)

__all__ = ["RowWriter"]

INTERVAL_S: Final = 1.0


def _text(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields)


@final
class RowWriter:
    """`note` what was decided; `flush` publishes what became of it, at most once a second."""

    def __init__(self, publish: Callable[[Mapping[str, str | None]], None]) -> None:
        self._publish = publish
        self._changed: dict[str, str | None] = {}
        self._nodes: dict[int, dict[str, Any]] = {}
        self._pins_changed = True
        self._flushed_s = float("-inf")
        self._notes: dict[type[Any], Callable[[Any], None]] = {
            NamespaceOpened: self._namespace,
            NodeKnown: self._node,
            NodeServes: self._serves,
            SegmentKnown: self._segment,
            SegmentGone: self._segment_gone,
            Pinned: self._pinned,
        }

    def begin(self, config: Mapping[str, Any], effects: Iterable[DurableEffect]) -> None:
        """The first rows of an epoch; `effects` are a state's `makeup`."""
        self._changed["config"] = _text(config)
        for effect in effects:
            self.note(effect)

    def note(self, effect: DurableEffect) -> None:
        """One more; those without a row are ignored."""
        found = self._notes.get(type(effect))
        if found is not None:
            found(effect)

    def flush(self, now_s: float, pins: Callable[[], tuple[int, int]]) -> None:
        """`pins()`: objects and bytes that are pinned."""
        if now_s - self._flushed_s < INTERVAL_S or not (self._changed or self._pins_changed):
            return
        self._flushed_s = now_s
        if self._pins_changed:
            objects, size_bytes = pins()
            self._changed["pins"] = _text({"objects": objects, "bytes": size_bytes})
            self._pins_changed = False
        changed, self._changed = self._changed, {}
        self._publish(changed)

    def _namespace(self, effect: NamespaceOpened) -> None:
        self._changed[f"namespaces/{effect.name}"] = _text(
            {
                "id": effect.namespace_id,
                "generation": effect.generation,
                "fingerprint": effect.fingerprint.hex(),
                "durability": effect.durability,
            }
        )

    def _node(self, effect: NodeKnown) -> None:
        fields = self._nodes.setdefault(effect.node_id, {})
        fields |= {
            "name": effect.name,
            "uuid": effect.node_uuid.hex(),
            "boot_id": effect.boot_id,
            "failure_domain": effect.failure_domain,
        }
        self._changed[f"nodes/{effect.node_id}"] = _text(fields)

    def _serves(self, effect: NodeServes) -> None:
        fields = self._nodes.setdefault(effect.node_id, {})
        fields["endpoints"] = [
            {"kind": endpoint.kind, "address": endpoint.address} for endpoint in effect.endpoints
        ]
        self._changed[f"nodes/{effect.node_id}"] = _text(fields)

    def _segment(self, effect: SegmentKnown) -> None:
        self._changed[f"segments/{effect.segment_id}"] = _text(
            {
                "node": effect.node_id,
                "index": effect.index,
                "tier": effect.tier,
                "incarnation": effect.incarnation.hex(),
                "size_bytes": effect.size_bytes,
                "unit_bytes": effect.unit_bytes,
                "slots": effect.slots,
            }
        )

    def _segment_gone(self, effect: SegmentGone) -> None:
        self._changed[f"segments/{effect.segment_id}"] = None

    def _pinned(self, _effect: Pinned) -> None:
        self._pins_changed = True
