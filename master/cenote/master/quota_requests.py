"""Quotas as they come over the wire, checked."""

from __future__ import annotations

from typing import Final

from cenote.api.errors import InvalidArgument
from cenote.v1 import admin_pb2, common_pb2

from .commands import SetQuota
from .effects import QuotaSet
from .requests import check_text

__all__ = ["check_quota", "quota_command"]

_MAX: Final = 1 << 60
_PRIORITIES: Final = frozenset(
    (common_pb2.PRIORITY_LOW, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_HIGH)
)


def _check(name: str, value: int) -> None:
    if value > _MAX:
        raise InvalidArgument(f"{name} is {value}, more than any pool has")


def check_quota(quota: QuotaSet) -> QuotaSet:
    """The same. Raises InvalidArgument."""
    for name in ("dram_bytes", "ssd_bytes", "objects"):
        _check(name, getattr(quota, name))
    if quota.priority not in _PRIORITIES:
        raise InvalidArgument(f"{quota.priority} is no priority: 1 low, 2 normal, 3 high")
    return quota


def quota_command(message: admin_pb2.SetNamespaceQuotaRequest) -> SetQuota:
    """What is absent stays None. Raises InvalidArgument."""
    name = check_text(message.name, "name")
    if message.priority and message.priority not in _PRIORITIES:
        raise InvalidArgument(f"{message.priority} is no priority: 1 low, 2 normal, 3 high")
    values = {
        field: getattr(message, field)
        for field in ("dram_bytes", "ssd_bytes", "objects")
        if message.HasField(field)
    }
    for field, value in values.items():
        _check(field, value)
    return SetQuota(name, **values, priority=message.priority or None)
