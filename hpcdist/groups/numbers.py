"""Numbers among the arguments: ranks, offsets, steps, rates, yes or no, and a tensor's splits."""

from __future__ import annotations

import math
import numbers
import operator
from typing import Any

import numpy as np

from hpcdist.backends.carrier import Carrier
from hpcdist.backends.dispatch import agreeing
from hpcdist.backends.refusal import refusing

_LISTS = (list, tuple, type(None))


def whole(value: Any, name: str) -> int:
    """Return an integer argument, also of NumPy or a tensor without dimensions.

    Raises
    ------
    TypeError
        If it is none, a float for example.
    """
    if type(value) is int:
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a whole number, not {type(value).__name__}: {value!r}"
        ) from None


def yes_or_no(value: Any, name: str) -> bool:
    """Return a boolean argument, also of NumPy, or 0 or 1.

    Raises
    ------
    TypeError
        If it is not a boolean. Python takes the text "False" for true.
    """
    if isinstance(value, (bool, int, np.bool_, np.integer)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name} must be True or False, not {type(value).__name__}: {value!r}")


def steps(value: Any, name: str) -> int | float:
    """Return a number of steps; a float may be one that is whole, such as 1e3, or infinite: never.

    Raises
    ------
    TypeError
        If it is none.
    """
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        value = float(value)
        if value == math.inf:
            return value
        value = int(value) if value.is_integer() else value
    return whole(value, name)


def real(value: Any, name: str) -> float:
    """Return a real argument, also of NumPy or a tensor of one element.

    Raises
    ------
    TypeError
        If it is none, a text for example.
    ValueError
        If it is not a number (NaN).
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError  # float() reads them
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}: {value!r}") from None
    if math.isnan(number):
        raise ValueError(f"{name} must be a number, not {number}")
    return number


def split_sizes(comm: Carrier, input: Any, outs: Any, ins: Any) -> tuple[Any, Any]:
    """Return output and input splits as lists, None for none; also of tensors and arrays.

    Raises
    ------
    TypeError
        If they are no sequences. The other ranks receive the error too.
    """
    if isinstance(outs, _LISTS) and isinstance(ins, _LISTS):
        return outs or None, ins or None
    if comm.rank < 0:
        return None, None
    with refusing(agreeing(comm, input), "all_to_all_single"):
        return _listed(outs, "output_split_sizes"), _listed(ins, "input_split_sizes")


def _listed(splits: Any, name: str) -> Any:
    if isinstance(splits, _LISTS):
        return splits or None
    if getattr(splits, "ndim", 1) != 1 or not hasattr(splits, "__len__"):
        raise TypeError(f"{name} must be a list of whole numbers, not {splits!r}")
    return (splits.tolist() if hasattr(splits, "tolist") else list(splits)) or None
