"""Numbers with names that stand in columns of NumPy arrays."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["Code"]


class Code(IntEnum):
    """An IntEnum that arrays are compared with.

    NumPy asks the class of what an array is compared with for `__array_ufunc__`, and drops any
    exception of the answer. Before Python 3.12 an enum's class answers in Python code, in which an
    interrupt may come: a Ctrl-C was lost. So there is one: arrays' own, which changes nothing.
    """

    __array_ufunc__ = np.ndarray.__array_ufunc__
