"""A master's settings as administrators see and change them. Secrets are not shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from cenote.api.errors import ConfigError, InvalidArgument
from cenote.runtime.config import help_of, load_config
from cenote.runtime.units import format_duration, format_size
from cenote.v1 import admin_pb2 as pb

from .config import ENV_PREFIX, MasterConfig
from .state_config import DYNAMIC

__all__ = ["config_values", "parse_values"]


def config_values(config: MasterConfig, overrides: Mapping[str, float]) -> list[pb.ConfigValue]:
    """By name. `overrides`: what was changed since the master was started."""
    found = []
    for field in sorted(dataclasses.fields(MasterConfig), key=lambda field: field.name):
        if not field.repr:  # a secret
            continue
        started = _text(field.name, getattr(config, field.name))
        value = pb.ConfigValue(
            name=field.name,
            value=started,
            dynamic=field.name in DYNAMIC,
            help=help_of(MasterConfig, field.name),
        )
        if field.name in overrides:
            kind = DYNAMIC[field.name][0]
            value.value = _text(field.name, kind(overrides[field.name]))
            value.changed, value.started_with = True, started
        found.append(value)
    return found


def _text(name: str, value: Any) -> str:
    """As a flag takes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float) and name.endswith("_s"):
        text = format_duration(value).replace(" ", "")
        return text if _is_exact(name, text, value) else f"{value:g}s"
    if isinstance(value, int) and "bytes" in name:
        text = format_size(value).replace(" ", "")
        return text if _is_exact(name, text, value) else str(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_exact(name: str, text: str, value: float) -> bool:
    try:
        return bool(_parsed({name: text})[name] == value)
    except InvalidArgument:
        return False


def _parsed(values: Mapping[str, str]) -> dict[str, Any]:
    try:
        config = load_config(MasterConfig, env_prefix=ENV_PREFIX, env={}, overrides=values)
    except ConfigError as error:
        raise InvalidArgument(error.message, remedy=error.remedy) from error
    return {name: getattr(config, name) for name in values}


def parse_values(values: Mapping[str, str]) -> dict[str, float]:
    """Numbers, from text with units. Raises InvalidArgument, also for names that are none."""
    for name in values:
        if name not in DYNAMIC:
            raise InvalidArgument(
                f"{name!r} can't be changed while a master runs",
                remedy="these can: " + ", ".join(DYNAMIC) + "; others are flags of cenote-master",
            )
    return {name: float(value) for name, value in _parsed(values).items()}
