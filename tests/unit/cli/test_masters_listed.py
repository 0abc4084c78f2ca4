"""How `cenote status` names the masters."""

from __future__ import annotations

import pytest

from cenote.cli.cmd_inspect import _masters
from cenote.v1.admin_pb2 import GetStatusResponse, MasterInfo


@pytest.mark.parametrize(
    ("silent_s", "text"),
    [
        (0.0, "a (leader), b (standby)"),
        (2.9, "a (leader), b (standby)"),
        (7.4, "a (leader), b (standby, last seen 7 s ago)"),
    ],
)
def test_a_master_that_has_gone_silent(silent_s: float, text: str) -> None:
    masters = [
        MasterInfo(name="b", role="standby", silent_s=silent_s),
        MasterInfo(name="a", role="leader"),
    ]
    assert _masters(GetStatusResponse(role="leader", masters=masters)) == text
