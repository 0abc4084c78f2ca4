"""Named numbers in comparisons with arrays."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from cenote.api import rows, types
from cenote.api.codes import Code

CODES = [
    kind
    for module in (rows, types)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Code) and kind is not Code
]


@pytest.mark.parametrize("kind", CODES, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_no_python_code_runs_in_a_comparison(
    kind: type[Code], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy drops what it raises, a Ctrl-C, too."""
    asked: list[str] = []

    def look_up(kind: type, name: str) -> object:
        asked.append(name)
        raise AttributeError(name)

    monkeypatch.setattr(type(kind), "__getattr__", look_up, raising=False)
    column = np.zeros(3, np.uint8)
    column[:] = member = next(iter(kind))
    assert np.all(column == member)
    assert not np.any(column != member)
    assert np.isin(column, [member]).all()
    assert np.count_nonzero(np.where(column == member, 1, 0)) == 3
    assert asked == []


def test_codes_are_enums_as_ever() -> None:
    assert next(iter(types.GetStatus)) is types.GetStatus.HIT is types.GetStatus(0)
    assert int(types.GetStatus.HIT) == 0
    assert pickle.loads(pickle.dumps(types.PutStatus.STORED)) is types.PutStatus.STORED
    assert "__array_ufunc__" not in types.PutStatus.__members__
