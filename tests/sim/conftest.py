"""What a world of the simulator sets for its whole process is as it was after each test."""

from __future__ import annotations

import pytest

from cenote.client.plan.spares import Spares


@pytest.fixture(autouse=True)
def settings_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A world chooses after how many puts clients ask for space ahead; there are few in it."""
    monkeypatch.setattr(Spares, "credit_needed", Spares.credit_needed)
